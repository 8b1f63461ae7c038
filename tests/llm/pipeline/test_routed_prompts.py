"""The prompts that routers see in place of requests with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.media.samples import digest, image, png, words
from tests.llm.text.tiny_tokenizer import CHATML, tiny_guarded

from dynbus import Unavailable
from dynbus.kvrouter import RequestShape
from dynbus.llm.media.reader import MediaReader
from dynbus.llm.openai.requests import read_chat
from dynbus.llm.pipeline.routed_prompts import (
    OwnTokenizer,
    ReadPrompt,
    RoutedPrompt,
    announced_stand_ins,
    placed,
    routed_prompt,
)
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.text_model import TextModel

pytestmark = pytest.mark.anyio

CAT, DOG = png(10), png(200)
BLOCK = 4


class Reader:
    """Reads all prompts alike, or none."""

    def __init__(self, prompt: ReadPrompt | None) -> None:
        self.prompt = prompt

    async def read(self, request: Any, body: Any, parts: Sequence[Any]) -> ReadPrompt:
        if self.prompt is None:
            raise Unavailable("the engine does not tell")
        return self.prompt


async def routed(*parts: Any, for_parts: Reader | None = None) -> RoutedPrompt:
    """The prompt that a router sees of a chat, by the front end's own tokenizer."""
    tokenizer = tiny_guarded()
    template = ChatTemplate(CHATML, model="m", special_tokens=tokenizer.special_tokens)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts]},
    ]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    media, request = MediaReader(), read_chat(body)
    named = await media.named(request, "m", None)
    read = await media.read(request, msgspec.Raw(body), named)
    reader = OwnTokenizer(TextModel("m", tokenizer, template), for_parts)
    return await routed_prompt(
        reader, read.request, read.body, read.parts, lora_name=None, cache_salt=None
    )


def blocks_of(prompt: RoutedPrompt) -> list[int]:
    shape = RequestShape.of(prompt.token_ids, BLOCK, objects=prompt.objects)
    return list(map(int, shape.block_hashes))


async def test_another_image_is_another_prompt_from_where_it_stands_on() -> None:
    cat = blocks_of(await routed(words("See: "), image(CAT), words(" What is it?")))
    again = blocks_of(await routed(words("See: "), image(CAT, "image/gif"), words(" What is it?")))
    dog = blocks_of(await routed(words("See: "), image(DOG), words(" What is it?")))
    text = blocks_of(await routed(words("See: "), words(" What is it?"), image(CAT)))

    assert cat == again
    assert cat[:2] == dog[:2] == text[:2]
    assert cat != dog
    assert cat[: len(text)] != text


async def test_an_engine_that_says_where_images_are_is_asked() -> None:
    tokens = list(range(12))
    told = ReadPrompt(tokens, [(digest(CAT), 5, 2)])

    prompt = await routed(image(CAT), for_parts=Reader(told))
    own = await routed(image(CAT))

    assert (prompt.token_ids, prompt.objects) == (tokens, [(digest(CAT), 5, 2)])
    assert own.token_ids
    # One that does not say it, or not in time, leaves it to the front end.
    for silent in (None, ReadPrompt(())):
        assert await routed(image(CAT), for_parts=Reader(silent)) == own


def test_each_run_of_tokens_is_an_image() -> None:
    tokens = [1, 7, 8, 8, 2, 8, 7, 3]

    assert placed(tokens, ["cat", "dog"], {7, 8}) == [("cat", 1, 3), ("dog", 5, 2)]
    assert placed(tokens, [], {7, 8}) == []


@pytest.mark.parametrize(
    ("tokens", "digests", "stand_ins", "objects"),
    [
        ([1, 7, 2, 7, 3], ["cat"], {7}, [("cat", 1, 4)]),
        ([1, 7, 2], ["cat", "dog", "cat"], {7}, [("cat", 1, 2), ("dog", 1, 2)]),
        ([1, 2, 3], ["cat"], {7}, [("cat", 0, 3)]),
        ([1, 2, 3], ["cat"], (), [("cat", 0, 3)]),
        ([], ["cat"], {7}, []),
    ],
)
def test_images_that_cannot_be_told_apart_are_in_all_that_follows(
    tokens: list[int], digests: list[str], stand_ins: Any, objects: Any
) -> None:
    assert placed(tokens, digests, stand_ins) == objects


@given(
    st.lists(st.integers(0, 4), min_size=BLOCK, max_size=40),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
)
def test_no_prompts_with_other_images_are_the_same(
    tokens: list[int], mine: list[str], others: list[str]
) -> None:
    def hashes(digests: list[str]) -> list[int]:
        shape = RequestShape.of(tokens, 1, objects=placed(tokens, digests, {3, 4}))
        return list(map(int, shape.block_hashes))

    assert set(mine) == set(others) or hashes(mine) != hashes(others)


@pytest.mark.parametrize(
    ("said", "tokens"), [("", ()), ("3", (3,)), ("3,40,5", (3, 40, 5)), ("x,-1,²,7", (7,))]
)
def test_an_instance_says_which_tokens_stand_for_images(said: str, tokens: Any) -> None:
    assert announced_stand_ins({"media_tokens": said}) == frozenset(tokens)
    assert announced_stand_ins({}) == frozenset()
