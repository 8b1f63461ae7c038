"""Movers of blocks between engines of one process, as NIXL does between processes, and do
wrong what they are told to."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Cancelled, DeadlineExceeded, DynbusError
from dynbus.transfer.errors import TransferFailed
from dynbus.transfer.layout import KvMemory, Region, plan
from dynbus.transfer.leases import LeaseTable, Ticket


class Wire:
    """What is between the movers of a test.

    Attributes:
        movers: by their names.
        fails: whether transfers fail.
        stalls: whether transfers begin and do not end; what they read arrives when they are told
            to be quiet, in the blocks that they had.
        moved: of each transfer that is done, its tokens.
        damages: whether a bit of what arrives is another one.
        breaks: "start" or "result" where these raise what no mover may raise.
        is_endless: whether transfers keep no deadline: neither do they fail, nor do they end.
        granted, begun, done: called when a lease is granted, when a transfer stalls, and when one
            is done, before it is settled.
        late: transfers that were given up, and whose bytes have not arrived.
    """

    def __init__(self) -> None:
        self.movers: dict[str, MemoryMover] = {}
        self.fails = self.stalls = self.damages = self.is_endless = False
        self.breaks: Literal["", "start", "result"] = ""
        self.granted: Callable[[], object] | None = None
        self.begun: Callable[[], object] | None = None
        self.done: Callable[[], object] | None = None
        self.moved: list[int] = []
        self.late: list[MemoryTransfer] = []

    def become_quiet(self) -> None:
        """Let what was given up arrive."""
        late, self.late = self.late, []
        for one in late:
            one.copy()
            one.calm.set()

    @asynccontextmanager
    async def mover(self, name: str, memory: KvMemory) -> AsyncGenerator[MemoryMover]:
        mover = self.movers[name] = MemoryMover(self, name, memory)
        try:
            yield mover
        finally:
            del self.movers[name]


class MemoryTransfer:
    """See `dynbus.transfer.Moving`."""

    def __init__(
        self,
        mover: MemoryMover,
        ticket: Ticket,
        local_blocks: Sequence[int],
        tokens: int,
        deadline: float,
        starts: tuple[int, int],
    ) -> None:
        self.mover = mover
        self.ticket = ticket
        self.local_blocks = local_blocks
        self.tokens = tokens
        self.deadline = deadline
        self.starts = starts
        self.bytes = 1000 * tokens
        self.blocks = len(local_blocks)
        self.seconds = 0.001
        self.calm = asyncio.Event()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = False

    def copy(self) -> None:
        peer = self.mover.wire.movers[self.ticket.agent]
        local_start, remote_start = self.starts
        pieces = plan(
            self.mover.memory.layout,
            self.local_blocks,
            peer.memory.layout,
            self.ticket.blocks,
            self.tokens,
            local_start=local_start,
            remote_start=remote_start,
        )
        rows: Iterable[tuple[int, int, int, int, int]] = zip(
            pieces.local_region.tolist(),
            pieces.local_offset.tolist(),
            pieces.remote_region.tolist(),
            pieces.remote_offset.tolist(),
            pieces.length.tolist(),
            strict=True,
        )
        ours: tuple[Region, ...] = self.mover.memory.regions
        theirs: tuple[Region, ...] = peer.memory.regions
        for to, at, region, offset, length in rows:
            ctypes.memmove(ours[to].address + at, theirs[region].address + offset, length)
            if self.mover.wire.damages:
                ctypes.c_uint8.from_address(ours[to].address + at + length - 1).value ^= 1

    async def result(self) -> None:
        wire = self.mover.wire
        # It takes a moment.
        await asyncio.sleep(0)
        if wire.breaks == "result":
            raise ValueError("a bug in the transfer")
        if wire.is_endless:
            await self.calm.wait()
        if not self.over.done():
            if wire.fails:
                self._end(TransferFailed("the link is cut"))
            elif not wire.stalls:
                self.copy()
                wire.moved.append(self.tokens)
                self._end(None)
                if wire.done is not None:
                    wire.done()
            else:
                self.begun = True
                if wire.begun is not None:
                    wire.begun()
        try:
            async with asyncio.timeout(max(0.0, self.deadline - monotonic())):
                await asyncio.shield(self.over)
        except TimeoutError:
            self._abandon(DeadlineExceeded("the read was not done in time"))
            await self.over
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _end(self, error: DynbusError | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
            self.over.exception()
        if not self.begun:
            self.calm.set()

    def _abandon(self, error: DynbusError) -> None:
        if not self.over.done():
            self._end(error)
            if self.begun:
                self.mover.wire.late.append(self)

    def cancel(self) -> None:
        self._abandon(Cancelled("the read was cancelled"))

    async def quiet(self) -> None:
        await self.calm.wait()


class MemoryMover:
    """See `dynbus.transfer.Mover`."""

    def __init__(self, wire: Wire, name: str, memory: KvMemory) -> None:
        self.wire = wire
        self.name = name
        self.epoch = f"epoch of {name}"
        self.memory = memory
        self.leases = LeaseTable(self.epoch)

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        if self.wire.granted is not None:
            self.wire.granted()
        lease = self.leases.grant(blocks, seconds, monotonic())
        return Ticket(self.name, self.epoch, lease.lease_id, lease.blocks, tokens, seconds)

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
    ) -> MemoryTransfer:
        assert operation == "read"
        if self.wire.breaks == "start":
            raise OSError("the disk is broken")
        assert tuple(remote_blocks) == ticket.blocks
        if ticket.agent not in self.wire.movers:
            raise TransferFailed(f"there is no mover {ticket.agent}")
        return MemoryTransfer(
            self, ticket, local_blocks, tokens, deadline, (local_start, remote_start)
        )
