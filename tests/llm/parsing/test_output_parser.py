from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.llm.parsing.delta import Delta
from dynbus.llm.parsing.json_calls import MAX_NAME
from dynbus.llm.parsing.output_parser import (
    TOOL_CALL_PARSERS,
    begins_reasoning,
    forced_calls_parser,
    output_parser,
)

from .reading import TOOLS, Call, Read, joined, parser_of, read, tool

FORMATS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")

WEATHER = Call("get_weather", '{"city": "Köln", "days": 2}')
NOW = Call("now", "{}")


def read_whole(format: str, text: str, *, tools: Any = TOOLS) -> Read:
    return read(parser_of(format, tools=tools), [text])


# The forms that models write ---------------------------------------------------------------------

WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "llama3_json": (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln", "days": 2}}; '
        '{"type": "function", "name": "now", "parameters": {}}'
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}, '
        '{"name": "now", "arguments": {}, "id": "D681PevKs"}]'
    ),
    "pythonic": '[get_weather(city="Köln", days=2), now()]',
}


@pytest.mark.parametrize("format", WRITTEN)
def test_calls_are_read_as_models_write_them(format: str) -> None:
    assert read_whole(format, WRITTEN[format]) == Read(calls=(WEATHER, NOW))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {},}</tool_call>'),
        ("hermes", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=now>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=now></tool_call>"),
        ("llama3_json", '{"name": "now", "parameters": {}}'),
        ("llama3_json", '\n{"type": "function", "name": "now", "parameters": null}\n'),
        ("llama3_json", '<|python_tag|>[{"name": "now", "parameters": {}}]'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]D681PevKs[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]now{}"),
        ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}'),
        ("pythonic", "\n[ now ( ) , ]"),
        ("pythonic", "<|python_start|>[now()]<|python_end|>"),
        ("pythonic", "<|python_tag|>[now()]"),
    ],
)
def test_a_call_is_read_however_it_is_written(format: str, text: str) -> None:
    assert read_whole(format, text) == Read(calls=(NOW,))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            "hermes",
            'One.\n<tool_call>{"name": "now"}</tool_call>\nTwo.\n<tool_call>{"name": "now"}',
        ),
        ("llama3_json", 'One.\n<|python_tag|>{"name": "now"}\nTwo.\n<|python_tag|>{"name": "now"}'),
        ("mistral", "One.\n[TOOL_CALLS]now[ARGS]{}\nTwo.\n[TOOL_CALLS]now[ARGS]{}"),
        ("qwen3_coder", "One.\n<function=now></function>\nTwo.\n<function=now></function>"),
    ],
)
def test_text_around_calls_is_content_without_the_white_space_before_them(
    format: str, text: str
) -> None:
    assert read_whole(format, text) == Read("One.\nTwo.", calls=(NOW, NOW))


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of("hermes")
    pieces = ['<tool_call>{"name": "get_', 'weather", "argu', 'ments": {"ci', 'ty": "K}', '"}', "}"]

    deltas = [parser.push(piece) for piece in pieces]

    told = [[(one.name, one.arguments) for one in delta.tool_calls] for delta in deltas]
    assert told == [[], [], [("get_weather", '{"ci')], [("", 'ty": "K}')], [("", '"}')], []]


@pytest.mark.parametrize("format", FORMATS)
def test_content_without_markers_comes_at_once_but_for_white_space_at_its_end(format: str) -> None:
    parser = parser_of(format)

    deltas = [*map(parser.push, ("So", " it", " is\n", "\n", "now", ".\n")), parser.finish()]

    assert [delta.content for delta in deltas] == ["So", " it", " is", "", "\n\nnow", ".", "\n"]
    assert not parser.has_tool_calls


def test_values_of_parameters_have_the_types_of_the_schema() -> None:
    parameters = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "is_it": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "which": {"enum": [1, 2]},
        "either": {"type": ["integer", "string"]},
        "list": {"type": "array"},
        "free": {},
    }
    given = {
        "text": "12",
        "count": "12",
        "share": "1.5",
        "is_it": "True",
        "maybe": "null",
        "which": "2",
        "either": "a b",
        "list": '["a"]',
        "free": '{"a": [1]}',
        "unknown": "3",
    }
    written = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items()
    )

    found = read_whole(
        "qwen3_coder", f"<function=f>\n{written}</function>", tools=[tool("f", **parameters)]
    )

    assert json.loads(found.calls[0].arguments) == {
        "text": "12",
        "count": 12,
        "share": 1.5,
        "is_it": True,
        "maybe": None,
        "which": 2,
        "either": "a b",
        "list": ["a"],
        "free": {"a": [1]},
        "unknown": "3",
    }


