"""The conversation of `dynbus chat` over HTTP: one question, or many.

It needs nothing but the standard library, so that it talks to front ends of any make from where
no extra is installed. It does one thing at a time and nothing else meanwhile: it is not async, and
Ctrl-C interrupts whatever it reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

import click
import msgspec

from dynbus import ConfigError, Unavailable
from dynbus.spi import is_loopback, terminal

MAX_ERROR_BYTES: Final = 64 * 1024
"""Of a refusal that is read for its message."""

HOW_TO_TALK: Final = (
    "Ctrl-C stops an answer, Ctrl-C twice or Ctrl-D ends, /new begins a new conversation."
)

STDIN: Final = "-"


class Refused(Exception):
    """Raised when the front end answers with an error."""


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    # What some servers call it.
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    delta: Delta = Delta()
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a streamed answer, as far as it is read here."""

    choices: list[Choice] = []
    error: Any = None


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        reasoning: what the model thinks before it answers.
        ended: why the answer has ended; None while more comes.
    """

    content: str
    reasoning: str
    ended: str | None


class Model(msgspec.Struct, frozen=True):
    id: str


class Models(msgspec.Struct, frozen=True):
    data: list[Model]


_chunk = msgspec.json.Decoder(Chunk)
_models = msgspec.json.Decoder(Models)


def events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events, up to `[DONE]` or the end of the lines."""
    data: list[bytes] = []
    for line in lines:
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            event = b"\n".join(data)
            data.clear()
            if event == b"[DONE]":
                return
            yield event


class Client:
    """A client of one front end that speaks the API of OpenAI.

    Args:
        url: without a path, `/v1` is added.
        api_key: sent as a bearer token; None for none.
        timeout: seconds of silence after which reading is given up.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 300.0) -> None:
        self.url = _base_url(url)
        self._api_key = api_key
        self._timeout = timeout
        self._opener = _opener(self.url)

    def __repr__(self) -> str:
        return f"<Client {terminal.redact_url(self.url)}>"

    def models(self) -> list[str]:
        """The names of the models.

        Raises:
            Unavailable: nobody answers.
            Refused: the front end answers with an error.
        """
        with closing(self._open("/models")) as response:
            data = self._read(response)
        try:
            return [model.id for model in _models.decode(data).data]
        except msgspec.DecodeError as error:
            raise Refused(
                f"{terminal.redact_url(self.url)}/models is no list of models: {error}"
            ) from None

    def answer(self, request: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come.

        Closing the iterator closes the connection, which cancels the request.

        Raises:
            Unavailable: nobody answers, or the connection breaks.
            Refused: the front end answers with an error.
        """
        with closing(self._open("/chat/completions", {**request, "stream": True})) as response:
            is_ended = False
            for event in events(self._lines(response)):
                for choice in self._chunk(event).choices[:1]:
                    is_ended = is_ended or choice.finish_reason is not None
                    said = choice.delta
                    reasoning = said.reasoning_content or said.reasoning or ""
                    yield Piece(said.content or "", reasoning, choice.finish_reason)
            if not is_ended:
                raise Unavailable("the front end closed the connection in the middle of the answer")

    def _chunk(self, event: bytes) -> Chunk:
        try:
            chunk = _chunk.decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(f"an event of the answer cannot be read: {error}") from None
        if chunk.error is not None:
            raise Refused(_message(event) or "the answer ended with an error")
        return chunk

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        try:
            request = Request(self.url + path, data, headers)
            response: HTTPResponse = self._opener.open(request, timeout=self._timeout)
        except HTTPError as error:
            with closing(error):
                said = _message(error.read(MAX_ERROR_BYTES)) or error.reason
            hint = "; give one with --api-key or OPENAI_API_KEY" if error.code == 401 else ""
            raise Refused(f"{error.code}: {said}{hint}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise Unavailable(
                f"no front end answers at {terminal.redact_url(self.url)}: {reason}; start one, or "
                "give the address of another with --url"
            ) from None
        return response

    def _read(self, response: HTTPResponse) -> bytes:
        return b"".join(self._lines(response))

    def _lines(self, response: HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except TimeoutError:
            raise Unavailable(
                f"the front end was silent for {self._timeout:g} s; raise --timeout"
            ) from None
        except (OSError, HTTPException) as error:
            raise Unavailable(f"the connection to the front end broke: {error}") from None


def _base_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"--url {terminal.redact_url(url)} is not the URL of a front end: write "
            "http://HOST:PORT, for example http://127.0.0.1:8000"
        )
    base = url.rstrip("/")
    return base if urlsplit(base).path else f"{base}/v1"


def _opener(url: str) -> OpenerDirector:
    """An opener that goes around proxies on this machine: those of the environment are for
    others.
    """
    host = urlsplit(url).hostname or ""
    return build_opener(ProxyHandler({})) if is_loopback(host) else build_opener()


def _message(data: bytes) -> str:
    """The message in an error's body, in OpenAI's form or others; empty for none."""
    try:
        content: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]  # pyright: ignore[reportUnknownVariableType]
    return content if isinstance(content, str) else ""


# Conversations ------------------------------------------------------------------------------


