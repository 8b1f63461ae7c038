"""What ranks hold, guessed from where requests were sent.

Used alone when engines tell no events, and beside the exact index for the time until the
events of a request arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from dynbus.kvrouter.radix.index import Rank

DEFAULT_TTL: Final = 120.0
"""Seconds that a block is taken to be held after its last use, when engines tell no events."""

PREDICTION_TTL: Final = 5.0
"""Seconds within which the events of a request arrive."""

DEFAULT_CAPACITY: Final = 65_536
"""Blocks that a rank is taken to have room for when its instance does not say."""


@dataclass(slots=True)
class _Held:
    """What a rank is taken to hold.

    Attributes:
        gone_at: when all of it is gone, unless it is used again.
        reversals: how often a block was guessed again that the exact index had had.
    """

    gone_at: float = inf
    reversals: int = 0
    # The time at which each block is gone, by its sequence hash. The order is that of the last
    # use, within a request from its last block to its first. So whatever is forgotten from the
    # front on, no block stays without the one before it: `_present` relies on that. Blocks that
    # the exact index has stay here for the same reason, and are told apart by `told`.
    blocks: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    # Blocks that the exact index had, each with the value of `reversals` when it was found there.
    # While that value is the same, those before a block are here as well.
    told: dict[int, int] = field(default_factory=dict[int, int])

    def tell(self, sequence_hashes: Sequence[int], end: int) -> None:
        """The exact index has the first `end` blocks of a prompt, which are all here."""
        told, reversals = self.told, self.reversals
        for at in range(end - 1, -1, -1):
            block = sequence_hashes[at]
            if told.get(block) == reversals:
                break
            told[block] = reversals

    def forget_oldest(self) -> None:
        block, _ = self.blocks.popitem(last=False)
        self.told.pop(block, None)


class ApproximateIndex:
    """Blocks by rank, each for some time after its last use.

    Args:
        ttl: seconds after its last use until a block counts as gone; None for never.
        default_capacity: blocks of a rank beyond which the least recently used are forgotten,
            where `store` is not given another number.
    """

    def __init__(
        self, *, ttl: float | None = DEFAULT_TTL, default_capacity: int = DEFAULT_CAPACITY
    ) -> None:
        self._ttl = ttl
        self._default_capacity = default_capacity
        # In the order of their last request, so that those that nobody asks for any longer are
        # found in front.
        self._ranks: OrderedDict[Rank, _Held] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ApproximateIndex [{len(self)} blocks, {len(self._ranks)} ranks]>"

    def __len__(self) -> int:
        return sum(len(held.blocks) for held in self._ranks.values())

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
            start: blocks at the beginning that the exact index has, as after `confirm`.
            capacity: blocks that this rank has room for; None for the default.
        """
        held = self._ranks.get(rank)
        if held is None:
            held = self._ranks[rank] = _Held()
        self._ranks.move_to_end(rank)
        self._expire(held, now)
        held.gone_at = gone_at = inf if self._ttl is None else now + self._ttl
        blocks, told = held.blocks, held.told
        for block in reversed(sequence_hashes):
            blocks[block] = gone_at
            blocks.move_to_end(block)
        if told:
            again = [
                block for block in sequence_hashes[start:] if told.pop(block, None) is not None
            ]
            held.reversals += bool(again)
        held.tell(sequence_hashes, start)
        limit = self._default_capacity if capacity is None else capacity
        while len(blocks) > limit:
            held.forget_oldest()
        while self._ranks and next(iter(self._ranks.values())).gone_at <= now:
            self._ranks.popitem(last=False)

    def reach(
        self, rank: Rank, sequence_hashes: Sequence[int], now: float, *, start: int = 0
    ) -> int:
        """How many blocks of a prompt a rank holds from the first on.

        Args:
            start: how many of them it holds in any case. The answer is not less.
        """
        held = self._ranks.get(rank)
        if held is None:
            return start
        self._expire(held, now)
        if not held.blocks:
            del self._ranks[rank]
            return start
        end = _present(held.blocks, sequence_hashes, start)
        if held.told:
            # What the exact index had and has no longer is not held, nor what comes after it.
            for at in range(start, end):
                if sequence_hashes[at] in held.told:
                    return at
        return end

    def confirm(self, rank: Rank, sequence_hashes: Sequence[int], end: int) -> None:
        """The exact index has the first `end` blocks of a prompt: guess them no longer."""
        held = self._ranks.get(rank)
        if held is None or not end or held.told.get(sequence_hashes[end - 1]) == held.reversals:
            return
        held.tell(sequence_hashes, _present(held.blocks, sequence_hashes[:end], 0))

    def remove_instance(self, instance: str) -> None:
        """Forget an instance."""
        for rank in [rank for rank in self._ranks if rank.instance == instance]:
            del self._ranks[rank]

    def _expire(self, held: _Held, now: float) -> None:
        if self._ttl is None:
            return
        blocks = held.blocks
        while blocks and blocks[next(iter(blocks))] <= now:
            held.forget_oldest()


def _present(blocks: Mapping[int, float], sequence_hashes: Sequence[int], start: int) -> int:
    """How many blocks of a prompt are in the map, from the first on, given the first `start`."""
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
