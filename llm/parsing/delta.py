"""The delta of an output's next piece: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of one tool call.

    Attributes:
        index: of the call in the output, from 0.
        id, name: come with the first piece of a call, and are empty in all others.
        arguments: the next characters of the JSON text of the call's arguments.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(NamedTuple):
    """The addition of a piece to an output. Reasoning comes before content, content before calls.

    Attributes:
        content, reasoning: the next characters of each.
        tool_calls: the next pieces of calls, in the order of the text.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


NOTHING = Delta()


class OutputParser(Protocol):
    """Reads the text of one output, in pieces of any size; how it is cut makes no difference.

    It never raises: what is not of the format it reads is content.
    """

    @property
    def has_tool_calls(self) -> bool:
        """True if a call has begun."""
        ...

    @property
    def marker_tokens(self) -> frozenset[str]:
        """Special tokens that it has to see in the text, where a tokenizer has them: see `shown`
        of `Detokenizer`."""
        ...

    def push(self, text: str) -> Delta:
        """Take the next piece; returns what is certain by now, which may be nothing."""
        ...

    def finish(self) -> Delta:
        """The rest, at the end of the output. A call that is cut off before its arguments begin is
        content; one that is cut off later stays as far as it came."""
        ...


class DeltaBuilder:
    """Collects what is read, until it is taken as a `Delta`.

    White space between content and a call, and between calls, is the format's and is dropped: chat
    templates write their own around a call, so that a repeated conversation has the same tokens.

    Args:
        make_id: makes the id of the next call.
    """

    __slots__ = (
        "_arguments",
        "_calls",
        "_content",
        "_follows_call",
        "_make_id",
        "_reasoning",
        "_space",
        "calls",
    )

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._space: list[str] = []
        self._follows_call = False
        self.calls = 0

    def reason(self, text: str) -> None:
        """Add reasoning."""
        self._reasoning.append(text)

    def say(self, text: str) -> None:
        """Add content."""
        solid = text.rstrip()
        if solid:
            self._content += self._space
            self._content.append(solid)
            self._space.clear()
            self._follows_call = False
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self._space.clear()
        self._close_piece()
        self._calls.append(ToolCallDelta(self.calls, self._make_id(), name))
        self._follows_call = True
        self.calls += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        self._arguments.append(text)

    def finish_calls(self) -> None:
        """No call comes any more."""
        if not self._follows_call:
            self._content += self._space
        self._space.clear()

    def pop(self) -> Delta:
        """All that was added since it was last taken."""
        self._close_piece()
        if not (self._content or self._reasoning or self._calls):
            return NOTHING
        delta = Delta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content.clear()
        self._reasoning.clear()
        self._calls.clear()
        return delta

    def _close_piece(self) -> None:
        arguments = "".join(self._arguments)
        self._arguments.clear()
        if not arguments:
            return
        if self._calls:
            # It was begun since the last time.
            begun = self._calls.pop()
            self._calls.append(msgspec.structs.replace(begun, arguments=arguments))
        else:
            self._calls.append(ToolCallDelta(self.calls - 1, arguments=arguments))
