"""Sessions stay where they were, for some time and up to some load."""

from __future__ import annotations

import pytest

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing import scheduler
from dynbus.kvrouter.routing.candidates import Candidate, Candidates
from dynbus.kvrouter.routing.scheduler import SessionAffinity

from .routing_fixtures import shape


def test_sessions_are_forgotten_by_time_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_SESSIONS", 2)
    affinity = SessionAffinity(ttl=10.0, overload=2.0)
    wanted, candidates = shape(4), Candidates.of([Candidate(Rank("a", 0)), Candidate(Rank("b", 0))])
    for at, session in enumerate(("one", "two", "three")):
        affinity.bind(session, Rank("b", 0), float(at))

    assert affinity.find("one", wanted, candidates, 3.0) is None
    assert affinity.find("two", wanted, candidates, 3.0) == 1
    assert affinity.find("two", wanted, candidates, 11.0) is None
    assert affinity.find("three", wanted, Candidates.of(candidates[:1]), 11.0) is None


def test_where_a_session_went_is_known_as_long_as_it_is_remembered() -> None:
    affinity = SessionAffinity(ttl=10.0, overload=2.0)
    affinity.bind("s", Rank("a", 0), 0.0)

    assert affinity.rank_of("s", 9.0) == Rank("a", 0)
    assert affinity.rank_of("s", 10.0) is None
    assert affinity.rank_of("another", 0.0) is None
    # To ask does not remember it for longer.
    assert affinity.rank_of("s", 9.0) is not None
    assert affinity.rank_of("s", 10.0) is None


def test_a_session_that_is_forgotten_at_once_harms_nobody() -> None:
    affinity = SessionAffinity(ttl=0.0, overload=2.0)

    affinity.bind("s", Rank("a", 0), 1.0)

    assert affinity.find("s", shape(4), Candidates.of([Candidate(Rank("a", 0))]), 1.0) is None


def test_a_session_bears_load_up_to_a_factor() -> None:
    affinity = SessionAffinity(ttl=600.0, overload=2.0)
    affinity.bind("s", Rank("a", 0), 0.0)

    def kept(blocks: int) -> bool:
        candidates = [Candidate(Rank("a", 0), active_blocks=blocks), Candidate(Rank("b", 0))]
        return affinity.find("s", shape(4), Candidates.of(candidates), 1.0) == 0

    assert kept(8)
    assert not kept(9)
