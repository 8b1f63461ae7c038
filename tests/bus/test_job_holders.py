"""What follows from the records of those who hold jobs, without a bus."""

from __future__ import annotations

import msgspec
import pytest

from dynbus.bus.protocol.liveness import GONE_AFTER
from dynbus.bus.transport import StoredMessage
from dynbus.bus.work_queue.holders import Absences, HeldJob, Holder, orphans, read_holders

TOKENS = "$JS.ACK.DYNBUS_WORK_demo+Printer+print."
LISTENS = "_R.-.0123.ctl.h.4567"


def record(holder: object, subject: str = "$KV.dynbus_jobs.demo.Printer.print.a") -> StoredMessage:
    return StoredMessage(subject, 7, 0.0, {}, msgspec.json.encode(holder))


def test_a_record_says_who_holds_which_jobs() -> None:
    holder = Holder(LISTENS, [HeldJob(3, 1, TOKENS + "takers.1.3.3.0.0")])

    (found,) = read_holders([record(holder)], TOKENS)

    assert (found.holder, found.sequence) == (holder, 7)


@pytest.mark.parametrize(
    "message",
    [
        StoredMessage("s", 1, 0.0, {}, b"no record"),
        StoredMessage("s", 1, 0.0, {"KV-Operation": "DEL"}, b""),
        record(Holder("$JS.API.STREAM.DELETE.x", [])),
        record(Holder("_R.*.0123", [])),
        record(Holder(LISTENS, [HeldJob(3, 1, "$JS.ACK.DYNBUS_WORK_other.takers.1.3.3.0.0")])),
        record(Holder(LISTENS, [HeldJob(3, 1, "demo.Printer.print")])),
    ],
)
def test_a_record_that_would_have_other_subjects_published_to_says_nothing(
    message: StoredMessage,
) -> None:
    assert read_holders([message], TOKENS) == []


def test_what_another_was_handed_since_is_not_given_back_for_the_dead() -> None:
    dead = Holder(LISTENS, [HeldJob(1, 1, "a"), HeldJob(2, 1, "b"), HeldJob(3, 2, "c")])
    others = [Holder("x", [HeldJob(2, 2, "d")]), Holder("y", [HeldJob(3, 1, "e")])]

    assert [job.sequence for job in orphans(dead, others)] == [1, 3]


def test_who_is_not_found_twice_is_dead_and_who_connects_again_is_not() -> None:
    absences = Absences()

    assert not absences.is_dead("a", False, 10.0)
    assert not absences.is_dead("b", False, 10.0)
    assert absences.are_any
    assert not absences.is_dead("b", True, 10.5)
    assert not absences.is_dead("a", False, 10.0 + GONE_AFTER - 0.1)
    assert absences.is_dead("a", False, 10.0 + GONE_AFTER)
    assert not absences.is_dead("b", False, 10.0 + GONE_AFTER)


def test_nothing_is_known_of_whom_nobody_could_ask_for() -> None:
    absences = Absences()
    absences.is_dead("a", False, 10.0)

    assert not absences.is_dead("a", None, 20.0)
    assert not absences.is_dead("a", False, 20.1)
    absences.keep([])
    assert not absences.are_any
