"""Owners that wait get their parts by the work, whatever the number and size of their requests."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.routing.fairness import MOST_OWNERS, FairTurns

WORKS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(WORKS, WORKS)
def test_of_two_that_have_work_waiting_neither_is_ahead_by_more_than_a_request_of_each(
    ours: list[int], theirs: list[int]
) -> None:
    turns = FairTurns()
    waiting = [
        (turns.take(owner, work), number, owner, work)
        for owner, works in (("a", ours), ("b", theirs))
        for number, work in enumerate(works)
    ]
    left = Counter({"a": len(ours), "b": len(theirs)})
    done = Counter[str]()

    for turn, _, owner, work in sorted(waiting):
        if not all(left[one] for one in "ab"):
            break
        turns.begin(turn)
        done[owner] += work
        left[owner] -= 1
        assert abs(done["a"] - done["b"]) <= max(ours) + max(theirs)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(-200, 200)), max_size=60))
def test_the_requests_of_one_owner_come_in_their_order(works: list[tuple[int, int]]) -> None:
    turns = FairTurns()
    taken: list[float] = []

    for work, more in works:
        taken.append(turns.take("", work))
        turns.correct("", more)

    assert taken == sorted(taken)


def test_one_that_comes_late_is_served_next_and_has_no_claim_to_what_it_missed() -> None:
    turns = FairTurns()
    early = [turns.take("a", 10.0) for _ in range(10)]
    for turn in early[:5]:
        turns.begin(turn)

    late = [turns.take("b", 10.0) for _ in range(3)]

    assert late == [40.0, 50.0, 60.0]
    assert early[5:8] == [50.0, 60.0, 70.0]


def test_what_was_predicted_wrongly_is_made_good_with_the_next_request() -> None:
    turns = FairTurns()
    turns.take("a", 10.0)
    turns.take("b", 10.0)

    turns.correct("a", 25.0)
    turns.correct("b", -10.0)

    assert [turns.take(owner, 1.0) for owner in "ab"] == [35.0, 0.0]


def test_owners_that_are_owed_nothing_are_forgotten() -> None:
    turns = FairTurns()
    for number in range(MOST_OWNERS):
        turns.begin(turns.take(f"{number}", 0.0))
    busy = turns.take("busy", 5.0)

    turns.take("new", 1.0)

    assert repr(turns) == "<FairTurns [2 owners]>"
    assert turns.take("busy", 1.0) == busy + 5.0
