"""Outputs read by a parser, whole or in pieces, and what it made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dynbus.llm.parsing.delta import Delta, OutputParser
from dynbus.llm.parsing.output_parser import output_parser


class Call(NamedTuple):
    name: str
    arguments: str


class Read(NamedTuple):
    """What an output was read as."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("now"),
]


def parser_of(
    calls: str, reasoning: str = "", tools: Sequence[Any] = TOOLS, *, begun: bool = False
) -> OutputParser:
    parser = output_parser(calls, reasoning, tools=tools, reasons_from_start=begun)
    assert parser is not None
    return parser


def read(parser: OutputParser, pieces: Iterable[str]) -> Read:
    return joined([*map(parser.push, pieces), parser.finish()])


def joined(deltas: Iterable[Delta]) -> Read:
    """All that deltas say, as a client joins it."""
    deltas = list(deltas)
    calls: list[Call] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.id:
            assert piece.index == len(calls)
            assert piece.name
            calls.append(Call(piece.name, piece.arguments))
        else:
            assert (piece.index, piece.name) == (len(calls) - 1, "")
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + piece.arguments)
    return Read(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(calls),
    )