class Conversation:
    """The messages so far, and what is asked with them."""

    def __init__(
        self, client: Client, model: str, system: str | None, settings: Mapping[str, Any]
    ) -> None:
        self.model = model
        self._client = client
        self._settings = settings
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []

    def forget(self) -> None:
        """Begin anew, with the instructions alone."""
        self._messages.clear()

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """The answer, piece by piece.

        What came of it is part of the conversation, also when it was stopped. A question that
        failed before the first piece is not.

        Raises:
            Unavailable, Refused: as `Client.answer`.
        """
        asked = {"role": "user", "content": question}
        messages = [*self._system, *self._messages, asked]
        request = {"model": self.model, "messages": messages, **self._settings}
        pieces: list[str] = []
        try:
            with closing(self._client.answer(request)) as answer:
                for piece in answer:
                    pieces.append(piece.content)
                    yield piece
                    if piece.ended == "length":
                        terminal.notice("[the answer reached its limit of tokens]")
        finally:
            if any(pieces):
                answered = {"role": "assistant", "content": "".join(pieces)}
                self._messages += [asked, answered]


def execute(
    client: Client,
    question: Sequence[str],
    *,
    model: str | None,
    system: str | None,
    settings: Mapping[str, Any],
) -> int:
    """Ask once, or talk; returns the exit code.

    Raises:
        BrokenPipeError: nobody reads standard output any longer; the request was cancelled.
        KeyboardInterrupt: Ctrl-C; the request was cancelled.
    """
    talks = not question and sys.stdin.isatty() and sys.stdout.isatty()
    asked = "" if talks else _question(question)
    try:
        chosen = model or _only_model(client)
        conversation = Conversation(client, chosen, system, settings)
        if talks:
            return _talk(conversation, client)
        _print_answer(conversation, asked)
    except (Unavailable, Refused) as error:
        click.echo(terminal.error_line(str(error)), err=True)
        return terminal.NO_SERVER if isinstance(error, Unavailable) else terminal.FAILURE
    return terminal.OK


def _question(words: Sequence[str]) -> str:
    """The question of the command line, with standard input where it belongs."""
    if not words:
        words = [STDIN]
    before, stdin_marker, after = _split(words)
    parts = [" ".join(before), sys.stdin.read() if stdin_marker else "", " ".join(after)]
    text = "\n\n".join(filter(None, map(str.strip, parts)))
    if not text:
        raise click.UsageError("the question is empty")
    return text


def _split(words: Sequence[str]) -> tuple[Sequence[str], bool, Sequence[str]]:
    if STDIN not in words:
        return words, False, ()
    at = list(words).index(STDIN)
    return words[:at], True, words[at + 1 :]


def _only_model(client: Client) -> str:
    models = client.models()
    if not models:
        raise Unavailable(
            f"{terminal.redact_url(client.url)} has no model now; its engines may still be loading"
        )
    if len(models) > 1:
        names = ", ".join(sorted(models))
        raise Refused(f"there are several models: choose one with --model: {names}")
    return models[0]


def _talk(conversation: Conversation, client: Client) -> int:
    """A conversation until the user ends it."""
    # With it, `input` has lines that can be edited and called back.
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]

    terminal.notice(f"{conversation.model} at {terminal.redact_url(client.url)}\n{HOW_TO_TALK}")
    was_interrupted = False
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            click.echo()
            return terminal.OK
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            terminal.notice("\n[Ctrl-C again, or Ctrl-D, ends]")
            continue
        was_interrupted = False
        if question == "/new":
            conversation.forget()
            terminal.notice("[a new conversation]")
        elif question == "/help":
            terminal.notice(HOW_TO_TALK)
        elif question:
            was_interrupted = _answer_in_talk(conversation, question)


def _answer_in_talk(conversation: Conversation, question: str) -> bool:
    """Print an answer or why there is none; whether Ctrl-C stopped it."""
    try:
        _print_answer(conversation, question)
    except KeyboardInterrupt:
        terminal.notice("\n[stopped]")
        return True
    except (Unavailable, Refused) as error:
        click.echo(terminal.error_line(str(error)), err=True)
    return False


def _print_answer(conversation: Conversation, question: str) -> None:
    """Print an answer; on a terminal what the model thinks comes before, dim."""
    printed = _Printed(shows=sys.stdout.isatty())
    with closing(conversation.ask(question)) as pieces:
        try:
            for piece in pieces:
                if printed.shows:
                    printed.write(piece.reasoning, dim=True)
                printed.write(piece.content)
        finally:
            printed.end()


class _Printed:
    """The printed part of an answer.

    Attributes:
        shows: whether it goes to a terminal.
    """

    def __init__(self, *, shows: bool) -> None:
        self.shows = shows
        self._is_begun = False
        self._is_dim = False
        self._ends_line = False

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write a piece."""
        if self._is_begun and text and dim != self._is_dim:
            self.end()
            click.echo()
            self._is_begun = False
        # Some models begin with a blank: it is no part of what they say.
        text = text if self._is_begun else text.lstrip()
        if not text:
            return
        self._is_begun, self._is_dim = True, dim
        self._ends_line = text.endswith("\n")
        shown = _for_terminal(text) if self.shows else text
        has_colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        sys.stdout.write(click.style(shown, dim=True) if dim and has_colour else shown)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line."""
        if self._is_begun and not self._ends_line:
            click.echo()


def _for_terminal(text: str) -> str:
    """A model's text without the characters that steer a terminal."""
    return "".join(
        letter if letter in "\n\t" else terminal.printable(letter)
        for letter in text.replace("\r\n", "\n")
    )
