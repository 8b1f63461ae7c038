"""The form of an output is checked before anything is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.llm.generation import StructuredOutput, Thinking
from dynbus.llm.structured import MAX_CHARACTERS, MAX_CHOICES, check_structured


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
        (StructuredOutput(grammar="a" * (MAX_CHARACTERS + 1)), "grammar has 262145 characters"),
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
