"""Routers of the served models, which the adapters of a model share with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio

from dynbus import Instance, NoInstances, Route, Router, RouteRequest, Runtime
from dynbus.kvrouter import KvRouter, RouterConfig, open_router, profiles
from dynbus.spi import Background


class _Shared:
    """A router, and how many models use it."""

    def __init__(self) -> None:
        self.users = 0
        self.router: KvRouter | None = None
        self.failure: Exception | None = None
        self.opened = anyio.Event()
        self.unused = anyio.Event()


class SharedRouters:
    """Routers by what is cached: one for each component, whichever of its models uses it.

    What a component's caches hold is followed once for a model and all its adapters.

    Args:
        background: owns the routers while they are used.
        config: of all of them.
    """

    def __init__(self, runtime: Runtime, background: Background, config: RouterConfig) -> None:
        self._runtime = runtime
        self._background = background
        self._config = config
        self._shared: dict[tuple[str, bool], _Shared] = {}

    @asynccontextmanager
    async def of(self, target: str, *, exact: bool) -> AsyncGenerator[KvRouter]:
        """The router of a component, for as long as the `async with` lasts.

        Raises:
            DynbusError: see `open_router`.
        """
        key = target, exact
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared()
            self._background.start(self._keep, shared, key, name=f"the router of {target}")
        shared.users += 1
        try:
            await shared.opened.wait()
            if shared.router is None:
                assert shared.failure is not None, "it was opened, or it failed"
                raise shared.failure
            yield shared.router
        finally:
            shared.users -= 1
            if not shared.users:
                self._forget(key, shared)
                shared.unused.set()

    async def _keep(self, shared: _Shared, key: tuple[str, bool]) -> None:
        target, exact = key
        try:
            # A request with an adapter is for those alone that have loaded it.
            async with open_router(
                self._runtime, target, self._config, exact=exact, lora="require"
            ) as shared.router:
                shared.opened.set()
                await shared.unused.wait()
        except Exception as error:
            if shared.opened.is_set():
                raise
            shared.failure = error
        finally:
            self._forget(key, shared)
            shared.opened.set()

    def _forget(self, key: tuple[str, bool], shared: _Shared) -> None:
        if self._shared.get(key) is shared:
            del self._shared[key]


def has_adapter(instance: Instance, lora_name: str) -> bool:
    """True if an instance announces that it has loaded an adapter."""
    return lora_name in profiles.split_words(instance.metadata.get(profiles.LORAS_KEY, ""))


class AdapterRouting:
    """Routes the requests with an adapter among the instances that have loaded it."""

    def __init__(self, lora_name: str, router: Router) -> None:
        self._lora_name = lora_name
        self._router = router

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str | Route:
        """See `Router.route`.

        Raises:
            NoInstances: none has loaded the adapter.
        """
        having = [one for one in instances if has_adapter(one, self._lora_name)]
        if not having:
            raise NoInstances(
                f"no instance of {request.endpoint} has loaded the adapter {self._lora_name}",
                started=False,
            )
        return await self._router.route(request, having)
