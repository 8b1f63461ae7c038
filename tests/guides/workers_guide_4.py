"""A worker that gives its requests back when it shuts down, completed by what serves it."""

import asyncio
import time

from dynbus.compat.runtime import DistributedRuntime, dynamo_worker, is_shutting_down


class Engine:
    def generate_streaming(self, request):
        for number in range(request["count"]):
            time.sleep(0.01)
            yield {"number": number}


# fmt: off
class RequestHandler:

    async def generate(self, request):
        """Generate response, with support for request migration"""
        for result in self.engine.generate_streaming(request):
            # Check if we need to migrate before yielding each token
            if is_shutting_down():
                # Raising GeneratorExit closes the stream and triggers migration
                raise GeneratorExit("Worker shutting down, migrating request")

            yield result
# fmt: on


@dynamo_worker()
async def worker(runtime: DistributedRuntime):
    handler = RequestHandler()
    handler.engine = Engine()
    component = runtime.namespace("guide").component("migrating")
    await component.create_service()
    await component.endpoint("generate").serve_endpoint(handler.generate)


if __name__ == "__main__":
    asyncio.run(worker())
