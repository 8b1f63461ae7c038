"""`Mover`: leases blocks of an engine to peers, and reads what peers have leased.

`TransferAgent` is the one over NIXL. Workers take another, such as one over shared memory, by their
`open_mover`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from .leases import LeaseTable, Ticket


class Moving(Protocol):
    """A read on its way, from `Mover.start` on; `Transfer` is one."""

    @property
    def bytes(self) -> int:
        """The number of bytes that it moves; 0 where that is not known."""
        ...

    @property
    def blocks(self) -> int:
        """The number of blocks that it touches here, as far as that is known."""
        ...

    @property
    def seconds(self) -> float:
        """From its start to its end, or until now."""
        ...

    async def result(self) -> None:
        """Wait until all bytes are there, and no longer than its deadline.

        One that is cancelled here is given up. It is awaited in one task.

        Raises:
            LeaseLost: the source does not hold them any more.
            DynbusError: they will not come, or not as a whole.
        """

    def cancel(self) -> None:
        """Give it up, or do nothing where it is over; never waits."""

    async def quiet(self) -> None:
        """Wait until nothing of it can be written here any more; raises nothing.

        Its blocks are kept from other requests until this returns. So it must return, if need be
        by taking away what writes.
        """


class Mover(Protocol):
    """A lender and reader of blocks: it leases them to peers, and reads those that peers have
    leased; all on the main loop.

    An engine of the same class elsewhere has one of the same kind. It need not know the peer that
    a ticket is for, nor whether what it has read is used: the worker has the source settle the
    lease, and compares checksums.
    """

    @property
    def epoch(self) -> str:
        """The name of this life of the mover, never used again: that of its tickets and leases."""
        ...

    @property
    def leases(self) -> LeaseTable:
        """Those on its blocks, which the worker settles and releases."""
        ...

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        """Lease blocks of the own engine, for a peer to read them; never waits.

        Args:
            tokens: in the blocks, from the beginning of the first one on.
            seconds: for which the lease holds at most.

        Raises:
            DynbusError: they cannot be leased: the peer computes them itself.
        """
        ...

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
    ) -> Moving:
        """Begin to read tokens into blocks of the own engine; never waits.

        Args:
            operation: "read"; workers write nothing.
            ticket: of the peer's mover.
            remote_blocks, local_blocks: ids in the order of their tokens.
            deadline: on `dynbus.spi.monotonic`. What is not over 0.5 s later is given up.
            remote_start, local_start: the place of the first token, counted from the beginning of
                the first block of the list.

        Raises:
            DynbusError: it cannot be read: the prompt is computed here, as it is whatever else is
                raised, which is logged with its traceback.
        """
        ...
