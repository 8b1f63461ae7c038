"""`/v1/embeddings`, `/tokenize` and `/detokenize`, asked by the `openai` package and plainly."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_tokenizer
from tests.llm.weights import tiny_models

from dynbus import Actor, handler
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.mock.text_model import write_mock_model
from dynbus.llm.models.card import ModelInput
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit

from .served import CARDS, ScriptedEngine, Served, card, served
from .test_connections import exchange, request

pytestmark = pytest.mark.anyio

EMBEDDING = {
    "tiny": CARDS["tiny"],
    "tiny's embeddings": card("tiny", "test.ScriptedEngine.embed", types=["embedding"]),
    "text": card("text", "test.TextEngine.embed", input=ModelInput.Text, types=["embedding"]),
}


@asynccontextmanager
async def asked(**settings: Any) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    async with (
        served(EMBEDDING, **settings) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield front, client


async def post(front: Served, path: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = await exchange(front, request(fields, path))
    return status, json.loads(body)


def tokens(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


async def test_texts_and_token_ids_are_embedded_in_their_order() -> None:
    async with asked() as (front, client):
        one = await client.embeddings.create(model="tiny", input="one")
        texts = [f"{'word ' * count}" for count in range(1, 50)]
        many = await client.embeddings.create(model="tiny", input=texts)
        ids = await client.embeddings.create(model="tiny", input=[5, 6, 7])
        lists = await client.embeddings.create(model="tiny", input=[[5, 6], [7]], dimensions=2)
        running = front.engine.most_running

    assert (one.object, one.model, one.data[0].object) == ("list", "tiny", "embedding")
    assert one.data[0].embedding[0] == len(tokens("one"))
    assert [each.index for each in many.data] == list(range(49))
    assert [each.embedding[0] for each in many.data] == [len(tokens(text)) for text in texts]
    assert many.usage.prompt_tokens == many.usage.total_tokens == sum(map(len, map(tokens, texts)))
    assert ids.data[0].embedding == pytest.approx([3.0, 5.0, 0.1])
    assert [each.embedding for each in lists.data] == [[2.0, 5.0], [1.0, 7.0]]
    # What others ask for comes between.
    assert 1 < running <= 16


async def test_numbers_are_the_same_as_json_and_as_base64() -> None:
    async with asked() as (front, _):
        _, plain = await post(front, "/v1/embeddings", model="tiny", input="one")
        _, packed = await post(
            front, "/v1/embeddings", model="tiny", input="one", encoding_format="base64"
        )

    data = base64.b64decode(packed["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4").tolist() == plain["data"][0]["embedding"]


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"input": []}, 400, "input"),
    ({"input": [[]]}, 400, "input"),
    ({"input": [1.5]}, 400, "input"),
    ({"input": ["a", 1]}, 400, "input"),
    ({"input": {"a": 1}}, 400, "input"),
    ({"input": None}, 400, "input"),
    ({}, 400, "input"),
    ({"input": ["a"] * 2049}, 400, "input"),
    ({"input": ""}, 400, "input"),
    ({"input": [5] * 2001}, 400, "input"),
    ({"input": "word " * 100_000}, 400, "input"),
    ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ({"input": "a", "dimensions": 0}, 400, "dimensions"),
    ({"input": "a", "priority": 10**6}, 400, "priority"),
    ({"input": "a", "model": "bare"}, 404, None),
]


async def test_a_request_that_does_not_fit_is_refused() -> None:
    async with served(EMBEDDING) as front:
        answers = [
            await post(front, "/v1/embeddings", **{"model": "tiny", **fields})
            for fields, _, _ in REFUSED
        ]
        texts = front.engine.texts

    found = [(status, body["error"]["param"]) for status, body in answers]
    assert found == [(status, param) for _, status, param in REFUSED]
    assert not texts


async def test_a_model_says_what_it_is_not_there_for() -> None:
    async with served(CARDS) as front:
        status, body = await post(front, "/v1/embeddings", model="bare", input="a")

    assert status == 400
    message = "the model bare takes no embeddings: use /v1/completions"
    assert body["error"]["message"] == message


async def test_one_text_that_fails_fails_the_request() -> None:
    errors: dict[str, type[openai.APIStatusError]] = {
        "fail now": openai.InternalServerError,
        "overloaded now": openai.RateLimitError,
        "broken now": openai.InternalServerError,
    }
    async with asked() as (front, client):
        for text, error in errors.items():
            with pytest.raises(error) as raised:
                await client.embeddings.create(model="tiny", input=["one", text, "silent now"])
            assert "secret" not in str(raised.value)
            await eventually(lambda: not front.engine.running, what="the other texts are left")


async def test_a_client_that_leaves_frees_its_engines() -> None:
    async with asked() as (front, client):
        asking = asyncio.ensure_future(
            client.embeddings.create(model="tiny", input=["silent"] * 20)
        )
        await eventually(lambda: front.engine.running == 16, what="engines work for it")
        asking.cancel()
        await eventually(lambda: not front.engine.running, what="they are free")
        await asyncio.wait({asking})
        _, body = await post(front, "/v1/embeddings", model="tiny", input="one")

    assert body["data"]


async def test_texts_whose_instance_dies_are_embedded_by_another_one() -> None:
    async with asked() as (front, client):
        front.engine.holds = True
        asking = asyncio.ensure_future(
            client.embeddings.create(model="tiny", input=["hold a", "hold b"])
        )
        await eventually(lambda: front.engine.running == 2, what="the engine has both")
        await front.kit.start(ScriptedEngine)
        [first] = [one for one in front.kit.started.values() if one.actor is front.engine]
        await front.kit.kill(first)
        answer = await asking

    lengths = [float(len(tokens(text))) for text in ("hold a", "hold b")]
    assert [each.embedding[0] for each in answer.data] == lengths


async def test_a_chat_waits_for_a_model_of_which_the_embeddings_alone_are_left() -> None:
    """Its cards go and come one after another when its instance is started again."""
    async with asked() as (front, client):
        models = front.front_end.shared.models
        left = {name: one for name, one in EMBEDDING.items() if name != "tiny"}
        front.catalog.change(left)
        await eventually(lambda: len(models.served) == len(left), what="chats are gone")
        status, body = await post(front, "/v1/completions", model="tiny", prompt="say one")
        asking = asyncio.ensure_future(
            client.completions.create(model="tiny", prompt="say one", max_tokens=1)
        )
        await asyncio.sleep(0)
        front.catalog.change(EMBEDDING)
        answer = await asking

    assert (status, body["error"]["code"]) == (503, "NoInstances")
    assert answer.choices


async def test_texts_of_a_tenant_are_cached_for_that_tenant_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ada sk-ada-1234\n")
    async with served(EMBEDDING, api_keys=tmp_path / "keys") as front:
        async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key="sk-ada-1234") as client:
            await client.embeddings.create(
                model="tiny", input="one", extra_body={"cache_salt": "of another"}
            )
            await client.embeddings.create(
                model="text", input="one", extra_body={"cache_salt": "of another"}
            )
        status, _ = await post(front, "/v1/embeddings", model="tiny", input="one")

    assert status == 401
    assert front.engine.texts == [EmbedRequest(tokens("one"), cache_salt="ada")]
    assert front.text.requests[0]["cache_salt"] == "ada"
    assert front.engine.metadata[0]["tenant"] == "ada"


async def test_a_model_that_takes_text_gets_the_request_as_it_is() -> None:
    async with asked() as (front, client):
        answer = await client.embeddings.create(
            model="text", input="one", encoding_format="float", extra_body={"own": 1}
        )
        page = await metrics(front)

    assert front.text.requests[0]["own"] == 1
    assert (answer.data[0].embedding, answer.usage.prompt_tokens) == ([0.5], 7)
    assert 'dynbus_http_tokens_total{model="text",kind="prompt"} 7' in page


async def metrics(front: Served) -> str:
    _, _, body = await exchange(
        front, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    return body.decode()


class ListEngine(Actor, namespace="test"):
    """Embeds lists of texts, as a model does that takes nothing else."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    @handler(batch=32, batch_wait="2s", idempotent=True)
    async def embed(self, texts: list[EmbedRequest]) -> list[Embedded]:
        self.batches.append(len(texts))
        return [Embedded([float(len(one.token_ids))]) for one in texts]


