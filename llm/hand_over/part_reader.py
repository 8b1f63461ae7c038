"""Readers of parts: what brings the bytes of a part of a prompt (a mover, or vLLM's connector), and
has its source say that they count.

`LeasedPartReader`, over a mover such as that of NIXL, is made by `llm/disaggregated/worker.py` and
by `llm/tiers/tiers.py`. The one over vLLM's own connector is `llm/vllm/connector_reader.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import anyio

from dynbus import DeadlineExceeded
from dynbus.llm.generation import Generated
from dynbus.transfer import KvMemory, Mover, Moving, Settled, Settlement, compare, wanted

from .messages import Prefilled


class Part(NamedTuple):
    """Blocks of a prompt that come together.

    Attributes:
        name: of the request in the engine.
        hand_over: the id of the attempt, by which the source knows it.
        item: what the source said of it: it has the tokens from `start` to `computed`.
        blocks: in which they are to be here, in the order of their tokens; none where the engine
            finds some by itself.
        shown: the first token of the output, where it was sent already.
    """

    name: str
    hand_over: str
    item: Prefilled
    blocks: Sequence[int]
    shown: Generated | None = None

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.item.computed - self.item.start


class PartReader(Protocol):
    """A reader of parts of prompts into the blocks of an engine."""

    def start(self, part: Part, deadline: float) -> Moving:
        """Begin with a part; never waits.

        Args:
            deadline: on the monotonic clock.

        Raises:
            DynbusError: what the source said of it is not usable.
        """
        ...

    async def settled(self, part: Part) -> bool:
        """True if the source held a part until it was read; asked once, when all of it is there.

        Raises:
            ChecksumMismatch: what has come is not what the source has.
            BadDescription: the source answers what cannot be.
            DynbusError: it does not answer.
        """
        ...


class LeasedPartReader:
    """Reads the blocks of tickets with a mover, and has their leases settled.

    Args:
        memory: of the engine.
        settle: has an instance, by its id, settle one of its leases.
        compares: whether what was read is compared with the checksums of its source.
        patience: seconds within which a source answers that has nothing to compute for it.
    """

    def __init__(
        self,
        mover: Mover,
        memory: KvMemory,
        settle: Callable[[Settlement, str], Awaitable[Settled]],
        *,
        compares: bool = False,
        patience: float,
    ) -> None:
        self._mover = mover
        self._memory = memory
        self._settle = settle
        self._compares = compares
        self._patience = patience

    def __repr__(self) -> str:
        return f"<LeasedPartReader {self._mover!r}>"

    def start(self, part: Part, deadline: float) -> Moving:
        """See `PartReader.start`."""
        ticket = part.item.ticket
        assert ticket is not None, "without a ticket there is nothing to read"
        return self._mover.start(
            "read",
            ticket,
            ticket.blocks,
            part.blocks,
            tokens=part.tokens,
            deadline=deadline,
            # The ticket's blocks end where its tokens do.
            remote_start=ticket.tokens - part.tokens,
            local_start=part.item.start % self._memory.layout.block_size,
        )

    async def settled(self, part: Part) -> bool:
        """See `PartReader.settled`."""
        ticket, source = part.item.ticket, part.item.instance
        assert ticket is not None, "it was read by its ticket"
        checked = None
        if self._compares:
            checked = wanted(self._memory, part.tokens, ticket.tokens - part.tokens)
        try:
            with anyio.fail_after(self._patience):
                answer = await self._settle(
                    Settlement(ticket.lease_id, ticket.epoch, checked), source
                )
        except TimeoutError:
            raise DeadlineExceeded("it does not settle its lease") from None
        if answer.held and checked is not None:
            start = part.item.start % self._memory.layout.block_size
            await compare(
                self._memory, part.blocks, part.tokens, answer.vouched, start=start, source=source
            )
        return answer.held
