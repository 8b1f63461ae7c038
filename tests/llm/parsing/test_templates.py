"""Parsers beside what is around them: tokens that are special, and templates that write calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llm.text.tiny_tokenizer import tiny_json

from dynbus.llm.text.detokenizer import Detokenizer
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.tokenizer import Tokenizer

from .reading import Call, Read, joined, parser_of, read

QWEN = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}
<think>
{{ message.reasoning_content }}
</think>
{% endif %}
{%- if message.content %}
{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
"""What Qwen's own does, in few lines."""


def test_markers_that_are_special_tokens_are_seen() -> None:
    raw: Any = tokenizers.Tokenizer.from_buffer(tiny_json())
    raw.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    tokenizer = Tokenizer(raw)
    parser = parser_of("mistral")
    detokenizer = Detokenizer(tokenizer, shown=parser.marker_tokens)
    ids = tokenizer.encode('é[TOOL_CALLS]now[ARGS]{"a": "é"}<|im_end|>')

    deltas = [parser.push(detokenizer.push([token_id])) for token_id in ids]
    deltas += [parser.push(detokenizer.flush()), parser.finish()]

    assert joined(deltas) == Read("é", calls=(Call("now", '{"a": "é"}'),))


values = st.text(max_size=20) | st.integers() | st.lists(st.booleans(), max_size=2)


@pytest.mark.parametrize("content", ["", "Let me look."])
@settings(max_examples=10)
@given(arguments=st.dictionaries(st.sampled_from(("city", "days")), values))
def test_an_output_is_read_so_that_its_template_writes_it_again(
    content: str, arguments: dict[str, Any]
) -> None:
    template = ChatTemplate(QWEN, model="tiny")
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    said = {"reasoning_content": "so", "content": content, "tool_calls": [call, call]}
    written = template.render([{"role": "assistant", **said}], add_generation_prompt=False)
    output = written.removeprefix("<|im_start|>assistant").removesuffix("<|im_end|>\n")

    found = read(parser_of("hermes", "qwen3"), [output])

    assert (found.reasoning, found.content) == ("so", content)
    assert [json.loads(one.arguments) for one in found.calls] == [arguments, arguments]
    history = {
        "reasoning_content": found.reasoning,
        "content": found.content,
        "tool_calls": [
            {"function": {"name": one.name, "arguments": json.loads(one.arguments)}}
            for one in found.calls
        ],
    }
    again = template.render([{"role": "assistant", **history}], add_generation_prompt=False)
    assert again == written
