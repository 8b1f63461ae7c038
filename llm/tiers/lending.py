"""The side of a fetch that has the blocks: it keeps them in place while a peer reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from typing import Final, Protocol, TypeAlias

import anyio

from dynbus import InvalidRequest, Overloaded
from dynbus.llm.engine.interface import Held
from dynbus.llm.generation import GenerateRequest
from dynbus.transfer import Settling, TransferAgent

from .messages import LendRequest, Lent

MAX_LOANS: Final = 32
"""Prefixes that are lent at a time: they take blocks from the requests that run here."""
MAX_SECONDS: Final = 60.0
"""For how long blocks are lent at most."""
MAX_SHARE: Final = 0.5
"""Of the cache that is lent at a time: the rest stays for the requests that run here."""


Link: TypeAlias = Callable[[Callable[[bool], None]], Callable[[], None]]


class Holder(Protocol):
    """What holds blocks of an engine, as `EngineRunner` does."""

    async def hold(self, hold_id: str, request: GenerateRequest) -> Held: ...
    def release(self, hold_id: str) -> None: ...


class Lender:
    """Lends cached blocks to peers.

    Args:
        agent: whose memory has the blocks.
        settling: of the leases of `agent`.
        block_size: tokens of a block.
        most_blocks: that are kept in place for peers at a time.

    Attributes:
        most_blocks: as they were given.
        lent_blocks: so far.
    """

    def __init__(
        self,
        holder: Holder,
        agent: TransferAgent,
        settling: Settling,
        block_size: int,
        most_blocks: int,
    ) -> None:
        self._holder = holder
        self._agent = agent
        self._settling = settling
        self._block_size = block_size
        self.most_blocks = most_blocks
        # Prefixes that begin alike share blocks, which count once.
        self._pinned: Counter[int] = Counter()
        self._numbers = count()
        self._loans = 0
        self.lent_blocks = 0

    def __repr__(self) -> str:
        return f"<Lender [{self._loans} loans]>"

    @property
    def loans(self) -> int:
        """How many prefixes are lent at this moment."""
        return self._loans

    @property
    def pinned(self) -> int:
        """How many blocks are kept in place for peers at this moment."""
        return len(self._pinned)

    async def lend(self, request: LendRequest, link: Link) -> AsyncGenerator[Lent]:
        """Lease what is cached of a prefix; the only item tells of it.

        The blocks stay where they are until the lease is settled or over, or the caller leaves.

        Args:
            link: has a listener called when the caller leaves; gives what undoes that.

        Raises:
            InvalidRequest: the request makes no sense.
            Overloaded: too many prefixes, or blocks, are lent already.
        """
        size = self._block_size
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
        if self._loans >= MAX_LOANS:
            raise Overloaded(f"{MAX_LOANS} prefixes are lent already", retry_after=1.0)
        self._loans += 1
        hold_id = f"lent.{next(self._numbers)}"
        try:
            held = await self._holder.hold(
                hold_id,
                GenerateRequest(
                    # No more is held than may be lent.
                    request.token_ids[: self.most_blocks * size],
                    lora_name=request.lora_name,
                    cache_salt=request.cache_salt,
                ),
            )
            try:
                if len(self._pinned.keys() | set(held.blocks)) > self.most_blocks:
                    raise Overloaded(
                        f"{self.pinned} of {self.most_blocks} blocks that may be are lent already",
                        retry_after=1.0,
                    )
                self._pinned.update(held.blocks)
                try:
                    async for lent in self._lease(held, request, link):
                        yield lent
                finally:
                    self._unpin(held.blocks)
            finally:
                self._holder.release(hold_id)
        finally:
            self._loans -= 1

    def _unpin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]

    async def _lease(self, held: Held, request: LendRequest, link: Link) -> AsyncGenerator[Lent]:
        size = self._block_size
        first, last = request.start // size, held.computed // size
        if last <= first:
            yield Lent(last * size)
            return
        ticket = self._agent.grant(
            held.blocks[first:last], tokens=(last - first) * size, seconds=request.seconds
        )
        # The reader has settled, or has left.
        ended = anyio.Event()
        self._settling.expect(ticket.lease_id, lambda held: ended.set() if held else None)
        unlink = link(lambda _: ended.set())
        self.lent_blocks += last - first
        try:
            yield Lent(last * size, ticket)
            with anyio.move_on_after(request.seconds):
                await ended.wait()
        finally:
            unlink()
            self._settling.release(ticket.lease_id)
