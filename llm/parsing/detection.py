"""Detection of the parsers that a model's outputs need, from its chat template."""

from __future__ import annotations

from typing import Final

_TOOL_CALLS: Final = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    # GLM's, whose names and values have tags of their own.
    ("", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>", "name", "arguments")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("dictionary of argument name and its value",)),
)
"""The strings of which a template has all; the first that fits counts."""

_REASONING: Final = (
    ("mistral", ("[THINK]",)),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)


def detected_tool_call_parser(template: str) -> str:
    """The parser of the calls that a template has models write; empty for none that is known."""
    return _first(_TOOL_CALLS, template)


def detected_reasoning_parser(template: str) -> str:
    """The parser of the reasoning that a template has models write; empty for none."""
    return _first(_REASONING, template)


def _first(known: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    fitting = (name for name, strings in known if all(one in template for one in strings))
    return next(fitting, "")
