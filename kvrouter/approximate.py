"""What ranks hold, guessed from where requests were sent.

Used alone when engines tell no events, and beside the exact index for the time until the
events of a request arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import repeat
from math import inf
from typing import Final

from .index import Rank

DEFAULT_TTL: Final = 120.0
"""Seconds that a block is taken to be held after its last use, when engines tell no events."""

PREDICTION_TTL: Final = 5.0
"""Seconds within which the events of a request arrive."""


class ApproximateIndex:
    """Blocks by rank, each for some time after its last use.

    Args:
        ttl: seconds after its last use until a block counts as gone; None for never, which
            needs `default_capacity` or a capacity at each `store`.
        default_capacity: blocks of a rank beyond which the least recently used are forgotten;
            None for no limit.
    """

    def __init__(
        self, *, ttl: float | None = DEFAULT_TTL, default_capacity: int | None = None
    ) -> None:
        self._ttl = ttl
        self._default_capacity = default_capacity
        # By rank, the time at which each block is gone, by its sequence hash. The order is that
        # of the last use, within a request from its last block to its first. So whatever is
        # forgotten from the front on, no block stays without the one before it: `_held` relies
        # on that.
        self._ranks: dict[Rank, OrderedDict[int, float]] = {}

    def __repr__(self) -> str:
        return f"<ApproximateIndex [{len(self)} blocks, {len(self._ranks)} ranks]>"

    def __len__(self) -> int:
        return sum(map(len, self._ranks.values()))

    def store(
        self,
        rank: Rank,
        sequence_hashes: Sequence[int],
        now: float,
        *,
        start: int = 0,
        capacity: int | None = None,
    ) -> None:
        """A request was sent to a rank, which will hold its blocks, or uses them again.

        Args:
            now: seconds of any clock that never goes back.
            start: blocks at the beginning that need not be remembered.
            capacity: blocks that this rank has room for; None for the default.
        """
        blocks = self._ranks.setdefault(rank, OrderedDict())
        self._expire(blocks, now)
        for at in range(start, _held(blocks, sequence_hashes, start)):
            del blocks[sequence_hashes[at]]
        gone_at = inf if self._ttl is None else now + self._ttl
        used = sequence_hashes[start:] if start else sequence_hashes
        blocks.update(zip(reversed(used), repeat(gone_at)))
        limit = self._default_capacity if capacity is None else capacity
        while limit is not None and len(blocks) > limit:
            blocks.popitem(last=False)

    def reach(
        self, rank: Rank, sequence_hashes: Sequence[int], now: float, *, start: int = 0
    ) -> int:
        """How many blocks of a prompt a rank holds from the first on.

        Args:
            start: how many of them it holds in any case. The answer is not less.
        """
        blocks = self._ranks.get(rank)
        if blocks is None:
            return start
        self._expire(blocks, now)
        if not blocks:
            del self._ranks[rank]
            return start
        return _held(blocks, sequence_hashes, start)

    def confirm(self, rank: Rank, sequence_hashes: Sequence[int], end: int) -> None:
        """The exact index has the first `end` blocks of a prompt: guess them no longer."""
        blocks = self._ranks.get(rank)
        if blocks is None or not end or sequence_hashes[end - 1] not in blocks:
            return
        for at in range(end - 1, -1, -1):
            if blocks.pop(sequence_hashes[at], None) is None:
                break

    def remove_instance(self, instance: str) -> None:
        """Forget an instance."""
        for rank in [rank for rank in self._ranks if rank.instance == instance]:
            del self._ranks[rank]

    def _expire(self, blocks: OrderedDict[int, float], now: float) -> None:
        if self._ttl is None:
            return
        while blocks and blocks[next(iter(blocks))] <= now:
            blocks.popitem(last=False)


def _held(blocks: Mapping[int, float], sequence_hashes: Sequence[int], start: int) -> int:
    """How many blocks of a prompt there are from the first on, given the first `start`."""
    if start >= len(sequence_hashes) or sequence_hashes[start] not in blocks:
        return start
    low, high = start + 1, len(sequence_hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_hashes[middle - 1] in blocks:
            low = middle
        else:
            high = middle - 1
    return low
