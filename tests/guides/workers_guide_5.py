"""A worker that stops when its caller wants no more, completed by what serves it."""

import asyncio
import time

from dynbus.compat.runtime import DistributedRuntime, dynamo_worker


class Engine:
    def __init__(self):
        self.made = 0

    def generate_streaming(self, request):
        for number in range(request["count"]):
            time.sleep(0.01)
            self.made += 1
            yield {"number": number}


# fmt: off
class RequestHandler:

    async def generate(self, request, context):
        """Generate response with cancellation support"""
        for result in self.engine.generate_streaming(request):
            # Check if the request has been cancelled
            if context.is_stopped():
                # Stop processing and clean up
                break

            yield result
# fmt: on


@dynamo_worker()
async def worker(runtime: DistributedRuntime):
    handler = RequestHandler()
    handler.engine = Engine()

    async def load_metrics(request):
        return {"made": handler.engine.made}

    component = runtime.namespace("guide").component("cancelling")
    await component.create_service()
    await asyncio.gather(
        component.endpoint("generate").serve_endpoint(handler.generate),
        component.endpoint("load_metrics").serve_endpoint(load_metrics),
    )


if __name__ == "__main__":
    asyncio.run(worker())
