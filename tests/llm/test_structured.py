"""The form of an output is checked before anything is made of it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from dynbus.llm import structured
from dynbus.llm.generation import StructuredOutput, Thinking
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.requests import chat_of, completion_of
from dynbus.llm.structured import CHECKERS, MAX_BYTES, MAX_CHOICES, check_grammar, check_structured


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(json_schema={"type": "object"}),
        StructuredOutput(json_schema=True),
        StructuredOutput(regex="[a-z]+"),
        StructuredOutput(choice=["yes", "no"]),
        StructuredOutput(grammar='start: "a"'),
        StructuredOutput(choice=["yes"], thinking=Thinking("<think>", "</think>")),
    ],
)
def test_a_structured_output_has_exactly_one_form(structured: StructuredOutput) -> None:
    check_structured(structured)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        (StructuredOutput(), "has no form: give exactly one of json_schema, regex"),
        (StructuredOutput(regex="a", choice=["a"]), "has regex and choice: give exactly one"),
        (StructuredOutput(regex=""), "regex is empty"),
        (StructuredOutput(grammar="a" * (MAX_BYTES + 1)), "grammar has 131073 bytes"),
        (StructuredOutput(regex="\ud800"), "regex cannot be written as JSON"),
        (StructuredOutput(choice=[]), f"choice: give 1 to {MAX_CHOICES} texts"),
        (StructuredOutput(choice=["a", ""]), "none of them empty"),
        (StructuredOutput(choice=["a"] * (MAX_CHOICES + 1)), "choice: give"),
        (StructuredOutput(json_schema=_nested(100_000)), "json_schema is nested too deeply"),
        (StructuredOutput(regex="a", thinking=Thinking("", "</think>")), "thinking: start and end"),
    ],
)
def test_what_is_no_form_or_too_large_is_refused(structured: StructuredOutput, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_structured(structured)


def _chain(rules: int) -> str:
    """Each rule leads to the next."""
    return "\n".join(["start: r0", *(f"r{at}:r{at + 1}" for at in range(rules)), f'r{rules}: "a"'])


def _bomb(terminals: int) -> str:
    """Each terminal is twice the next."""
    rules = (f"R{at}: R{at + 1} R{at + 1}" for at in range(terminals))
    return "\n".join(["start: R0", *rules, f'R{terminals}: "a"'])


@pytest.mark.anyio
async def test_what_takes_a_process_all_its_stack_or_time_is_found_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "MAX_SECONDS", 0.5)
    with pytest.raises(ValueError, match="grammar cannot be enforced: it takes more than 0.5 s"):
        await check_grammar(StructuredOutput(grammar=_bomb(5000)))
    # It would need more stack than the threads of most systems have.
    await check_grammar(StructuredOutput(grammar=_chain(9000)))


@pytest.mark.anyio
async def test_a_form_is_checked_though_the_processes_that_check_were_ended() -> None:
    await check_grammar(StructuredOutput(regex="a{3}"))
    assert CHECKERS.idle
    for process in CHECKERS.idle:
        os.kill(process, signal.SIGKILL)

    await check_grammar(StructuredOutput(regex="a{4}"))
    with pytest.raises(ValueError, match=r"regex cannot be enforced: .*unclosed group"):
        await check_grammar(StructuredOutput(regex="("))


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput(json_schema={"type": "object"}),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "one", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput(json_schema=SCHEMA),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, StructuredOutput(json_schema={"type": "null"})),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutput(choice=["a"])),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, StructuredOutput(choice=["a"])),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredOutput(json_schema={"type": "object"}),
        ),
    ],
)
def test_the_fields_of_openai_and_of_vllm_give_a_form(
    fields: dict[str, Any], wanted: StructuredOutput | None
) -> None:
    assert chat_of({**CHAT, **fields}).structured() == wanted
    assert completion_of({"model": "m", "prompt": "x", **fields}).structured() == wanted


def _json_schema(**fields: Any) -> dict[str, Any]:
    described = {"name": "one", "schema": SCHEMA, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (_json_schema(name="two words"), "response_format.json_schema.name"),
        (_json_schema(name=None), "response_format.json_schema.name"),
        (_json_schema(strict="yes"), "response_format.json_schema.strict"),
        (_json_schema(schema=[]), "response_format.json_schema.schema"),
        (_json_schema(schema={"a": "x" * MAX_BYTES}), "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ],
)
def test_a_field_that_gives_no_form_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        chat_of({**CHAT, **fields}).structured()

    assert raised.value.param == param
    assert raised.value.status in (400, 422)
