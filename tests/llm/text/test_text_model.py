from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from dynbus.bus.errors import InvalidRequest
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.text_model import TextModel

from .tiny_tokenizer import CHATML, tiny_tokenizer

pytestmark = pytest.mark.anyio


def tiny_model(template: str | None = CHATML) -> TextModel:
    chat = ChatTemplate(template, model="tiny") if template is not None else None
    return TextModel("tiny", tiny_tokenizer(), chat)


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
    model = TextModel("tiny", tiny_tokenizer(), template)
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
    stuck, ends = tiny_model(), threading.Event()

    def never(text: str, *, special: bool = True) -> list[int]:
        ends.wait()
        return []

    monkeypatch.setattr(stuck.encoder, "encode", never)
    waiting = [asyncio.create_task(stuck.encode("a")) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert await asyncio.wait_for(tiny_model().encode("a"), 30)
    finally:
        ends.set()
    assert await asyncio.gather(*waiting) == [[]] * len(waiting)
