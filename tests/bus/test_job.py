"""The decision about a delivery of a job."""

from __future__ import annotations

import pytest

from dynbus.bus.protocol import headers
from dynbus.bus.transport import Delivery, StoredMessage
from dynbus.bus.work_queue import DeathReason, JobEnd, Moves, WorkQueueConfig
from dynbus.bus.work_queue.job import judge

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


def test_a_job_that_another_region_has_taken_over_is_left_to_it() -> None:
    def end(moves: Moves) -> JobEnd | None:
        return judge(delivery(1), 0.0, 0.5, CONFIG, moves=[moves]).end

    assert end(Moves(up_to=1, at=100.0)) is JobEnd.MOVED
    assert end(Moves(up_to=0, at=100.0)) is None
    # A queue that was made again begins with sequence 1.
    assert end(Moves(up_to=1, at=99.0)) is None
