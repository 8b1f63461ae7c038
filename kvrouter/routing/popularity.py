"""How large a part of the latest requests begins with a prefix."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW: Final = 512
"""Requests of a generation; the latest one and the one before it count."""

GROWTH: Final = 1.25
"""Each prefix that is counted is so many times as long as the one before."""


def next_length(blocks: int) -> int:
    """The length of the prefix that is counted after one of `blocks` blocks."""
    return max(blocks + 1, int(blocks * GROWTH))


class Popularity:
    """Counts prefixes of growing length over the latest requests. Its memory is bounded.

    Args:
        window: requests after which the older half of what is counted is forgotten.
    """

    __slots__ = ("_before", "_now", "_requests", "_window")

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._requests = 0

    def __repr__(self) -> str:
        return f"<Popularity [{len(self._now) + len(self._before)} prefixes]>"

    def note(self, block_hashes: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Count a request; the (blocks, requests that begin with them) of its prefixes.

        Only prefixes that another request had too are listed, the shortest first.
        """
        if self._requests >= self._window:
            self._before, self._now, self._requests = self._now, {}, 0
        self._requests += 1
        content = block_hashes.tobytes()
        size = block_hashes.itemsize
        found: list[tuple[int, int]] = []
        blocks = 1
        while blocks * size <= len(content):
            key = hash(content[: blocks * size])
            count = self._now[key] = self._now.get(key, 0) + 1
            count += self._before.get(key, 0)
            if count > 1:
                found.append((blocks, count))
            blocks = next_length(blocks)
        return found

    @property
    def requests(self) -> int:
        """How many requests are counted."""
        return self._requests + (self._window if self._before else 0)
