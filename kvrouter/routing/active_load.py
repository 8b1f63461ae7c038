"""The load that running requests put on each rank, as far as routers know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.index import Rank

from .candidates import Offer

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
_NO_ROWS: Final = np.empty(0, dtype=np.int64)
FIRST_ROOM: Final = 64
"""Ranks that there is room for at first."""
MANY: Final = 16
"""Ranks that are looked at together, which takes less time than one after the other."""


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


class LoadColumns(NamedTuple):
    """The loads of ranks in the order of an offer, each of shape [ranks]; see `RankLoad`.

    Attributes:
        added_blocks: blocks of a prompt that no running request of the rank uses.
    """

    prefill_tokens: NDArray[np.float64]
    blocks: NDArray[np.float64]
    requests: NDArray[np.float64]
    added_blocks: NDArray[np.int64]

    def of_one(self, routes: NDArray[np.float64]) -> LoadColumns:
        """The load of one instance in the mean, of those that each rank forwards to."""
        return self._replace(
            prefill_tokens=self.prefill_tokens / routes,
            blocks=self.blocks / routes,
            requests=self.requests / routes,
        )


@dataclass(slots=True)
class _RankState:
    row: int
    prefill_tokens: int = 0
    output_blocks: float = 0.0
    requests: set[str] = field(default_factory=set[str])
    # How many requests use a block, by its sequence hash. A request uses all blocks from the
    # first on, so a request that has a block here has all before it: `leading_blocks` relies on
    # that.
    uses: Counter[int] = field(default_factory=Counter[int])
    # How many requests begin with a block.
    firsts: Counter[int] = field(default_factory=Counter[int])


class ActiveLoad:
    """Running requests by rank, with the blocks that they share counted once."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, _RankState] = {}
        self._requests: dict[str, ActiveRequest] = {}
        # The ranks that use a block, by the hash of the first one of a prompt.
        self._users: dict[int, set[Rank]] = {}
        # What `columns` gives, by the rows of ranks; those without requests have zeros.
        self._loads = np.zeros((3, FIRST_ROOM))
        self._rows: dict[Rank, int] = {}
        self._offer: Offer | None = None
        self._offered_rows = _NO_ROWS

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
            state = self._ranks[rank] = _RankState(self._row(rank))
        state.requests.add(request_id)
        state.prefill_tokens += prefill_tokens
        state.uses.update(sequence_hashes)
        if sequence_hashes:
            state.firsts[sequence_hashes[0]] += 1
            self._users.setdefault(sequence_hashes[0], set()).add(rank)
        self._note(state)

    def prefill_completed(self, request_id: str) -> bool:
        """The first output token of a request came; False for an unknown one."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        state = self._ranks[request.rank]
        state.prefill_tokens -= request.prefill_tokens
        request.prefill_tokens = 0
        self._note(state)
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
        state = self._ranks[request.rank]
        state.output_blocks += blocks - request.output_blocks
        request.output_blocks = blocks
        self._note(state)
        return True

    def free(self, request_id: str) -> bool:
        """A request ended; False for an unknown one."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        rank, hashes = request.rank, request.sequence_hashes
        state = self._ranks[rank]
        state.requests.discard(request_id)
        if not state.requests:
            del self._ranks[rank]
            self._loads[:, state.row] = 0.0
            self._ends_with(rank, state, hashes)
            return True
        state.prefill_tokens -= request.prefill_tokens
        state.output_blocks -= request.output_blocks
        uses: dict[int, int] = state.uses
        for block in hashes:
            left = uses[block] - 1
            if left:
                uses[block] = left
            else:
                # `del` would call the Counter's own method, for each block.
                uses.pop(block)
        self._ends_with(rank, state, hashes)
        self._note(state)
        return True

    def remove_instance(self, instance: str) -> None:
        """An instance is gone, and all that ran there."""
        for rank in [rank for rank in self._ranks if rank.instance == instance]:
            state = self._ranks.pop(rank)
            self._loads[:, state.row] = 0.0
            for request_id in state.requests:
                hashes = self._requests.pop(request_id).sequence_hashes
                self._ends_with(rank, state, hashes)

    def _ends_with(self, rank: Rank, state: _RankState, sequence_hashes: Sequence[int]) -> None:
        """A request of a rank that began with the first of these blocks is over."""
        if not sequence_hashes:
            return
        first = sequence_hashes[0]
        state.firsts[first] -= 1
        if state.firsts[first]:
            return
        state.firsts.pop(first)
        users = self._users[first]
        users.discard(rank)
        if not users:
            del self._users[first]

    def _note(self, state: _RankState) -> None:
        """The load of a rank is another one."""
        loads, row = self._loads, state.row
        loads[0, row] = state.prefill_tokens
        loads[1, row] = len(state.uses) + state.output_blocks
        loads[2, row] = len(state.requests)

    def _row(self, rank: Rank) -> int:
        """The row of a rank, which has one from now on."""
        row = self._rows.get(rank)
        if row is None:
            if len(self._rows) == self._loads.shape[1]:
                self._make_room()
            row = self._rows[rank] = len(self._rows)
        return row

    def _make_room(self) -> None:
        """Have room for as many ranks again, and forget those that are neither offered nor used."""
        offered: Mapping[Rank, int] = {} if self._offer is None else self._offer.positions
        kept = {
            rank: row for rank, row in self._rows.items() if rank in self._ranks or rank in offered
        }
        loads = np.zeros((3, FIRST_ROOM + 2 * len(kept)))
        loads[:, : len(kept)] = self._loads[:, list(kept.values())]
        self._loads = loads
        self._rows = {rank: row for row, rank in enumerate(kept)}
        self._offered_rows = _NO_ROWS
        for rank, state in self._ranks.items():
            state.row = self._rows[rank]

    # Questions --------------------------------------------------------------------------

    def of(self, rank: Rank) -> RankLoad:
        """The load of a rank."""
        state = self._ranks.get(rank)
        if state is None:
            return NO_LOAD
        return RankLoad(
            state.prefill_tokens, len(state.uses) + state.output_blocks, len(state.requests)
        )

    def columns(self, offer: Offer, sequence_hashes: Sequence[int]) -> LoadColumns:
        """The load of all ranks of an offer, and what a prompt with these blocks would add to it.

        The cost grows with the ranks that use the first block, and the logarithm of the blocks.
        """
        ranks, positions = offer.ranks, offer.positions
        if self._offer is not offer or len(self._offered_rows) != len(ranks):
            # Those of an offer keep their rows where room is made.
            self._offer = offer
            for rank in ranks:
                self._row(rank)
            self._offered_rows = np.array([self._rows[rank] for rank in ranks], dtype=np.int64)
        prefill_tokens, blocks, requests = self._loads.take(self._offered_rows, axis=1)
        added = np.empty(len(ranks), dtype=np.int64)
        added.fill(len(sequence_hashes))
        users = self._users.get(sequence_hashes[0], ()) if sequence_hashes else ()
        offered = [rank for rank in users if rank in positions]
        if offered:
            used = leading_blocks_of_each(
                [self._ranks[rank].uses for rank in offered], sequence_hashes
            )
            added[[positions[rank] for rank in offered]] -= used
        return LoadColumns(prefill_tokens, blocks, requests, added)


def leading_blocks_of_each(
    held: Sequence[Mapping[int, object]], sequence_hashes: Sequence[int]
) -> list[int]:
    """`leading_blocks` of many, most of which hold equally much."""
    if len(held) < MANY:
        return [leading_blocks(one, sequence_hashes) for one in held]
    counts = [0] * len(held)
    # Those that hold the first `low` blocks, and none from `high` on.
    groups = [(list(range(len(held))), 0, len(sequence_hashes))]
    while groups:
        group, low, high = groups.pop()
        if low == high:
            for at in group:
                counts[at] = low
            continue
        middle = (low + high + 1) // 2
        block = sequence_hashes[middle - 1]
        further = [at for at in group if block in held[at]]
        if further:
            groups.append((further, middle, high))
        if len(further) < len(group):
            shorter = [at for at in group if block not in held[at]] if further else group
            groups.append((shorter, low, middle - 1))
    return counts


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
