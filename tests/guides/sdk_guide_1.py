"""The skeleton of a worker."""

from typing import AsyncIterator

from pydantic import BaseModel

from dynbus.compat.sdk import DYNAMO_IMAGE, dynamo_endpoint, service


class RequestType(BaseModel):
    text: str


class ResponseType(BaseModel):
    text: str


# fmt: off
@service(
    dynamo={
        "enabled": True,
        "namespace": "your_namespace",
    },
    image=DYNAMO_IMAGE,
)
class YourWorker:
    # Worker implementation
    # ...

    @dynamo_endpoint()
    async def your_endpoint(self, request: RequestType) -> AsyncIterator[ResponseType]:
        # Endpoint Implementation
        for word in request.text.split():
            yield ResponseType(text=word)
# fmt: on
