from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.llm.text.tiny_tokenizer import tiny_guarded, tiny_tokenizer

from dynbus.llm.generation import DefaultSampling, Sampling
from dynbus.llm.openai.answers import AnswerHead, CompletionFormat
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.requests import completion_of
from dynbus.llm.pipeline.preparing import ModelLimits, prepare
from dynbus.llm.text.text_model import TextModel

pytestmark = pytest.mark.anyio


class _Unread(TextModel):
    """A model of whose tokens nobody may want the text."""

    async def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        raise AssertionError("decoded")


async def test_token_ids_that_are_too_many_are_refused_before_anything_is_made_of_them() -> None:
    request = completion_of({"model": "tiny", "prompt": [5] * 3000, "echo": True})

    with pytest.raises(BadRequest, match="has 2000 tokens, and prompt has 3000"):
        await prepare(
            _Unread("tiny", tiny_guarded()),
            ModelLimits(2000, [2]),
            request,
            CompletionFormat(AnswerHead("cmpl-1", 0, "tiny")),
            cache_salt=None,
        )


@pytest.mark.parametrize(("over", "given"), [(-1, -1), (0, 0), (1, 0)])
async def test_a_limit_above_the_room_is_brought_down_to_it_where_that_is_asked_for(
    over: int, given: int
) -> None:
    room = 2000 - len(tiny_tokenizer().encode("say yes"))
    request = completion_of({"model": "tiny", "prompt": "say yes", "max_tokens": room + over})

    prepared = await prepare(
        TextModel("tiny", tiny_guarded()),
        ModelLimits(2000, [2]),
        request,
        CompletionFormat(AnswerHead("cmpl-1", 0, "tiny")),
        cache_salt=None,
        shortens=True,
    )

    assert prepared.requests[0].max_tokens == room + given


async def test_a_stop_string_has_a_limit() -> None:
    request = completion_of({"model": "tiny", "prompt": "a", "stop": ["b", "a" * 257], "n": 128})

    with pytest.raises(BadRequest, match="stop: a string has 257 characters; at most 256"):
        await prepare(
            _Unread("tiny", tiny_guarded()),
            ModelLimits(2000, [2]),
            request,
            CompletionFormat(AnswerHead("cmpl-1", 0, "tiny")),
            cache_salt=None,
        )


async def test_what_a_request_does_not_say_is_drawn_as_its_model_recommends() -> None:
    request = completion_of({"model": "tiny", "prompt": "a", "top_p": 1.0, "min_p": 0.1})
    limits = ModelLimits(
        2000, [2], sampling=DefaultSampling(temperature=0.2, top_k=-1, top_p=0.9, min_p=0.5)
    )

    prepared = await prepare(
        TextModel("tiny", tiny_guarded()),
        limits,
        request,
        CompletionFormat(AnswerHead("cmpl-1", 0, "tiny")),
        cache_salt=None,
    )

    assert prepared.requests[0].sampling == Sampling(temperature=0.2, top_p=1.0, min_p=0.1)
    # And nobody waits for a stream.
    assert not prepared.requests[0].stream
