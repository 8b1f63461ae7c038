"""JSON is counted before it is decoded, and what strings say is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynbus.llm.openai import json_values
from dynbus.llm.openai.conversation import messages_for_template
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.fields import is_array, is_object
from dynbus.llm.openai.json_values import MAX_ITEMS, MAX_VALUES, JsonSize
from dynbus.llm.openai.requests import read_chat

texts = st.text(st.sampled_from('[]{},:"\\ aé\n'), max_size=12)
documents = st.recursive(
    st.one_of(texts, st.integers(-5, 5), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=20,
)


def counted(document: Any) -> tuple[int, int]:
    """Objects, lists and strings of a document, and commas between items."""
    if isinstance(document, str):
        return 1, 0
    if is_array(document):
        found = [counted(one) for one in document]
        commas = max(len(found) - 1, 0)
    elif is_object(document):
        found = [counted(one) for one in document.values()]
        commas = max(len(found) - 1, 0)
        found += [(1, 0)] * len(found)
    else:
        return 0, 0
    return 1 + sum(one for one, _ in found), commas + sum(one for _, one in found)


@given(st.lists(documents, min_size=1, max_size=3), st.integers(1, 7), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_outside_of_strings_is_counted(
    monkeypatch: pytest.MonkeyPatch, given: list[Any], piece: int, ascii: bool
) -> None:
    sizes = [counted(document) for document in given]
    values, items = (sum(one) for one in zip(*sizes, strict=True))
    monkeypatch.setattr(json_values, "_PIECE", piece)

    def has_problem(most_values: int, most_items: int) -> bool:
        monkeypatch.setattr(json_values, "MAX_VALUES", most_values)
        monkeypatch.setattr(json_values, "MAX_ITEMS", most_items)
        size = JsonSize()
        return any([size.add(json.dumps(one, ensure_ascii=ascii).encode()) for one in given])

    assert not has_problem(values, items)
    if values:
        assert has_problem(values - 1, items)
    if items:
        assert has_problem(values, items - 1)


@pytest.mark.parametrize(
    "begin", ["[", '{"a":', '"a",', '"', "{", '"\\"", [', "\\", "\\\\"], ids=range(8)
)
def test_whatever_is_no_json_is_counted_without_an_error(begin: str) -> None:
    told = JsonSize().add(begin.encode() * 200_000)

    assert ("more than" in told) == (begin not in ("\\", "\\\\"))


def test_a_text_full_of_brackets_is_a_text() -> None:
    said = '["a", {"b": [1, 2]}], \\' * 20_000

    request = read_chat(json.dumps({"model": "m", "messages": [{"content": said}]}).encode())

    assert request.messages[0]["content"] == said


def test_the_most_that_is_taken_is_taken() -> None:
    numbers = read_chat(b'{"model":"m","messages":[{}],"x":[%b0]}' % (b"0," * (MAX_ITEMS - 3)))
    lists = b'{"model":"m","messages":[{}],"x":[%b[]]}' % (b"[]," * (MAX_VALUES - 9))
    with pytest.raises(BadRequest, match="more than 50000 objects, lists and strings") as refused:
        read_chat(lists.replace(b"[]]", b"[[]]]"))

    assert numbers.model == read_chat(lists).model == "m"
    assert refused.value.status == 413


def test_the_arguments_of_all_calls_together_have_a_bound() -> None:
    def call(arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}

    many = f"[{','.join(['[]'] * 20_000)}]"
    text = json.dumps({"text": many * 5})

    with pytest.raises(BadRequest, match="with those before it has more than 50000") as refused:
        messages_for_template([call(many)] * 3)
    [told] = messages_for_template([call(text)])

    assert refused.value.param == "messages[2].tool_calls[0].function.arguments"
    assert told["tool_calls"][0]["function"]["arguments"] == {"text": many * 5}
