"""The context of a service's code: `dynamo_context` and `get_runtime`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from dynbus import Actor, Runtime
from dynbus.spi import InstanceName, ServedInstance

from .runtime import DistributedRuntime


class ServiceContext:
    """The runtime and the endpoints of the code of one service.

    Attributes:
        endpoints: those that its class declares.
        service: None while it is constructed.
    """

    def __init__(self, name: InstanceName, runtime: Runtime, endpoints: Sequence[str]) -> None:
        self.name = name
        self.runtime = DistributedRuntime(runtime)
        self.endpoints = endpoints
        self.service: Actor | None = None


_contexts: Final[WeakValueDictionary[InstanceName, ServiceContext]] = WeakValueDictionary()
"""Those of this process, each of which its service keeps."""


def make_context(name: InstanceName, runtime: Runtime, endpoints: Sequence[str]) -> ServiceContext:
    """Make the context of the code of the instance `name`, which lasts as long as it is referred
    to."""
    made = _contexts[name] = ServiceContext(name, runtime, endpoints)
    return made


def current_context() -> ServiceContext | None:
    """The context of the service whose code is running; None outside of one.

    On threads that nobody told, it is that of the process where there is only one.
    """
    name = ServedInstance.current_name()
    if name is not None:
        return _contexts.get(name)
    known = list(_contexts.values())
    return known[0] if len(known) == 1 else None


class DynamoContext(Mapping[str, Any]):
    """The running service: `runtime`, `namespace`, `service_name`, `component`, `endpoints` and
    `instance_id`. It is empty outside of services.

    Known from the constructor on, in hooks, endpoints and the tasks that they begin.
    """

    def __getitem__(self, key: str) -> Any:
        context = current_context()
        if context is None:
            raise KeyError(
                f"{key!r}: dynamo_context is only known inside a service; elsewhere use "
                "`await get_runtime()`"
            )
        name, runtime = context.name, context.runtime
        match key:
            case "runtime":
                return runtime
            case "namespace":
                return name.namespace
            case "service_name":
                return name.component
            case "instance_id":
                return name.instance_id
            case "component":
                return runtime.namespace(name.namespace).component(name.component)
            case "endpoints":
                component = runtime.namespace(name.namespace).component(name.component)
                return [component.endpoint(each) for each in context.endpoints]
            case _:
                raise KeyError(f"{key!r}: dynamo_context has {', '.join(_KEYS)}")

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS if current_context() is not None else ())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        context = current_context()
        return f"<dynamo_context of {context.name}>" if context else "<dynamo_context, no service>"


_KEYS: Final = ("runtime", "namespace", "service_name", "component", "endpoints", "instance_id")

dynamo_context: Final = DynamoContext()


class _Opened:
    """The runtime of a loop that has no service, closed with the loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.runtime: asyncio.Future[DistributedRuntime] = loop.create_future()
        self._task = asyncio.create_task(self._keep(), name="the runtime of get_runtime")

    async def _keep(self) -> None:
        try:
            async with Runtime.connect() as runtime:
                self.runtime.set_result(DistributedRuntime(runtime))
                # Until `asyncio.run` cancels what is left.
                await asyncio.Event().wait()
        except Exception as error:
            if self.runtime.done():
                raise
            self.runtime.set_exception(error)


_opened: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Opened]] = WeakKeyDictionary()


async def get_runtime() -> DistributedRuntime:
    """The runtime of the running service; elsewhere one for the loop, connected at the first call.

    The latter is closed when `asyncio.run` ends.

    Raises:
        Unavailable: the bus cannot be used.
    """
    context = current_context()
    if context is not None:
        return context.runtime
    loop = asyncio.get_running_loop()
    opened = _opened.get(loop)
    if opened is None:
        opened = _opened[loop] = _Opened()
    try:
        return await asyncio.shield(opened.runtime)
    except Exception:
        _opened.pop(loop, None)
        raise
