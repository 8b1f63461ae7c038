"""A hook of the shutdown."""

import contextlib

from dynbus.compat.sdk import async_on_shutdown, async_on_start, service


@contextlib.asynccontextmanager
async def engine():
    print("the engine is open")
    try:
        yield
    finally:
        print("the engine is closed")


@service(dynamo={"namespace": "demo"})
class Closing:
    def __init__(self):
        self._engine_context = None

    @async_on_start
    async def open(self):
        self._engine_context = engine()
        await self._engine_context.__aenter__()

    # fmt: off
    @async_on_shutdown
    async def async_shutdown(self):
        if self._engine_context is not None:
            await self._engine_context.__aexit__(None, None, None)
        print("VllmWorkerRouterLess shutting down")


# fmt: on
