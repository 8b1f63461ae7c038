"""Broadcasts to all instances: this must pass mypy --strict and pyright strict."""

from __future__ import annotations

from typing import Any, assert_type

from dynbus import Actor, Context, DynbusError, Runtime, depends, handler, with_options


class Cache(Actor, namespace="demo"):
    @handler
    async def reload(self, version: int) -> str:
        return str(version)

    @handler(timeout=5.0)
    async def size(self, context: Context | None = None) -> int:
        return 1

    @handler(batch=8)
    async def names(self, numbers: list[int]) -> list[str]:
        return list(map(str, numbers))


class Larger(Cache, namespace="demo"):
    pass


class Admin(Actor, namespace="demo"):
    cache = depends(Cache)

    @handler
    async def reload(self, version: int) -> list[str]:
        answers = await self.cache.broadcast(Cache.reload, version)
        return [name for name, answer in answers.items() if isinstance(answer, DynbusError)]


async def use(runtime: Runtime) -> None:
    cache = runtime.client(Cache)
    assert_type(await cache.broadcast(Cache.reload, 1), dict[str, str | DynbusError])
    assert_type(await cache.broadcast(Cache.reload, version=1), dict[str, str | DynbusError])
    assert_type(await cache.broadcast(Cache.size), dict[str, int | DynbusError])
    assert_type(await cache.broadcast(Cache.names, 1), dict[str, str | DynbusError])
    assert_type(await cache.broadcast.reload(1), dict[str, Any | DynbusError])
    hurried = with_options(runtime.client(Larger), timeout=1.0)
    assert_type(await hurried.broadcast(Cache.reload, 1), dict[str, str | DynbusError])
