"""The HTTP front end: events, options from headers, status codes, and callers that hang up."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from dynbus.testing import RunningServer, free_port

from .conftest import Example, running

BOUND = 60.0
"""Seconds in which a machine that is busy does what takes a moment."""


class Front:
    """`python front.py` beside its actors."""

    def __init__(self, actors: Example) -> None:
        self.actors = actors
        self.port = free_port()
        self._process = actors.start("front.py", str(self.port))
        self._connections: list[HTTPConnection] = []

    def wait_until_ready(self) -> None:
        end = time.monotonic() + BOUND
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert self._process.poll() is None, self._process.communicate()[0]
                assert time.monotonic() < end, "the front end takes no connection"
                time.sleep(0.05)
            else:
                return

    def post(self, path: str, body: Any, **headers: str) -> HTTPResponse:
        """The answer to a request, its body still to be read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=BOUND)
        self._connections.append(connection)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, json.dumps(body), fields)
        return connection.getresponse()

    def hang_up(self) -> None:
        """Close the connection of every request."""
        while self._connections:
            self._connections.pop().close()

    def stop(self) -> tuple[int, str]:
        """Press Ctrl-C; the exit code and the output."""
        self.hang_up()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            output, _ = self._process.communicate(timeout=BOUND)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        return self._process.returncode, output


@contextmanager
def front_of(url: str) -> Generator[Front]:
    with running("http_front", url, ("http.Model.generate", "http.Model.count")) as actors:
        front = Front(actors)
        try:
            front.wait_until_ready()
            yield front
        finally:
            front.stop()


@pytest.fixture(scope="module")
def shared_front(nats_server: RunningServer) -> Iterator[Front]:
    with front_of(nats_server.url) as front:
        yield front


@pytest.fixture
def front(shared_front: Front) -> Iterator[Front]:
    """A front end that tests share, each with connections of its own."""
    yield shared_front
    shared_front.hang_up()


@pytest.fixture
def own_front(own_server: RunningServer) -> Iterator[Front]:
    """A front end that a test may end, with actors that nobody else calls."""
    with front_of(own_server.url) as front:
        yield front


def events(answer: HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The events of an answer as they arrive, each with its data."""
    name = ""
    for line in answer:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_tokens_arrive_as_events_and_a_last_one_says_that_all_is_done(front: Front) -> None:
    body = {"text": "one two", "max_tokens": 3}

    answer = front.post("/generate", body)
    arrived = [(name, data.get("text")) for name, data in events(answer)]

    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert arrived == [
        ("token", "one"),
        ("token", "two"),
        ("token", "one"),
        ("done", None),
    ]


def test_requests_at_one_time_keep_their_tenants_apart(front: Front) -> None:
    answers = {
        tenant: front.post("/generate", {"text": "a b c", "max_tokens": 10}, X_Tenant=tenant)
        for tenant in ("ada", "bob", "cy")
    }

    tenants = {
        tenant: [data["tenant"] for name, data in events(answer) if name == "token"]
        for tenant, answer in answers.items()
    }

    assert tenants == {tenant: [tenant] * 10 for tenant in answers}


def test_a_unary_call_answers_in_json(front: Front) -> None:
    answer = front.post("/count", {"text": "one two three"})

    assert (answer.status, json.load(answer)) == (200, {"words": 3})


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ({"text": ""}, {}, 400, "InvalidRequest"),
        ({"text": "a"}, {"X_Timeout": "-1"}, 400, "InvalidRequest"),
        ({"text": "a"}, {"X_Timeout": "soon"}, 400, "InvalidRequest"),
        ({"text": "a", "max_tokens": 2000}, {}, 429, "Overloaded"),
        ({"text": "a"}, {"X_Timeout": "0.01"}, 504, "DeadlineExceeded"),
        ({"text": "fail"}, {}, 500, "HandlerError"),
    ],
)
def test_a_failure_before_the_first_token_is_a_status_code(
    front: Front, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    answer = front.post("/generate", body, **headers)

    assert (answer.status, json.load(answer)["code"]) == (status, code)
    assert answer.getheader("Retry-After") == ("3" if status == 429 else None)


@pytest.mark.parametrize(
    ("text", "headers", "code"),
    [("a fail", {}, "HandlerError"), ("a b", {"X_Timeout": "2"}, "DeadlineExceeded")],
)
def test_a_failure_after_that_is_the_last_event(
    front: Front, text: str, headers: dict[str, str], code: str
) -> None:
    answer = front.post("/generate", {"text": text, "max_tokens": 999}, **headers)

    arrived = list(events(answer))

    assert answer.status == 200
    assert arrived[0][0] == "token"
    assert (arrived[-1][0], arrived[-1][1]["code"]) == ("error", code)
    assert [name for name, _ in arrived].count("error") == 1


def test_whoever_hangs_up_stops_the_model(own_front: Front) -> None:
    front = own_front
    answer = front.post("/generate", {"text": "a b", "max_tokens": 900}, X_Tenant="left")

    # At once, though the last one would come in 45 s.
    assert next(events(answer))[0] == "token"
    answer.close()
    front.hang_up()
    before_the_first = socket.create_connection(("127.0.0.1", front.port), BOUND)
    body = b'{"text": "a", "max_tokens": 900}'
    before_the_first.sendall(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Tenant: early\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    before_the_first.close()
    # Had one gone on, the actors' drain would have to wait for 45 s.
    exit_code, output = front.stop()
    stopped = front.actors.stop()

    assert (exit_code, stopped) == (0, 0)
    assert "Traceback" not in output + front.actors.output
    [left] = [line for line in front.actors.output.splitlines() if line.startswith("left: ")]
    assert int(left.split()[1]) < 800
    assert "early: 9" not in front.actors.output


def test_without_a_model_the_front_end_says_that_it_is_not_available(
    own_front: Front,
) -> None:
    own_front.actors.stop()

    answer = own_front.post("/count", {"text": "a"})

    assert answer.status == 503
    assert json.load(answer)["retryable"] is True
