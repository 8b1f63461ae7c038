"""The decision about a delivery of a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.protocol import headers
from dynbus.bus.transport import Delivery, StoredMessage
from dynbus.bus.work_queue import DeathReason, JobEnd, Moves, WorkQueueConfig
from dynbus.bus.work_queue.job import judge, with_moves

CONFIG = WorkQueueConfig(tries=3)


def delivery(tries: int) -> Delivery:
    fields = {headers.JOB: "one", headers.DEADLINE: "1000"}
    message = StoredMessage("a.B._work.c.normal.one", 1, 100.0, fields, b"")
    return Delivery(message, tries, "token")


@pytest.mark.parametrize(
    ("tries", "now", "end", "reason"),
    [
        (1, 0.5, None, None),
        (3, 0.5, None, None),
        (3, 1.5, JobEnd.EXPIRED, None),
        # A job that has begun is not dropped by its deadline: it would be begun for ever.
        (4, 1.5, JobEnd.DEAD, DeathReason.TRIES),
        (4, 0.5, JobEnd.DEAD, DeathReason.TRIES),
    ],
)
def test_a_job_without_tries_left_is_dead_also_beyond_its_deadline(
    tries: int, now: float, end: JobEnd | None, reason: DeathReason | None
) -> None:
    decision = judge(delivery(tries), 0.0, now, CONFIG)

    assert (decision.end, decision.reason) == (end, reason)


def test_an_answer_of_the_server_in_a_queue_is_no_job() -> None:
    answer = StoredMessage("ns.A._work.e.normal.1", 1, 0.0, {headers.STREAM: "KV_x"}, b"")

    judged = judge(Delivery(answer, 1, ""), 0.0, 0.0, WorkQueueConfig())

    assert (judged.end, judged.reason) == (JobEnd.DEAD, DeathReason.MALFORMED)


def test_a_job_that_another_region_has_taken_over_is_left_to_it() -> None:
    def end(moves: Moves) -> JobEnd | None:
        return judge(delivery(1), 0.0, 0.5, CONFIG, moves=[moves]).end

    assert end(Moves(up_to=1, at=100.0)) is JobEnd.MOVED
    assert end(Moves(up_to=0, at=100.0)) is None
    # A queue that was made again begins with sequence 1.
    assert end(Moves(up_to=1, at=99.0)) is None
    # The copies did not have it any more, or no queue there can have it.
    assert end(Moves(up_to=1, at=100.0, after=1)) is None
    assert end(Moves(up_to=1, at=100.0, left=(1,))) is None


def test_ranges_of_jobs_that_were_taken_over_are_kept_until_a_later_one_has_them() -> None:
    first = Moves(up_to=10, at=1.0)
    begun = Moves(up_to=20, at=2.0, after=10, is_put=False)
    put = Moves(up_to=20, at=2.0, after=10)
    gap = Moves(up_to=40, at=3.0, after=30, left=(33,))
    again = Moves(up_to=5, at=4.0)

    assert with_moves([], first) == [first]
    assert with_moves([first], begun) == [first, begun]
    assert with_moves([first, begun], put) == [Moves(up_to=20, at=2.0)]
    assert with_moves([first], gap) == [first, gap]
    # A queue that was made again.
    assert with_moves([first, gap], again) == [first, gap, again]
    # Another operator was faster.
    assert with_moves([put], begun) == [put]


def _moves(after: int, length: int, left: set[int], is_put: bool) -> Moves:
    return Moves(after + length, 9.0, after, tuple(sorted(left)), is_put)


@given(
    ranges=st.lists(
        st.builds(
            _moves,
            st.integers(0, 12),
            st.integers(1, 6),
            st.sets(st.integers(1, 18), max_size=2),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_no_range_is_forgotten_and_none_is_made_up(ranges: list[Moves]) -> None:
    known: list[Moves] = []
    for one in ranges:
        known = with_moves(known, one)

    for sequence in range(1, 20):
        message = StoredMessage("a", sequence, 1.0, {}, b"")

        def have(moves: list[Moves], of: StoredMessage = message) -> tuple[bool, bool]:
            having = [each for each in moves if each.have(of)]
            return bool(having), any(each.is_put for each in having)

        assert have(known) == have(ranges)
