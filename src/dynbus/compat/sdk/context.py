"""What the code of a service knows of where it runs: `dynamo_context` and `get_runtime`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from dynbus import Runtime
from dynbus.bus.context import current_instance
from dynbus.bus.protocol.names import InstanceName

_runtimes: Final[WeakValueDictionary[InstanceName, Runtime]] = WeakValueDictionary()
"""Those of the services that have been made in this process, each by the name of its instance."""


def remember(name: InstanceName, runtime: Runtime) -> None:
    """The code of this instance runs in `runtime`."""
    _runtimes[name] = runtime


def current_service() -> tuple[InstanceName, Runtime] | None:
    """The instance of a service whose code is running, and its runtime; None outside of one.

    On threads that nobody told, it is that of the process where there is only one.
    """
    name = current_instance()
    if name is None:
        known = list(_runtimes)
        name = known[0] if len(known) == 1 else None
    runtime = _runtimes.get(name) if name is not None else None
    return (name, runtime) if name is not None and runtime is not None else None


class DynamoContext(Mapping[str, Any]):
    """What the running service is: `runtime`, `namespace`, `service_name`, `component`,
    `endpoints` and `instance_id`. It is empty outside of services.

    Known from the constructor on, in hooks, endpoints and the tasks that they begin.
    """

    def __getitem__(self, key: str) -> Any:
        found = current_service()
        if found is None:
            raise KeyError(
                f"{key!r}: dynamo_context is only known inside a service; elsewhere use "
                "`await get_runtime()`"
            )
        name, runtime = found
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
            case _:
                raise KeyError(f"{key!r}: dynamo_context has {', '.join(_KEYS)}")

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS if current_service() is not None else ())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        found = current_service()
        return f"<dynamo_context of {found[0]}>" if found else "<dynamo_context outside a service>"


_KEYS: Final = ("runtime", "namespace", "service_name", "component", "instance_id")

dynamo_context: Final = DynamoContext()


class _Opened:
    """The runtime of a loop that has no service, closed with the loop."""

    def __init__(self) -> None:
        self.runtime: asyncio.Future[Runtime] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name="the runtime of get_runtime")

    async def _keep(self) -> None:
        try:
            async with Runtime.connect() as runtime:
                self.runtime.set_result(runtime)
                # Until `asyncio.run` cancels what is left.
                await asyncio.Event().wait()
        except Exception as error:
            if self.runtime.done():
                raise
            self.runtime.set_exception(error)


_opened: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Opened]] = WeakKeyDictionary()


async def get_runtime() -> Runtime:
    """The runtime of the running service; elsewhere one for the loop, connected at the first call.

    The latter is closed when `asyncio.run` ends.

    Raises:
        Unavailable: the bus cannot be used.
    """
    found = current_service()
    if found is not None:
        return found[1]
    loop = asyncio.get_running_loop()
    opened = _opened.get(loop)
    if opened is None:
        opened = _opened[loop] = _Opened()
    try:
        return await asyncio.shield(opened.runtime)
    except Exception:
        _opened.pop(loop, None)
        raise