def test_a_value_that_has_not_its_type_is_a_string() -> None:
    text = "<function=get_weather><parameter=days>two\n</parameter></function>"

    assert read_whole("qwen3_coder", text).calls == (Call("get_weather", '{"days": "two"}'),)


def test_a_text_of_several_lines_streams_without_the_line_breaks_of_its_tags() -> None:
    parser = parser_of("qwen3_coder")
    pieces = ["<function=get_weather><parameter=city>", "\n", "a\n", '\n"b"', "\n", "</parameter>"]

    deltas = [parser.push(piece) for piece in pieces]

    told = ["".join(one.arguments for one in delta.tool_calls) for delta in deltas]
    assert told == ['{"city": "', "", "a", '\\n\\n\\"b\\"', "", '"']


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"function": None}],
        [{"function": {"name": 1}}],
        [{"function": {"name": "f", "parameters": []}}],
        [{"function": {"name": "f", "parameters": {"properties": {"x": 7}}}}],
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_tools_of_any_shape_are_read(format: str, tools: Any) -> None:
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"

    found = read_whole(format, text, tools=tools)

    assert found.content or found.calls


# What is no call ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "the tag <tool_call> begins a call"),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"function": {"name": "now", "arguments": {}}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "argu'),
        ("hermes", '<tool_call>{"arguments": {"a": [1, 2'),
        ("hermes", "so <tool_ca"),
        ("hermes", f'<tool_call>{{"name": "{"n" * 3000}"}}</tool_call>'),
        ("qwen3_coder", "<function=now"),
        ("qwen3_coder", "<function=>x</function>"),
        ("qwen3_coder", "<function=now>now</function>"),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "now", "parameters": {}}}'),
        ("llama3_json", 'It is {"name": "now", "parameters": {}}.'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] is a token"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "argu'),
        ("pythonic", "[now](http://a.b)"),
        ("pythonic", "[now(7)]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[call()]"),
        ("pythonic", "now()"),
    ],
)
def test_what_is_no_call_is_content_as_it_is(format: str, text: str) -> None:
    assert read_whole(format, text) == Read(text)


@pytest.mark.parametrize(
    ("format", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, "b', '{"a": [1, "b', ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1]}}', '{"a": 1', "]}}"),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": 1', '{"a": 1', ""),
        ("pythonic", "[now(a='b", '{"a": "b', ""),
        ("pythonic", "[now(a=1, b)]", '{"a": 1', ", b)]"),
        ("qwen3_coder", "<function=now><parameter=a>b", '{"a": "b', ""),
    ],
)
def test_a_call_that_breaks_off_stays_as_far_as_it_came_and_the_rest_is_content(
    format: str, text: str, arguments: str, content: str
) -> None:
    assert read_whole(format, text) == Read(content, calls=(Call("now", arguments),))


def test_a_call_with_a_marker_is_passed_on_whatever_function_it_names() -> None:
    found = read_whole("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>')

    assert found.calls == (Call("other", "{}"),)


def test_members_that_no_call_has_are_content() -> None:
    text = '<tool_call>{"why": [1], "name": "now", "arguments": {}, "id": 7}</tool_call>'

    assert read_whole("hermes", text) == Read('"why": [1]', calls=(NOW,))


def test_arguments_that_are_deeper_than_clients_can_read_are_cut_off() -> None:
    deep = "[" * 5000

    found = read_whole("hermes", f'<tool_call>{{"name": "now", "arguments": {deep}')

    assert len(found.calls[0].arguments) + len(found.content) == len(deep)
    assert found.content


# Reasoning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nso\n</think>\n\nIt is.", False, Read("It is.", "so")),
        ("\n<think>so</think>It is.", False, Read("It is.", "so")),
        ("so\n\nthus\n</think>\n\nIt is.\n", True, Read("It is.\n", "so\n\nthus")),
        ("<think>so</think>It is.", True, Read("It is.", "so")),
        ("<think>\n\n</think>\n\nIt is.", False, Read("It is.")),
        ("<think>so", False, Read("", "so")),
        ("so </thin", True, Read("", "so </thin")),
        (" It is.", False, Read(" It is.")),
        ("The tag <think> begins.</think>", False, Read("The tag <think> begins.</think>")),
        ("<thin", False, Read("<thin")),
        ("", True, Read()),
    ],
)
def test_reasoning_stands_between_its_markers(text: str, begun: bool, expected: Read) -> None:
    assert read(parser_of("", "qwen3", begun=begun), text) == expected


