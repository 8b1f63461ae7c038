"""Which parser reads the outputs of a model, by the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .delta import OutputParser

TOOL_CALL_PARSERS: Final[tuple[str, ...]] = (
    "hermes",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
)
REASONING_PARSERS: Final[tuple[str, ...]] = ("deepseek_r1", "mistral", "qwen3")


def output_parser(
    tool_call_parser: str,
    reasoning_parser: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    reasons_from_start: bool,
) -> OutputParser | None:
    """What reads one output of a request; None where its text is its content as it is.

    Args:
        tool_call_parser: of `TOOL_CALL_PARSERS`; empty where calls are not looked for.
        reasoning_parser: of `REASONING_PARSERS`; empty where reasoning is not looked for.
        tools: those of the request, as OpenAI's API has them. Without any, calls are not looked
            for.
        reasons_from_start: whether the prompt began the reasoning: see `begins_reasoning`.
    """
    if not reasoning_parser and not (tool_call_parser and tools):
        return None
    raise NotImplementedError


def forced_calls_parser(
    reasoning_parser: str, *, function: str | None, reasons_from_start: bool
) -> OutputParser:
    """What reads an output whose form is enforced, whatever form the model was trained for.

    Args:
        function: whose arguments the output is, as a JSON object; None where it is a JSON array of
            objects with `name` and `parameters`.
    """
    raise NotImplementedError


def begins_reasoning(reasoning_parser: str, prompt_end: str) -> bool:
    """Whether an output begins with reasoning, without a marker of its own.

    Args:
        prompt_end: the last characters of the rendered prompt, special tokens written out; 64 are
            enough.
    """
    raise NotImplementedError
