"""Ranks in need are asked soon, not all at once, and not without end."""

from __future__ import annotations

import pytest

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.resync import (
    MOST_AT_ONCE,
    ResyncPlan,
    ResyncRequest,
    decode_resync,
    encode_resync,
)

RANKS = [Rank(f"i{number}", 0) for number in range(20)]
A = RANKS[0]


def plan() -> ResyncPlan:
    return ResyncPlan(jitter=lambda: 0.5)


def asks_over(plan: ResyncPlan, seconds: float, begin: float = 0.0) -> list[float]:
    """When ranks are asked, looked at every 0.1 s."""
    times = [begin + step / 10 for step in range(int(seconds * 10) + 1)]
    return [now for now in times for _ in plan.due(now)]


def test_a_rank_in_need_is_asked_once_and_again_when_it_does_not_answer() -> None:
    waiting = plan()
    waiting.need(A, "gap", 0.0)
    waiting.need(A, "gap", 0.0)

    assert asks_over(waiting, 3.0) == pytest.approx([0.1, 0.6, 1.6, 2.6])


def test_only_so_many_ranks_are_asked_at_once() -> None:
    waiting = plan()
    for rank in RANKS:
        waiting.need(rank, "gap", 0.0)

    first = waiting.due(0.1)
    at_once = waiting.due(0.1)
    waiting.answer(first[0])
    then = waiting.due(0.2)

    assert (len(first), at_once, len(then)) == (MOST_AT_ONCE, [], 1)


def test_ranks_that_never_answer_do_not_keep_others_from_being_asked() -> None:
    waiting = plan()
    for rank in RANKS:
        waiting.need(rank, "gap", 0.0)

    asked: set[Rank] = set()
    for step in range(200):
        asked.update(waiting.due(step / 10))

    assert asked == set(RANKS)


def test_an_answered_rank_is_in_need_until_it_is_confirmed() -> None:
    waiting = plan()
    waiting.need(A, "gap", 0.0)
    waiting.due(0.1)

    waiting.answer(A)
    assert A in waiting
    assert waiting.due(60.0) == []
    waiting.confirm(A)

    assert len(waiting) == 0


def test_a_rank_whose_answers_are_wrong_is_asked_less_and_less() -> None:
    waiting = plan()
    asked: list[float] = []
    waiting.need(A, "digest mismatch", 0.0)
    for step in range(3000):
        if waiting.due(step / 10):
            asked.append(step / 10)
            waiting.answer(A)
            waiting.need(A, "digest mismatch", step / 10)

    pauses = [after - before for before, after in zip(asked, asked[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1.0 < 50.0 < pauses[-1] < 75.0


def test_what_was_lost_on_the_way_is_asked_for_at_once_however_often() -> None:
    waiting = plan()
    for fault in range(10):
        now = float(fault)
        waiting.need(A, "gap", now, is_lost=True)
        assert waiting.due(now + 0.1) == [A]
        waiting.answer(A)


def test_an_instance_that_is_gone_is_forgotten() -> None:
    waiting = plan()
    for rank in (A, Rank("i0", 1), RANKS[1]):
        waiting.need(rank, "gap", 0.0)

    waiting.forget("i0")

    assert list(waiting.ranks()) == [RANKS[1]]


def test_a_request_is_read_as_it_was_written() -> None:
    request = ResyncRequest(7, "gap")

    assert decode_resync(encode_resync(request)) == request
    assert encode_resync(request) == b'{"event_epoch":7,"reason":"gap"}'


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b'{"event_epoch":-1}', b'{"event_epoch":"1"}', b'{"reason":1}']
)
def test_what_is_no_request_is_none(data: bytes) -> None:
    assert decode_resync(data) is None
