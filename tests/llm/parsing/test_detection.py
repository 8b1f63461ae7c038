"""Short pieces of the models' own templates, by which they are known."""

from __future__ import annotations

import pytest

from dynbus.llm.parsing.detection import detected_reasoning_parser, detected_tool_call_parser
from dynbus.llm.parsing.output_parser import REASONING_PARSERS, TOOL_CALL_PARSERS

# Of templates under the Apache License 2.0, or MIT's for DeepSeek and GLM.
QWEN = (
    r"""{{- "\n</tools>\n\nFor each function call, return a json object with function name and """
    r"""arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": """
    r"""<function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}"""
)
QWEN_THINKS = r"""{{- '<|im_start|>' + role + '\n<think>\n' + reasoning + '\n</think>\n\n' }}"""
QWEN_CODER = (
    r"""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}"""
    r"""{{- '<parameter=' + args_name + '>\n' }}"""
)
HERMES = (
    r"""{{- '{"name": <function-name>, "arguments": <args-dict>}\n' }}{{- '\n<tool_call>\n' }}"""
)
MISTRAL = r"""{{- "[TOOL_CALLS] [" }}{{- '{"name": "' + name + '", "arguments": ' }}"""
LLAMA = (
    r"""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument """
    r"""name and its value}.' }}{{- "Do not use variables.\n\n" }}"""
)
TOOLACE = (
    r"""{{- "you MUST put it in the format of [func_name1(params_name1=params_value1, """
    r"""params_name2=params_value2...), func_name2(params)]\n" }}"""
)
DEEPSEEK = r"""{% if '</think>' in content %}{% endif %}{{'<｜Assistant｜><think>\n'}}"""
GLM = r"""{{ '\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key> {{ tc.arguments }}"""


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        (QWEN, "hermes", ""),
        (QWEN + QWEN_THINKS, "hermes", "qwen3"),
        (QWEN_CODER, "qwen3_coder", ""),
        (HERMES, "hermes", ""),
        (MISTRAL, "mistral", ""),
        (MISTRAL + "[THINK]", "mistral", "mistral"),
        (LLAMA, "llama3_json", ""),
        ("{{- '<|python_tag|>' }}", "llama3_json", ""),
        (TOOLACE, "pythonic", ""),
        (DEEPSEEK, "", "deepseek_r1"),
        (GLM, "", ""),
        ("{{ messages }}", "", ""),
        ("", "", ""),
    ],
)
def test_a_template_tells_which_parsers_its_model_needs(
    template: str, tool_calls: str, reasoning: str
) -> None:
    found = detected_tool_call_parser(template), detected_reasoning_parser(template)

    assert found == (tool_calls, reasoning)
    assert {found[0]} <= {"", *TOOL_CALL_PARSERS}
    assert {found[1]} <= {"", *REASONING_PARSERS}
