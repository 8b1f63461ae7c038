"""Jobs of another region as copies tell of them: which go on, with what, and what is pruned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.nats.stream_config import misfits, stream_config, stream_request
from dynbus.bus.protocol.names import EndpointName, job_log_subject, moves_subject, work_subject
from dynbus.bus.transport import StoredMessage
from dynbus.bus.work_queue import CopiedJobs, Leftover, MovedRecord, Moves, copy_configs

QUEUE = EndpointName.of("demo", "Desk", "settle")
DAY = 24 * 3600.0


def job(
    sequence: int, time: float, token: str = "a", lane: str = "normal", **fields: str
) -> StoredMessage:
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    return StoredMessage(work_subject(QUEUE, token, lane), sequence, time, headers, b"{}")


def record(
    sequence: int, time: float, kind: str, data: bytes = b"", token: str = "a", **fields: str
) -> StoredMessage:
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    return StoredMessage(job_log_subject(QUEUE, token, kind), sequence, time, headers, data)


def end(sequence: int, time: float, outcome: str = "done", token: str = "a") -> StoredMessage:
    return record(sequence, time, "end", token=token, Dynbus_Job_End=outcome)


def copied(jobs: Iterable[StoredMessage], log: Iterable[StoredMessage]) -> CopiedJobs:
    both = CopiedJobs("eu")
    for message in log:
        both.add_record(message)
    for message in jobs:
        both.add_job(message)
    return both


def ids(jobs: CopiedJobs, *moves: Moves) -> list[str]:
    return [one.job_id for one in jobs.unfinished(moves)]


def test_a_job_has_ended_where_the_log_says_so_since_it_was_put() -> None:
    jobs = [job(1, 10.0), job(2, 11.0, "b"), job(3, 12.0, "c", Dynbus_Job="the c")]

    assert ids(copied(jobs, [end(1, 12.0, token="b")])) == ["a", "the c"]
    # The end of another job, which had the key before.
    assert ids(copied(jobs, [end(1, 10.5, token="b")])) == ["a", "b", "the c"]


def test_the_word_that_a_job_has_ended_may_come_after_its_copy_was_read() -> None:
    jobs = copied([job(1, 10.0), job(2, 11.0, "b")], [])

    jobs.add_record(end(1, 12.0))

    assert ids(jobs) == ["b"]


def test_a_job_that_goes_on_as_a_copy_is_one_with_the_time_of_its_put() -> None:
    copy = job(2, 20.0, "a.1", Dynbus_Job_Age="10000")

    [one] = copied([job(1, 10.0, lane="high"), copy], []).unfinished([])
    assert (one.token, one.lane, one.message.sequence) == ("a", "high", 1)
    assert ids(copied([copy], [end(1, 15.0)])) == []


def test_what_was_taken_over_or_purged_is_not_taken_over_again() -> None:
    jobs = [job(4, 10.0), job(5, 11.0, "b"), job(6, 12.0, "c")]
    purged = StoredMessage(
        moves_subject(QUEUE, "eu"), 1, 10.5, {}, msgspec.json.encode([Moves(4, 10.5)])
    )
    other = purged._replace(subject=moves_subject(QUEUE, "ap"), sequence=2)

    assert ids(copied(jobs, []), Moves(5, 12.0)) == ["c"]
    assert ids(copied(jobs, [purged])) == ["b", "c"]
    assert ids(copied(jobs, [other])) == ["a", "b", "c"]
    # A queue that was made again begins with sequence 1.
    assert ids(copied(jobs, []), Moves(100, 9.0)) == ["a", "b", "c"]


def test_a_job_goes_on_with_its_steps_its_failures_and_the_signals_that_it_has_not_taken() -> None:
    step = b'{"kind":"step","name":"pay","result":1}'
    took = b'{"kind":"signal","name":"go","result":"x","sequence":5}'
    log = [
        record(1, 10.0, "claim"),
        record(2, 10.0, "log.step.0", step, Nats_TTL="100s", Dynbus_Job_Writer="w"),
        record(4, 10.2, "log.signal.stop", b"0"),
        record(5, 10.3, "log.signal.go", b"1"),
        record(6, 10.4, "log.step.1", took),
        record(7, 10.5, "log.signal.go", b"2"),
        record(8, 10.6, "log.run", b"{}"),
        record(9, 10.7, "return", b"1"),
        record(10, 10.8, "failure", b"{}"),
        record(11, 10.9, "log.step.2", b"not JSON"),
    ]

    [one] = copied([job(1, 10.0)], log).unfinished([])

    assert one.records == (
        MovedRecord("log.step.0", step, {}, 100.0),
        MovedRecord("log.signal.stop", b"0", {}, None),
        MovedRecord("log.step.1", b'{"kind":"signal","name":"go","result":"x"}', {}, None),
        MovedRecord("log.signal.go", b"2", {}, None),
        MovedRecord("failure", b"{}", {}, None),
        MovedRecord("log.step.2", b"not JSON", {}, None),
    )


def test_a_dead_letter_that_was_put_back_goes_on_with_its_steps_and_another_job_without() -> None:
    log = [
        record(1, 10.0, "log.step.0", b"{}"),
        record(2, 10.0, "failure", b"{}"),
    ]
    jobs = [job(1, 9.0), job(2, 20.0, "a.7")]

    [redriven] = copied(jobs, [*log, end(3, 11.0, "failed")]).unfinished([])
    [another] = copied(jobs, [*log, end(3, 11.0)]).unfinished([])

    assert [one.record for one in redriven.records] == ["log.step.0"]
    assert another.records == ()


def test_pruning_drops_jobs_that_are_over_and_the_records_of_those_long_ended() -> None:
    jobs = [job(1, 1.0), job(2, 2.0, "b"), job(3, 3.0, "c"), job(4, 100.0, "d")]
    log = [
        record(1, 1.0, "log.step.0", token="b"),
        end(2, 4.0),
        end(3, 5.0, "failed", "c"),
        end(4, 99.0, token="d"),
    ]

    both = copied(jobs, log)

    assert both.leftover_jobs([]) == Leftover(1, {"c": 3})
    assert both.leftover_jobs([Moves(3, 100.0)]) == Leftover(3, {})
    assert both.leftover_records() == Leftover(0, {"a": 2})
    assert copied([job(5, 5.0 + 15 * DAY, "e")], log).leftover_records() == Leftover(
        0, {"a": 2, "c": 3, "d": 4}
    )
    assert copied([], []).leftover_jobs([]) == Leftover(0, {})


def test_the_last_word_about_a_schedule_and_about_a_purge_is_kept() -> None:
    firings = [record(n, float(n), "last", b"%d" % n, "=schedule") for n in (1, 2)]
    log = [*firings, end(3, 3.0), record(4, 4.0, "eu", b'[{"up_to":9,"at":5.0}]', "=moves")]

    both = copied([job(10, 100.0, "b")], log)

    assert both.last_firing == b"2"
    assert both.leftover_records() == Leftover(1, {"a": 3})
    assert ids(both) == ["b"]


class Event(NamedTuple):
    """A change of a job: it is put, does a step, or ends, so long after the change before."""

    token: str
    what: str
    pause: float


events = st.lists(
    st.builds(
        Event,
        st.sampled_from("abc"),
        st.sampled_from(["put", "step", "done", "failed"]),
        st.sampled_from([0.01, 1.0, 50.0]),
    ),
    max_size=25,
)


def history(happened: Sequence[Event]) -> tuple[list[StoredMessage], list[StoredMessage]]:
    """The queue and the log of jobs to which this happened, each of a key at a time."""
    jobs: list[StoredMessage] = []
    log: list[StoredMessage] = []
    running: set[str] = set()
    now = 1000.0
    for token, what, pause in happened:
        now += pause
        if what == "put" and token not in running:
            running.add(token)
            jobs.append(job(len(jobs) + 1, now, token))
        elif what == "step" and token in running:
            log.append(record(len(log) + 1, now, f"log.step.{len(log)}", b"{}", token))
        elif what in ("done", "failed") and token in running:
            running.discard(token)
            log.append(end(len(log) + 1, now, what, token))
    return jobs, log


def kept(messages: Sequence[StoredMessage], leftover: Leftover, place: int) -> list[StoredMessage]:
    def token(message: StoredMessage) -> str:
        return message.subject.split(".")[place]

    return [
        one
        for one in messages
        if one.sequence > max(leftover.up_to, leftover.tokens.get(token(one), 0))
    ]


@given(happened=events, data=st.data())
def test_what_goes_on_is_the_same_with_copies_that_were_pruned_meanwhile(
    happened: Sequence[Event], data: st.DataObject
) -> None:
    jobs, log = history(happened)
    first_jobs = data.draw(st.integers(0, len(jobs)), "jobs that were copied when it was pruned")
    first_log = data.draw(st.integers(0, len(log)), "records")
    pruned = copied(jobs[:first_jobs], log[:first_log])
    jobs_left = [
        *kept(jobs[:first_jobs], pruned.leftover_jobs([]), 5),
        *jobs[first_jobs:],
    ]
    log_left = [*kept(log[:first_log], pruned.leftover_records(), 4), *log[first_log:]]

    assert copied(jobs_left, log_left).unfinished([]) == copied(jobs, log).unfinished([])


@given(happened=events)
def test_a_job_goes_on_with_all_of_its_steps_unless_it_has_ended(happened: Sequence[Event]) -> None:
    jobs, log = history(happened)
    last: dict[str, str] = {}
    for one in sorted([*jobs, *log], key=lambda one: one.time):
        parts = one.subject.split(".")
        if parts[2] == "_work":
            last[parts[5]] = "put"
        elif parts[-1] == "end":
            last[parts[4]] = "end"

    assert sorted(ids(copied(jobs, log))) == sorted(
        token for token, what in last.items() if what == "put"
    )


def test_copies_are_mirrors_of_which_nothing_expires() -> None:
    for config in copy_configs(QUEUE, "eu"):
        request = stream_request(config)

        assert request["mirror"]["external"] == {"api": "$JS.eu.API", "deliver": ""}
        assert "allow_msg_ttl" not in request
        assert request["max_age"] == 0
        assert stream_config(request)._replace(replicas=None, description=config.description) == (
            config
        )
        assert misfits(request, config) == []
        assert misfits({**request, "mirror": None}, config)
