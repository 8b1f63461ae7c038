from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from dynbus.bus.context import Context
from dynbus.bus.errors import InvalidRequest
from dynbus.llm.text.chat_encoder import MOST_AT_ONCE, is_short
from dynbus.llm.text.guarded_tokenizer import GuardedTokenizer
from dynbus.llm.text.template import BrokenTemplate, ChatTemplate
from dynbus.llm.text.text_model import TextModel

from .tiny_tokenizer import CHATML, tiny_guarded, tiny_json, tiny_tokenizer

pytestmark = pytest.mark.anyio


def tiny_model(template: str | None = CHATML) -> TextModel:
    chat = ChatTemplate(template, model="tiny") if template is not None else None
    return TextModel("tiny", tiny_guarded(), chat)


async def test_a_conversation_becomes_the_tokens_of_its_prompt() -> None:
    model = tiny_model()
    messages = [{"role": "user", "content": "The capital of France?"}]

    ids = await model.encode_chat(messages)

    assert model.template is not None
    assert ids == tiny_tokenizer().encode(model.template.render(messages), special=False)


async def test_a_model_without_a_template_takes_no_conversation() -> None:
    with pytest.raises(InvalidRequest, match="tiny has no chat template"):
        await tiny_model(None).encode_chat([])


async def test_a_conversation_may_have_variables_of_any_name() -> None:
    template = ChatTemplate("{{ text }}{{ special }}", model="tiny")
    model = TextModel("tiny", tiny_guarded(), template)
    variables: dict[str, Any] = {"self": "a", "text": "b", "special": "c"}

    tokens = await model.encode_chat([{"role": "user", "content": "hi"}], **variables)

    assert await model.decode(tokens) == "bc"


async def test_a_text_that_is_none_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        await tiny_model().encode("\udfff")


async def test_the_loop_goes_on_while_a_long_text_is_encoded() -> None:
    model = tiny_model()
    turns = 0
    encoding = asyncio.create_task(model.encode("The capital of France is Paris. " * 20_000))

    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns > 10
    assert len(await encoding) > 20_000


async def test_a_model_whose_texts_never_end_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, ends = TextModel("stuck", GuardedTokenizer(tiny_json())), threading.Event()

    def never(text: str, *, special: bool = True) -> list[int]:
        ends.wait()
        return []

    monkeypatch.setattr(stuck.tokenizer, "encode", never)
    waiting = [asyncio.create_task(stuck.encode("a")) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert await asyncio.wait_for(tiny_model().encode("a"), 30)
    finally:
        ends.set()
    assert await asyncio.gather(*waiting) == [[]] * len(waiting)


class Endless(Sequence[Any]):
    """JSON of which only the length may be looked at."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("it is read")


def test_a_long_conversation_is_not_read_to_see_that_it_is_long() -> None:
    messages = [{"role": "user", "content": "hi"}]

    assert is_short({"messages": messages, "tools": None, "add_generation_prompt": True})
    assert not is_short({"messages": messages, "tools": Endless()})
    assert not is_short({"messages": messages, "tools": [{"a": {"b": "x" * MOST_AT_ONCE}}]})
    assert not is_short({"x" * MOST_AT_ONCE: 1})
    assert not is_short([["x"] * 100] * 100)


async def test_conversations_that_come_at_once_are_each_answered_for_themselves() -> None:
    template = ChatTemplate(
        "{% set said = messages[0].content %}"
        "{% if said == 'refused' %}{{ raise_exception('not that') }}{% endif %}"
        "{% if said == 'fails' %}{{ nothing.at.all }}{% endif %}"
        "{% if said == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}"
        "{{ said }}",
        model="tiny",
        seconds=0.2,
    )
    model = TextModel("tiny", tiny_guarded(), template)
    said = [f"The capital of {number}?" for number in range(80)]
    said[7:40:8] = ["refused", "fails", "endless", "\ud800", "long " * 40_000]

    found = await asyncio.gather(
        *(model.encode_chat([{"role": "user", "content": one}]) for one in said),
        return_exceptions=True,
    )

    for one, ids in zip(said, found, strict=True):
        match one:
            case "refused":
                assert isinstance(ids, InvalidRequest), ids
                assert "not that" in str(ids)
            case "fails":
                assert isinstance(ids, BrokenTemplate), ids
                assert "undefined" in str(ids)
            case "endless":
                assert isinstance(ids, BrokenTemplate), ids
                assert "processor time" in str(ids)
            case "\ud800":
                assert isinstance(ids, InvalidRequest), ids
                assert "surrogates" in str(ids)
            case _:
                assert ids == tiny_tokenizer().encode(one, special=False)


async def test_slow_conversations_of_one_tenant_take_turns_with_those_of_others() -> None:
    template = ChatTemplate(
        "{% if messages[0].content != 'quick' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
        "{{ messages[0].content }}",
        model="tiny",
        seconds=0.1,
    )
    model = TextModel("tiny", tiny_guarded(), template)
    slow = [
        asyncio.create_task(encode_for(model, "ada", f"{number} " + "long " * size))
        for number in range(6)
        for size in (1, 20_000)
    ]
    await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)

    assert await encode_for(model, "bob", "quick")

    # In the order of their coming it would have been the last.
    assert not all(one.done() for one in slow)
    found = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(one, BrokenTemplate) for one in found)


async def encode_for(model: TextModel, tenant: str, said: str) -> list[int]:
    Context("r", metadata={Context.TENANT_KEY: tenant}).enter()
    return await asyncio.create_task(model.encode_chat([{"role": "user", "content": said}]))


async def test_a_conversation_that_is_left_before_its_turn_keeps_none_waiting() -> None:
    model = tiny_model()
    messages = [{"role": "user", "content": "The capital of France?"}]
    left = [asyncio.create_task(model.encode_chat(messages)) for _ in range(20)]
    await asyncio.sleep(0)

    for task in left:
        task.cancel()

    assert await asyncio.wait_for(model.encode_chat(messages), 30)
    assert all(
        isinstance(one, asyncio.CancelledError)
        for one in await asyncio.gather(*left, return_exceptions=True)
    )


async def test_a_text_has_its_turn_among_conversations_that_never_cease() -> None:
    model, ends = tiny_model(), False
    messages = [{"role": "user", "content": "The capital of France?"}]

    async def chat() -> None:
        while not ends:
            await model.encode_chat(messages)

    chats = [asyncio.create_task(chat()) for _ in range(8 * (os.cpu_count() or 1))]
    try:
        for _ in range(20):
            assert await asyncio.wait_for(model.encode("a"), 30)
    finally:
        ends = True
        await asyncio.gather(*chats)
