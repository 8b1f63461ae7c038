"""Streams of which nothing comes for a while: their clients see that they live."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Final

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tests.conditions import PATIENCE, eventually

from .served import served

pytestmark = pytest.mark.anyio

OFTEN: Final = 0.01
"""Seconds; an engine that speaks slowly says something every 20 ms."""

SAID: Final = "the quick brown fox jumps over the lazy dog"
SLOWLY: Final = f"slowly {SAID}"

PROMPT: Final = f"<|im_start|>user\n{SLOWLY}<|im_end|>\n<|im_start|>assistant"

INTERFACES: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": SLOWLY}]},
        ": keep-alive\n",
    ),
    "/v1/completions": ({"prompt": PROMPT}, ": keep-alive\n"),
    "/v1/responses": ({"input": SLOWLY}, ": keep-alive\n"),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": SLOWLY}], "max_tokens": 100},
        'event: ping\ndata: {"type": "ping"}\n\n',
    ),
}


@pytest.fixture
async def client() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        yield client


async def streamed(client: httpx2.AsyncClient, url: str, body: Any, **headers: str) -> str:
    body = {"model": "tiny", "stream": True, **body}
    return (await client.post(url, json=body, headers=headers)).text


@pytest.mark.parametrize("path", INTERFACES)
@pytest.mark.parametrize("resumable", ["0", "1"])
async def test_a_stream_tells_while_nothing_comes_of_it_that_it_lives(
    client: httpx2.AsyncClient, path: str, resumable: str
) -> None:
    body, told = INTERFACES[path]
    headers = {"Dynbus-Resumable": resumable, "X-Request-Id": "one"}
    async with served(stream_keep_alive=OFTEN) as front:
        often = await streamed(client, front.url + path, body, **headers)
    async with served(stream_keep_alive=PATIENCE) as front:
        never = await streamed(client, front.url + path, body, **headers)

    assert often.count(told) > 3
    assert told not in never
    # What else is told is the same, up to the times that it tells.
    assert [line[:40] for line in often.replace(told, "").splitlines()] == [
        line[:40] for line in never.splitlines()
    ]


async def test_a_client_is_told_before_the_first_token_and_an_error_after_that_is_an_event(
    client: httpx2.AsyncClient,
) -> None:
    body = {"messages": [{"role": "user", "content": "silent"}]}
    async with served(stream_keep_alive=OFTEN, request_timeout=0.5) as front:
        path = f"{front.url}/v1/chat/completions"
        answer = await client.post(path, json={"model": "tiny", "stream": True, **body})
        whole = await client.post(path, json={"model": "tiny", **body})

    assert answer.status_code == 200
    assert answer.text.startswith(": keep-alive\n")
    error = json.loads(answer.text.rpartition("data: ")[2])["error"]
    assert error["type"] == "timeout"
    # A whole answer has a status of its own, however long it takes.
    assert whole.status_code == 504


async def test_a_resumed_stream_tells_that_it_lives(client: httpx2.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": SLOWLY}]}
    async with served(stream_keep_alive=OFTEN) as front:
        path = f"{front.url}/v1/chat/completions"
        asked = {"model": "tiny", "stream": True, **body}
        headers = {"Dynbus-Resumable": "1", "X-Request-Id": "one"}
        async with client.stream("POST", path, json=asked, headers=headers) as first:
            await anext(first.aiter_text())

        rest = (await client.get(f"{front.url}/v1/streams/one")).text

    assert rest.count(": keep-alive\n") > 3
    assert rest.endswith("data: [DONE]\n\n")


async def test_an_answer_that_is_given_again_has_no_comments(client: httpx2.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": SLOWLY}]}
    async with served(stream_keep_alive=OFTEN) as front:
        path = f"{front.url}/v1/chat/completions"
        first = await streamed(client, path, body, **{"Idempotency-Key": "one"})
        again = await streamed(client, path, body, **{"Idempotency-Key": "one"})

    assert first.count(": keep-alive\n") > 3
    assert again == first.replace(": keep-alive\n", "")


async def test_a_front_end_forgets_the_streams_that_have_ended(client: httpx2.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": SLOWLY}]}
    async with served(stream_keep_alive=OFTEN) as front:
        await streamed(client, f"{front.url}/v1/chat/completions", body)

        kept = front.front_end.shared.keep_alive
        await eventually(lambda: repr(kept) == f"<KeepAlive [0 streams, every {OFTEN:g} s]>")


async def test_the_openai_package_reads_over_what_says_that_a_stream_lives() -> None:
    async with (
        served(stream_keep_alive=OFTEN) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for resumable in ("0", "1"):
            chunks = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": SLOWLY}],
                stream=True,
                extra_headers={"Dynbus-Resumable": resumable},
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            assert text == SAID
        events = await client.responses.create(model="tiny", input=SLOWLY, stream=True)
        pieces = [one.delta async for one in events if one.type == "response.output_text.delta"]
    assert "".join(pieces) == SAID


@pytest.mark.parametrize("resumable", ["0", "1"])
async def test_the_anthropic_package_reads_over_pings(resumable: str) -> None:
    async with (
        served(stream_keep_alive=OFTEN) as front,
        AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="tiny",
            max_tokens=100,
            messages=[{"role": "user", "content": SLOWLY}],
            extra_headers={"Dynbus-Resumable": resumable},
        ) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
    assert text == SAID
