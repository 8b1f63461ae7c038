"""`dynamo.runtime`: workers as functions, what they serve, and clients."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from weakref import WeakSet

import anyio

from dynbus import ConfigError, EndpointName, Runtime, Unavailable
from dynbus import Context as CallContext
from dynbus.spi import ComponentName, EndpointAddress, check_token, task_group

from .clients import Annotated, Client, Responses
from .handlers import Context, Translation, streaming_handler

__all__ = [
    "Annotated",
    "Client",
    "Component",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "Namespace",
    "Responses",
    "dynamo_worker",
    "is_shutting_down",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

GATHERING_TURNS: Final = 3
"""Turns of the loop for which endpoints that are served together are gathered into one instance."""

HANDLER_MIGRATIONS: Final = 8
"""The number of times that a call goes to another instance since a handler gave it back before its
first item.
"""

CLEANUP_TIMEOUT: Final = 30.0
"""Seconds that a worker's function has to end when what it served has drained."""

CANCEL_TIMEOUT: Final = 2.0
"""Seconds that it has when it is cancelled since all is to end at once."""

_URL: Final = "dyn://"


class DistributedRuntime:
    """One process on the bus, as programs of Dynamo use it.

    When it shuts down, instances are found no more, their calls have the configured `drain_grace`
    to finish, and `serve_endpoint` returns. A handler that raises `GeneratorExit` gives its call
    back: before the first item `Client` makes it elsewhere, after it the stream ends with
    `Migrate`.

    Attributes:
        runtime: dynbus's own, which both kinds of calls can be made with.
        translations: of what is served for front ends, by endpoint.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.translations: dict[EndpointName, Translation] = {}
        self._gathering: dict[ComponentName, _Serving] = {}
        self._ending = asyncio.Event()
        self._serving: set[_Serving] = set()
        _runtimes.add(self)

    def __repr__(self) -> str:
        state = "shutting down" if self.is_shutting_down else "running"
        return f"<DistributedRuntime [{state} | {len(self._serving)} components served]>"

    def namespace(self, name: str) -> Namespace:
        """A namespace; see `Namespace.component`."""
        return Namespace(self, check_token("namespace", name))

    def endpoint(self, path: str) -> Endpoint:
        """The endpoint `namespace.component.endpoint`, which may have `dyn://` before it."""
        return Endpoint(self, EndpointName.parse(path.removeprefix(_URL)))

    @property
    def is_shutting_down(self) -> bool:
        """True if `shutdown` was called, or the program was asked to end."""
        return self._ending.is_set()

    @property
    def is_closed(self) -> bool:
        """True if its connections are closed for good."""
        return self.runtime.bus.data.state.value == "closed"

    @property
    def is_serving(self) -> bool:
        """True if something is served, or drains."""
        return bool(self._serving)

    def shutdown(self) -> None:
        """End what is served once its calls have ended; `serve_endpoint` returns then."""
        self._ending.set()

    async def serve(
        self,
        name: EndpointName,
        function: Callable[..., Any],
        *,
        graceful: bool,
        metadata: dict[str, str],
    ) -> None:
        """Serve an endpoint until the runtime shuts down: see `Endpoint.serve_endpoint`."""
        if self.is_shutting_down:
            return
        component = name.component_name
        serving = self._gathering.get(component)
        leads = serving is None
        if serving is None:
            serving = self._gathering[component] = _Serving()
            self._serving.add(serving)
        serving.add(name, function, graceful, metadata)
        if not leads:
            await serving.wait(name)
            return
        try:
            try:
                for _ in range(GATHERING_TURNS):
                    await asyncio.sleep(0)
            finally:
                del self._gathering[component]
            await self._serve(component, serving)
        except Exception as error:
            serving.failure = error
            raise
        except asyncio.CancelledError:
            serving.leave(name)
            raise
        finally:
            self._serving.discard(serving)
            serving.ended.set()

    async def _serve(self, component: ComponentName, serving: _Serving) -> None:
        async with (
            self.runtime.serve_endpoints(
                *component,
                serving.endpoints,
                metadata=serving.metadata,
                grace=None if serving.is_graceful else 0.0,
            ) as instance,
            anyio.create_task_group() as tasks,
        ):
            for end in (self._ending, serving.left):
                tasks.start_soon(_cancel_when, end, tasks.cancel_scope)
            await instance.stopped.wait()
            tasks.cancel_scope.cancel()
        self.runtime.bus.check()
        if instance.broken:
            raise Unavailable(f"{instance.name} is broken: {instance.broken}")
        if serving.failure is not None:
            raise serving.failure

    async def drained(self) -> None:
        """Wait until nothing is served any longer."""
        for serving in list(self._serving):
            await serving.ended.wait()


async def _cancel_when(event: asyncio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


class _Serving:
    """The endpoints that one instance of a component serves, for each `serve_endpoint` that waits
    for its end.

    Attributes:
        failure: with which it ends.
        left: set when one of those was cancelled, which ends the instance for all.
        ended: set when it has ended.
    """

    def __init__(self) -> None:
        self.endpoints: dict[str, Callable[..., Any]] = {}
        self.metadata: dict[str, str] = {}
        self.is_graceful = False
        self.failure: Exception | None = None
        self.left = asyncio.Event()
        self.ended = asyncio.Event()

    def add(
        self,
        name: EndpointName,
        function: Callable[..., Any],
        graceful: bool,
        metadata: dict[str, str],
    ) -> None:
        if name.endpoint in self.endpoints:
            raise ConfigError(f"{name} is served twice by this process: give them different names")
        self.endpoints[name.endpoint] = function
        self.metadata |= metadata
        self.is_graceful = self.is_graceful or graceful

    async def wait(self, name: EndpointName) -> None:
        """Wait for the end of the instance; a caller that is cancelled meanwhile ends it.

        Raises:
            Exception: with which it ended.
        """
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.leave(name)
            raise
        if self.failure is not None:
            raise self.failure

    def leave(self, name: EndpointName) -> None:
        """`serve_endpoint` of this endpoint was cancelled."""
        self.failure = self.failure or Unavailable(
            f"serve_endpoint of {name} was cancelled, and with it the instance that served it"
        )
        self.left.set()


class Namespace:
    """A namespace of the bus."""

    def __init__(self, runtime: DistributedRuntime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def component(self, name: str) -> Component:
        """One kind of worker in it."""
        return Component(self._runtime, ComponentName.of(self.name, name))


class Component:
    """One kind of worker in a namespace.

    Attributes:
        address: where it is on the bus.
    """

    def __init__(self, runtime: DistributedRuntime, address: ComponentName) -> None:
        self.runtime = runtime
        self.address = address

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return self.address.component

    async def create_service(self) -> None:
        """Nothing is to be done: an instance announces itself when it serves."""

    def endpoint(self, name: str) -> Endpoint:
        """One of its endpoints."""
        return Endpoint(self.runtime, EndpointName.of(*self.address, name))


class Endpoint:
    """One endpoint of a component.

    Attributes:
        address: where it is, for dynbus's own functions.
    """

    def __init__(self, runtime: DistributedRuntime, name: EndpointName) -> None:
        self.runtime = runtime
        self.address = EndpointAddress(runtime.runtime, name)

    def __repr__(self) -> str:
        return f"<Endpoint {self.address.name}>"

    def component(self) -> Component:
        """The component that it belongs to."""
        return Component(self.runtime, self.address.name.component_name)

    async def serve_endpoint(
        self,
        handler: Callable[..., Any],
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        """Serve it, until the runtime shuts down.

        Endpoints of one component that are served at the same time, as by `asyncio.gather`, are
        those of one instance, which ends when one of these calls is cancelled. One that is served
        later gets an instance of its own.

        Args:
            handler: `async def`, with a request, and `context` if it wants; it yields items, or
                returns the only one. Neither needs annotations: requests and items are JSON values.
            graceful_shutdown: whether its calls may finish when the runtime shuts down. An instance
                waits for its calls where one of its endpoints asks for that.
            metrics_labels: what the instance announces of itself, by the names `label.NAME`.

        Raises:
            ConfigError: the handler is not usable, or the endpoint is served twice.
            Unavailable: the instance is broken, or the bus is gone for good.
        """
        name = self.address.name
        function = streaming_handler(
            name.endpoint, handler, lambda: self.runtime.translations.get(name)
        )
        labels = _labels(metrics_labels or ())
        await self.runtime.serve(name, function, graceful=graceful_shutdown, metadata=labels)

    async def client(self) -> Client:
        """A client of it, once the instances that exist now are known.

        Raises:
            Unavailable: the instances cannot be read.
        """
        client = await self.address.client(migration_limit=HANDLER_MIGRATIONS)
        return Client(client, self.runtime.runtime.discovery)


def _labels(given: Any) -> dict[str, str]:
    """The labels that an instance announces.

    Raises:
        ConfigError: they are no pairs.
    """
    try:
        return {f"label.{label}": value for label, value in given}
    except (TypeError, ValueError):
        raise ConfigError(
            f'metrics_labels {given!r} are not usable: give pairs, such as [("model", "llama")]'
        ) from None


_runtimes: Final[WeakSet[DistributedRuntime]] = WeakSet()
"""Those of this process."""


def is_shutting_down() -> bool:
    """True if the instance whose handler is running goes away; outside of handlers, if this process
    does.
    """
    context = CallContext.current()
    if context is not None and context.is_draining():
        return True
    # One that has ended may still be held by its program, which goes on with another.
    return any(each.is_shutting_down for each in _runtimes if not each.is_closed)


def dynamo_worker(
    static: bool = False,
) -> Callable[
    [Callable[Concatenate[DistributedRuntime, P], Awaitable[T]]],
    Callable[P, Coroutine[Any, Any, T | None]],
]:
    """Decorates the main function of a worker: called, it connects and is given the runtime.

    The bus is that of `NATS_URL`, otherwise `nats://127.0.0.1:4222`; where that is on this machine
    and nothing listens there, a server is started, as by `dynbus run`. SIGTERM and Ctrl-C shut the
    runtime down; what does not serve then is cancelled. A second one ends all at once.

    Args:
        static: changes nothing. In Dynamo a static worker does without discovery, and so without
            etcd; discovery of dynbus needs nothing but NATS.

    Raises:
        ConfigError: it does not decorate an `async def` function.
    """
    given: Any = static
    if not isinstance(given, bool):
        raise ConfigError("dynamo_worker has options: write `@dynamo_worker()`")

    def decorate(
        function: Callable[Concatenate[DistributedRuntime, P], Awaitable[T]],
    ) -> Callable[P, Coroutine[Any, Any, T | None]]:
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is not async: write `async def worker(runtime)`")

        @wraps(function)
        async def worker(*args: P.args, **kwargs: P.kwargs) -> T | None:
            ending = asyncio.Event()
            # Only programs need it, and none that imports these names for its clients.
            from dynbus.spi import program_runtime, terminal

            with anyio.CancelScope() as at_once:
                async with program_runtime(
                    function.__name__, drain=ending.set, stop=at_once.cancel
                ) as connected:
                    runtime = DistributedRuntime(connected)
                    return await _run(lambda: function(runtime, *args, **kwargs), runtime, ending)
            raise SystemExit(terminal.INTERRUPTED)

        return worker

    return decorate


async def _run(
    make: Callable[[], Awaitable[T]], runtime: DistributedRuntime, ending: asyncio.Event
) -> T | None:
    """The result of a worker's function; None for one that was cancelled as the runtime ended."""
    # It is the user's code, which is cancelled once, so that what it awaits to clean up is not.
    work = asyncio.ensure_future(make())
    try:
        async with task_group() as tasks:
            tasks.start_soon(_end, work, runtime, ending)
            await asyncio.wait({work})
            tasks.cancel_scope.cancel()
    finally:
        if not work.done():
            for instance in runtime.runtime.instances.values():
                instance.stop_now()
            work.cancel()
            with anyio.move_on_after(CANCEL_TIMEOUT, shield=True):
                await asyncio.wait({work})
    if work.cancelled() and runtime.is_shutting_down:
        return None
    return work.result()


async def _end(
    work: asyncio.Future[Any], runtime: DistributedRuntime, ending: asyncio.Event
) -> None:
    """Have a worker's function come to its end when the program is to end."""
    await ending.wait()
    runtime.shutdown()
    if runtime.is_serving:
        await runtime.drained()
        # What follows its `serve_endpoint`.
        await asyncio.wait({work}, timeout=CLEANUP_TIMEOUT)
    work.cancel()
