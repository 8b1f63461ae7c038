"""An output in blocks: each is whole before the next one begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import InvalidResponse
from dynbus.llm.openai.blocks import Blocks
from dynbus.llm.parsing.delta import Delta, ToolCallDelta

texts = st.text("ab \n", max_size=3)
calls = st.lists(st.tuples(st.sampled_from(("f", "g")), st.lists(texts, max_size=3)), max_size=3)


@given(st.lists(texts, max_size=3), st.lists(texts, max_size=3), calls)
def test_blocks_hold_all_that_an_output_says_and_never_overlap(
    reasoning: list[str], content: list[str], called: list[tuple[str, list[str]]]
) -> None:
    deltas = [Delta(reasoning=text) for text in reasoning]
    deltas += [Delta(content=text) for text in content]
    for index, (name, pieces) in enumerate(called):
        deltas.append(Delta(tool_calls=(ToolCallDelta(index, f"call_{index}", name),)))
        deltas += [Delta(tool_calls=(ToolCallDelta(index, arguments=one),)) for one in pieces]
    blocks = Blocks()

    steps = [step for delta in deltas for step in blocks.add(delta)] + list(blocks.close())

    opened = None
    for step in steps:
        if step.what == "open":
            assert opened is None
            opened = step.block
        assert step.block is opened
        if step.what == "close":
            opened = None
    assert opened is None
    assert [block.place for block in blocks.all] == list(range(len(blocks.all)))
    said = {kind: "" for kind in ("reasoning", "text")}
    for block in blocks.all:
        if block.kind != "call":
            said[block.kind] += block.text
    assert said["reasoning"] == "".join(reasoning)
    if "".join(content).strip() or not (called or "".join(reasoning)):
        assert said["text"] == "".join(content)
    else:
        assert not said["text"]
    assert [(one.id, one.name, one.text) for one in blocks.all if one.kind == "call"] == [
        (f"call_{index}", name, "".join(pieces)) for index, (name, pieces) in enumerate(called)
    ]


def test_an_output_that_says_nothing_is_one_empty_text() -> None:
    blocks = Blocks()

    steps = list(blocks.close())

    assert [(step.what, step.block.kind) for step in steps] == [("open", "text"), ("close", "text")]


@pytest.mark.parametrize(
    "between", [Delta(content="text"), Delta(tool_calls=(ToolCallDelta(1, "b", "g"),))]
)
def test_a_piece_of_a_call_that_has_ended_is_refused(between: Delta) -> None:
    blocks = Blocks()
    list(blocks.add(Delta(tool_calls=(ToolCallDelta(0, "a", "f", "{"),))))
    list(blocks.add(between))

    with pytest.raises(InvalidResponse, match="the tool call 0 came after its end"):
        list(blocks.add(Delta(tool_calls=(ToolCallDelta(0, arguments="}"),))))
