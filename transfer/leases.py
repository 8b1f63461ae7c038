"""Leases on blocks, not those of instances: what keeps blocks in place while a peer reads or writes
them.

A peer's READ cannot be revoked, and its end is not seen here. So the owner of the blocks grants a
lease on them, and neither frees nor overwrites them while the lease holds. The peer may use what it
has read only after the owner has *settled* the lease: has answered that the lease held until now.

Where the peer may write, time alone frees nothing. A writer that was frozen goes on writing when it
wakes, whatever the clock says then. So such a lease is *overdue* when its time is over: it is not
settled any more, and it keeps its blocks until the writer says that nothing of it is on its way, or
is known to be dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from .errors import BadDescription, InvalidTransfer

MAX_SECONDS = 86_400.0
"""The longest time that a lease is granted for at once."""
_MAX_BLOCK = 2**31 - 1


class Lease(NamedTuple):
    """Blocks that are kept in place until `deadline`.

    Attributes:
        deadline: on the owner's own monotonic clock, in seconds.
        writable: whether the peer may write them.
    """

    lease_id: int
    epoch: str
    blocks: tuple[int, ...]
    deadline: float
    writable: bool = False


class LeaseTable:
    """The leases of one agent on its own blocks.

    Times are given by the caller, from one monotonic clock; an earlier time than the latest counts
    as the latest.

    Args:
        epoch: which life of the agent this is; no other agent has ever had it.
        over: called with each lease that holds its blocks no longer, however it ended; to free
            what was kept beside it.
    """

    def __init__(self, epoch: str, over: Callable[[Lease], object] | None = None) -> None:
        self.epoch = epoch
        self._over = over
        self._leases: dict[int, Lease] = {}
        # Ids of those whose time is over, and which keep their blocks nevertheless.
        self._overdue: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._next = 1
        self._now = float("-inf")

    def __repr__(self) -> str:
        return f"<LeaseTable [{len(self._leases)} leases, {self.blocks_held} blocks]>"

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def blocks_held(self) -> int:
        """The number of blocks that are held by at least one lease."""
        return len(self._uses)

    def holds(self, block: int) -> bool:
        """True if a lease that is not over holds this block."""
        return block in self._uses

    @property
    def overdue(self) -> int:
        """The number of leases that keep blocks although their time is over: see above."""
        return len(self._overdue)

    def grant(
        self, blocks: Iterable[int], seconds: float, now: float, *, writable: bool = False
    ) -> Lease:
        """Hold blocks for a peer.

        Raises:
            InvalidTransfer: there are no blocks, one of them twice, or the time is not usable.
        """
        deadline = self._advance(now) + _checked_seconds(seconds)
        lease = Lease(self._next, self.epoch, _checked_blocks(blocks), deadline, writable)
        self._next += 1
        self._leases[lease.lease_id] = lease
        self._uses.update(lease.blocks)
        return lease

    def held(self, lease_id: int, epoch: str, now: float) -> Lease | None:
        """A lease that has held until now; None when it does not hold any more."""
        now = self._advance(now)
        lease = self._leases.get(lease_id)
        if lease is None or epoch != self.epoch or lease.deadline <= now:
            return None
        return lease

    def settle(self, lease_id: int, epoch: str, now: float) -> bool:
        """True if a lease has held until now; if so it ends here, and its blocks are free."""
        lease = self.held(lease_id, epoch, now)
        if lease is None:
            return False
        self._end(lease)
        return True

    def release(self, lease_id: int, epoch: str) -> bool:
        """End a lease, whatever its peer still reads; False when there is none any more.

        One that is writable is released once nothing of its writer is on its way.
        """
        lease = self._leases.get(lease_id)
        if lease is None or epoch != self.epoch:
            return False
        self._end(lease)
        return True

    def expired(self, now: float) -> Sequence[Lease]:
        """The leases whose time is over, each of which is told once.

        The owner of the table calls this every so often. Workers need not: they release each lease
        of theirs when its prompt is read, or its time is over.

        Those that peers only read are ended, and hold their blocks until then; those that are
        writable become overdue.
        """
        now = self._advance(now)
        over = [
            lease
            for lease in self._leases.values()
            if lease.deadline <= now and lease.lease_id not in self._overdue
        ]
        for lease in over:
            if lease.writable:
                self._overdue.add(lease.lease_id)
            else:
                self._end(lease)
        return over

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        self._overdue.discard(lease.lease_id)
        for block in lease.blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
        if self._over is not None:
            self._over(lease)

    def _advance(self, now: float) -> float:
        self._now = max(self._now, now)
        return self._now


class Ticket(msgspec.Struct, frozen=True):
    """The proof of a lease that the owner of blocks gives to the peer that is to read or write
    them.

    It is checked when it is made and when it is decoded.

    Attributes:
        agent: the name of the owner's mover, which is a `TransferAgent` or another.
        epoch: of that mover; a ticket is void where the mover has another.
        lease_id: of the lease that holds the blocks.
        blocks: ids of blocks of the owner's memory, in the order of their tokens.
        tokens: how many tokens are in them, from the first block on.
        seconds: how long the lease held when this was sent; it says nothing about clocks.
        writable: whether the peer may write the blocks.
    """

    agent: str
    epoch: str
    lease_id: int
    blocks: tuple[int, ...]
    tokens: int
    seconds: float
    writable: bool = False

    def __post_init__(self) -> None:
        if not self.agent or not self.epoch:
            raise InvalidTransfer("a ticket names an agent and its epoch")
        if not 0 < self.lease_id < 2**63:
            raise InvalidTransfer(f"lease {self.lease_id} of a ticket is not the number of a lease")
        _checked_blocks(self.blocks)
        if not 0 <= self.tokens < 2**31:
            raise InvalidTransfer(f"a ticket cannot have {self.tokens} tokens")
        _checked_seconds(self.seconds)

    def encode(self) -> bytes:
        """The ticket in msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """The ticket that `encode` made `data` of.

        Raises:
            BadDescription: it is none, or says what cannot be.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescription(f"this is not a ticket: {error}") from error


def _checked_blocks(blocks: Iterable[int]) -> tuple[int, ...]:
    checked = tuple(blocks)
    if not checked:
        raise InvalidTransfer("a lease needs at least one block")
    if min(checked) < 0 or max(checked) > _MAX_BLOCK:
        raise InvalidTransfer(f"block ids are from 0 to {_MAX_BLOCK}")
    if len(set(checked)) != len(checked):
        twice = next(block for block, times in Counter(checked).items() if times > 1)
        raise InvalidTransfer(f"block {twice} is given twice")
    return checked


def _checked_seconds(seconds: float) -> float:
    # Written so that a NaN is refused.
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidTransfer(
            f"a lease of {seconds:g} s is not possible: choose more than 0 and at most"
            f" {MAX_SECONDS:g} s"
        )
    return seconds
