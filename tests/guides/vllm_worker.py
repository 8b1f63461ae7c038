"""The worker of Dynamo's documentation, which says what it was asked."""

from collections.abc import AsyncIterator
from typing import Any

from dynbus.compat.sdk import dynamo_endpoint, service


@service(dynamo={"enabled": True, "namespace": "dynamo"})
class VllmWorker:
    @dynamo_endpoint()
    async def generate(self, request: Any) -> AsyncIterator[str]:
        for word in request["prompt"].split():
            yield word
