"""The split of an output's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from dynbus.llm.generation import StructuredOutput, Thinking
from dynbus.llm.openai.errors import unsupported
from dynbus.llm.openai.tools import ToolUse
from dynbus.llm.parsing.delta import OutputParser
from dynbus.llm.parsing.output_parser import (
    NewId,
    begins_reasoning,
    forced_calls_parser,
    output_parser,
    thinking_of,
)
from dynbus.llm.structured import json_rule
from dynbus.spi import random_id


def _no_parser() -> None:
    return None


class Reading(NamedTuple):
    """The rules by which each output of a request is read.

    Attributes:
        parser: makes what reads one output; it makes None where the text is the content.
        thinks: whether an output may begin with reasoning.
        structured: the form that an output has; None for any.
        one_call: whether an output ends after its first tool call.
        named_call: whether the output is the call of a function that the request names: it ends as
            a text does, as OpenAI's API has it.
    """

    parser: Callable[[], OutputParser | None] = _no_parser
    thinks: bool = False
    structured: StructuredOutput | None = None
    one_call: bool = False
    named_call: bool = False


def reading_of(
    tool_call_parser: str,
    reasoning_parser: str,
    use: ToolUse,
    prompt_end: str,
    asked: StructuredOutput | None = None,
    *,
    new_id: NewId = random_id,
    goes_on: bool = False,
) -> Reading:
    """The rules by which the outputs of a chat are read.

    Args:
        tool_call_parser, reasoning_parser: of the model; empty for none.
        prompt_end: see `begins_reasoning`.
        asked: the form that the request gives its answers; a call that has to be made has its own.
        new_id: what the ids of calls are made of.
        goes_on: whether the outputs go on with a message that has begun, and not with reasoning.

    Raises:
        BadRequest: the parameters of a tool do not fit.
    """
    begun = begins_reasoning(reasoning_parser, prompt_end, goes_on=goes_on)
    if not use.is_forced:
        parser = partial(
            output_parser,
            tool_call_parser,
            reasoning_parser,
            tools=use.tools,
            reasons_from_start=begun,
            form_sign=_first_of(asked),
            new_id=new_id,
        )
        return Reading(
            parser,
            bool(reasoning_parser),
            _after_thinking(
                _beside_calls(asked, tool_call_parser, use), reasoning_parser, begun=begun
            ),
            one_call=use.one_call and bool(tool_call_parser),
        )
    return Reading(
        partial(
            forced_calls_parser,
            tool_call_parser,
            reasoning_parser,
            function=use.named or None,
            reasons_from_start=begun,
            new_id=new_id,
        ),
        bool(reasoning_parser),
        _after_thinking(
            StructuredOutput(json_schema=use.forced_schema()), reasoning_parser, begun=begun
        ),
        # Of how many calls there may be, the form sees to it.
        named_call=bool(use.named),
    )


def _beside_calls(
    form: StructuredOutput | None, tool_call_parser: str, use: ToolUse
) -> StructuredOutput | None:
    """The form of an output that is an answer in a form, or calls as the model was trained to
    write them."""
    if form is None or not (tool_call_parser and use.tools):
        return form
    answer = form.json_schema
    if isinstance(answer, dict) and tool_call_parser in ("llama3_json", "llama4_json"):
        return StructuredOutput(json_schema=use.answer_or_call_schema(answer, "parameters"))
    if isinstance(answer, dict) and tool_call_parser == "hermes":
        calls = "call" if use.one_call else 'call ("\\n" call)*'
        return StructuredOutput(
            grammar=f"start: answer | {calls}\n"
            f"answer: {json_rule(answer)}\n"
            f'call: "<tool_call>\\n" {json_rule(use.call_schema("arguments"))} "\\n</tool_call>"\n'
        )
    raise unsupported(
        "tools",
        "this model's calls cannot be told from an answer whose form is enforced; give "
        "tool_choice 'none' or 'required', or no form",
    )


def _first_of(form: StructuredOutput | None) -> str:
    """The first character of an output in a form; empty where it may be another one."""
    schema = form.json_schema if form is not None else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    return "{" if kind == "object" else "[" if kind == "array" else ""


def _after_thinking(
    form: StructuredOutput | None, reasoning_parser: str, *, begun: bool
) -> StructuredOutput | None:
    marked = thinking_of(reasoning_parser)
    if form is None or marked is None:
        return form
    return msgspec.structs.replace(form, thinking=Thinking(marked.start, marked.end, begun))
