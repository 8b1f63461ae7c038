"""`dynbus chat` asks once or talks, with any OpenAI-compatible front end, and stops when told."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import pytest
from tests.conditions import wait_until

from dynbus.cli import main
from dynbus.llm.commands.chatting import Client, events

ROOT = Path(__file__).parents[3]
BOUND = 60.0
"""Seconds in which a machine that is busy does what takes a moment."""


class Server(ThreadingHTTPServer):
    """A front end that answers with what it is given.

    Attributes:
        pieces: of each answer.
        reasoning: the pieces before them.
        waits: whether an answer does not end before its client leaves.
        refusal: status and body in place of an answer.
        asked: the bodies of the requests.
        left: set when a client has left in the middle of an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pieces: Sequence[str] = ("The answer", " is 42.")
        self.reasoning: Sequence[str] = ()
        self.models = ["tiny"]
        self.waits = False
        self.refusal: tuple[int, bytes] | None = None
        self.after: bytes = b""
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        # What the base class prints of a client that has left would be found in the next test.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        data = [{"id": name, "object": "model"} for name in self.server.models]
        self._send(200, json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self) -> None:
        server = self.server
        server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.authorizations.append(self.headers["Authorization"])
        if server.refusal is not None:
            self._send(*server.refusal)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in server.reasoning:
            self._event({"delta": {"reasoning_content": piece}, "finish_reason": None})
        for piece in server.pieces:
            self._event({"delta": {"content": piece}, "finish_reason": None})
        if server.waits:
            # Its end of the connection becomes readable when the client leaves.
            readable, _, _ = select.select([self.connection], [], [], BOUND)
            if readable and not self.connection.recv(1):
                server.left.set()
            return
        if server.after:
            self.wfile.write(server.after)
            return
        self._event({"delta": {}, "finish_reason": "stop"})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, choice: dict[str, Any]) -> None:
        chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(BOUND)


ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")},
    "PYTHONPATH": str(ROOT / "src"),
    # Of a terminal that knows nothing: what is read below is the text alone.
    "TERM": "dumb",
}
COMMAND = [sys.executable, "-m", "dynbus", "chat"]


class Ended(NamedTuple):
    """How the command ended."""

    code: object
    out: str
    err: str


class Chat(Protocol):
    """Runs the command in this process, with its output in a pipe."""

    def __call__(self, *arguments: str, stdin: str = "") -> Ended: ...


@pytest.fixture
def chat(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Chat:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--url", server.url, *arguments])
        shown = capsys.readouterr()
        return Ended(ended.value.code, shown.out, shown.err)

    return run


class Terminal:
    """The command at a terminal.

    Attributes:
        shown: all that it has printed.
    """

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=ENVIRONMENT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Read until a text was shown so often."""
        end = time.monotonic() + BOUND
        while self.shown.count(text) < times:
            readable, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert readable, f"{text!r} was not shown: {self.shown!r}"
            try:
                data = os.read(self._master, 4096)
            except OSError:
                data = b""
            assert data, f"it ended before {text!r} was shown: {self.shown!r}"
            self.shown += data.decode()

    def wait_until_it_reads(self) -> None:
        """Wait until the command sleeps: a Ctrl-C after the prompt and before that, some
        microseconds, has no effect until the next key, as Python's `input` has it."""
        process = psutil.Process(self.process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, BOUND)

    def ended(self) -> int:
        return self.process.wait(BOUND)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(BOUND)
        os.close(self._master)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    terminal = Terminal("--url", server.url)
    yield terminal
    terminal.close()


# One question -------------------------------------------------------------------------------


def test_a_question_is_asked_once_and_its_answer_printed(server: Server, chat: Chat) -> None:
    done = chat("What", "is it?", "--system", "Be brief.", "--temperature", "0")

    assert (done.code, done.out, done.err) == (0, "The answer is 42.\n", "")
    assert server.asked == [
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is it?"},
            ],
            "temperature": 0.0,
            "stream": True,
        }
    ]


