"""Asking a rank to send again what it holds: the request, and who is asked when.

`ResyncPlan` keeps many ranks that are in need from being asked all at once, and a rank that
does not answer, or answers wrongly, from being asked without end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from dynbus.kvrouter.radix.index import Rank

MOST_AT_ONCE: Final = 8
"""Ranks that are asked and have not answered."""
FIRST_DELAY: Final = 0.02
"""Seconds over which the first requests of several routers are spread."""
FIRST_PATIENCE: Final = 0.5
MAX_PATIENCE: Final = 1.0
"""Seconds after which a rank that does not answer is asked again: a request costs little."""
FIRST_RELAPSE: Final = 0.5
MAX_RELAPSE: Final = 60.0
"""Seconds after which a rank that answered, and is wrong all the same, is asked again. Doubled
each time: an answer costs all that the rank holds."""


class ResyncRequest(msgspec.Struct, frozen=True):
    """The request of a router that lacks blocks to the rank that has them, as JSON.

    Attributes:
        event_epoch: the newest that it knows of the rank; 0 for none.
        reason: for the log of who is asked.
    """

    event_epoch: int = 0
    reason: str = ""


_decoder = msgspec.json.Decoder(ResyncRequest)


def encode_resync(request: ResyncRequest) -> bytes:
    return msgspec.json.encode(request)


def decode_resync(data: bytes) -> ResyncRequest | None:
    """A request; None for bytes that are none."""
    try:
        request = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return request if 0 <= request.event_epoch < 1 << 64 else None


@dataclass(slots=True)
class _Need:
    reason: str
    due: float
    tries: int = 0
    relapses: int = 0
    is_asked: bool = False
    answered: bool = False
    asks: int = 0


class ResyncPlan:
    """The ranks that lack blocks, with the time to ask each. Times are of one monotonic clock.

    A rank is in need from `need` until a digest agrees (`confirm`). It is answered when a new
    epoch of it begins.

    Args:
        jitter: numbers from 0 to 1.

    Attributes:
        asked: requests so far.
    """

    def __init__(self, *, jitter: Callable[[], float] = random.random) -> None:
        self.asked = 0
        self._needs: dict[Rank, _Need] = {}
        self._jitter = jitter

    def __repr__(self) -> str:
        return f"<ResyncPlan [{len(self._needs)} ranks, {self.asked} requests]>"

    def __len__(self) -> int:
        return len(self._needs)

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._needs

    def ranks(self) -> Iterable[Rank]:
        """Those in need."""
        return self._needs.keys()

    def is_asked(self, rank: Rank) -> bool:
        """True if a rank was asked and has not answered."""
        known = self._needs.get(rank)
        return known is not None and known.is_asked

    def is_answered(self, rank: Rank) -> bool:
        """True if the answer of a rank that needs one is on its way, or here."""
        known = self._needs.get(rank)
        return known is not None and known.answered

    def reason(self, rank: Rank) -> str:
        """The reason for which a rank is in need."""
        return self._needs[rank].reason

    def need(self, rank: Rank, reason: str, now: float, *, is_lost: bool = False) -> None:
        """A rank lacks blocks, or has too many.

        Args:
            is_lost: whether messages of it were lost, which is no fault of the rank's.
        """
        known = self._needs.get(rank)
        if known is None:
            self._needs[rank] = _Need(reason, now + FIRST_DELAY * self._jitter())
        elif known.answered:
            known.answered = False
            known.reason = reason
            known.tries = 0
            known.due = now + FIRST_DELAY * self._jitter()
            if not is_lost and known.asks:
                known.due = now + self._spread(FIRST_RELAPSE, known.relapses, MAX_RELAPSE)
                known.relapses += 1

    def answer(self, rank: Rank) -> None:
        """A new epoch of a rank begins; what it holds is on its way."""
        known = self._needs.get(rank)
        if known is None:
            self._needs[rank] = _Need("", 0.0, answered=True)
        else:
            known.answered = True
            known.is_asked = False

    def confirm(self, rank: Rank) -> None:
        """Note that the rank says that it holds what is known of it."""
        self._needs.pop(rank, None)

    def forget(self, instance: str) -> None:
        """An instance is gone."""
        self._needs = {rank: one for rank, one in self._needs.items() if rank.instance != instance}

    def due(self, now: float) -> list[Rank]:
        """The ranks to ask now; they count as asked."""
        waiting = [
            (need.due, rank)
            for rank, need in self._needs.items()
            if not need.answered and need.due <= now
        ]
        # Those that are overdue without an answer make room for others.
        busy = sum(need.is_asked and need.due > now for need in self._needs.values())
        chosen = [rank for _, rank in sorted(waiting)[: max(0, MOST_AT_ONCE - busy)]]
        for rank in chosen:
            need = self._needs[rank]
            need.is_asked = True
            need.asks += 1
            need.due = now + self._spread(FIRST_PATIENCE, need.tries, MAX_PATIENCE)
            need.tries += 1
            self.asked += 1
        return chosen

    def _spread(self, first: float, times: int, most: float) -> float:
        doubled: float = first * 2.0 ** min(times, 10)
        return min(doubled, most) * (0.75 + 0.5 * self._jitter())
