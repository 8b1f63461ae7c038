"""The process in which chat templates are rendered: it reads requests and writes answers.

A template comes from a model's files. In Jinja's sandbox it reaches nothing, but it can still
compute without end or make something enormous, within one call too, and neither a thread nor the
interpreter's lock could be taken back from it. So it has a process of its own, which the system
ends when one rendering takes too much processor time, and which gets no more than so much memory.

Each request and each answer is one line: JSON, which has no line ends of its own. The process ends
when its input does, so it never outlives the one that it renders for. Where a model's tokenizer is
at work, its process renders too, and tokenises what it has written: see `tokenizing`.

This file is run by its path. It imports nothing of dynbus, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS: Final = 32 * 1024 * 1024
"""Of a prompt: no request is larger."""

MAX_MEMORY: Final = 1024**3
"""Bytes of address space."""


CONTINUE: Final = "continue_final_message"
"""The variable by which a conversation goes on with its last message."""

END_MARK: Final = "[[the end of the message that goes on]]"

_NO_END: Final = "its template does not write the last message as it is, so that it cannot go on"


class Rendering(msgspec.Struct, frozen=True):
    """A template, and what it is rendered with, time after time; nothing to see whether it is a
    template at all.

    Attributes:
        conversations: the variables of each time, as JSON.
        seconds: of processor time that all of them together may take.
    """

    source: str
    conversations: list[msgspec.Raw]
    seconds: float


class RenderAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of rendering.

    Attributes:
        text: the prompt.
        refused: what the template said against the conversation, by `raise_exception`.
        failed: why there is neither.
    """

    text: str = ""
    refused: str | None = None
    failed: str | None = None

    @property
    def is_text(self) -> bool:
        """True if there is a prompt, which may be empty."""
        return self.refused is None and self.failed is None


class _Refused(Exception):
    pass


class _Generation(Extension):
    """`{% generation %}` marks what the model is trained on; it is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what has a meaning in HTML, which a prompt is not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    # Any function may be there, whatever the type of those that are there already says.
    functions: dict[str, Any] = environment.globals
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT: Final = _environment()


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def render(source: str, conversation: msgspec.Raw | None) -> RenderAnswer:
    """Render a template, without a limit on its time; without a conversation see whether it is one.

    Where `continue_final_message` is true, the prompt ends with the content of the last message, a
    text: what the template writes behind it is left out.
    """
    try:
        template = _compiled(source)
        if conversation is None:
            return RenderAnswer()
        variables = msgspec.json.decode(conversation, type=dict[str, Any])
        goes_on = bool(variables.get(CONTINUE))
        if goes_on:
            variables = _with_end_mark(variables)
        pieces: list[str] = []
        left = MAX_CHARACTERS
        for piece in template.generate(variables):
            left -= len(piece)
            if left < 0:
                return RenderAnswer(failed=f"it makes more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        text = "".join(pieces)
        if not goes_on:
            return RenderAnswer(text)
        text, mark, _ = text.rpartition(END_MARK)
        return RenderAnswer(text) if mark else RenderAnswer(refused=_NO_END)
    except _Refused as error:
        return RenderAnswer(refused=str(error))
    except jinja2.TemplateSyntaxError as error:
        return RenderAnswer(failed=f"line {error.lineno}: {error.message}")
    except MemoryError:
        return RenderAnswer(failed="it takes more memory than there is for it")
    except RecursionError:
        return RenderAnswer(failed="it is nested too deeply, or calls itself without end")
    except Exception as error:  # noqa: BLE001 - whatever it raises is the template's failure
        return RenderAnswer(failed=f"{type(error).__name__}: {error}")


def _with_end_mark(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of which the last message ends with a mark, by which its end is found again:
    what it says may come in what the template writes behind it as well."""
    *before, last = variables["messages"]
    return {**variables, "messages": [*before, {**last, "content": last["content"] + END_MARK}]}


def render_each(request: Rendering) -> list[RenderAnswer]:
    """The answer for each conversation, or for the template alone, within the request's time:
    SIGPROF ends the process after it."""
    signal.setitimer(signal.ITIMER_PROF, request.seconds)
    try:
        conversations: Sequence[msgspec.Raw | None] = request.conversations or [None]
        return [render(request.source, one) for one in conversations]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    decoder, encoder = msgspec.json.Decoder(Rendering), msgspec.json.Encoder()
    for line in requests:
        answers.write(encoder.encode(render_each(decoder.decode(line))) + b"\n")
        answers.flush()


def main() -> None:
    """Serve standard input and output."""
    # The process that is rendered for decides when it ends: Ctrl-C goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):
        # Some systems have no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