def test_a_call_after_reasoning_is_read_and_one_within_is_reasoning() -> None:
    text = 'use <tool_call> {"name": "now"}\n</think>\n\n' + WRITTEN["hermes"]

    found = read(parser_of("hermes", "qwen3", begun=True), [text])

    assert found == Read("", 'use <tool_call> {"name": "now"}', (WEATHER, NOW))


def test_a_call_on_a_line_of_its_own_ends_reasoning_whose_end_was_forgotten() -> None:
    found = read(parser_of("hermes", "qwen3", begun=True), ["so.\n\n" + WRITTEN["hermes"]])

    assert found == Read("", "so.", (WEATHER, NOW))


@pytest.mark.parametrize(
    ("parser", "prompt", "begins"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("mistral", "[/INST]", False),
        ("", "<think>", False),
    ],
)
def test_the_prompt_tells_whether_an_output_begins_with_reasoning(
    parser: str, prompt: str, begins: bool
) -> None:
    assert begins_reasoning(parser, prompt) is begins


@pytest.mark.parametrize(
    ("parser", "said", "begins"),
    [
        ("deepseek_r1", "The answer is", False),
        ("deepseek_r1", "<think>\n", True),
        ("qwen3", "<think>", True),
        ("qwen3", "{", False),
    ],
)
def test_an_output_that_goes_on_with_a_message_goes_on_with_what_that_is(
    parser: str, said: str, begins: bool
) -> None:
    assert begins_reasoning(parser, f"<｜Assistant｜>{said}", goes_on=True) is begins


# Enforced forms ----------------------------------------------------------------------------------


def test_an_enforced_array_is_read_as_its_calls() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Köln", "days": 2}}, {"name": "now"}]'
    parser = forced_calls_parser("hermes", "", function=None, reasons_from_start=False)

    assert read(parser, text) == Read(calls=(WEATHER, NOW))


def test_an_enforced_object_is_the_arguments_of_its_function() -> None:
    parser = forced_calls_parser("", "qwen3", function="get_weather", reasons_from_start=True)

    found = read(parser, 'so</think>\n{"city": "Köln", "days": 2}\n')

    assert found == Read("", "so", (WEATHER,))


def test_a_form_that_an_engine_enforces_from_the_start_is_no_reasoning() -> None:
    parser = forced_calls_parser("", "qwen3", function="now", reasons_from_start=True)

    answer = output_parser("", "qwen3", tools=[], reasons_from_start=True, form_sign="{")

    assert read(parser, "{}") == Read(calls=(NOW,))
    assert answer is not None
    assert read(answer, '{"a": 1}') == Read('{"a": 1}')


ENFORCED = (
    '[{"name": "now", "parameters": {}} ,\r {"name": "get_weather", "parameters": {"city": 1}}]'
)


@pytest.mark.parametrize("end", range(len(ENFORCED)))
def test_of_an_enforced_array_that_is_cut_off_nothing_is_content(end: int) -> None:
    begun = ENFORCED.index("1}}") - len('{"city": ')
    closed = len(ENFORCED) - len("}]")

    found = read(
        forced_calls_parser("", "", function=None, reasons_from_start=False), [ENFORCED[:end]]
    )

    assert found.content == ""
    first = ENFORCED[ENFORCED.index("{}") : end][:2]
    calls = [Call("now", first)] if first else []
    if end > begun:
        calls.append(Call("get_weather", ENFORCED[begun : min(end, closed)]))
    assert found.calls == tuple(calls)


@pytest.mark.parametrize(
    "text", ["Hello", "[1, 2]", '[{"name": "now"} and more', '[{"name": 1}, {"name": "now"}]']
)
def test_what_is_not_of_the_enforced_form_is_content(text: str) -> None:
    parser = forced_calls_parser("", "", function=None, reasons_from_start=False)

    found = read(parser, text)

    assert found.content == (" and more" if found.calls else text)


# What holds for every output ---------------------------------------------------------------------

fragments = st.sampled_from(
    [
        *"{}[]()\"':,;=<> \n\\é0",
        *("<tool_call>", "</tool_call>", "<function=", "<function=now>", "</function>"),
        *("<parameter=city>", "<parameter=days>", "</parameter>", "<think>", "</think>"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>"),
        *('{"name": "now", "arguments": ', '"parameters": {"city": ', '"name": "now"', '"why": '),
        *("[now(", "now(", "city=", "True", "None", "-1.5", "\\n", "\\u00e9", "\\ud83d", "'''"),
        *(WRITTEN[format] for format in FORMATS),
    ]
)
outputs = st.lists(fragments | st.text(max_size=4), max_size=24).map("".join)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(places, places[1:], strict=False)]


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["", "qwen3", "mistral"]),
    st.booleans(),
    outputs,
    st.none() | st.lists(st.integers(0, 10_000), max_size=12),
)
def test_how_an_output_is_cut_makes_no_difference(
    format: str, reasoning: str, begun: bool, text: str, cuts: list[int] | None
) -> None:
    pieces = list(text) if cuts is None else pieces_of(text, cuts)

    whole = read(parser_of(format, reasoning, begun=begun), [text])
    cut = read(parser_of(format, reasoning, begun=begun), pieces)

    assert cut == whole


