"""Output parsers by the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from dynbus.spi import random_id

from .delta import NOTHING, Delta, DeltaBuilder, OutputParser
from .functions import Functions
from .incoming import IncomingText, Markers, Reading
from .json_calls import read_calls
from .json_text import read_json
from .llama_calls import TAG, read_llama_calls
from .mistral_calls import ARGS, CALL_ID, TOOL_CALLS, read_mistral_calls
from .pythonic_calls import END, STARTS, read_pythonic_calls
from .reasoning import Thinking, read_reasoning
from .tagged_calls import CLOSE, OPEN, read_tagged_calls

_Tools = Sequence[Mapping[str, Any]]
_Read = Callable[[IncomingText, DeltaBuilder], Reading[None]]


NewId = Callable[[], str]
"""Gives another id at each call: 32 hexadecimal digits."""


def _call_id(new_id: NewId) -> str:
    return f"call_{new_id()[:24]}"


def _mistral_call_id(new_id: NewId) -> str:
    # Its templates refuse any that has not 9 letters and digits.
    return new_id()[:9]


class _Format(NamedTuple):
    """A format in which a kind of models writes calls.

    Attributes:
        reads: what reads them, for the tools of a request.
        tokens: which its markers may be.
        ends_reasoning: a marker on a line of its own that ends reasoning too.
        make_id: makes the id of a call of a new id.
    """

    reads: Callable[[_Tools], _Read]
    tokens: Collection[str]
    ends_reasoning: str | None = None
    make_id: Callable[[NewId], str] = _call_id


def _tagged(*tags: str) -> _Format:
    open_tags = Markers(*tags)

    def reads(tools: _Tools) -> _Read:
        functions = Functions(tools)
        return lambda text, out: read_tagged_calls(text, out, functions, open_tags=open_tags)

    return _Format(reads, (OPEN, CLOSE), OPEN)


def _llama(tools: _Tools) -> _Read:
    offered = Functions(tools)
    return lambda text, out: read_llama_calls(text, out, offered)


def _mistral(_tools: _Tools) -> _Read:
    return read_mistral_calls


def _pythonic(tools: _Tools) -> _Read:
    offered = Functions(tools)
    return lambda text, out: read_pythonic_calls(text, out, offered)


_HERMES = _tagged(OPEN)
_QWEN3_CODER = _tagged(OPEN, "<function=")
_LLAMA = _Format(_llama, (TAG,))
_PYTHONIC = _Format(_pythonic, (*STARTS, END))

_FORMATS: Final[Mapping[str, _Format]] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _Format(_mistral, (TOOL_CALLS, ARGS, CALL_ID), make_id=_mistral_call_id),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
}
_THINKING: Final[Mapping[str, Thinking]] = {
    "deepseek_r1": Thinking("<think>", "</think>", always=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "qwen3": Thinking("<think>", "</think>"),
}

TOOL_CALL_PARSERS: Final = tuple(_FORMATS)
REASONING_PARSERS: Final = tuple(_THINKING)


def output_parser(
    tool_call_parser: str,
    reasoning_parser: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    reasons_from_start: bool,
    form_sign: str = "",
    new_id: NewId = random_id,
) -> OutputParser | None:
    """The parser of one output of a request; None where its text is its content as it is.

    Calls that a marker begins are passed on whatever function they name: one that was not offered
    is for the client to refuse. Where nothing but its form says that a text is a call, as with an
    answer in JSON, it is one only of a function that was offered.

    Args:
        tool_call_parser: of `TOOL_CALL_PARSERS`; with another name, as a worker of a later version
            may give it, and with an empty one, calls are not looked for.
        reasoning_parser: of `REASONING_PARSERS`; the same holds for reasoning.
        tools: those of the request, as OpenAI's API has them. Without any, calls are not looked
            for.
        reasons_from_start: whether the prompt began the reasoning: see `begins_reasoning`.
        form_sign: see `read_reasoning`; empty for an output of any form.
        new_id: what the ids of calls are made of.
    """
    thinking = _THINKING.get(reasoning_parser)
    call_format = _FORMATS.get(tool_call_parser) if tools else None
    if call_format is not None:
        return _TextParser(
            call_format.reads(tools),
            tokens=call_format.tokens,
            make_id=partial(call_format.make_id, new_id),
            thinking=thinking,
            reasons_from_start=reasons_from_start,
            ends_reasoning=call_format.ends_reasoning,
            form_sign=form_sign,
        )
    if thinking is not None:
        return _TextParser(
            _read_content,
            make_id=partial(_call_id, new_id),
            thinking=thinking,
            reasons_from_start=reasons_from_start,
            form_sign=form_sign,
        )
    return None


def forced_calls_parser(
    tool_call_parser: str,
    reasoning_parser: str,
    *,
    function: str | None,
    reasons_from_start: bool,
    new_id: NewId = random_id,
) -> OutputParser:
    """The parser of an output whose form is enforced, whatever form the model was trained for.

    Args:
        tool_call_parser: whose ids the calls have; may be empty.
        function: whose arguments the output is, as a JSON object; None where it is a JSON array of
            objects with `name` and `parameters`. Of an array that is cut off, calls stay as far as
            their arguments came, and the rest is left out.
        new_id: what the ids of calls are made of.
    """
    call_format = _FORMATS.get(tool_call_parser)
    return _TextParser(
        _read_array if function is None else lambda text, out: _read_object(text, out, function),
        make_id=partial(call_format.make_id if call_format is not None else _call_id, new_id),
        thinking=_THINKING.get(reasoning_parser),
        reasons_from_start=reasons_from_start,
        form_sign="[" if function is None else "{",
    )


def begins_reasoning(reasoning_parser: str, prompt_end: str, *, goes_on: bool = False) -> bool:
    """True if an output begins with reasoning, without a marker of its own.

    Args:
        prompt_end: the last characters of the rendered prompt, special tokens written out; 64 are
            enough.
        goes_on: whether the output goes on with a message that has begun.
    """
    thinking = thinking_of(reasoning_parser)
    if thinking is None:
        return False
    end = prompt_end.rstrip()
    reasons_always = thinking.always and not goes_on
    return end.endswith(thinking.start) or (reasons_always and not end.endswith(thinking.end))


def thinking_of(reasoning_parser: str) -> Thinking | None:
    """The markers of the reasoning that a parser reads; None for no parser."""
    return _THINKING.get(reasoning_parser)


def _read_content(text: IncomingText, out: DeltaBuilder) -> Reading[None]:
    """Read a text that has nothing to look for any more."""
    while True:
        out.say(text.read_all())
        if text.has_ended:
            return
        yield


def _read_array(text: IncomingText, out: DeltaBuilder) -> Reading[None]:
    text.keep()
    if (yield from text.skip_space()) == "[" and (yield from read_calls(text, out)):
        text.let_go()
    if text.has_ended:
        # It was cut off within its form: what is left of that is no content.
        text.let_go()
    out.say(text.give_back())


def _read_object(text: IncomingText, out: DeltaBuilder, function: str) -> Reading[None]:
    text.keep()
    if (yield from text.skip_space()) == "{":
        text.let_go()
        out.begin_call(function)
        yield from read_json(text, out.add_arguments)
    out.say(text.give_back())


class _TextParser:
    """An `OutputParser`: reads reasoning, if there may be any, and then the rest.

    Args:
        read: reads the rest; what it leaves is content.
        tokens: which its markers may be.
    """

    def __init__(
        self,
        read: _Read,
        *,
        tokens: Collection[str] = (),
        make_id: Callable[[], str],
        thinking: Thinking | None = None,
        reasons_from_start: bool = False,
        ends_reasoning: str | None = None,
        form_sign: str = "",
    ) -> None:
        self._text = text = IncomingText()
        self._out = out = DeltaBuilder(make_id)
        own = (thinking.start, thinking.end) if thinking is not None else ()
        self.marker_tokens = frozenset((*tokens, *own))
        # It knows nothing of this object: nothing is left for the garbage collection to find.
        self._reading = _read_all(
            text,
            out,
            read,
            None
            if thinking is None
            else read_reasoning(
                text,
                out,
                thinking,
                has_begun=reasons_from_start,
                call_marker=ends_reasoning,
                form_sign=form_sign,
            ),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self._out.calls} calls, {self._text.unread} unread]>"

    @property
    def has_tool_calls(self) -> bool:
        return self._out.calls > 0

    def push(self, text: str) -> Delta:
        if not text:
            return NOTHING
        self._text.feed(text)
        next(self._reading, None)
        return self._out.pop()

    def finish(self) -> Delta:
        if self._text.has_ended:
            return NOTHING
        self._text.has_ended = True
        next(self._reading, None)
        self._out.finish_calls()
        return self._out.pop()


def _read_all(
    text: IncomingText, out: DeltaBuilder, read: _Read, reasoning: Reading[None] | None
) -> Reading[None]:
    if reasoning is not None:
        yield from reasoning
    yield from read(text, out)
    yield from _read_content(text, out)
