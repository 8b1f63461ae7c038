"""One pipeline for all log records: format, the running call, secrets."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider

from dynbus.bus.context import Context, inside_instance
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.telemetry.logs import configure_logging, redact_url

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def structlog_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def inside(call: Context, log: logging.Logger) -> None:
    """Log one line in the context of a call."""

    def run() -> None:
        call.enter()
        log.warning("inside")

    contextvars.copy_context().run(run)


def test_what_is_logged_with_extra_is_a_field_of_json_and_not_twice_on_a_terminal(
    stream: io.StringIO,
) -> None:
    told = {"tenant": "acme", "prompt_tokens": 3}
    configure_logging("json", stream=stream)
    logging.getLogger("dynbus").info("POST /v1 200 tenant=acme", extra=told)
    (line,) = lines(stream)
    console = io.StringIO()
    configure_logging("console", stream=console)

    logging.getLogger("dynbus").info("POST /v1 200 tenant=acme", extra=told)

    assert (line["event"], line["tenant"], line["prompt_tokens"]) == (
        "POST /v1 200 tenant=acme",
        "acme",
        3,
    )
    assert console.getvalue().count("acme") == 1
    assert "prompt_tokens" not in console.getvalue()


def test_a_record_is_one_json_object(stream: io.StringIO) -> None:
    configure_logging("json", stream=stream)

    logging.getLogger("dynbus.bus.test").info("%s has load %d", "Shouter", 3)

    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "Shouter has load 3",
        "level": "info",
        "logger": "dynbus.bus.test",
        "process": os.getpid(),
    }


def test_records_of_other_libraries_take_the_same_way(stream: io.StringIO) -> None:
    configure_logging("json", stream=stream)

    logging.getLogger("nats.aio.client").error("lost %s", "connection")
    structlog.get_logger("user").warning("from structlog", key="value")

    nats, user = lines(stream)
    assert (nats["event"], nats["level"], nats["logger"]) == (
        "lost connection",
        "error",
        "nats.aio.client",
    )
    assert (user["event"], user["key"], user["logger"]) == ("from structlog", "value", "user")


def test_every_line_inside_a_handler_names_its_call(stream: io.StringIO) -> None:
    configure_logging("json", stream=stream)
    call = Context(
        "request-1",
        hop="demo.Shouter.generate@i1",
        trace_headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )

    inside(call, logging.getLogger("user"))
    logging.getLogger("user").warning("outside")

    within, without = lines(stream)
    assert within["request_id"] == "request-1"
    assert within["endpoint"] == "demo.Shouter.generate"
    assert within["instance"] == "i1"
    assert within["trace_id"] == TRACE
    assert not {"request_id", "endpoint", "instance", "trace_id"} & without.keys()


def test_every_line_names_the_actor_the_instance_and_the_process(stream: io.StringIO) -> None:
    configure_logging("json", stream=stream, actor="demo.Only", instance="i0")

    logging.getLogger("nats").warning("of the process")
    with inside_instance(InstanceName("demo", "Shouter", "i1")):
        logging.getLogger("user").warning("of an instance")
        inside(Context("request-1", hop="demo.Shouter.generate@i1"), logging.getLogger("user"))

    origins = [
        (line["event"], line["actor"], line["instance"], line["process"]) for line in lines(stream)
    ]
    assert origins == [
        ("of the process", "demo.Only", "i0", os.getpid()),
        ("of an instance", "demo.Shouter", "i1", os.getpid()),
        ("inside", "demo.Shouter", "i1", os.getpid()),
    ]


def test_the_current_span_is_named_on_each_line(stream: io.StringIO) -> None:
    configure_logging("json", stream=stream)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")

    with tracer.start_as_current_span("work") as span:
        logging.getLogger("dynbus").info("inside")

    (line,) = lines(stream)
    assert line["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert line["span_id"] == f"{span.get_span_context().span_id:016x}"


def test_an_error_is_logged_with_its_traceback(stream: io.StringIO) -> None:
    configure_logging("json", stream=stream)

    try:
        raise ValueError("broken nats://me:s3cret@host:4222")
    except ValueError as error:
        logging.getLogger("dynbus").error("failed", exc_info=error)

    (line,) = lines(stream)
    assert "Traceback" in line["exception"]
    assert "ValueError: broken nats://me:***@host:4222" in line["exception"]


def test_no_format_writes_a_password(stream: io.StringIO) -> None:
    console = Terminal()
    for out in (stream, console):
        configure_logging(stream=out)
        structlog.get_logger("user").info("to nats://a:s3cret@b", url="nats://a:s3cret@b")
        logging.getLogger("dynbus").warning("url %s", "https://x:s3cret@y/z")

    for out in (stream, console):
        assert "s3cret" not in out.getvalue()
        assert out.getvalue().count("***") == 3


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://me:secret@host:4222", "nats://me:***@host:4222"),
        ("nats://token@host", "nats://***@host"),
        ("tls://me:se/c@r#et@host", "tls://me:***@host"),
        ("nats://a:b@h1,nats://c:d@h2", "nats://a:***@h1,nats://c:***@h2"),
        ("NATS://me:secret@[::1]:4222", "NATS://me:***@[::1]:4222"),
        ("wss://me:secret@host/path", "wss://me:***@host/path"),
        ("https://me:secret@host/a@b", "https://me:***@host/a@b"),
        ("https://host/@name", "https://host/@name"),
        ("mail me@host", "mail me@host"),
        ("me:secret@host:4222", "me:***@host:4222"),
        ("NATS_URL=me:se/c@r#et@host", "NATS_URL=me:***@host"),
        ("'me:secret@host'", "'me:***@host'"),
        ("https://host:80/a:b@c", "https://host:80/a:b@c"),
        ("12:30 demo.Slow.work@i1: done", "12:30 demo.Slow.work@i1: done"),
        ("", ""),
    ],
)
def test_credentials_in_urls_are_hidden(text: str, redacted: str) -> None:
    assert redact_url(text) == redacted


@pytest.mark.parametrize("part", ["nats://", "a:", "a:b ", "a:b@"])
def test_redacting_a_long_line_takes_linear_time(part: str) -> None:
    line = part * 20_000 + "a:" + "a" * 200_000 + "@"

    assert len(redact_url(line)) < len(line)


def test_a_terminal_gets_text_and_everything_else_json(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()

    configure_logging(stream=terminal)
    logging.getLogger("dynbus").info("hello")
    configure_logging(stream=stream)
    logging.getLogger("dynbus").info("hello")

    assert "hello" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
    assert lines(stream)[0]["event"] == "hello"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()

    configure_logging("console", stream=terminal)
    logging.getLogger("dynbus").info("hello")

    assert "hello" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    configure_logging("json", "WARNING", stream=stream)

    logging.getLogger("dynbus").info("quiet")
    logging.getLogger("dynbus").warning("loud")
    structlog.get_logger("user").info("quiet")

    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_configuring_again_replaces_what_was_configured(stream: io.StringIO) -> None:
    foreign = logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    configure_logging("json", stream=io.StringIO())

    configure_logging("json", stream=stream)
    logging.getLogger("dynbus").info("once")

    assert len(lines(stream)) == 1
    assert foreign in logging.getLogger().handlers


def test_importing_it_does_not_import_structlog() -> None:
    code = (
        "import sys, dynbus.bus.telemetry.logs; "
        "print('structlog' in sys.modules, 'rich' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.strip() == "False False", done.stderr