@pytest.mark.parametrize(
    ("format", "start"),
    [
        ("hermes", '<tool_call>{"name": "'),
        ("qwen3_coder", "<function="),
        ("mistral", "[TOOL_CALLS]"),
        ("pythonic", "<|python_tag|>["),
    ],
)
def test_where_a_name_is_too_long_does_not_depend_on_how_it_is_cut(format: str, start: str) -> None:
    text = start + "n" * MAX_NAME + WRITTEN[format] + "n" * MAX_NAME

    found = {
        read(parser_of(format), [text[at : at + size] for at in range(0, len(text), size)])
        for size in (1, 10, 1000, len(text))
    }

    assert len(found) == 1


@given(st.sampled_from(FORMATS), outputs)
def test_an_output_in_which_no_call_is_found_is_its_content(format: str, text: str) -> None:
    found = read_whole(format, text)

    assert found.calls or found.content == text


@given(st.sampled_from(FORMATS), st.sampled_from(["", "qwen3"]), st.lists(fragments, max_size=20))
def test_no_word_of_an_output_is_lost(format: str, reasoning: str, parts: list[str]) -> None:
    text = "".join(f"{part}w{place}w" for place, part in enumerate(parts))

    found = read(parser_of(format, reasoning), [text])

    told = " ".join([found.content, found.reasoning, *(" ".join(call) for call in found.calls)])
    assert sorted(set(re.findall(r"w\d+w", text)) - set(re.findall(r"w\d+w", told))) == []


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@settings(max_examples=60)
@given(
    st.sampled_from(("hermes", "llama3_json", "mistral", "pythonic")),
    st.lists(
        st.tuples(
            st.sampled_from(("now", "get_weather")), st.dictionaries(names, json_values, max_size=3)
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 9),
)
def test_any_arguments_are_read_as_they_were_meant(
    format: str, calls: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    text = _written(format, calls)

    found = read(parser_of(format), [text[at : at + size] for at in range(0, len(text), size)])

    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
    assert found.content == ""


def _written(format: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    match format:
        case "hermes":
            objects = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3_json":
            return "; ".join(
                json.dumps({"name": n, "parameters": given}, ensure_ascii=False)
                for n, given in calls
            )
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)
        case _:
            written = [
                (name, ", ".join(f"{key}={value!r}" for key, value in given.items()))
                for name, given in calls
            ]
            return f"[{', '.join(f'{name}({given})' for name, given in written)}]"


@given(st.sampled_from(FORMATS), outputs)
def test_little_of_an_output_is_held_back_unread(format: str, text: str) -> None:
    parser = parser_of(format, "qwen3")

    for piece in text:
        parser.push(piece)

        # What is read again with each piece would make the time of a long output its square.
        assert int(re.findall(r"(\d+) unread", repr(parser))[0]) < 32


def test_calls_have_ids_of_their_own_that_a_model_takes() -> None:
    deltas = parser_of("mistral").push(WRITTEN["mistral"]).tool_calls

    ids = {delta.id for delta in deltas}

    assert len(ids) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)


def test_a_parser_says_which_tokens_it_has_to_see() -> None:
    assert parser_of("mistral", "qwen3").marker_tokens == {
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>")
    }


def test_nothing_is_parsed_where_nothing_is_looked_for() -> None:
    assert output_parser("hermes", "", tools=[], reasons_from_start=False) is None
    assert output_parser("", "", tools=TOOLS, reasons_from_start=False) is None


@pytest.mark.parametrize("format", TOOL_CALL_PARSERS)
def test_nothing_comes_after_the_end(format: str) -> None:
    parser = parser_of(format)
    parser.push("a ")

    assert joined([parser.finish(), parser.finish()]) == Read(" ")
    assert parser.push("b") == Delta()


def test_the_ids_of_calls_are_made_of_what_the_request_gives() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    given = iter(("a" * 32, "b" * 32))

    parser = output_parser(
        "hermes", "", tools=TOOLS, reasons_from_start=False, new_id=lambda: next(given)
    )
    assert parser is not None
    calls = [*parser.push(text * 2).tool_calls, *parser.finish().tool_calls]

    assert [call.id for call in calls if call.id] == ["call_" + "a" * 24, "call_" + "b" * 24]