def test_what_a_model_thinks_is_no_part_of_what_a_program_gets(server: Server, chat: Chat) -> None:
    server.reasoning = ("I think.",)

    assert chat("What is it?").out == "The answer is 42.\n"


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        ((), "a\nb"),
        (("Summarise:", "-"), "Summarise:\n\na\nb"),
        (("-", "In one."), "a\nb\n\nIn one."),
    ],
)
def test_standard_input_is_the_question_or_a_part_of_it(
    server: Server, chat: Chat, arguments: tuple[str, ...], question: str
) -> None:
    done = chat(*arguments, stdin="a\nb\n")

    assert done.code == 0, done.err
    assert server.asked[0]["messages"] == [{"role": "user", "content": question}]


def test_nothing_asked_is_wrong_usage(chat: Chat) -> None:
    done = chat(stdin=" \n")

    assert done.code == 2
    assert "the question is empty" in done.err


def test_the_key_comes_from_the_option_or_the_variable(
    server: Server, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat("a", "--api-key", "given")
    chat("a")
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    chat("a")

    assert server.authorizations == ["Bearer given", None, "Bearer of-the-environment"]


def test_a_key_that_is_missing_or_wrong_says_where_one_is_given(server: Server, chat: Chat) -> None:
    server.refusal = (401, b'{"error": {"message": "this key is not known"}}')

    done = chat("a")

    assert (done.code, done.err) == (
        1,
        "dynbus: 401: this key is not known; give one with --api-key or OPENAI_API_KEY\n",
    )


def test_several_models_need_a_choice(server: Server, chat: Chat) -> None:
    server.models = ["large", "a-small"]

    refused = chat("a")
    chosen = chat("a", "--model", "large")

    assert refused.code == 1
    assert "choose one with --model: a-small, large" in refused.err
    assert chosen.code == 0
    assert server.asked[0]["model"] == "large"


def test_a_front_end_without_a_model_is_named(server: Server, chat: Chat) -> None:
    server.models = []

    done = chat("a")

    assert done.code == 4
    assert "has no model now; its engines may still be loading" in done.err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error": {"message": "The prompt is too long.", "type": "x"}}',
            "The prompt is too long.",
        ),
        (b'{"detail": "Not here."}', "Not here."),
        (b"<html>", "Payload Too Large|Request Entity Too Large|Content Too Large"),
        (b"\xff\xfe", "Payload Too Large|Request Entity Too Large|Content Too Large"),
    ],
)
def test_a_refusal_is_one_line_with_what_the_front_end_says(
    server: Server, chat: Chat, body: bytes, said: str
) -> None:
    server.refusal = (413, body)

    done = chat("a")

    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"dynbus: 413: ({said})\n", done.err)


def test_an_error_within_an_answer_is_told_after_what_came(server: Server, chat: Chat) -> None:
    server.after = b'data: {"error": {"message": "the engine is gone"}}\n\n'

    done = chat("a")

    assert (done.code, done.out) == (1, "The answer is 42.\n")
    assert done.err == "dynbus: the engine is gone\n"


@pytest.mark.parametrize(
    ("after", "code", "said"),
    [
        (b": nothing more\n\n", 4, "closed the connection in the middle of the answer"),
        (b"data: {no json\n\n", 1, "an event of the answer cannot be read"),
    ],
)
def test_an_answer_that_is_cut_or_garbled_is_a_failure(
    server: Server, chat: Chat, after: bytes, code: int, said: str
) -> None:
    server.after = after

    done = chat("a")

    assert done.code == code
    assert said in done.err


def test_no_front_end_is_told_with_its_address_and_the_remedy(server: Server, chat: Chat) -> None:
    server.server_close()

    done = chat("a")

    assert done.code == 4
    assert f"no front end answers at {server.url}/v1" in done.err
    assert "--url" in done.err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_refused(chat: Chat, url: str) -> None:
    done = chat("a", "--url", url)

    assert done.code == 3
    assert "is not the URL of a front end" in done.err


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/api/v3", "https://host/api/v3"),
    ],
)
def test_a_url_without_a_path_gets_the_usual_one(url: str, base: str) -> None:
    assert Client(url).url == base


