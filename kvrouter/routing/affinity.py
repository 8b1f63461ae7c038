"""Requests of one session go to one rank for as long as that is good for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from dynbus.kvrouter.radix.index import Rank

from .cost import Candidate, RequestShape

SESSION_KEY: Final = "session"
"""The metadata key of a call that names its session."""

DEFAULT_TTL: Final = 600.0
MAX_SESSIONS: Final = 65_536
DEFAULT_OVERLOAD: Final = 2.0


class SessionAffinity:
    """Remembers where each session was, for some time after its last request.

    Args:
        ttl: seconds after its last request until a session is forgotten.
        overload: how many times the load of the least loaded candidate, with the request
            added, a session's rank may have before the session gives way.
        limit: sessions to remember; beyond it the least recently used are forgotten.
    """

    def __init__(
        self,
        *,
        ttl: float = DEFAULT_TTL,
        overload: float = DEFAULT_OVERLOAD,
        limit: int = MAX_SESSIONS,
    ) -> None:
        self._ttl = ttl
        self._overload = overload
        self._limit = limit
        self._sessions: OrderedDict[str, tuple[Rank, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SessionAffinity [{len(self._sessions)} sessions]>"

    def find(
        self, session: str, request: RequestShape, candidates: Sequence[Candidate], now: float
    ) -> int | None:
        """The position of the candidate where a session was; None when it is to be chosen anew.

        That is so for a new session, and when its rank is no candidate or has too much load.
        """
        rank, until = self._sessions.get(session, (None, 0.0))
        if rank is None or until <= now:
            return None
        block_size = request.block_size
        loads = [one.active_prefill_tokens / block_size + one.active_blocks for one in candidates]
        for at, candidate in enumerate(candidates):
            if candidate.rank == rank:
                bearable = self._overload * (min(loads) + request.prompt_blocks)
                return at if loads[at] <= bearable else None
        return None

    def bind(self, session: str, rank: Rank, now: float) -> None:
        """A request of a session goes to a rank."""
        sessions = self._sessions
        sessions[session] = (rank, now + self._ttl)
        sessions.move_to_end(session)
        while sessions and (len(sessions) > self._limit or next(iter(sessions.values()))[1] <= now):
            sessions.popitem(last=False)
