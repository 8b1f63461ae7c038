"""One endpoint, executed on an idle in-memory bus; its calls go nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.bus.near_side import ADDRESS, INSTANCE, RecordedCall, bus_in_memory

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.serving.execution import Execution
from dynbus.bus.serving.served_endpoint import ServedEndpoint
from dynbus.testing import run


class Bench:
    """One endpoint, executed."""

    def __init__(self, execution: Execution, handler: Endpoint) -> None:
        self.execution = execution
        self.served = ServedEndpoint(ADDRESS, handler, INSTANCE)

    def call(
        self, data: bytes = b"", *, seconds: float | None = None, taker: str = "the test"
    ) -> RecordedCall:
        """Admit a call with so many seconds until its deadline, in the turn of `taker`."""
        now = monotonic()
        deadline = None if seconds is None else now + seconds
        context = Context("r1", deadline=deadline)
        made = RecordedCall(self.execution, self.served, context, taker)
        self.execution.admit(made, data, now)
        return made


def story(handler: Endpoint, tell: Callable[[Bench], Any], **settings: Any) -> Any:
    """What `tell` returns, with the endpoint on an idle in-memory bus."""

    async def whole() -> Any:
        async with bus_in_memory(**settings) as (_, bus):
            bench = Bench(Execution(bus, INSTANCE), handler)
            return await tell(bench)

    return run(whole())


def assert_settled(bench: Bench, *calls: RecordedCall) -> None:
    assert bench.execution.load == 0
    assert (bench.served.admission.running, bench.served.admission.waiting) == (0, 0)
    assert [call.retired for call in calls] == [1] * len(calls)
    assert bench.served.requests == len(calls)


async def echo(data: bytes) -> bytes:
    return data


async def wait_for_ever(_: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""