async def test_the_texts_of_several_users_go_together_where_an_engine_takes_lists() -> None:
    listed = card("listed", "test.ListEngine.embed", types=["embedding"])
    async with served() as front:
        instance = await front.kit.start(ListEngine)
        front.catalog.change({"listed": listed})
        await eventually(lambda: front.front_end.shared.models.names == ["listed"])
        users = [AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key) for key in ("ada", "bob")]
        texts = [f"{'word ' * count}" for count in range(1, 17)]
        answers = await asyncio.gather(
            *(user.embeddings.create(model="listed", input=texts) for user in users)
        )
        for user in users:
            await user.close()

    for answer in answers:
        assert [each.embedding for each in answer.data] == [[len(tokens(text))] for text in texts]
    assert isinstance(instance.actor, ListEngine)
    assert instance.actor.batches == [32]


async def test_embeddings_are_counted_as_completions_are() -> None:
    async with asked() as (front, client):
        await client.embeddings.create(model="tiny", input=["one", "two"])
        await post(front, "/tokenize", model="tiny", prompt="one")
        page = await metrics(front)

    count = len(tokens("one")) + len(tokens("two"))
    for line in (
        'dynbus_http_requests_total{endpoint="/v1/embeddings",model="tiny",status="200"} 1',
        'dynbus_http_requests_total{endpoint="/tokenize",model="tiny",status="200"} 1',
        f'dynbus_http_tokens_total{{model="tiny",kind="prompt"}} {count}',
        'dynbus_http_tokens_total{model="tiny",kind="cached"} 2',
        'dynbus_http_request_duration_seconds_count{model="tiny"} 2',
        'dynbus_http_preparing_seconds_count{model="tiny"} 2',
        "dynbus_http_requests_in_flight 0",
    ):
        assert line in page


