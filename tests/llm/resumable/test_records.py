"""What is stored of a stream, who goes on with it, and when it is over: literals and histories."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import HandlerError, Overloaded, StreamLost
from dynbus.llm.resumable.records import (
    KEPT_SECONDS,
    MOST_BOUNCES,
    MOST_BYTES,
    MOST_MISSES,
    Begun,
    Came,
    Next,
    Over,
    Owned,
    OwnerWatch,
    Piece,
    Record,
    StreamLog,
    failed_with,
    failure,
    log_key,
    next_step,
)

BEGUN: Final = Begun("0", "/v1/completions", b"{}", "one", 1.0, 60.0, "seed")
CAME: Final = Came([Piece(2.0, 0, [b"x", b"y"]), Piece(2.5, 0, [], True)])


class Subject:
    """A subject of a stream, which takes a record only after the one that its writer expects."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, float, bytes]] = []

    @property
    def last(self) -> int:
        return self.stored[-1][0] if self.stored else 0

    def append(self, log: StreamLog, record: Record, at: float = 1.0) -> bool:
        data = log.encode(record)
        if log.sequence != self.last:
            return False
        sequence = self.last + 3
        if isinstance(record, Over):
            self.stored = []
        self.stored.append((sequence, at, data))
        log.wrote(record, len(data), sequence, at)
        return True

    def read(self, log: StreamLog) -> list[Piece]:
        return [
            piece for sequence, at, data in self.stored for piece in log.read(data, sequence, at)
        ]


def written(*records: Record) -> tuple[Subject, StreamLog]:
    subject, log = Subject(), StreamLog()
    for record in records:
        assert subject.append(log, record)
    return subject, log


def test_a_reader_knows_of_a_log_what_its_writer_does() -> None:
    subject, log = written(BEGUN, CAME, Owned("b"))

    reader = StreamLog()
    pieces = subject.read(reader)

    assert pieces == CAME.pieces
    assert vars(reader) == vars(log)
    assert (reader.begun, reader.owner) == (BEGUN, "b")


def test_records_that_were_read_already_say_nothing() -> None:
    subject, log = written(BEGUN, CAME)

    assert subject.read(log) == []
    assert log.over == ""


@pytest.mark.parametrize("lost", [0, 1])
def test_a_log_without_its_beginning_is_over(lost: int) -> None:
    subject, _ = written(BEGUN, CAME, CAME)
    del subject.stored[lost]

    reader = StreamLog()
    subject.read(reader)

    assert "gone" in reader.over
    assert next_step(reader, is_complete=False, owner_lives=True, now=1.0) is Next.GONE


@given(st.binary(max_size=40))
def test_bytes_that_are_no_record_end_a_log(data: bytes) -> None:
    log = StreamLog()

    assert log.read(data, 1, 1.0) == ()
    assert log.over


def test_a_log_that_was_replaced_says_why() -> None:
    subject, _ = written(BEGUN, CAME, Over("it is too large"))

    reader = StreamLog()
    subject.read(reader)

    assert reader.over == "it is too large"
    assert next_step(reader, is_complete=False, owner_lives=True, now=1.0) is Next.GONE


def test_a_log_has_room_for_so_many_bytes_and_not_for_one_more() -> None:
    _, log = written(BEGUN)

    assert log.has_room(MOST_BYTES - log.size)
    assert not log.has_room(MOST_BYTES - log.size + 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["read", "take", "write"]))))
def test_whatever_front_ends_do_one_alone_writes_and_all_read_the_same(
    steps: list[tuple[int, str]],
) -> None:
    subject, first = written(BEGUN)
    logs = [first, StreamLog(), StreamLog(), StreamLog()]
    owner, made = 0, 0
    told: list[list[Piece]] = [[], [], [], []]
    for number, step in steps:
        log = logs[number]
        if step == "read":
            told[number] += subject.read(log)
        elif log.begun is not None and step == "take":
            if subject.append(log, Owned(str(number))):
                owner = number
        elif log.owner == str(number):
            # One that was taken for dead still believes that it is the owner.
            piece = Piece(float(made), 0, [b"%d" % made])
            if subject.append(log, Came([piece])):
                assert owner == number
                told[number].append(piece)
                made += 1

    for number, log in enumerate(logs):
        told[number] += subject.read(log)
        assert [piece.at for piece in told[number]] == [float(at) for at in range(made)]
        assert log.over == ""


