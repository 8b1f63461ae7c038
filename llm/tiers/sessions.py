"""`KeptSessions`: the blocks that are kept for conversations which go on later.

A conversation's blocks are those of its last request. What two conversations have in common is kept
once. An owner (a tenant) has its share of the room; where it wants more, its conversation that is
over the soonest gives way. Plain objects without I/O or clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from dynbus.kvrouter import fairness

KEPT_SHARE: Final = 0.75
"""The part of a store that conversations may have: the rest is for whatever comes."""


class SessionKey(NamedTuple):
    """A conversation that goes on later, or a branch of one, and whose it is."""

    owner: str
    name: str


_STALE: Final = 64
"""Entries of the order of ends that may be outdated, beside as many as there are conversations."""


class _Ends:
    """Conversations in the order in which they are over."""

    def __init__(self) -> None:
        self._until: dict[SessionKey, float] = {}
        # Outdated entries are passed by.
        self._order: list[tuple[float, SessionKey]] = []

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, key: SessionKey, until: float) -> None:
        """Note when a conversation is over."""
        self._until[key] = until
        heappush(self._order, (until, key))
        if len(self._order) > 2 * len(self._until) + _STALE:
            self._order = [(end, one) for one, end in self._until.items()]
            heapify(self._order)

    def remove(self, key: SessionKey) -> None:
        """Leave a conversation out."""
        del self._until[key]

    def first(self) -> tuple[float, SessionKey] | None:
        """The conversation that is over the soonest, and when."""
        while self._order:
            until, key = self._order[0]
            if self._until.get(key) == until:
                return until, key
            heappop(self._order)
        return None


class KeptSessions:
    """The blocks of conversations, by their sequence hashes.

    Args:
        limit: blocks that all conversations may have. There are no more conversations than that
            either, as those that have all their blocks in common take none.
    """

    def __init__(self, limit: int) -> None:
        self._shares = fairness.Shares(limit, fairness.TIMES_FREE)
        self._places = fairness.Shares(limit, fairness.TIMES_FREE)
        self._sessions: dict[SessionKey, Sequence[int]] = {}
        # How many conversations have a block.
        self._uses = Counter[int]()
        self._ends = _Ends()
        self._ends_of = defaultdict[str, _Ends](_Ends)

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

    def blocks_of(self, key: SessionKey) -> Sequence[int]:
        """The blocks of a conversation, in their order; none for an unknown one."""
        return self._sessions.get(key, ())

    def keep(
        self,
        key: SessionKey,
        sequence_hashes: Sequence[int],
        until: float,
        replaced: SessionKey | None = None,
    ) -> list[int]:
        """Keep the blocks of a conversation in place of those that it had; where its owner's share
        has no room for all, the first of them.

        Args:
            replaced: the branch that it goes on from, which is kept no longer; None for none.

        Returns:
            The blocks that are kept no longer.
        """
        # First of all the new ones, so that what both have stays kept.
        before: list[int] | None = None
        for one in dict.fromkeys((key, replaced)):
            if one is not None and one in self._sessions:
                before = [*(before or ()), *self._take_out(one)]
        hashes, wanted = sequence_hashes, set(sequence_hashes)
        # Counted on and not anew: many short conversations may give way to a long one.
        more = self._count_more(hashes)
        freed: list[int] = []
        while hashes and not self._reserve(key.owner, more):
            first = self._first_over(key.owner)
            if first is not None:
                given = self._drop(first)
            elif before is not None:
                given, before = self._give_back(key.owner, before), None
            else:
                hashes = hashes[: len(hashes) // 2]
                more = self._count_more(hashes)
                continue
            freed += given
            more += sum(one in wanted for one in given)
        if hashes:
            self._uses.update(hashes)
            self._sessions[key] = hashes
            self._ends.add(key, until)
            self._ends_of[key.owner].add(key, until)
        if before is not None:
            freed += self._give_back(key.owner, before)
        return [one for one in freed if one not in self._uses]

    def end_those_over(self, now: float) -> list[int]:
        """Keep nothing more of conversations whose time is over.

        Returns:
            The blocks that are kept no longer.
        """
        freed: list[int] = []
        while (first := self._ends.first()) is not None and first[0] <= now:
            freed += self._drop(first[1])
        return freed

    def _count_more(self, hashes: Sequence[int]) -> int:
        """The number of blocks that no conversation has yet."""
        return sum(one not in self._uses for one in hashes)

    def _reserve(self, owner: str, blocks: int) -> bool:
        """Take room for a conversation of an owner; False, and nothing is taken, without room."""
        if not self._places.reserve(owner):
            return False
        if not self._shares.reserve(owner, blocks):
            self._places.give_back(owner)
            return False
        return True

    def _first_over(self, owner: str) -> SessionKey | None:
        first = self._ends_of[owner].first() if owner in self._ends_of else None
        return None if first is None else first[1]

    def _drop(self, key: SessionKey) -> list[int]:
        return self._give_back(key.owner, self._take_out(key))

    def _take_out(self, key: SessionKey) -> Sequence[int]:
        """Know nothing more of a conversation; its blocks are to be given back."""
        self._ends.remove(key)
        self._ends_of[key.owner].remove(key)
        if not self._ends_of[key.owner]:
            del self._ends_of[key.owner]
        self._places.give_back(key.owner)
        return self._sessions.pop(key)

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
