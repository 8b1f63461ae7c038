"""Summaries of caches for other regions, which get them in place of each event.

A summary is what one rank holds, in short: the low 32 bits of the hash of each prefix that it holds
(`hash_prefixes`), of its latest blocks, as little-endian numbers in any order. It says it every few
seconds on a subject that leaves its region. Nothing stores it and nobody answers: a router that
missed one waits for the next. Two prefixes that share their low bits, once in half a million
questions, make one hop too many.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.names import kv_abroad_subject
from dynbus.kvrouter.radix.index import Rank
from dynbus.spi import Connection, Message, monotonic

from .cache_mirror import CacheMirror

SUMMARY_INTERVAL: Final = 5.0
"""Seconds between two summaries of a rank."""
SUMMARY_BLOCKS: Final = 8192
"""Blocks of a summary at most, of each tier: 32 KiB, and 4 ms of the loop that makes it."""
BELIEVED_FOR: Final = 3 * SUMMARY_INTERVAL
"""Seconds after which a summary counts no longer."""
MOST_SUMMARIES: Final = 4096
"""Ranks whose summaries are kept."""

_SHORT: Final = np.dtype("<u4")


def summarize(cache: CacheMirror, max_bytes: int) -> bytes:
    """The summary of what a rank holds, of at most `max_bytes`."""
    short = np.array(cache.prefixes(SUMMARY_BLOCKS), dtype=np.uint64).astype(_SHORT)
    return short[: max_bytes // _SHORT.itemsize].tobytes()


class CachesAbroad:
    """The summaries of ranks in other regions. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._summaries: dict[Rank, tuple[NDArray[np.uint32], float]] = {}

    def __repr__(self) -> str:
        return f"<CachesAbroad [{len(self._summaries)} ranks]>"

    def put(self, rank: Rank, summary: bytes, now: float) -> bool:
        """Take in a summary; returns False for bytes that are none, or more than are kept."""
        if len(summary) % _SHORT.itemsize:
            return False
        if rank not in self._summaries and len(self._summaries) >= MOST_SUMMARIES:
            self._forget(now)
            if len(self._summaries) >= MOST_SUMMARIES:
                return False
        # A copy: the bytes are part of what came over the connection.
        self._summaries[rank] = np.unique(np.frombuffer(summary, _SHORT)), now + BELIEVED_FOR
        return True

    def reach(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> int:
        """The number of leading blocks of a prompt that a rank has said that it holds.

        Args:
            sequence_hashes: of the prompt's complete blocks.
        """
        summary, until = self._summaries.get(rank, (None, 0.0))
        if summary is None or until <= now or not summary.size or not sequence_hashes:
            return 0
        wanted = np.array(sequence_hashes, dtype=np.uint64).astype(_SHORT)
        at = np.searchsorted(summary, wanted)
        misses = np.flatnonzero(summary[np.minimum(at, summary.size - 1)] != wanted)
        return int(misses[0]) if misses.size else len(sequence_hashes)

    def _forget(self, now: float) -> None:
        self._summaries = {
            rank: summary for rank, summary in self._summaries.items() if summary[1] > now
        }


@asynccontextmanager
async def caches_abroad(
    connection: Connection, namespace: str, component: str
) -> AsyncGenerator[CachesAbroad]:
    """The caches of a component's instances in other regions, as these say them, for as long as the
    `async with` lasts.

    Args:
        connection: of the running loop.

    Raises:
        Unavailable: the connection was lost meanwhile.
    """
    caches = CachesAbroad()

    def hear(message: Message) -> None:
        _, region, _, _, instance, dp_rank = message.subject.split(".")
        if region != connection.region and dp_rank.isdecimal() and len(dp_rank) < 6:
            caches.put(Rank(instance, int(dp_rank)), message.data, monotonic())

    subject = kv_abroad_subject("*", namespace, component, "*", "*")
    subscription = connection.subscribe(subject, hear)
    try:
        await connection.barrier()
        yield caches
    finally:
        subscription.unsubscribe()
