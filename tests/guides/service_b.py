"""The service on which those of Dynamo's documentation depend."""

from typing import Any

from dynbus.compat.sdk import dynamo_endpoint, service


@service(dynamo={"enabled": True, "namespace": "dynamo"})
class ServiceB:
    @dynamo_endpoint()
    async def preprocess(self, request: Any) -> dict[str, Any]:
        return {"prompt": " ".join(message["content"] for message in request["messages"])}