# Tokens ----------------------------------------------------------------------------------


async def test_the_tokens_of_a_text_are_those_of_a_completion() -> None:
    async with asked() as (front, client):
        _, told = await post(
            front, "/tokenize", model="tiny", prompt="say naïve 🙂", return_token_strs=True
        )
        await client.completions.create(model="tiny", prompt="say naïve 🙂")
        _, back = await post(front, "/detokenize", model="tiny", tokens=told["tokens"])
        [asked_for] = front.engine.requests

    assert told["tokens"] == asked_for.token_ids == tokens("say naïve 🙂")
    assert (told["count"], told["max_model_len"]) == (len(asked_for.token_ids), 2000)
    assert len(told["token_strs"]) == told["count"]
    assert back == {"prompt": "say naïve 🙂"}


async def test_the_tokens_of_a_conversation_are_those_of_a_chat() -> None:
    messages: Any = [{"role": "user", "content": "say hi"}]
    async with asked() as (front, client):
        _, told = await post(front, "/tokenize", model="tiny", messages=messages)
        await client.chat.completions.create(model="tiny", messages=messages)
        _, short = await post(
            front, "/tokenize", model="tiny", messages=messages, add_generation_prompt=False
        )
        begun = [*messages, {"role": "assistant", "content": "hi t"}]
        options = {"model": "tiny", "messages": begun, "continue_final_message": True}
        _, going_on = await post(front, "/tokenize", **options)
        both, _ = await post(front, "/tokenize", **options, add_generation_prompt=True)
        _, back = await post(front, "/detokenize", model="tiny", tokens=told["tokens"])
        [asked_for] = front.engine.requests

    assert told["tokens"] == asked_for.token_ids
    assert told["token_strs"] is None
    assert told["tokens"][: short["count"]] == short["tokens"]
    assert short["count"] < told["count"]
    assert going_on["tokens"][: told["count"]] == told["tokens"]
    assert tiny_tokenizer().decode(going_on["tokens"][told["count"] :]) == "hi t"
    assert both == 400
    assert back["prompt"].endswith("<|im_start|>assistant\n")


