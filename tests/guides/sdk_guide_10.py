"""An endpoint that awaits, and takes what JSON has."""

import asyncio

from dynbus.compat.sdk import dynamo_endpoint, service


@service(dynamo={"namespace": "demo"})
class Waiting:
    async def some_async_operation(self):
        await asyncio.sleep(0)
        return {"done": True}

    # fmt: off
    @dynamo_endpoint()
    async def generate(self, request):
        # Use async operations for better performance
        result = await self.some_async_operation()
    # fmt: on

        return result | request
