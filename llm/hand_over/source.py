"""The source: prompts' blocks that others read, computed for them or cached here already."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Final, Protocol

import anyio

from dynbus import Context, InvalidRequest, Overloaded
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.weights.fingerprint import are_same
from dynbus.transfer import LeaseLost, Mover, Settling, Ticket

from .messages import LendRequest, Lent, Prefilled, PrefillRequest
from .observing import HandOverEvents, HandOverFigures

LEAST_TOKENS: Final = 64
"""Tokens that are offered at once at least, but for the last ones: each part takes two messages."""
MAX_LOANS: Final = 32
"""Prefixes that are lent at a time: they take blocks from the requests that run here."""
MAX_SECONDS: Final = 60.0
"""For how long blocks are lent at most."""


class Keeping(Protocol):
    """The part of one prompt that is kept for its reader."""

    @property
    def is_read(self) -> bool:
        """True if all that was offered has been read."""
        ...

    def offer(self, blocks: Sequence[int], tokens: int, seconds: float) -> Ticket | None:
        """Offer the blocks of so many tokens; the ticket by which they are read, if any."""
        ...

    async def over(self) -> None:
        """Wait until all of it is read, or is found to be lost, or nobody wants it any more."""

    def leave(self) -> None:
        """Nobody wants it any more."""

    def release(self) -> None:
        """Keep it no longer."""


Keep = Callable[[str, str], Keeping]
"""Begins to keep a prompt: of its request or hold in the engine the name, and of its reader's
hand-over the id."""


class Leases:
    """The leases of one prompt by a mover, until all of them are over; see `Keeping`.

    Args:
        settling: of the leases of `mover`.
    """

    def __init__(self, mover: Mover, settling: Settling) -> None:
        self._mover = mover
        self._settling = settling
        self._open: set[int] = set()
        self._is_lost = False
        self._changed = anyio.Event()

    @classmethod
    def of(cls, mover: Mover, settling: Settling) -> Keep:
        """Keeps prompts by leases."""
        return lambda name, hand_over: cls(mover, settling)

    @property
    def is_read(self) -> bool:
        return not self._open

    def offer(self, blocks: Sequence[int], tokens: int, seconds: float) -> Ticket:
        ticket = self._mover.grant(blocks, tokens=tokens, seconds=seconds)
        self._open.add(ticket.lease_id)
        self._settling.expect(ticket.lease_id, partial(self._settled, ticket.lease_id))
        return ticket

    def _settled(self, lease_id: int, held: bool) -> None:
        if held:
            self._open.discard(lease_id)
        # One that has run out stays open, and is released with the prompt.
        self._is_lost |= not held
        self._changed.set()

    async def over(self) -> None:
        while self._open and not self._is_lost:
            self._changed = anyio.Event()
            await self._changed.wait()

    def leave(self) -> None:
        self._is_lost = True
        self._changed.set()

    def release(self) -> None:
        for lease_id in self._open:
            self._settling.release(lease_id)
        self._open.clear()


class Source:
    """Computes prompts for others, and lends them what is cached of some.

    Args:
        keep: keeps blocks of the engine for readers.
        events: of its hand-overs, in the flight.
        instance: its id, under which readers settle leases.
        lease: seconds for which what is computed is held to be read.
        in_parts: whether what is computed is read while the rest is.
        most_lent: blocks that are kept in place at a time of what is lent.
        model: the fingerprint of the own model, with which readers' are compared; empty to believe
            all.

    Attributes:
        loans: prefixes that are lent at this moment.
        lent_blocks: so far.
        most_lent: as it was given.
    """

    def __init__(
        self,
        runner: EngineRunner,
        keep: Keep,
        figures: HandOverFigures,
        *,
        events: HandOverEvents,
        instance: str,
        lease: float,
        in_parts: bool = True,
        most_lent: int = 0,
        model: str = "",
    ) -> None:
        self.loans = self.lent_blocks = 0
        self.most_lent = most_lent
        self._runner = runner
        self._keep = keep
        self._in_parts = in_parts
        self._figures = figures
        self._events = events
        self._instance = instance
        self._lease = lease
        self._model = model
        self._open: set[str] = set()
        # Prefixes that begin alike share blocks, which count once.
        self._pinned: Counter[int] = Counter()
        self._numbers = count()

    def __repr__(self) -> str:
        return f"<Source {self._instance} [{len(self._open)} prompts, {self.loans} loans]>"

    @property
    def pinned(self) -> int:
        """The number of lent blocks that are kept in place at this moment."""
        return len(self._pinned)

    # Computed ---------------------------------------------------------------------------

    async def prefill(
        self, name: str, wanted: PrefillRequest, call: Context
    ) -> AsyncGenerator[Prefilled]:
        """Compute a prompt, and hold it until it is read.

        The stream ends when all leases are settled. When it is left before, all is free at once.

        Args:
            name: of the request in the engine.

        Raises:
            InvalidRequest: the engine refuses it, it is of another model, or this prompt is being
                computed already.
            LeaseLost: nobody has read it in time.
            Cancelled, HandlerError, Unavailable: the engine does not go on with it.
        """
        self._check_model(wanted.model)
        prompt = len(wanted.request.token_ids)
        if not 0 <= wanted.cached < prompt:
            raise InvalidRequest(
                f"cached = {wanted.cached} is not usable: the prompt has {prompt} tokens"
            )
        if wanted.hand_over in self._open:
            raise InvalidRequest(f"the hand-over {wanted.hand_over!r} is going on already")
        self._open.add(wanted.hand_over)
        kept = self._keep(name, wanted.hand_over)
        has_all = False
        self._figures.held += 1
        # A caller that stops leaves at once: nobody reads what is computed.
        unlink = call.link(lambda _: self._stop(name, kept))
        try:
            self._runner.add_held(name, wanted.request)
            if self._in_parts:
                # It is taken in, and may wait in the engine: nobody else need be found for it.
                yield Prefilled(wanted.cached, instance=self._instance)
            async for item in self._compute(name, wanted, kept):
                has_all = item.first is not None
                yield item
            with anyio.move_on_after(self._lease):
                await kept.over()
            if not kept.is_read and not call.is_stopped():
                self._events.unread(call.id, self._lease)
                raise LeaseLost(f"nobody has read the prompt within {self._lease:g} s")
        finally:
            unlink()
            # A reader that has all may leave before it is told that this is over.
            self._figures.served["read" if has_all and kept.is_read else "left"] += 1
            kept.release()
            self._runner.release(name)
            self._open.discard(wanted.hand_over)
            self._figures.held -= 1

    def _stop(self, name: str, kept: Keeping) -> None:
        self._runner.cancel(name)
        kept.leave()

    async def _compute(
        self, name: str, wanted: PrefillRequest, kept: Keeping
    ) -> AsyncGenerator[Prefilled]:
        prompt, offered = len(wanted.request.token_ids), wanted.cached
        while (held := await self._runner.next_held(name)).computed < prompt:
            computed = held.computed
            if self._in_parts and computed - offered >= LEAST_TOKENS:
                ticket = self._offer(kept, held.blocks, offered, computed, self._lease)
                yield Prefilled(computed, offered, ticket, self._instance)
                offered = computed
        first = await self._runner.first(name)
        ticket = self._offer(kept, held.blocks, offered, prompt, self._lease)
        yield Prefilled(prompt, offered, ticket, self._instance, first)

    def _offer(
        self, kept: Keeping, blocks: Sequence[int], start: int, stop: int, seconds: float
    ) -> Ticket | None:
        size = self._runner.limits.block_size
        before = start // size
        return kept.offer(blocks[before : -(-stop // size)], stop - before * size, seconds)

    def _check_model(self, theirs: str) -> None:
        if not are_same(self._model, theirs):
            raise InvalidRequest(
                f"this instance computes a model of fingerprint {self._model[:8]}, and the one "
                f"that asks one of {theirs[:8]}: give both the same files"
            )

    # Lent -------------------------------------------------------------------------------

    async def lend(self, request: LendRequest, call: Context) -> AsyncGenerator[Lent]:
        """Lease what is cached of a prefix; the only item tells of it.

        The blocks stay where they are until the lease is settled or over, or the caller leaves.

        Raises:
            InvalidRequest: the request makes no sense, or is of another model.
            Overloaded: too many prefixes, or blocks, are lent already.
        """
        self._check_model(request.model)
        size = self._runner.limits.block_size
        if not 0 < request.seconds <= MAX_SECONDS:
            raise InvalidRequest(
                f"seconds = {request.seconds}: blocks are lent for more than 0 and at most "
                f"{MAX_SECONDS:g} seconds"
            )
        if not 0 <= request.start < len(request.token_ids) or request.start % size:
            raise InvalidRequest(
                f"start = {request.start}: it is a multiple of {size}, the tokens of a block, "
                f"below the {len(request.token_ids)} token_ids"
            )
        if self.loans >= MAX_LOANS:
            raise Overloaded(f"{MAX_LOANS} prefixes are lent already", retry_after=1.0)
        self.loans += 1
        name = f"lent.{next(self._numbers)}"
        kept = self._keep(name, "")
        unlink: Callable[[], object] = call.link(lambda _: kept.leave())
        try:
            held = await self._runner.hold(
                name,
                GenerateRequest(
                    # No more is held than may be lent.
                    request.token_ids[: self.most_lent * size],
                    lora_name=request.lora_name,
                    cache_salt=request.cache_salt,
                ),
            )
            with self._pinning(held.blocks):
                tokens = held.computed - held.computed % size
                if tokens <= request.start:
                    yield Lent(tokens)
                    return
                ticket = self._offer(kept, held.blocks, request.start, tokens, request.seconds)
                self.lent_blocks += (tokens - request.start) // size
                yield Lent(tokens, ticket)
                with anyio.move_on_after(request.seconds):
                    await kept.over()
        finally:
            unlink()
            kept.release()
            self._runner.release(name)
            self.loans -= 1

    @contextmanager
    def _pinning(self, blocks: Sequence[int]) -> Generator[None]:
        """Count blocks as lent.

        Raises:
            Overloaded: they are too many, with those that are lent already.
        """
        if len(self._pinned.keys() | set(blocks)) > self.most_lent:
            raise Overloaded(
                f"{self.pinned} of {self.most_lent} blocks that may be are lent already",
                retry_after=1.0,
            )
        self._pinned.update(blocks)
        try:
            yield
        finally:
            for block in blocks:
                self._pinned[block] -= 1
                if not self._pinned[block]:
                    del self._pinned[block]
