"""A number that says what a rank holds, whatever the order in which it came to hold it.

    mix(z)  = splitmix64: z += 0x9e3779b97f4a7c15; z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
              z = (z ^ z >> 27) * 0x94d049bb133111eb; z ^ z >> 31
    digest  = sum over the blocks of mix(mix(engine hash + tier) ^ block hash)

All in 64 bits without a sign. A block that two tiers hold is two blocks. A publisher keeps the
sum up as blocks come and go; an index counts it anew from what it really holds.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import CacheDigest
from dynbus.kvrouter.radix.index import RadixIndex, Rank

MASK: Final = (1 << 64) - 1

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def block_digest(
    engine_hashes: NDArray[np.uint64], block_hashes: NDArray[np.uint64], tier: int
) -> int:
    """The digest of blocks of one tier.

    Args:
        engine_hashes, block_hashes: of shape [blocks].
    """
    mixed = _mix(_mix(engine_hashes + np.uint64(tier)) ^ block_hashes)
    return int(mixed.sum(dtype=np.uint64))


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = numbers + _GAMMA
    numbers ^= numbers >> _30
    numbers *= _FIRST
    numbers ^= numbers >> _27
    numbers *= _SECOND
    numbers ^= numbers >> _31
    return numbers


def index_digest(index: RadixIndex, rank: Rank) -> CacheDigest:
    """What an index says that a rank holds. Costs about a fifth of a microsecond for each block."""
    state = index.ranks.get(rank)
    if state is None:
        return CacheDigest(0, 0)
    digest = 0
    for tier, holder in state.holders.items():
        digest += block_digest(*index.kernel.contents(holder), tier)
    return CacheDigest(state.blocks, digest & MASK)
