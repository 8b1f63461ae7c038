"""What the failure stories look at: journals, open calls and memory; and a choosable instance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import psutil

from dynbus import RouteRequest, Runtime
from dynbus.bus.records.instance_view import Instance

from .workload import Census, Source


class Prefer:
    """A router that picks one instance as long as it is there."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        ids = [instance.id for instance in instances]
        return self._instance_id if self._instance_id in ids else ids[0]


def begun_at(source: Source, tag: str) -> Callable[[], Awaitable[bool]]:
    """A condition: the call of this tag runs where `source` calls lead."""

    async def begun() -> bool:
        return tag in (await source.journal()).begun

    return begun


def no_handler_runs(source: Source) -> Callable[[], Awaitable[bool]]:
    """A condition: every handler that began has been left."""

    async def quiet() -> bool:
        return (await source.journal()).running == 0

    return quiet


def holds_as_before(before: Census, source: Source) -> Callable[[], Awaitable[bool]]:
    """A condition: where `source` calls lead there are as many tasks and calls as there were."""

    async def restored() -> bool:
        now = await source.census()
        # The questions themselves are kept for a moment.
        same = (now.tasks, now.served, now.pending) == (before.tasks, before.served, before.pending)
        return same and now.kept < 100

    return restored


def resident(process_id: int) -> int:
    """The memory that a process occupies, in MiB."""
    return int(psutil.Process(process_id).memory_info().rss) >> 20


def leftovers(runtime: Runtime) -> dict[str, object]:
    """What a runtime still holds of calls; empty when all of them are over."""
    bus = runtime.bus
    found: dict[str, object] = {
        "calls": runtime.caller.open_calls(),
        "bounce handlers": dict(bus.bounce_handlers),
    }
    for instance in runtime.instances.values():
        server = instance.server
        found[f"load of {instance.id}"] = server.execution.load
        found[f"calls of {instance.id}"] = [
            call
            for peer in server.control.registry.remotes.values()
            for call in peer.calls.values()
            if not call.ended
        ]
    return {what: held for what, held in found.items() if held}
