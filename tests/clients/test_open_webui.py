"""Requests of Open WebUI, as `routers/openai.py`, `routers/tasks.py`, `utils/middleware.py` and
`retrieval` of its backend make them, and its page where it asks a front end directly."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from tests.llm.http.served import CARDS, Served, card, served

pytestmark = pytest.mark.anyio

EMBEDS = card("embedder", "test.ScriptedEngine.embed", types=["embedding"])
HEADERS = {
    "Authorization": "Bearer sk-ada",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada%20Lovelace",
    "X-OpenWebUI-User-Id": "b8f1",
    "X-OpenWebUI-User-Email": "ada@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c0ffee",
}


def client_of(front: Served) -> httpx2.AsyncClient:
    """A client with the headers of Open WebUI's backend."""
    return httpx2.AsyncClient(base_url=front.url, headers=HEADERS)


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": ""}},
            "required": ["city"],
        },
    },
}
METADATA: dict[str, Any] = {
    "user_id": "b8f1",
    "chat_id": "c0ffee",
    "message_id": "f00d",
    "session_id": "s1",
    "filter_ids": [],
    "tool_ids": None,
    "tool_servers": [],
    "files": None,
    "features": {"web_search": False},
    "variables": {"{{USER_NAME}}": "Ada"},
    "direct": True,
    "params": {"stream_delta_chunk_size": None, "function_calling": "native"},
    "task": "title_generation",
    "task_body": {"model": "tiny", "messages": [said("say hello")]},
}
CHAT: dict[str, Any] = {
    "stream": True,
    "model": "tiny",
    "messages": [said("Be brief.", "system"), said("say hello")],
    "stream_options": {"include_usage": True},
}
"""The request for a chat, as the backend sends it."""

STREAMED: dict[str, dict[str, Any]] = {
    "a chat": CHAT,
    "a chat with parameters": {
        **CHAT,
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 100,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 7,
        "stop": ["</s>"],
        "logit_bias": {"5": 0},
        "reasoning_effort": "medium",
        "response_format": {"type": "text"},
        "top_k": 40,
        "min_p": 0.0,
        "repeat_penalty": 1.1,
        "keep_alive": "5m",
    },
    "a chat with native tools": {
        **CHAT,
        "messages": [
            said("say hello"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "14 degrees"},
        ],
        "tools": [WEATHER],
    },
    "a chat of parts": {
        **CHAT,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "say hello"}]}],
    },
    "a chat of a page that asks directly": {
        **CHAT,
        "params": {},
        "files": [],
        "filter_ids": [],
        "tool_ids": [],
        "tool_servers": [],
        "features": {"image_generation": False, "code_interpreter": False, "web_search": False},
        "variables": {"{{CURRENT_DATE}}": "2026-11-27"},
        "model_item": {"id": "tiny", "object": "model", "owned_by": "openai", "urlIdx": 0},
        "session_id": "s1",
        "chat_id": "c0ffee",
        "id": "f00d",
        "parent_id": None,
        "background_tasks": {"title_generation": True, "tags_generation": True},
        "metadata": METADATA,
    },
}
TASKS: dict[str, dict[str, Any]] = {
    "a title": {
        "model": "tiny",
        "messages": [said("say hello")],
        "stream": False,
        "max_completion_tokens": 1000,
        "metadata": METADATA,
    },
    "tags, follow-ups, queries": {
        "model": "tiny",
        "messages": [said("say hello")],
        "stream": False,
        "metadata": METADATA,
    },
    "the end of a line": {
        "model": "tiny",
        "messages": [said("say hello")],
        "stream": False,
        "max_completion_tokens": 30,
        "metadata": METADATA,
    },
}


@pytest.mark.parametrize("what", STREAMED)
async def test_a_chat_of_open_webui_is_a_stream_with_usage_at_its_end(what: str) -> None:
    async with served() as front, client_of(front) as client:
        answer = await client.post("/v1/chat/completions", json=STREAMED[what])

    assert answer.status_code == 200, answer.text
    *chunks, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    read = [json.loads(chunk) for chunk in chunks]
    deltas = [one["choices"][0]["delta"].get("content") or "" for one in read if one["choices"]]
    assert done == "[DONE]"
    assert "".join(deltas) == "hello"
    assert read[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("what", TASKS)
async def test_a_task_of_open_webui_is_answered_at_once(what: str) -> None:
    async with served() as front, client_of(front) as client:
        answer = await client.post("/v1/chat/completions", json=TASKS[what])

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


async def test_open_webui_lists_the_models_makes_embeddings_and_ranks() -> None:
    async with served({**CARDS, "embedder": EMBEDS}) as front, client_of(front) as client:
        listed = await client.get("/v1/models")
        made = await client.post(
            "/v1/embeddings", json={"input": ["one", "two words"], "model": "embedder"}
        )
        ranked = await client.post(
            "/v1/rerank",
            json={"model": "embedder", "query": "one", "documents": ["one", "two"], "top_n": 2},
        )

    assert sorted(one["index"] for one in ranked.json()["results"]) == [0, 1]
    assert {"tiny", "embedder"} <= {one["id"] for one in listed.json()["data"]}
    assert [one["index"] for one in made.json()["data"]] == [0, 1]
