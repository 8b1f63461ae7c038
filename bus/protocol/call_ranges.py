"""The calls of one heartbeat, told in as many messages as the server's limit asks for.

What a heartbeat does not list does not exist at its sender. A message that holds only some of
the calls therefore says which numbers it speaks of, and its reader judges only those: parts may
be lost or change places, and nothing is taken for absent that was told elsewhere. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from .wire import BATCH_OVERHEAD, MAX_FRAME_BYTES

CALL_BYTES: Final = 20
"""Bytes that one call takes at most: its number and a sequence."""


class CallRange(NamedTuple):
    """All calls of one side whose numbers lie between two bounds.

    Attributes:
        calls: (number, sequence) of each, by number.
        first, last: the bounds, both included; a `last` of None is no bound.
    """

    calls: list[tuple[int, int]]
    first: int
    last: int | None


class Bounded(Protocol):
    """The protocol of what speaks of the numbers between two bounds: a range, or a frame that
    carries one."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int | None: ...


def heartbeat_room(max_payload: int) -> int:
    """Bytes of calls and acknowledgements that one heartbeat may carry."""
    return min(MAX_FRAME_BYTES, max_payload - 3 * BATCH_OVERHEAD)


def split_calls(calls: Mapping[int, int], most: int) -> list[CallRange]:
    """Ranges that together speak of every number once, each with at most `most` calls.

    Args:
        calls: the sequence of each call, by number.
        most: taken for 1 when it is less.
    """
    most = max(1, most)
    numbered = sorted(calls.items())
    starts = range(0, max(1, len(numbered)), most)
    firsts = [0, *(numbered[start][0] for start in starts[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), None]
    return [
        CallRange(numbered[start : start + most], first, last)
        for start, first, last in zip(starts, firsts, lasts, strict=True)
    ]


def covers(bounded: Bounded, number: int) -> bool:
    """True if a call of this number exists only if it is listed."""
    return bounded.first <= number and (bounded.last is None or number <= bounded.last)
