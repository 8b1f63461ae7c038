"""Two stages of one request, in workers of their own."""

from pydantic import BaseModel

from dynbus.compat.sdk import DYNAMO_IMAGE, dynamo_endpoint, service


class PrefillRequest(BaseModel):
    token_ids: list[int]


class DecodeRequest(BaseModel):
    first_token: int
    max_tokens: int


# fmt: off
@service(
    dynamo={
        "enabled": True,
        "namespace": "dynamo",
    },
    image=DYNAMO_IMAGE,
)
class PrefillWorker:
    def __init__(self):
        # Initialize prefill-specific resources
        self.prefilled = 0

    @dynamo_endpoint()
    async def prefill(self, request: PrefillRequest):
        # Implement prefill logic
        self.prefilled += 1
        return {"first_token": sum(request.token_ids) % 100, "prefilled": self.prefilled}

@service(
    dynamo={
        "enabled": True,
        "namespace": "dynamo",
    },
    image=DYNAMO_IMAGE,
)
class DecodeWorker:
    def __init__(self):
        # Initialize decode-specific resources
        self.step = 1

    @dynamo_endpoint()
    async def decode(self, request: DecodeRequest):
        # Implement decode logic
        token = request.first_token
        for _ in range(request.max_tokens):
            yield {"token_ids": [token]}
            token += self.step
# fmt: on
