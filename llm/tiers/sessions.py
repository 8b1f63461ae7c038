"""`KeptSessions`: the blocks that are kept for conversations which go on later.

A conversation's blocks are those of its last request. What two conversations have in common is kept
once. An owner (a tenant) has its share of the room; where it wants more, its conversation that is
over the soonest gives way. Plain objects without I/O or clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from dynbus.kvrouter import fairness

KEPT_SHARE: Final = 0.75
"""The part of a store that conversations may have: the rest is for whatever comes."""


class SessionKey(NamedTuple):
    """A conversation that goes on later, and whose it is."""

    owner: str
    name: str


@dataclass(slots=True)
class _Session:
    """The blocks of a conversation, the first of its last request on, and until when it has them.

    Attributes:
        until: on any clock.
    """

    hashes: Sequence[int]
    until: float


class KeptSessions:
    """The blocks of conversations, by their sequence hashes.

    Args:
        limit: blocks that all conversations may have.
    """

    def __init__(self, limit: int) -> None:
        self._shares = fairness.Shares(limit, fairness.TIMES_FREE)
        self._sessions: dict[SessionKey, _Session] = {}
        # How many conversations have a block.
        self._uses = Counter[int]()
        # When each one is over, as it once was.
        self._ends: list[tuple[float, SessionKey]] = []

    def __repr__(self) -> str:
        return f"<KeptSessions [{len(self._sessions)} with {len(self._uses)} blocks]>"

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, sequence_hash: object) -> bool:
        return sequence_hash in self._uses

    @property
    def blocks(self) -> int:
        """The blocks of all conversations."""
        return self._shares.taken

    def keep(self, key: SessionKey, sequence_hashes: Sequence[int], until: float) -> list[int]:
        """Keep the blocks of a conversation in place of those that it had; where its owner's share
        has no room for all, the first of them.

        Returns:
            The blocks that are kept no longer.
        """
        # First of all the new ones, so that what both have stays kept.
        before = self._sessions.pop(key, None)
        hashes = sequence_hashes
        freed: list[int] = []
        while not (fits := self._reserve(key.owner, hashes)):
            first = self._first_over(key.owner)
            if first is not None:
                freed += self._drop(first)
            elif before is not None:
                freed += self._give_back(key.owner, before.hashes)
                before = None
            elif hashes:
                hashes = hashes[: len(hashes) // 2]
            else:
                break
        if fits and hashes:
            self._sessions[key] = _Session(hashes, until)
            heappush(self._ends, (until, key))
        if before is not None:
            freed += self._give_back(key.owner, before.hashes)
        return [one for one in freed if one not in self._uses]

    def end_those_over(self, now: float) -> list[int]:
        """Keep nothing more of conversations whose time is over.

        Returns:
            The blocks that are kept no longer.
        """
        freed: list[int] = []
        while self._ends and self._ends[0][0] <= now:
            _, key = heappop(self._ends)
            session = self._sessions.get(key)
            if session is not None and session.until <= now:
                freed += self._drop(key)
        return freed

    def _reserve(self, owner: str, hashes: Sequence[int]) -> bool:
        """Take blocks for an owner; False, and nothing is taken, without room."""
        uses = self._uses
        if not self._shares.reserve(owner, sum(one not in uses for one in hashes)):
            return False
        uses.update(hashes)
        return True

    def _first_over(self, owner: str) -> SessionKey | None:
        own = (key for key in self._sessions if key.owner == owner)
        return min(own, key=lambda key: self._sessions[key].until, default=None)

    def _drop(self, key: SessionKey) -> list[int]:
        return self._give_back(key.owner, self._sessions.pop(key).hashes)

    def _give_back(self, owner: str, hashes: Iterable[int]) -> list[int]:
        uses = self._uses
        freed: list[int] = []
        for one in hashes:
            uses[one] -= 1
            if not uses[one]:
                del uses[one]
                freed.append(one)
        self._shares.give_back(owner, len(freed))
        return freed
