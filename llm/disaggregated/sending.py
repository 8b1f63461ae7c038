"""The prefill side of hand-overs: prompts are computed for others, and held until they are read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final, Protocol

import anyio

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import InvalidRequest
from dynbus.llm.engine.runner import EngineRunner
from dynbus.transfer.checksums import Settled, vouch
from dynbus.transfer.errors import LeaseLost
from dynbus.transfer.leases import LeaseTable, Ticket

from .messages import Prefilled, PrefillRequest, Settlement
from .observing import HandOverFigures

LEAST_TOKENS: Final = 64
"""Tokens that are offered at once at least, but for the last ones: each part takes two messages."""


class Granter(Protocol):
    """What leases blocks to peers; `dynbus.transfer.agent.TransferAgent` is one."""

    epoch: str
    leases: LeaseTable

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        """A ticket with which a peer may read blocks."""
        ...


class _Leases:
    """The leases of one prompt, until all of them are over."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self.open: set[int] = set()
        self.lost = False
        self.changed = anyio.Event()

    def grant(self, ticket: Ticket) -> Ticket:
        self.open.add(ticket.lease_id)
        return ticket

    def settle(self, settlement: Settlement) -> bool:
        if settlement.lease_id not in self.open or settlement.epoch != self._table.epoch:
            # Whoever asks holds a ticket of another prompt, or of another life.
            return False
        held = self._table.settle(settlement.lease_id, settlement.epoch, monotonic())
        if held:
            self.open.discard(settlement.lease_id)
        # One that has run out stays open, and is released with the prompt.
        self.lost |= not held
        self.changed.set()
        return held

    async def over(self) -> None:
        """Wait until the last of them is settled, or one is found to be lost."""
        while self.open and not self.lost:
            self.changed = anyio.Event()
            await self.changed.wait()

    def release(self) -> None:
        for lease_id in self.open:
            self._table.release(lease_id, self._table.epoch)
        self.open.clear()


class Sender:
    """Computes prompts for others.

    Args:
        instance: who this is, for whoever settles leases.
        lease: seconds for which what is computed is held to be read.
    """

    def __init__(
        self,
        runner: EngineRunner,
        granter: Granter,
        figures: HandOverFigures,
        *,
        instance: str,
        lease: float,
    ) -> None:
        self._runner = runner
        self._granter = granter
        self._figures = figures
        self._instance = instance
        self._lease = lease
        self._open: dict[str, _Leases] = {}

    def __repr__(self) -> str:
        return f"<Sender {self._instance} [{len(self._open)} prompts]>"

    async def prefill(
        self, name: str, wanted: PrefillRequest, call: Context
    ) -> AsyncGenerator[Prefilled]:
        """Compute a prompt, and hold it until it is read.

        The stream ends when all leases are settled. When it is left before, all is free at once.

        Args:
            name: of the request in the engine.

        Raises:
            InvalidRequest: the engine refuses it, or this prompt is being computed already.
            LeaseLost: nobody has read it in time.
            Cancelled, HandlerError, Unavailable: the engine does not go on with it.
        """
        prompt = len(wanted.request.token_ids)
        if not 0 <= wanted.cached < prompt:
            raise InvalidRequest(
                f"cached = {wanted.cached} is not usable: the prompt has {prompt} tokens"
            )
        if wanted.hand_over in self._open:
            raise InvalidRequest(f"the hand-over {wanted.hand_over} is going on already")
        leases = self._open[wanted.hand_over] = _Leases(self._granter.leases)
        has_all = False
        self._figures.held += 1
        # Whoever is asked to stop leaves at once: nobody reads what it computes.
        unlink = call.link(lambda _: self._stop(name, leases))
        try:
            self._runner.add_held(name, wanted.request)
            async for item in self._compute(name, wanted, leases):
                has_all = item.first is not None
                yield item
            with anyio.move_on_after(self._lease):
                await leases.over()
            if leases.open and not call.is_stopped():
                raise LeaseLost(f"nobody has read the prompt within {self._lease:g} s")
        finally:
            unlink()
            # Whoever has read it all may leave before it is told that this is over.
            self._figures.served["read" if has_all and not leases.open else "left"] += 1
            leases.release()
            self._runner.release(name)
            del self._open[wanted.hand_over]
            self._figures.held -= 1

    def _stop(self, name: str, leases: _Leases) -> None:
        self._runner.cancel(name)
        leases.lost = True
        leases.changed.set()

    async def _compute(
        self, name: str, wanted: PrefillRequest, leases: _Leases
    ) -> AsyncGenerator[Prefilled]:
        prompt, offered = len(wanted.request.token_ids), wanted.cached
        is_first = True
        while (held := await self._runner.next_held(name)).computed < prompt:
            computed = held.computed
            if computed - offered >= LEAST_TOKENS:
                ticket = leases.grant(self._grant(held.blocks, offered, computed))
                yield Prefilled(computed, offered, ticket, self._instance)
                offered = computed
            elif is_first:
                # It has begun.
                yield Prefilled(max(offered, computed), instance=self._instance)
            is_first = False
        first = await self._runner.first(name)
        ticket = leases.grant(self._grant(held.blocks, offered, prompt))
        yield Prefilled(prompt, offered, ticket, self._instance, first)

    def _grant(self, blocks: Sequence[int], start: int, stop: int) -> Ticket:
        size = self._runner.limits.block_size
        before = start // size
        return self._granter.grant(
            blocks[before : -(-stop // size)], tokens=stop - before * size, seconds=self._lease
        )

    async def settle(self, settlement: Settlement) -> Settled:
        """Whether a lease has held until now; it ends with this.

        Raises:
            InvalidTransfer: checksums are wanted of what the lease has not.
        """
        leases, granter = self._open.get(settlement.hand_over), self._granter
        if leases is None:
            return Settled(held=False)
        vouched = None
        if settlement.wanted is not None:
            vouched = await vouch(
                self._runner.memory,
                granter.leases,
                settlement.lease_id,
                settlement.epoch,
                settlement.wanted,
            )
        held = leases.settle(settlement)
        return Settled(held, vouched if held else None)
