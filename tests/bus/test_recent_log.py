"""The last warnings and errors of a process are kept, without what users' code says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.conditions import eventually

from dynbus import Actor, handler
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.recent_log import MOST_RECORDS, MOST_TEXT, RecentLog, recent_log
from dynbus.testing import TestKit, run

SIZE = 1_000_000
OWN = "dynbus.bus.nats.connection"


@pytest.fixture
def log() -> Iterator[RecentLog]:
    """A log that is kept during a test."""
    kept = RecentLog()
    kept.keep()
    yield kept
    logging.getLogger("dynbus").removeHandler(kept)


def texts(log: RecentLog) -> list[str]:
    return [record["text"] for record in log.read(MOST_RECORDS, SIZE)]


def test_warnings_and_errors_of_dynbus_are_kept_and_nothing_else(log: RecentLog) -> None:
    logging.getLogger("dynbus.test").info("in detail")
    logging.getLogger("user").error("of the user")
    logging.getLogger("dynbus.test").warning("%s waits for %.1f s", "demo.Desk", 2.0)

    (record,) = log.read(MOST_RECORDS, SIZE)

    assert record["text"] == "demo.Desk waits for 2.0 s"
    assert (record["level"], record["logger"]) == ("WARNING", "dynbus.test")
    assert record["time"] > 0 < record["line"]


def test_no_text_of_users_is_kept(log: RecentLog) -> None:
    error = ValueError("the prompt was private")

    try:
        raise error
    except ValueError:
        logging.getLogger("dynbus.test").exception("%s raised %s, %r", "a.B.c", error, error)
    logging.getLogger("dynbus.test").error("%s: %s", "a.B.c", "ValueError: private\nlines")
    # As a mistake in a call would make it.
    wrong = {
        "name": "dynbus.test",
        "msg": "%d of %s",
        "args": ("private", EndpointName("a", "B", "c")),
    }
    log.emit(logging.makeLogRecord(wrong))

    first, *_ = log.read(MOST_RECORDS, SIZE)
    assert texts(log) == [
        "a.B.c raised ValueError, 'ValueError'",
        "a.B.c: ValueError: ...",
        "%d of %s",
    ]
    assert first["raised"] == "ValueError"
    assert b"private" not in msgspec.json.encode(log.read(MOST_RECORDS, SIZE))


def test_the_reason_of_a_lost_connection_is_kept_without_credentials(log: RecentLog) -> None:
    logging.getLogger(OWN).warning("%s is lost: %s", "nats://me:secret@bus", "it is silent for 1 s")

    assert texts(log) == ["nats://me:***@bus is lost: it is silent for 1 s"]


def test_the_latest_are_kept_as_many_as_fit(log: RecentLog) -> None:
    for number in range(2 * MOST_RECORDS):
        logging.getLogger(OWN).warning("%d %s", number, "x" * 2 * MOST_TEXT)

    kept = log.read(2 * MOST_RECORDS, SIZE)

    assert [int(record["text"].split()[0]) for record in kept] == list(range(100, 200))
    assert {len(record["text"]) for record in kept} == {MOST_TEXT}
    assert log.read(2, SIZE) == kept[-2:]
    assert log.read(MOST_RECORDS, 2000) == kept[-3:]
    assert log.read(MOST_RECORDS, 0) == []


def test_where_nobody_set_logging_up_warnings_are_still_shown(
    log: RecentLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("dynbus"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("dynbus"), "handlers", [log])

    logging.getLogger("dynbus.test").warning("shown once")

    assert capsys.readouterr().err == "shown once\n"


class Desk(Actor, namespace="demo"):
    @handler
    async def ask(self) -> str:
        return ""


def test_an_instance_tells_it_to_those_who_ask() -> None:
    async def story() -> list[Any]:
        async with TestKit() as kit:
            instance = await kit.start(Desk)
            logging.getLogger("dynbus.test").warning("first")
            logging.getLogger("dynbus.test").warning("second")
            subject = f"$SRV.STATS.demo_Desk.{instance.id}"
            questions = (b"", b'{"log": 1}', b'{"log": -1}', b'{"log": 9999}', b'{"log": "all"}')
            answers: list[Any] = []
            connection = instance.server.bus.data
            connection.subscribe("_INBOX.x", lambda message: answers.append(message.data))
            await connection.barrier()
            for question in questions:
                connection.publish(subject, question, reply="_INBOX.x")
                await connection.barrier()
            await eventually(lambda: len(answers) == len(questions))
            return [msgspec.json.decode(answer) for answer in answers]

    plain, one, less, all_of_them, odd = run(story())

    assert [answer.get("log") for answer in (plain, less, odd)] == [None] * 3
    assert [record["text"] for record in one["log"]["records"]] == ["second"]
    assert [record["text"] for record in all_of_them["log"]["records"]][-2:] == ["first", "second"]
    assert len(all_of_them["log"]["process"]) == 8
    assert recent_log in logging.getLogger("dynbus").handlers


@pytest.mark.parametrize("said", ["ここだけの話です", '{"prompt":"private"}', "hf_" + "x" * 200])
def test_a_text_without_spaces_is_no_name(log: RecentLog, said: str) -> None:
    logging.getLogger("dynbus.test").warning("%s: %s", "a.B.c", said)

    assert texts(log) == [f"a.B.c: ({len(said)} characters)"]


def test_what_cannot_be_shown_harms_nobody(log: RecentLog) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    logger = logging.getLogger(OWN)
    logger.propagate = False
    try:
        log.emit(logger.makeRecord(OWN, logging.WARNING, "", 1, "of %s", (Broken(),), None))
    finally:
        logger.propagate = True

    assert texts(log) == ["of %s"]
