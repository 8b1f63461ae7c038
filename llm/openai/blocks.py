"""An output in blocks: of reasoning, of text, and one for each tool call.

Interfaces that tell an output as a list have one entry for each, which is complete before the next
one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from dynbus import InvalidResponse
from dynbus.llm.parsing.delta import Delta

BlockKind = Literal["reasoning", "text", "call"]


class Block:
    """One block.

    Attributes:
        place: in the list of blocks.
        id, name: of a tool call; empty elsewhere.
        pieces: what has come of its text, or of a call's arguments.
    """

    __slots__ = ("id", "kind", "name", "pieces", "place")

    def __init__(self, place: int, kind: BlockKind, call_id: str = "", name: str = "") -> None:
        self.place = place
        self.kind: Final = kind
        self.id = call_id
        self.name = name
        self.pieces: list[str] = []

    def __repr__(self) -> str:
        return f"<Block {self.place} [{self.kind}, {len(self.pieces)} pieces]>"

    @property
    def text(self) -> str:
        """All that has come of it."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """The change of a block: it is opened, gets a piece, or is closed."""

    what: Literal["open", "piece", "close"]
    block: Block
    piece: str = ""


class Blocks:
    """The blocks of one output, as its deltas come.

    Attributes:
        all: those that were opened, in order; the last one may be open still.
    """

    __slots__ = ("_call", "_open", "_space", "all")

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call = -1
        # Space before a call or after reasoning: a text of its own only where more follows.
        self._space = ""

    @property
    def is_text(self) -> bool:
        """True if a block of text is open: more content only adds to it."""
        return self._open is not None and self._open.kind == "text"

    def add(self, delta: Delta) -> Iterator[Step]:
        """Give the steps of a delta.

        Raises:
            InvalidResponse: it adds to a call after which something else began.
        """
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            content = self._space + delta.content
            if self.is_text or not content.isspace():
                self._space = ""
                yield from self._add("text", content)
            else:
                self._space = content
        for call in delta.tool_calls:
            if call.index > self._call:
                self._call = call.index
                yield from self._begin("call", call.id, call.name)
            elif call.index < self._call or self._open is None or self._open.kind != "call":
                raise InvalidResponse(f"a piece of the tool call {call.index} came after its end")
            if call.arguments:
                yield from self._add("call", call.arguments)

    def close(self) -> Iterator[Step]:
        """There is no more. An output that says nothing is an empty text."""
        if not self.all:
            yield from self._begin("text")
            if self._space:
                yield from self._add("text", self._space)
        yield from self._close()

    def _add(self, kind: BlockKind, piece: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        block = self._open
        assert block is not None
        block.pieces.append(piece)
        yield Step("piece", block, piece)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._close()
        self._open = block = Block(len(self.all), kind, call_id, name)
        self.all.append(block)
        yield Step("open", block)

    def _close(self) -> Iterator[Step]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Step("close", block)
