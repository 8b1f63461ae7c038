"""The load that running requests put on each rank, as far as routers know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dynbus.kvrouter.radix.index import Rank

MOST_TOKENS: Final = 2**24
"""The most tokens that a prompt or an output counts for. The ids of so many fit into no message."""


def expected_tokens(said: int | None) -> int | None:
    """The number of output tokens that a request may have, as one that can be reckoned with.

    Callers write what they like there: none at all or less is no expectation, and a number
    without meaning stands for much.
    """
    return None if said is None or said < 1 else min(said, MOST_TOKENS)


class RankLoad(NamedTuple):
    """The requests that run on a rank.

    Attributes:
        prefill_tokens: prompt tokens that are still to compute.
        blocks: blocks in use, those that requests share counted once.
    """

    prefill_tokens: int
    blocks: float
    requests: int


NO_LOAD: Final = RankLoad(0, 0.0, 0)


@dataclass(slots=True)
class ActiveRequest:
    """A request that was sent to a rank and did not end.

    Attributes:
        sequence_hashes: of the complete blocks of its prompt.
        prefill_tokens: prompt tokens still to compute; 0 once its prefill is completed.
        expected_output_tokens: from 1 on; None when nobody said.
        output_blocks: what its output counts for.
    """

    rank: Rank
    sequence_hashes: Sequence[int]
    prefill_tokens: int
    expected_output_tokens: int | None = None
    output_blocks: float = 0.0


@dataclass(slots=True)
class _RankState:
    prefill_tokens: int = 0
    output_blocks: float = 0.0
    requests: set[str] = field(default_factory=set[str])
    # How many requests use a block, by its sequence hash. A request uses all blocks from the
    # first on, so a request that has a block here has all before it: `leading_blocks` relies on
    # that.
    uses: Counter[int] = field(default_factory=Counter[int])


class ActiveLoad:
    """Running requests by rank, with the blocks that they share counted once."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, _RankState] = {}
        self._requests: dict[str, ActiveRequest] = {}

    def __repr__(self) -> str:
        return f"<ActiveLoad [{len(self._requests)} requests, {len(self._ranks)} ranks]>"

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    # What happens to requests -----------------------------------------------------------

    def add(
        self,
        request_id: str,
        rank: Rank,
        sequence_hashes: Sequence[int],
        prompt_tokens: int,
        cached_tokens: int,
        expected_output_tokens: int | None = None,
    ) -> None:
        """A request goes to a rank that has `cached_tokens` of its prompt.

        Args:
            sequence_hashes: of all complete blocks of the prompt, kept and not to be changed.

        Raises:
            ValueError: there is a request with this id.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is active already: free it first")
        prefill_tokens = max(0, prompt_tokens - cached_tokens)
        self._requests[request_id] = ActiveRequest(
            rank, sequence_hashes, prefill_tokens, expected_tokens(expected_output_tokens)
        )
        state = self._ranks.get(rank)
        if state is None:
            state = self._ranks[rank] = _RankState()
        state.requests.add(request_id)
        state.prefill_tokens += prefill_tokens
        state.uses.update(sequence_hashes)

    def prefill_completed(self, request_id: str) -> bool:
        """The first output token of a request came; False for an unknown one."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._ranks[request.rank].prefill_tokens -= request.prefill_tokens
        request.prefill_tokens = 0
        return True

    def grow(self, request_id: str, output_tokens: int, block_size: int) -> bool:
        """A request has so much output by now; False for an unknown one.

        The blocks of its output count in whole when nobody said how long it will be. Otherwise
        they count for the part that is still to come, since they will be free soon.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        blocks: float = output_tokens // block_size
        if request.expected_output_tokens:
            blocks *= max(0.0, 1.0 - output_tokens / request.expected_output_tokens)
        self._ranks[request.rank].output_blocks += blocks - request.output_blocks
        request.output_blocks = blocks
        return True

    def free(self, request_id: str) -> bool:
        """A request ended; False for an unknown one."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        state = self._ranks[request.rank]
        state.requests.discard(request_id)
        if not state.requests:
            del self._ranks[request.rank]
            return True
        state.prefill_tokens -= request.prefill_tokens
        state.output_blocks -= request.output_blocks
        uses: dict[int, int] = state.uses
        for block in request.sequence_hashes:
            left = uses[block] - 1
            if left:
                uses[block] = left
            else:
                # `del` would call the Counter's own method, for each block.
                uses.pop(block)
        return True

    def remove_instance(self, instance: str) -> None:
        """An instance is gone, and all that ran there."""
        for rank in [rank for rank in self._ranks if rank.instance == instance]:
            for request_id in self._ranks.pop(rank).requests:
                del self._requests[request_id]

    # Questions --------------------------------------------------------------------------

    def of(self, rank: Rank) -> RankLoad:
        """The load of a rank."""
        state = self._ranks.get(rank)
        if state is None:
            return NO_LOAD
        return RankLoad(
            state.prefill_tokens, len(state.uses) + state.output_blocks, len(state.requests)
        )

    def added_blocks(self, rank: Rank, sequence_hashes: Sequence[int]) -> int:
        """The number of blocks of a prompt that no running request of a rank uses.

        The cost grows with the logarithm of the number of blocks.
        """
        state = self._ranks.get(rank)
        if state is None:
            return len(sequence_hashes)
        return len(sequence_hashes) - leading_blocks(state.uses, sequence_hashes)


def leading_blocks(
    held: Mapping[int, object], sequence_hashes: Sequence[int], start: int = 0
) -> int:
    """The number of blocks of a prompt that are held, from the first on, given that the first
    `start` are.

    A request that holds a block holds all before it, so that the cost grows with the logarithm.
    """
    if start >= len(sequence_hashes) or sequence_hashes[start] not in held:
        return start
    low, high = start + 1, len(sequence_hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
