"""An engine and two agents of a test, without blocks: who lends, and who reads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast

import anyio

from dynbus.bus.errors import Cancelled, DynbusError
from dynbus.bus.protocol.names import InstanceName
from dynbus.llm.engine.interface import EngineLimits, Held
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.hand_over.observing import HandOverEvents, HandOverFigures
from dynbus.llm.hand_over.source import Leases, Source
from dynbus.transfer.leases import LeaseTable, Ticket
from dynbus.transfer.settling import Settling

Noted: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]
"""An event of a flight: its namespace, what it is, whose and the request's id; and the details."""

SIZE = 16
EPOCH = "epoch"
LIMITS = EngineLimits(
    block_size=SIZE, blocks=64, max_num_seqs=4, max_num_batched_tokens=64, context_length=1024
)


class Memory:
    """An agent that copies between lists: what block holds what."""

    layout = SimpleNamespace(block_size=SIZE)

    def __init__(self, name: str, blocks: Sequence[str] = ()) -> None:
        self.name = name
        self.epoch = EPOCH
        self.contents = dict(enumerate(blocks))
        self.leases = LeaseTable(EPOCH)
        self.source: Memory | None = None
        self.error: DynbusError | None = None
        self.takes = 0.01
        self.started: list[Reading] = []

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        lease = self.leases.grant(blocks, seconds, anyio.current_time())
        return Ticket(self.name, EPOCH, lease.lease_id, lease.blocks, tokens, seconds)

    def start(
        self,
        operation: Literal["read", "write"],
        ticket: Ticket,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        tokens: int,
        deadline: float,
        remote_start: int = 0,
        local_start: int = 0,
    ) -> Reading:
        assert operation == "read"
        assert remote_start == local_start == 0
        assert tokens == SIZE * len(remote_blocks) == SIZE * len(local_blocks)
        reading = Reading(self, list(zip(remote_blocks, local_blocks, strict=True)))
        self.started.append(reading)
        return reading


class Reading:
    """A transfer of a `Memory`."""

    def __init__(self, memory: Memory, pairs: list[tuple[int, int]]) -> None:
        self.memory, self.pairs = memory, pairs
        self.bytes, self.blocks, self.seconds = len(pairs) << 20, len(pairs), 0.01
        self.was_cancelled = False
        self._over = anyio.Event()

    async def result(self) -> None:
        with anyio.move_on_after(self.memory.takes):
            await self._over.wait()
        if self.was_cancelled:
            raise Cancelled("the read was cancelled")
        if self.memory.error is not None:
            raise self.memory.error
        assert self.memory.source is not None
        for remote, local in self.pairs:
            self.memory.contents[local] = self.memory.source.contents[remote]
        self._over.set()

    def cancel(self) -> None:
        self.was_cancelled = not self._over.is_set()
        self._over.set()

    async def quiet(self) -> None:
        if self.was_cancelled:
            await anyio.sleep(3.0)


class Ending:
    """The reply of a request."""

    def __init__(self) -> None:
        self._over = anyio.Event()

    @property
    def has_ended(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        self._over.set()

    async def ended(self) -> None:
        await self._over.wait()


class Engine:
    """A runner of an engine that has some blocks of every prompt, and waits for others."""

    limits = LIMITS

    def __init__(self, blocks: Sequence[int], cached: int) -> None:
        self.blocks, self.cached = tuple(blocks), cached
        self.delivered: list[int] = []
        self.sources: list[str] = []
        self.released: list[str] = []
        self.error: DynbusError | None = None
        self.reply = Ending()

    async def prepare(self, request: GenerateRequest) -> None:
        """There is nothing to prepare."""

    def reserve(self, request_id: str, request: GenerateRequest, reply: Any) -> None:
        self.reply = reply

    async def next_held(self, hold_id: str) -> Held:
        if self.error is not None:
            self.reply.end()
            raise self.error
        return Held(hold_id, self.blocks, self.cached * SIZE, self.cached * SIZE)

    async def hold(self, hold_id: str, request: GenerateRequest) -> Held:
        held = min(self.cached, len(request.token_ids) // SIZE)
        return Held(hold_id, self.blocks[:held], held * SIZE, held * SIZE)

    def note_source(self, request_id: str, source: str) -> None:
        self.sources.append(source)

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        assert first is None
        self.delivered.append(computed)
        self.reply.end()

    def release(self, hold_id: str) -> None:
        self.released.append(hold_id)

    def cancel(self, request_id: str) -> None:
        self.reply.end()

    def forget(self, request_id: str) -> None:
        """It is over."""


def events_into(noted: list[Noted] | None, instance: str) -> HandOverEvents:
    """Hand-overs in a flight that is a list; in none where that is None."""

    def note(*event: Any, **details: Any) -> None:
        assert noted is not None
        noted.append((event, details))

    def note_request(*event: Any) -> None:
        note(*event[:-1], **event[-1])

    bus: Any = (
        None
        if noted is None
        else SimpleNamespace(flight=SimpleNamespace(note=note, note_request=note_request))
    )
    return HandOverEvents(bus, InstanceName("test", "a", instance))


def source_of(
    engine: Engine,
    memory: Memory,
    settling: Settling,
    *,
    most_lent: int = 16,
    model: str = "",
    events: list[Noted] | None = None,
) -> Source:
    """What lends blocks of an engine."""
    return Source(
        cast(Any, engine),
        Leases.of(memory, settling),
        HandOverFigures(),
        events=events_into(events, "b"),
        instance="b",
        lease=5.0,
        most_lent=most_lent,
        model=model,
    )
