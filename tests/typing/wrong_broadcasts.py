"""Wrong broadcasts: both checkers refuse each line that says that it is ignored."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dynbus import Actor, Reply, Runtime, handler


class Cache(Actor, namespace="demo"):
    @handler
    async def reload(self, version: int) -> str:
        return str(version)

    @handler
    async def words(self) -> AsyncGenerator[str, None]:
        yield "a"

    @handler
    async def push(self, reply: Reply[str]) -> None:
        reply.push("a")

    @handler(durable=True)
    async def store(self, version: int) -> None: ...


class Other(Actor, namespace="demo"):
    @handler
    async def reload(self, version: int) -> str:
        return str(version)


async def use(runtime: Runtime) -> None:
    cache = runtime.client(Cache)
    await cache.broadcast(Cache.reload, "1")  # type: ignore
    await cache.broadcast(Cache.reload)  # type: ignore
    await cache.broadcast(Cache.reloads, 1)  # type: ignore
    await cache.broadcast(Other.reload, 1)  # type: ignore
    await cache.broadcast(cache.reload, 1)  # type: ignore
    await cache.broadcast(Cache.words)  # type: ignore
    await cache.broadcast(Cache.push)  # type: ignore
    await cache.broadcast(Cache.store, 1)  # type: ignore
    await cache.broadcast.reload(1).upper()  # type: ignore
    for answer in (await cache.broadcast(Cache.reload, 1)).values():
        answer.upper()  # type: ignore
