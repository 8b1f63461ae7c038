"""Leases that are settled: the answer to a reader whether its lease has held until now."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynbus.spi import monotonic

from .checksums import Vouched, Wanted, vouch
from .layout import KvMemory
from .leases import LeaseTable


class Settlement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The question whether a lease has held until now, which ends it.

    Attributes:
        lease_id, epoch: as the ticket has them.
        wanted: of which tokens the reader compares checksums; None where it does not.
    """

    lease_id: int
    epoch: str
    wanted: Wanted | None = None


class Settled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a source to a peer that settles one of its leases.

    Attributes:
        held: whether what was read until now may be used.
        vouched: the checksums that were asked for, where it was held.
    """

    held: bool
    vouched: Vouched | None = None


class Settling:
    """Settles the leases that an agent has granted, and tells the keeper of the blocks.

    Args:
        memory: which has the blocks.
    """

    def __init__(self, memory: KvMemory, leases: LeaseTable) -> None:
        self._memory = memory
        self._leases = leases
        self._open: dict[int, Callable[[bool], object]] = {}

    def __repr__(self) -> str:
        return f"<Settling [{len(self._open)} leases]>"

    def expect(self, lease_id: int, settled: Callable[[bool], object]) -> None:
        """Let a lease be settled, until `release`.

        Args:
            settled: called when that is asked for, with whether the lease has held.
        """
        self._open[lease_id] = settled

    def release(self, lease_id: int) -> None:
        """End a lease, settled or not."""
        self._open.pop(lease_id, None)
        self._leases.release(lease_id, self._leases.epoch)

    async def settle(self, settlement: Settlement) -> Settled:
        """End a lease; the result says if it has held until now.

        Raises:
            InvalidTransfer: checksums are wanted of what the lease has not.
        """
        lease_id, epoch, wanted = settlement.lease_id, settlement.epoch, settlement.wanted
        if lease_id not in self._open or epoch != self._leases.epoch:
            # The peer that asks holds a ticket that is over, or of another life.
            return Settled(held=False)
        vouched = None
        if wanted is not None:
            vouched = await vouch(self._memory, self._leases, lease_id, epoch, wanted)
        settled = self._open.get(lease_id)
        if settled is None:
            return Settled(held=False)
        held = self._leases.settle(lease_id, epoch, monotonic())
        if held:
            del self._open[lease_id]
        settled(held)
        return Settled(held, vouched if held else None)
