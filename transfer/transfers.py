"""One transfer, as its waiting caller sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from dynbus import Cancelled, DeadlineExceeded, DynbusError
from dynbus.spi import Bus, monotonic

from .binding import Operation
from .leases import Ticket
from .links import Flow, Link, Moved
from .states import Event, State

_numbers = itertools.count(1)


class Owner(Protocol):
    """The interface that a transfer needs of its agent."""

    @property
    def bus(self) -> Bus: ...

    def count(self, transfer: Transfer, result: str) -> None:
        """A transfer is over."""

    def hold_back(self, transfer: Transfer, way: str) -> None:
        """A transfer was abandoned, and its memory is not quiet."""

    def let_go(self, transfer: Transfer) -> None:
        """The memory of a transfer is quiet."""


class Transfer:
    """One transfer, from `TransferAgent.start` on.

    Attributes:
        number: that no other transfer of this process has.
        operation: what the local side does.
        peer: the name of the peer's agent.
        moved: what it moves.
        ticket: under which it moves that; None where the peer has asked for it.
        deadline: when it is given up.
    """

    def __init__(
        self, owner: Owner, moved: Moved, ticket: Ticket | None, peer: str, deadline: float
    ) -> None:
        self.number = next(_numbers)
        self.operation: Operation = moved.operation
        self.peer = peer
        self.moved = moved
        self.ticket = ticket
        self.deadline = deadline
        self._owner = owner
        self._bus = owner.bus
        self._flow = Flow(moved, self._ended_in_thread)
        self._way = ""
        self._abandoned: Callable[[], object] | None = None
        self._begun = monotonic()
        self._seconds: float | None = None
        self._error: DynbusError | None = None
        self._over = asyncio.Event()
        self._quiet = asyncio.Event()
        self._timer = self._bus.loop.call_later(max(0.0, deadline - self._begun), self.expire)

    def __repr__(self) -> str:
        return f"<Transfer {self.number} {self.operation} {self.peer} [{self.state.value}]>"

    @property
    def state(self) -> State:
        """The state of the transfer."""
        return self._flow.state

    @property
    def bytes(self) -> int:
        """The number of bytes that it moves; 0 before the peer's description is known."""
        return self._flow.bytes

    @property
    def is_cut_off(self) -> bool:
        """True if it is over, but bytes that it has written may still arrive at the peer."""
        return self._flow.is_cut_off

    @property
    def local_blocks(self) -> tuple[int, ...]:
        """Those that are read or written here."""
        return tuple(self.moved.local_blocks.tolist())

    @property
    def blocks(self) -> int:
        """The number of local blocks that it touches."""
        return self.moved.local_blocks.size

    @property
    def seconds(self) -> float:
        """From its start to its end, or until now."""
        return monotonic() - self._begun if self._seconds is None else self._seconds

    async def result(self) -> None:
        """Wait until all bytes are there. A caller that is cancelled here abandons the transfer.

        After a READ the bytes may be used only once the source has settled the lease.

        Raises:
            TransferFailed: the link, the peer or NIXL failed.
            PeerRestarted: the ticket is of an earlier life of the peer.
            BadDescription: what the peer says of its memory is damaged, or cannot be.
            LayoutMismatch: the peer's blocks cannot become those here.
            InvalidTransfer: the peer has no such blocks.
            DeadlineExceeded: its deadline, or the lease's time, is over.
            Cancelled: `cancel` was called.
        """
        try:
            await self._over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Give the transfer up, at any time; what has ended stays as it is."""
        self._abandon("cancelled", Cancelled(f"the {self.operation} was cancelled"))

    async def quiet(self) -> None:
        """Wait until nothing reads or writes its local memory any more, whatever its result.

        That is at once for what is done; at most about `TransferConfig.quiet_seconds` after it was
        abandoned otherwise.
        """
        await self._quiet.wait()

    def begin(self, link: Link) -> None:
        """Go by this link; its agent calls this."""
        if not self._over.is_set():
            self._way = link.name
            link.start(self._flow)

    def begin_apart(self, way: str, abandoned: Callable[[], object]) -> bool:
        """Go by another way, unless it is over; whether it does.

        Args:
            way: its name, by which it is destroyed if the transfer does not get quiet.
            abandoned: called when nobody waits for the transfer any longer.
        """
        if self._over.is_set():
            return False
        self._way = way
        self._abandoned = abandoned
        self._flow.move(Event.POST)
        return True

    def end_apart(self, error: DynbusError | None, size: int = 0) -> None:
        """End what went by another way: nothing of it is on its way any more."""
        if self._quiet.is_set():
            return
        self._flow.bytes = size
        self._flow.error = error
        self._flow.move(Event.FINISHED if error is None else Event.BROKE)
        self._ended()

    def fail(self, error: DynbusError) -> None:
        """It never had a link; its agent calls this."""
        if not self._over.is_set():
            self._flow.move(Event.DESTROYED)
            self._finish("failed", error)
            self._be_quiet()

    def expire(self) -> None:
        """Give it up: its time is over."""
        seconds = max(0.0, self.deadline - self._begun)
        self._abandon(
            "expired",
            DeadlineExceeded(f"the {self.operation} was not done within {seconds:.3g} s"),
        )

    def _abandon(self, result: str, error: DynbusError) -> None:
        if self._over.is_set():
            return
        state = self._flow.move(Event.CANCEL)
        if state in (State.DONE, State.FAILED):
            # It has ended just now, and the news is on its way.
            return
        self._finish(result, error)
        if state is State.QUIET:
            self._be_quiet()
        else:
            self._owner.hold_back(self, self._way)
            if self._abandoned is not None:
                self._abandoned()

    def _ended_in_thread(self) -> None:
        self._bus.to_main(self._ended)

    def _ended(self) -> None:
        if self._flow.state is State.DONE:
            self._finish("done", None)
        elif self._flow.state is State.FAILED:
            self._finish("failed", self._flow.error)
        self._be_quiet()

    def _finish(self, result: str, error: DynbusError | None) -> None:
        if self._over.is_set():
            return
        self._timer.cancel()
        self._error = error
        self._seconds = monotonic() - self._begun
        self._over.set()
        self._owner.count(self, result)

    def _be_quiet(self) -> None:
        if not self._quiet.is_set():
            self._quiet.set()
            self._owner.let_go(self)