WITHOUT_TOKENS: list[tuple[str, dict[str, Any], int]] = [
    ("/tokenize", {}, 400),
    ("/tokenize", {"prompt": "a", "messages": []}, 400),
    ("/tokenize", {"messages": []}, 400),
    ("/tokenize", {"prompt": 1}, 400),
    ("/tokenize", {"messages": [{"role": "user", "content": 1}]}, 400),
    ("/tokenize", {"messages": [{"content": "a"}]}, 400),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "a"}, 400),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400),
    ("/tokenize", {"prompt": "\ud800"}, 400),
    ("/tokenize", {"prompt": "a", "model": "none"}, 404),
    ("/tokenize", {"prompt": "a", "model": "text"}, 400),
    ("/tokenize", {"prompt": "a", "model": None}, 400),
    ("/detokenize", {}, 400),
    ("/detokenize", {"tokens": "a"}, 400),
    ("/detokenize", {"tokens": [-1]}, 400),
    ("/detokenize", {"tokens": [1 << 40]}, 400),
    ("/detokenize", {"tokens": [1 << 20]}, 400),
    ("/detokenize", {"tokens": [5], "model": "text"}, 400),
]


async def test_what_has_no_tokens_is_refused() -> None:
    async with served(EMBEDDING) as front:
        answers = [
            await post(front, path, **{"model": "tiny", **fields})
            for path, fields, _ in WITHOUT_TOKENS
        ]

    assert [status for status, _ in answers] == [status for _, _, status in WITHOUT_TOKENS]
    assert all(body["error"]["message"] for _, body in answers)


async def test_the_only_model_needs_no_name() -> None:
    async with served({"tiny": CARDS["tiny"]}) as front:
        status, told = await post(front, "/tokenize", prompt="one")
        empty, nothing = await post(front, "/tokenize", prompt="")
        _, back = await post(front, "/detokenize", tokens=[])

    assert (status, told["tokens"]) == (200, tokens("one"))
    assert (empty, nothing["count"], back) == (200, 0, {"prompt": ""})


# The small engine behind it --------------------------------------------------------------


class Small(ModelWorker, namespace="llm"):
    pass


async def test_a_model_is_served_for_chats_and_for_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings are made beside tokens, by an engine that has registered both."""
    vocabulary = write_mock_model(tmp_path)
    monkeypatch.setattr(tiny_models, "VOCABULARY", vocabulary)
    tiny_models.TinyModel("tiny-llama", "llama").write_folder(tmp_path)
    async with TestKit() as kit:
        await kit.start(Small, model=str(tmp_path), model_name="small", backend="numpy", blocks=64)
        config = HttpSettings(port=0, grace=1.0)
        async with (
            Catalog(kit.caller) as catalog,
            HttpFrontEnd(kit.caller, catalog, config) as front,
            AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as client,
        ):
            await eventually(lambda: len(front.shared.models.served) == 2, what="both are served")
            listed = await client.models.list()
            chat = client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "Hello"}], max_tokens=20
            )
            texts = ["a text", "another text", "a text"]
            embed = client.embeddings.create(model="small", input=texts)
            answer, embedded = await asyncio.gather(chat, embed)
            with pytest.raises(openai.BadRequestError, match="dimensions = 65: it is from 1 to 64"):
                await client.embeddings.create(model="small", input="a", dimensions=65)
            # As of another tokenizer, which clients make unless they are told otherwise.
            with pytest.raises(openai.BadRequestError, match="ids of the model's own tokenizer"):
                await client.embeddings.create(model="small", input=[[5, 99_999]])
            body = {"model": "small", "query": texts[0], "documents": texts}
            ranked: Any = await client.post("/rerank", body=body, cast_to=object)

    assert [each.id for each in listed.data] == ["small"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    vectors = np.array([each.embedding for each in embedded.data])
    assert vectors.shape == (3, tiny_models.HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    assert vectors[0] @ vectors[1] < 0.9999
    assert [one["index"] for one in ranked["results"]] in ([0, 2, 1], [2, 0, 1])
