"""The prefill side of hand-overs: prompts are computed for others, and held until they are read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Final, Protocol

import anyio

from dynbus import Context, InvalidRequest
from dynbus.llm.engine.runner import EngineRunner
from dynbus.transfer import LeaseLost, LeaseTable, Settling, Ticket

from .messages import Prefilled, PrefillRequest
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

    def __init__(self, settling: Settling) -> None:
        self._settling = settling
        self.open: set[int] = set()
        self.lost = False
        self.changed = anyio.Event()

    def add(self, ticket: Ticket) -> Ticket:
        self.open.add(ticket.lease_id)
        self._settling.expect(ticket.lease_id, partial(self._settled, ticket.lease_id))
        return ticket

    def _settled(self, lease_id: int, held: bool) -> None:
        if held:
            self.open.discard(lease_id)
        # One that has run out stays open, and is released with the prompt.
        self.lost |= not held
        self.changed.set()

    async def over(self) -> None:
        """Wait until the last of them is settled, or one is found to be lost."""
        while self.open and not self.lost:
            self.changed = anyio.Event()
            await self.changed.wait()

    def release(self) -> None:
        for lease_id in self.open:
            self._settling.release(lease_id)
        self.open.clear()


class Sender:
    """Computes prompts for others.

    Args:
        settling: of the leases of `granter`.
        instance: who this is, for whoever settles leases.
        lease: seconds for which what is computed is held to be read.
    """

    def __init__(
        self,
        runner: EngineRunner,
        granter: Granter,
        settling: Settling,
        figures: HandOverFigures,
        *,
        instance: str,
        lease: float,
    ) -> None:
        self._runner = runner
        self._granter = granter
        self._settling = settling
        self._figures = figures
        self._instance = instance
        self._lease = lease
        self._open: set[str] = set()

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
        self._open.add(wanted.hand_over)
        leases = _Leases(self._settling)
        has_all = False
        self._figures.held += 1
        # Whoever is asked to stop leaves at once: nobody reads what it computes.
        unlink = call.link(lambda _: self._stop(name, leases))
        try:
            self._runner.add_held(name, wanted.request)
            # It is taken in, and may wait in the engine: nobody else need be found for it.
            yield Prefilled(wanted.cached, instance=self._instance)
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
            self._open.discard(wanted.hand_over)
            self._figures.held -= 1

    def _stop(self, name: str, leases: _Leases) -> None:
        self._runner.cancel(name)
        leases.lost = True
        leases.changed.set()

    async def _compute(
        self, name: str, wanted: PrefillRequest, leases: _Leases
    ) -> AsyncGenerator[Prefilled]:
        prompt, offered = len(wanted.request.token_ids), wanted.cached
        while (held := await self._runner.next_held(name)).computed < prompt:
            computed = held.computed
            if computed - offered >= LEAST_TOKENS:
                ticket = leases.add(self._grant(held.blocks, offered, computed))
                yield Prefilled(computed, offered, ticket, self._instance)
                offered = computed
        first = await self._runner.first(name)
        ticket = leases.add(self._grant(held.blocks, offered, prompt))
        yield Prefilled(prompt, offered, ticket, self._instance, first)

    def _grant(self, blocks: Sequence[int], start: int, stop: int) -> Ticket:
        size = self._runner.limits.block_size
        before = start // size
        return self._granter.grant(
            blocks[before : -(-stop // size)], tokens=stop - before * size, seconds=self._lease
        )
