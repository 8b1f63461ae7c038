"""What the next piece of an output adds to its content, its reasoning and its tool calls."""

from __future__ import annotations

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
    """What a piece of an output adds. Reasoning comes before content, content before calls.

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

    Attributes:
        has_tool_calls: whether a call has begun.
        marker_tokens: special tokens that it has to see in the text, where a tokenizer has them;
            see `shown` of `Detokenizer`.
    """

    has_tool_calls: bool

    @property
    def marker_tokens(self) -> frozenset[str]: ...

    def push(self, text: str) -> Delta:
        """Take the next piece; returns what is certain by now, which may be nothing."""
        ...

    def end(self) -> Delta:
        """The rest, at the end of the output. A call that is cut off before its name is known is
        content; one that is cut off later stays as far as it came."""
        ...