def test_ctrl_c_cancels_a_question_and_keeps_what_came(server: Server) -> None:
    server.waits = True
    process = subprocess.Popen(
        [*COMMAND, "--url", server.url, "a"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    came = process.stdout.read(len("The answer is 42."))

    process.send_signal(signal.SIGINT)

    assert server.left.wait(BOUND)
    assert (process.wait(BOUND), came + process.stdout.read()) == (130, "The answer is 42.\n")
    process.stdout.close()


# A conversation -----------------------------------------------------------------------------


def test_a_conversation_goes_on_with_what_was_said(server: Server, terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("The answer is 42.")
    terminal.wait_for("> ", 2)
    terminal.type("two\n")
    terminal.wait_for("The answer is 42.", 2)
    terminal.wait_for("> ", 3)
    terminal.type("/new\n")
    terminal.wait_for("> ", 4)
    server.reasoning, server.pieces = ("\nI ", "think."), ("\n\n", *server.pieces)
    terminal.type("/help\n")
    terminal.wait_for("/new begins a new conversation", 2)
    terminal.wait_for("> ", 5)
    terminal.type("three\n")
    # What a model thinks is shown before what it says.
    terminal.wait_for("I think.\r\n\r\nThe answer is 42.")
    terminal.wait_for("> ", 6)
    terminal.type("\x04")

    assert terminal.ended() == 0
    answer = {"role": "assistant", "content": "The answer is 42."}
    assert [body["messages"] for body in server.asked] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "one"}, answer, {"role": "user", "content": "two"}],
        [{"role": "user", "content": "three"}],
    ]


def test_ctrl_c_stops_an_answer_and_again_ends(server: Server, terminal: Terminal) -> None:
    server.waits = True
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("is 42.")

    terminal.type("\x03")
    terminal.wait_for("[stopped]")
    assert server.left.wait(BOUND)
    server.waits = False
    terminal.wait_for("> ", 2)
    terminal.type("two\n")
    terminal.wait_for("> ", 3)
    terminal.wait_until_it_reads()
    terminal.type("\x03")
    terminal.wait_for("[Ctrl-C again, or Ctrl-D, ends]")
    terminal.wait_for("> ", 4)
    terminal.wait_until_it_reads()
    terminal.type("\x03")

    assert terminal.ended() == 130
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "The answer is 42."}


def test_a_question_that_failed_is_no_part_of_the_conversation(
    server: Server, terminal: Terminal
) -> None:
    server.refusal = (503, b'{"error": {"message": "no engine is there"}}')
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("dynbus: 503: no engine is there")
    terminal.wait_for("> ", 2)
    server.refusal = None

    terminal.type("two\n")
    terminal.wait_for("The answer is 42.")

    assert server.asked[1]["messages"] == [{"role": "user", "content": "two"}]


def test_a_model_cannot_steer_the_terminal(server: Server, terminal: Terminal) -> None:
    server.pieces = ("\x1b]0;title\x07\x1b[2J", "ok\r\nnext\u202e")

    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("next")
    terminal.wait_for("> ", 2)

    assert r"\x1b]0;title\x07\x1b[2Jok" in terminal.shown
    assert r"next\u202e" in terminal.shown


# Events -------------------------------------------------------------------------------------


def test_events_end_with_done_and_skip_what_is_no_data() -> None:
    lines = [
        b": a comment\n",
        b"\n",
        b"event: x\r\n",
        b"data: one\r\n",
        b"\r\n",
        b"data:two\n",
        b"data: more\n",
        b"\n",
        b"data: [DONE]\n",
        b"\n",
        b"data: late\n",
        b"\n",
    ]

    assert list(events(lines)) == [b"one", b"two\nmore"]