@pytest.mark.parametrize(
    ("is_complete", "lives", "age", "then"),
    [
        (True, None, KEPT_SECONDS, Next.WHOLE),
        (True, None, KEPT_SECONDS + 1, Next.GONE),
        (False, None, 0, Next.ASK),
        (False, None, KEPT_SECONDS + 1, Next.ASK),
        (False, True, KEPT_SECONDS + 1, Next.FOLLOW),
        (False, False, KEPT_SECONDS, Next.TAKE),
        (False, False, KEPT_SECONDS + 1, Next.GONE),
    ],
)
def test_what_follows_from_a_log_and_its_owner(
    is_complete: bool, lives: bool | None, age: float, then: Next
) -> None:
    _, log = written(BEGUN, CAME)

    now = log.last_at + age

    assert next_step(log, is_complete=is_complete, owner_lives=lives, now=now) is then


def test_a_stream_that_nobody_owns_is_taken_without_a_question() -> None:
    _, log = written(BEGUN, Owned(""))

    assert next_step(log, is_complete=False, owner_lives=None, now=1.0) is Next.TAKE


def test_without_a_record_there_never_was_a_stream() -> None:
    assert next_step(StreamLog(), is_complete=False, owner_lives=None, now=1.0) is Next.UNKNOWN


def test_an_owner_that_answers_lives_and_one_that_knows_nothing_does_not() -> None:
    watch = OwnerWatch()
    assert watch.due(0.0, is_silent=False)
    watch.ask(0.0)
    assert watch.lives is None

    watch.answered(owns=True)
    assert watch.lives is True
    watch.answered(owns=False)
    assert watch.lives is False


def test_an_owner_is_dead_after_questions_without_an_answer_however_long_one_took() -> None:
    watch = OwnerWatch()
    watch.ask(0.0)
    # Whoever asks was frozen itself.
    watch.ask(1000.0)
    assert watch.lives is None
    for number in range(MOST_MISSES - 1):
        watch.ask(1001.0 + number)

    assert watch.lives is False


def test_a_question_that_comes_back_once_says_nothing() -> None:
    watch = OwnerWatch()
    for number in range(MOST_BOUNCES):
        assert watch.lives is None
        watch.ask(float(number))
        watch.bounced()

    assert watch.lives is False


def test_an_owner_that_could_not_be_asked_is_asked_again_soon() -> None:
    watch = OwnerWatch()
    watch.ask(0.0)
    watch.bounced()

    assert not watch.due(0.05, is_silent=True)
    assert watch.due(0.11, is_silent=False)


def test_an_owner_that_writes_is_asked_seldom_and_one_that_is_silent_often() -> None:
    watch = OwnerWatch()
    watch.ask(0.0)
    watch.wrote()

    assert not watch.due(1.0, is_silent=False)
    assert watch.due(1.0, is_silent=True)
    assert watch.due(11.0, is_silent=False)


def test_an_error_is_the_same_when_it_is_read() -> None:
    for error in (
        StreamLost("it died", hop="a.B.c@1", request_id="one"),
        HandlerError("ValueError: no"),
        Overloaded("full", retry_after=2.5),
    ):
        read = failed_with(Piece(1.0, 0, [], True, failure(error)))

        assert type(read) is type(error)
        assert read is not None
        assert (read.code, read.message) == (error.code, error.message)


@given(st.text(), st.text(), st.text(), st.text())
def test_streams_of_two_tenants_have_no_log_in_common(
    tenant: str, request: str, other: str, request_of_other: str
) -> None:
    names = (tenant.replace("\0", ""), request), (other.replace("\0", ""), request_of_other)

    same = log_key(*names[0]) == log_key(*names[1])

    assert same == (names[0] == names[1])
