"""`/v1/score` and `/v1/rerank`: models that make embeddings, and models that compute scores."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus.llm.models.card import ModelInput

from .served import CARDS, Served, card, served
from .test_connections import exchange, request

pytestmark = pytest.mark.anyio

SCORING = {
    "embedder": card("embedder", "test.ScriptedEngine.embed", types=["embedding"]),
    "cross": card("cross", "test.ScriptedEngine.score", types=["score"]),
    "text": card("text", "test.TextEngine.embed", input=ModelInput.Text, types=["embedding"]),
    "ranker": card("ranker", "test.TextEngine.score", input=ModelInput.Text, types=["score"]),
    "bare": CARDS["bare"],
}


async def post(front: Served, path: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = await exchange(front, request(fields, path))
    return status, json.loads(body)


def embedding(text: str) -> NDArray[np.float64]:
    """The embedding that the scripted engine makes of a text, at length 1."""
    ids = tiny_tokenizer().encode(text)
    vector = np.array([len(ids), ids[0], 0.1])
    length: float = np.linalg.norm(vector).item()
    return vector / length


async def test_a_model_of_embeddings_scores_by_the_angle_between_them() -> None:
    texts = ["one", "two words", "one"]
    async with served(SCORING) as front:
        status, told = await post(
            front, "/v1/score", model="embedder", text_1="one", text_2=texts, user="u"
        )
        asked = len(front.engine.texts)
        _, each = await post(front, "/score", model="embedder", queries=texts, documents=texts)
        _, single = await post(front, "/v1/score", model="embedder", queries="one", items="two")

    expected = [embedding("one") @ embedding(text) for text in texts]
    assert (status, told["object"], told["model"]) == (200, "list", "embedder")
    assert [(one["index"], one["object"]) for one in told["data"]] == [
        (index, "score") for index in range(3)
    ]
    assert [one["score"] for one in told["data"]] == pytest.approx(expected, abs=1e-6)
    assert [one["score"] for one in each["data"]] == pytest.approx([1, 1, 1])
    assert len(single["data"]) == 1
    # Each text once, whatever it is compared with.
    assert asked == 2
    tokens = sum(len(tiny_tokenizer().encode(text)) for text in set(texts))
    assert told["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_documents_are_ranked_best_first() -> None:
    documents: list[Any] = ["b b b b b b", "one", {"text": "b b"}, "one"]
    async with served(SCORING) as front:
        asked = {"model": "embedder", "query": "one", "documents": documents}
        status, whole = await post(front, "/v1/rerank", **asked)
        _, best = await post(front, "/v2/rerank", **asked, top_n=1, return_documents=False)
        _, all_of_them = await post(front, "/rerank", **asked, top_n=0)

    assert status == 200
    ranked = [one["index"] for one in whole["results"]]
    scores = [one["relevance_score"] for one in whole["results"]]
    assert ranked[:2] == [1, 3]
    assert scores == sorted(scores, reverse=True)
    assert [one["document"]["text"] for one in whole["results"]][:2] == ["one", "one"]
    assert [one.keys() for one in best["results"]] == [{"index", "relevance_score"}]
    assert len(all_of_them["results"]) == 4
    assert whole["model"] == "embedder"
    assert whole["usage"]["total_tokens"] > 0


async def test_a_model_of_scores_gets_each_pair_as_one_text() -> None:
    async with served(SCORING) as front:
        _, told = await post(front, "/v1/score", model="cross", text_1="a", text_2=["b b", "c"])
        _, ranked = await post(
            front, "/v1/rerank", model="cross", query="a", documents=["b", "c c c"]
        )
        pairs = front.engine.texts

    lengths = [len(pair.token_ids) for pair in pairs]
    assert [one["score"] for one in told["data"]] == lengths[:2]
    assert [one["index"] for one in ranked["results"]] == [1, 0]
    assert tiny_tokenizer().decode(pairs[0].token_ids) == "ab b"
    assert told["usage"]["prompt_tokens"] == sum(lengths[:2])


async def test_an_engine_of_scores_that_takes_text_gets_the_request_as_it_is() -> None:
    asked = {"model": "ranker", "query": "a", "documents": ["b"], "truncate_prompt_tokens": 5}
    async with served(SCORING) as front:
        status, told = await post(front, "/v1/rerank", **asked)
        [sent] = front.text.requests

    assert (status, told) == (200, {"results": [], "usage": {"prompt_tokens": 3}})
    assert sent == asked


async def test_an_engine_of_embeddings_that_takes_text_makes_those_of_scores() -> None:
    async with served(SCORING) as front:
        status, told = await post(
            front, "/v1/rerank", model="text", query="a", documents=["b", "c"], priority=2
        )
        [sent] = front.text.requests
        front.text.vectors = 1
        broken, error = await post(front, "/v1/score", model="text", text_1="a", text_2="b")

    assert sent == {"model": "text", "input": ["a", "b", "c"], "priority": 2}
    assert status == 200
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx([1, 1])
    assert told["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert broken == 500
    assert error["error"]["code"]


SCORES: Any = {"model": "embedder", "text_1": "a", "text_2": "b"}
RANKED: Any = {"model": "embedder", "query": "a", "documents": ["b"]}
REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/v1/score", {**SCORES, "text_2": None}, 400, "text_1"),
    ("/v1/score", {**SCORES, "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
    ("/v1/score", {**SCORES, "queries": "a", "documents": "b"}, 400, "text_1"),
    ("/v1/score", {**SCORES, "queries": "a"}, 400, "queries"),
    (
        "/v1/score",
        {"model": "embedder", "queries": "a", "documents": "b", "items": "c"},
        400,
        "items",
    ),
    ("/v1/score", {**SCORES, "text_2": []}, 400, "text_2"),
    ("/v1/score", {**SCORES, "text_2": ["a", ""]}, 400, "text_2"),
    ("/v1/score", {**SCORES, "text_2": [1, 2]}, 400, "text_2"),
    ("/v1/score", {**SCORES, "text_2": ["a"] * 2049}, 400, "text_2"),
    ("/v1/score", {**SCORES, "text_2": "word " * 2001}, 400, "text_2"),
    ("/v1/score", {**SCORES, "priority": 10**6}, 400, "priority"),
    ("/v1/score", {**SCORES, "model": "none"}, 404, None),
    ("/v1/score", {**SCORES, "model": "cross", "text_2": "word " * 2001}, 400, "text_2"),
    ("/v1/score", {**SCORES, "text_2": "fail now"}, 500, None),
    ("/v1/score", {**SCORES, "model": "cross", "text_2": " fails"}, 500, None),
    ("/v1/rerank", {**RANKED, "query": None}, 400, "query"),
    ("/v1/rerank", {**RANKED, "documents": []}, 400, "documents"),
    ("/v1/rerank", {**RANKED, "documents": [{"title": "a"}]}, 400, "documents"),
    ("/v1/rerank", {**RANKED, "top_n": -1}, 400, "top_n"),
    ("/v1/rerank", {**RANKED, "model": "bare"}, 400, "model"),
]


async def test_a_request_that_does_not_fit_is_refused() -> None:
    async with served(SCORING) as front:
        answers = [await post(front, path, **fields) for path, fields, _, _ in REFUSED]

    found = [(status, body["error"]["param"]) for status, body in answers]
    assert found == [(status, param) for _, _, status, param in REFUSED]
    message = "the model bare takes no texts to score: use /v1/completions"
    assert answers[-1][1]["error"]["message"] == message
