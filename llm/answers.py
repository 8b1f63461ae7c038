"""Answers: their parts, and the face of the formats in which interfaces tell them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynbus import DynbusError

from .parsing.delta import Delta, ToolCallDelta


class Usage(NamedTuple):
    """The number of tokens that a request has used so far.

    Attributes:
        cached: of the prompt, found in a cache; None when the engine does not say.
        reasoning: of the completion, what the model thought; None where nobody counts them.
        sampler_restarted: whether an engine that took the request over had to draw anew, see
            `Generated`.
    """

    prompt: int
    completion: int
    cached: int | None = None
    reasoning: int | None = None
    sampler_restarted: bool = False


class TokenText(NamedTuple):
    """A token with its log-probability, as text.

    Attributes:
        data: the bytes that it stands for, which may be part of a character.
        top: the likeliest ones in its place, each with its log-probability.
    """

    data: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an answer, whole or a piece of it.

    Attributes:
        said: what it says; each tool call of a whole one is one delta.
        logprobs: of its tokens; None where they were not asked for.
        finish_reason: `stop`, `length` or `tool_calls`; None before the last piece, and where the
            engine did not say.
        stop_string: of the request's, that ended it; None for none.
    """

    index: int
    said: Delta
    logprobs: Sequence[TokenText] | None = None
    finish_reason: str | None = None
    stop_string: str | None = None


class OutputFormat(Protocol):
    """The format of one output of a stream, written piece by piece, in order. It is told piece by
    piece, in order."""

    def text(self, text: str) -> bytes:
        """A piece that is nothing but content, before the end: nearly every token is one."""
        ...

    def piece(self, piece: Output, usage: Usage | None = None) -> bytes:
        """A piece of any kind.

        Args:
            usage: so far, where the format tells it with each piece.
        """
        ...


class AnswerFormat(Protocol):
    """The format of one answer. There is one for each request, which may keep what it has told.

    A stream is what `start` gives, the pieces of the outputs, and what `end` or `error` gives.
    """

    @property
    def id(self) -> str:
        """Of the answer."""
        ...

    @property
    def frame(self) -> tuple[bytes, bytes] | None:
        """The frame of a chunk of an engine that answers in this format by itself; None for a
        format in which no engine answers."""
        ...

    @property
    def continuous_usage(self) -> bool:
        """True if each piece is given the usage."""
        ...

    def start(self, usage: Usage | None) -> bytes:
        """The bytes before the first piece; empty for nothing.

        Args:
            usage: so far; None where the engine counts the tokens.
        """
        ...

    def output(self, index: int) -> OutputFormat:
        """The format of one of the outputs."""
        ...

    def end(self, usage: Usage | None) -> bytes:
        """The bytes after the last piece; empty for nothing.

        Args:
            usage: of all outputs; None where it is not known, or was passed on in chunks.
        """
        ...

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The bytes that end a stream that fails after its start."""
        ...

    def whole(self, outputs: Sequence[Output], usage: Usage | None) -> bytes:
        """An answer that is not streamed."""
        ...


def joined(deltas: Iterable[Delta]) -> Delta:
    """All that pieces of one output say; each tool call is one delta with all its arguments."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            known_id, name, pieces = calls.get(call.index, ("", "", []))
            pieces.append(call.arguments)
            calls[call.index] = (known_id or call.id, name or call.name, pieces)
    return Delta(
        "".join(content),
        "".join(reasoning),
        tuple(
            ToolCallDelta(index, call_id, name, "".join(pieces))
            for index, (call_id, name, pieces) in sorted(calls.items())
        ),
    )
