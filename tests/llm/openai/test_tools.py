"""What a request says of tools, and the form that a call which has to be made has."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.tools import MAX_TOOLS, ToolUse, tool_use


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED = {"type": "function", "function": {"name": "time"}}


def test_a_model_decides_by_itself_unless_it_is_told_otherwise() -> None:
    tools = [tool(parameters=CITY), tool("time")]

    assert tool_use(tools, None, None) == tool_use(tools, "auto", True) == ToolUse(tools)
    assert not tool_use(None, "auto", None).tools
    assert not tool_use(tools, "none", None).tools
    assert tool_use(tools, "auto", False) == ToolUse(tools, one_call=True)
    assert tool_use(tools, "required", None) == ToolUse(tools, "required")
    assert tool_use(tools, NAMED, None) == ToolUse(tools, "named", "time", one_call=True)


def test_only_the_tools_that_are_allowed_are_told_to_the_model() -> None:
    tools = [tool(), tool("time")]

    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tools[1]]}}
        assert tool_use(tools, choice, None) == ToolUse([tools[1]], mode)


MISFITS: list[tuple[Any, Any, str, str]] = [
    (["x"], None, "tools[0]", "give {'type': 'function'"),
    ([{"function": {"name": "f"}}], None, "tools[0].type", "give 'function'"),
    ([{"type": "custom", "custom": {}}], None, "tools[0].type", "only 'function'"),
    ([{"type": "function"}], None, "tools[0].function.name", "give the name of a function"),
    ([tool("")], None, "tools[0].function.name", "give the name"),
    ([tool("a\nb")], None, "tools[0].function.name", "give the name"),
    ([tool(parameters=[])], None, "tools[0].function.parameters", "a JSON schema of an object"),
    ([tool(description=1)], None, "tools[0].function.description", "give a string"),
    ([tool(), tool()], None, "tools", "two functions are called 'weather'"),
    ([tool(str(n)) for n in range(MAX_TOOLS + 1)], None, "tools", "513 are too many"),
    ([], "required", "tool_choice", "there are no tools"),
    ([], NAMED, "tool_choice", "there are no tools"),
    ([tool()], NAMED, "tool_choice.function.name", "there is no tool 'time'; the tools are: we"),
    ([tool()], "always", "tool_choice", "give 'none', 'auto', 'required', or"),
    ([tool()], 3, "tool_choice", "give 'none', 'auto', 'required', or"),
    ([tool()], {"type": "function"}, "tool_choice.function.name", "give the name"),
    ([tool()], {"type": "custom"}, "tool_choice", "the type 'custom' is not supported"),
    ([tool()], {"type": "allowed_tools"}, "tool_choice.allowed_tools", "give a mode"),
    (
        [tool()],
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
        "tool_choice.allowed_tools.tools[0].function.name",
        "give the name",
    ),
    (
        [tool()],
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        "tool_choice.allowed_tools.tools",
        "there is no tool 'time'",
    ),
]


@pytest.mark.parametrize(("tools", "choice", "param", "part"), MISFITS)
def test_what_does_not_fit_is_refused_with_its_place(
    tools: Any, choice: Any, param: str, part: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(part)) as raised:
        tool_use(tools, choice, None)

    assert raised.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(
    st.lists(JSON | st.builds(tool, st.text(max_size=3), parameters=JSON), max_size=3) | st.none(),
    JSON | st.builds(tool, st.text(max_size=3)),
)
def test_whatever_is_asked_for_is_done_or_refused(tools: Any, choice: Any) -> None:
    with contextlib.suppress(BadRequest):
        use = tool_use(tools, choice, None)
        assert not use.is_forced or use.forced_schema()
        assert use.call_schema("arguments")


def takes(schema: dict[str, Any], value: Any) -> bool:
    validator: Any = jsonschema.Draft202012Validator(schema)
    return bool(validator.is_valid(value))


def test_a_call_that_is_named_has_the_form_of_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}

    assert tool_use([tool(parameters=CITY)], choice, None).forced_schema() == CITY
    nothing = tool_use([tool()], choice, None).forced_schema()
    assert takes(nothing, {})
    assert not takes(nothing, {"city": "Paris"})
    assert not takes(nothing, [])


def test_calls_that_are_required_have_the_form_of_any_tool() -> None:
    nested = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "up": {"$ref": "#"}},
        "$defs": {"Place": {"type": "string", "enum": ["a"], "default": {"$ref": "#/no"}}},
        "additionalProperties": False,
    }
    tools = [tool(parameters=CITY), tool("near", parameters=nested)]
    several = tool_use(tools, "required", None).forced_schema()
    single = tool_use(tools, "required", False).forced_schema()
    paris = {"name": "weather", "parameters": {"city": "Paris"}}
    near = {"name": "near", "parameters": {"at": "a", "up": {"at": "a"}}}

    assert takes(several, [paris, near])
    assert takes(single, [near])
    assert not takes(single, [paris, near])
    assert not takes(several, [])
    assert not takes(several, [{"name": "near", "parameters": {"at": "b"}}])
    assert not takes(several, [{"name": "near", "parameters": {"up": {"at": "b"}}}])
    assert not takes(several, [{"name": "weather", "parameters": {}}])
    assert not takes(several, [{"name": "other", "parameters": {}}])


def test_arguments_may_have_the_names_of_keywords() -> None:
    keywords = ["default", "enum", "examples", "const", "$defs", "properties"]
    parameters = {
        "properties": {keyword: {"$ref": "#/$defs/default"} for keyword in keywords},
        "$defs": {"default": {"type": "string"}},
    }
    form = tool_use([tool("f", parameters=parameters)], "required", None).forced_schema()

    assert takes(form, [{"name": "f", "parameters": dict.fromkeys(keywords, "a")}])
    for keyword in keywords:
        assert not takes(form, [{"name": "f", "parameters": {keyword: 1}}])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("kind", ["string", ["array", "null"], 3])
def test_arguments_that_are_no_object_are_refused(choice: Any, kind: Any) -> None:
    with pytest.raises(BadRequest, match="arguments are an object") as raised:
        tool_use([tool("f", parameters={"type": kind})], choice, None).forced_schema()

    assert raised.value.param == "tools[0].function.parameters"


def test_parameters_that_are_nested_without_end_are_refused() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(5000):
        deep = {"type": "object", "properties": {"x": deep}}

    with pytest.raises(BadRequest, match="nested too deeply"):
        tool_use([tool(parameters=deep)], "required", None).forced_schema()
