"""One endpoint, executed on an idle in-memory bus; its calls go nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.bus.near_side import ADDRESS, INSTANCE, RecordedReply, bus_in_memory

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.cancellation import Tombstones
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.unread_bytes import ClientUnreadBytes, UnreadBytes
from dynbus.bus.serving.calls import Call, ServedEndpoint
from dynbus.bus.serving.execution import Execution
from dynbus.testing import run


class Called:
    """A call on the bench.

    Attributes:
        retired: how often it was said to be over.
    """

    def __init__(self, call: Call, reply: RecordedReply) -> None:
        self.call = call
        self.reply = reply
        self.retired = 0

    @property
    def sent(self) -> list[bytes]:
        return self.reply.sent

    @property
    def error(self) -> DynbusError | None:
        return self.reply.error


class Bench:
    """One endpoint, executed."""

    def __init__(self, bus: Bus, handler: Endpoint) -> None:
        self.bus = bus
        self.cancelled = Tombstones()
        self.execution = Execution(bus, INSTANCE, self.cancelled, self._retired)
        self.served = ServedEndpoint(ADDRESS, handler, INSTANCE)
        self.execution.gather(self.served)
        self._made: dict[Call, Called] = {}

    def call(
        self, data: bytes = b"", *, seconds: float | None = None, taker: str = "the test"
    ) -> Called:
        """Admit a call with so many seconds until its deadline, in the turn of `taker`."""
        now = monotonic()
        deadline = None if seconds is None else now + seconds
        reply = RecordedReply(self.bus)
        account = ClientUnreadBytes(UnreadBytes())
        context = Context("r1", deadline=deadline)
        call = Call(self.served, context, reply, now, turn_taker=taker, account=account)
        made = self._made[call] = Called(call, reply)
        self.execution.admit(call, data, now)
        return made

    def _retired(self, call: Call, _: float) -> None:
        self._made[call].retired += 1


def story(handler: Endpoint, tell: Callable[[Bench], Any], **settings: Any) -> Any:
    """What `tell` returns, with the endpoint on an idle in-memory bus."""

    async def whole() -> Any:
        async with bus_in_memory(**settings) as (_, bus):
            bench = Bench(bus, handler)
            return await tell(bench)

    return run(whole())


def assert_settled(bench: Bench, *calls: Called) -> None:
    assert bench.execution.load == 0
    assert (bench.served.admission.running, bench.served.admission.waiting) == (0, 0)
    assert [call.retired for call in calls] == [1] * len(calls)
    assert bench.served.requests == len(calls)


async def echo(data: bytes) -> bytes:
    return data


async def wait_for_ever(_: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""
