"""One call from the command line prints what comes, and its end becomes an exit code."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from dynbus.actors.commands.call import CallRequest, describe_error, execute
from dynbus.actors.declaring.handlers import handler
from dynbus.actors.runtime import Actor, Runtime
from dynbus.bus import exit_codes
from dynbus.bus.errors import HandlerError, Overloaded, Unavailable
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.protocol.names import EndpointName


class Word(BaseModel):
    text: str
    places: list[dict[str, int]]


class Called(Actor, namespace="commanded"):
    @handler
    async def word(self, text: str) -> Word:
        return Word(text=text, places=[{"at": 1}])

    @handler
    async def words(self) -> AsyncGenerator[Word, None]:
        for text in ("a", "b"):
            yield Word(text=text, places=[])
        raise ValueError("no more")


@pytest.fixture(scope="module")
def url(nats_server: RunningServer) -> Iterator[str]:
    """The server at which the actor is served, by a thread of its own."""
    ready, end = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with Runtime.connect(nats_server.url) as runtime:
            await runtime.start(Called)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield nats_server.url
    loops[0].call_soon_threadsafe(end.set)
    thread.join(60)
    assert not thread.is_alive()


def made(
    url: str,
    name: str,
    request: Any = None,
    *,
    instance: str | None = None,
    as_json: bool = False,
) -> int:
    return execute(
        CallRequest(
            endpoint=EndpointName.parse(f"commanded.{name}"),
            request=request,
            timeout=120,
            instance=instance,
            metadata={},
            wait=0.0,
            as_json=as_json,
            nats=url,
        )
    )


def test_a_result_is_printed_for_people(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = made(url, "Called.word", "a")

    assert code == exit_codes.OK
    assert capfd.readouterr().out == (
        '{\n  "text": "a",\n  "places": [\n    {\n      "at": 1\n    }\n  ]\n}\n'
    )


def test_with_json_a_result_is_one_line(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    made(url, "Called.word", "a", as_json=True)

    assert capfd.readouterr().out == '{"text":"a","places":[{"at":1}]}\n'


def test_items_come_before_the_error_that_ends_them(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = made(url, "Called.words")

    printed = capfd.readouterr()
    assert code == exit_codes.CALL_CODES["HandlerError"]
    assert printed.out == '{"text":"a","places":[]}\n{"text":"b","places":[]}\n'
    # The instance, which here is of the same process, has logged its traceback before.
    assert printed.err.splitlines()[-1].startswith("dynbus: HandlerError: ValueError: no more")


def test_an_error_is_one_line_for_people() -> None:
    assert describe_error(HandlerError("ValueError:\n no"), as_json=False) == (
        "dynbus: HandlerError: ValueError: no"
    )
    assert describe_error(Overloaded("full", retry_after=1.5), as_json=False) == (
        "dynbus: Overloaded: full; retry after 1.5 s"
    )
    assert describe_error(Overloaded("full", retry_after=1.22176), as_json=False) == (
        "dynbus: Overloaded: full; retry after 1.22 s"
    )
    assert describe_error(Unavailable("no nats://me:pw@h\x1b[2J"), as_json=False) == (
        "dynbus: Unavailable: no nats://me:***@h\\x1b[2J"
    )


def test_an_error_is_one_object_for_programs() -> None:
    error = Overloaded("full", retry_after=1.5, hop="demo.A.b@i1", request_id="r", started=False)

    assert json.loads(describe_error(error, as_json=True)) == {
        "error": "Overloaded",
        "message": "full",
        "hop": "demo.A.b@i1",
        "request_id": "r",
        "retryable": True,
        "started": False,
        "retry_after": 1.5,
        "error_type": "",
    }


def test_a_component_that_nobody_serves_has_a_code_of_its_own(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert made(url, "Missing.call") == exit_codes.CALL_CODES["NoInstances"]

    assert capfd.readouterr().err.startswith("dynbus: NoInstances: ")


def test_an_instance_that_nobody_knows_is_named_with_the_remedy(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = made(url, "Called.word", "a", instance="nope")

    assert code == exit_codes.CALL_CODES["Unavailable"]
    assert capfd.readouterr().err.startswith(
        "dynbus: Unavailable: no instance nope of commanded.Called; see `dynbus ps`"
    )


def test_a_server_that_is_not_there_is_named_with_the_remedy(
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = free_port()

    code = made(f"nats://127.0.0.1:{port}", "Called.word", "a")

    printed = capfd.readouterr().err
    assert code == exit_codes.NO_SERVER
    assert printed.startswith("dynbus: Unavailable: no NATS server can be reached")
    assert f"127.0.0.1:{port}" in printed
    assert "for example nats://127.0.0.1" in printed


@pytest.mark.parametrize(
    ("url", "error", "code"),
    [
        ("nats://127.0.0.1:{port}", "Unavailable", exit_codes.NO_SERVER),
        ("bla", "ConfigError", exit_codes.CONFIG_ERROR),
    ],
)
def test_with_json_an_error_before_the_call_is_an_object_too(
    url: str, error: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert made(url.format(port=free_port()), "Called.word", "a", as_json=True) == code

    printed = capfd.readouterr()
    assert json.loads(printed.err)["error"] == error
    assert printed.out == ""


def test_with_json_an_option_that_cannot_be_used_is_an_object_too(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert made(url, "Called.word", instance="a b", as_json=True) == exit_codes.CONFIG_ERROR

    assert json.loads(capfd.readouterr().err)["error"] == "ConfigError"


def test_a_misspelt_variable_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNBUS_COLOUR", "1")

    assert made(url, "Called.word", "a") == exit_codes.CONFIG_ERROR

    assert capfd.readouterr().err.startswith(
        "dynbus: ConfigError: the environment variable DYNBUS_COLOUR is unknown; "
    )


@pytest.mark.parametrize("given", [None, "mine"])
def test_the_id_of_a_request_is_told_beside_the_result_when_asked_for(
    url: str, capfd: pytest.CaptureFixture[str], given: str | None
) -> None:
    code = execute(
        CallRequest(
            endpoint=EndpointName.parse("commanded.Called.word"),
            request="a",
            timeout=120,
            instance=None,
            metadata={},
            wait=10.0,
            as_json=True,
            nats=url,
            request_id=given,
            verbose=True,
        )
    )

    output = capfd.readouterr()
    assert code == exit_codes.OK
    assert json.loads(output.out)["text"] == "a"
    assert re.fullmatch(r"request (mine|[0-9a-f]{16,})\n", output.err)
