from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dynbus.bus.errors import InvalidRequest
from dynbus.llm.text.template import MAX_SOURCE, RENDERERS, BrokenTemplate, ChatTemplate

from .tiny_tokenizer import CHATML

USER = {"role": "user", "content": "hi"}


def rendered(source: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(source, model="tiny").render(messages, **variables)


def test_a_conversation_becomes_a_prompt() -> None:
    text = rendered(CHATML, {"role": "system", "content": "Be brief."}, USER)

    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_prompt_may_end_with_the_conversation() -> None:
    assert rendered(CHATML, USER, add_generation_prompt=False).endswith("<|im_end|>\n")


GOING_ON: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("said", ["The answer is", " i", "<|im_end|>", "two ", "a\n\n", "{"])
def test_a_prompt_may_go_on_with_the_last_message(said: str) -> None:
    text = rendered(CHATML, USER, {"role": "assistant", "content": said}, **GOING_ON)

    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{said}"


def test_what_a_template_writes_behind_the_message_that_goes_on_is_left_out() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %} the end"
    again = {"role": "user", "content": "[[the end of the message that goes on]]"}

    assert rendered(source, again, USER, **GOING_ON) == f"[{again['content']}][hi"


def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )

    with pytest.raises(InvalidRequest, match="does not write the last message as it is"):
        rendered(source, USER, {"role": "assistant", "content": "a"}, **GOING_ON)


def test_blocks_take_their_line_with_them() -> None:
    source = (
        "{% for message in messages %}\n"
        "  {% if true %}\n"
        "{{ message.content }}\n"
        "  {% endif %}\n"
        "{% endfor %}"
    )

    assert rendered(source, USER) == "hi\n"


def test_a_template_knows_the_models_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}x", model="tiny", special_tokens={"bos_token": "<s>"})

    assert template.render([]) == "<s>x"


def test_a_variable_may_have_any_name() -> None:
    template = ChatTemplate("{{ args }}{{ variables }}", model="tiny")
    variables: dict[str, Any] = {"self": "a", "args": "b", "variables": "c"}

    assert template.render([USER], **variables) == "bc"


def test_tools_come_as_json_that_escapes_nothing() -> None:
    tool = {"name": "größer", "rule": "a<b & 'c'"}

    text = rendered("{% for tool in tools %}{{ tool | tojson }}{% endfor %}", tools=[tool])

    assert text == '{"name": "größer", "rule": "a<b & \'c\'"}'


def test_json_may_be_indented() -> None:
    assert rendered("{{ tools | tojson(indent=2) }}", tools=[{"a": 1}]) == (
        '[\n  {\n    "a": 1\n  }\n]'
    )


def test_a_template_knows_the_date() -> None:
    year = datetime.now().year

    assert rendered("{{ strftime_now('%Y') }}") in {str(year), str(year + 1)}


def test_loops_may_break_and_what_is_trained_on_may_be_marked() -> None:
    source = (
        "{% for x in [1, 2] %}{% generation %}{{ x }}{% endgeneration %}{% break %}{% endfor %}"
    )

    assert rendered(source) == "1"


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    source = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(InvalidRequest, match="tiny.*roles must alternate"):
        rendered(source, USER)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "line 1"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages.__class__.mro() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
        ("{{ 'a' * 10 ** 12 }}", "memory"),
        ("{% set ns = namespace(x='aaaa') %}{% for a in range(99) %}"
         "{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "(memory|processor time)"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_told_with_its_model(source: str, says: str) -> None:
    with pytest.raises(BrokenTemplate, match=f"model tiny .*{says}"):
        rendered(source, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        # One call, which no check between two of them would see.
        "{% set ns = namespace(x=3) %}{% for a in range(99) %}"
        "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    template = ChatTemplate(source, model="tiny", seconds=0.2)

    with pytest.raises(BrokenTemplate, match=r"more than 0\.2 s"):
        template.render([USER])

    assert rendered(CHATML, USER)


def test_a_template_is_checked_without_a_conversation() -> None:
    ChatTemplate(CHATML, model="tiny").check()

    with pytest.raises(BrokenTemplate, match="tiny"):
        ChatTemplate("{% for %}", model="tiny").check()


def test_a_template_that_is_too_long_is_not_read() -> None:
    with pytest.raises(BrokenTemplate, match=str(MAX_SOURCE)):
        ChatTemplate(" " * (MAX_SOURCE + 1), model="tiny")


def test_what_is_no_json_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        rendered(CHATML, {"role": "user", "content": "\ud800"})


def test_a_process_that_was_killed_is_replaced() -> None:
    rendered(CHATML, USER)
    for process in RENDERERS.idle:
        os.kill(process, signal.SIGKILL)

    assert rendered(CHATML, USER)


def test_several_conversations_are_rendered_at_once() -> None:
    template = ChatTemplate(CHATML, model="tiny")

    def render(number: int) -> str:
        return template.render([{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(render, range(100)))

    assert [text.partition("user\n")[2].partition("<")[0] for text in texts] == [
        str(number) for number in range(100)
    ]


GOLDEN = Path(__file__).parents[2] / "data" / "chat_templates"
TEMPLATES = json.loads((GOLDEN / "templates.json").read_text())
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())


@pytest.mark.parametrize("conversation", PROMPTS["conversations"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_one_that_transformers_makes(name: str, conversation: str) -> None:
    template = ChatTemplate(
        TEMPLATES[name], model=name, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )

    prompt = template.render(**PROMPTS["conversations"][conversation])

    assert prompt == PROMPTS["prompts"][name][conversation]
