"""Images and sounds in requests of each interface: what engines get, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tests.llm.media.samples import digest, encoded, image, png, sound, wav, words

from dynbus import ConfigError
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.card import ModelInput

from .served import Served, card, served

pytestmark = pytest.mark.anyio


def text_card(name: str, modalities: list[str] | None) -> Any:
    return card(
        name,
        "test.TextEngine.chat",
        input=ModelInput.Text,
        types=["chat"],
        modalities=modalities,
    )


CARDS = {
    one.name: one
    for one in (
        card("tiny", "test.ScriptedEngine.generate"),
        text_card("seer", ["image"]),
        text_card("reader", []),
        text_card("silent", None),
    )
}


@asynccontextmanager
async def asked(
    api_key: str = "none", **settings: Any
) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    async with (
        served(CARDS, **settings) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key=api_key, max_retries=0) as client,
    ):
        yield front, client


def shown(*parts: Any, model: str = "seer", **fields: Any) -> Any:
    return {"model": model, "messages": [{"role": "user", "content": [*parts]}], **fields}


async def create(client: AsyncOpenAI, request: Any) -> Any:
    create: Any = client.chat.completions.create
    return await create(**request)


async def refusal(client: AsyncOpenAI, request: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as raised:
        await create(client, request)
    return raised.value


EXPECTED = {**image(png()), "uuid": digest(png())}


async def test_each_interface_shows_an_engine_the_same_image() -> None:
    data = encoded(png())
    async with (
        asked() as (front, client),
        AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as other,
    ):
        await create(client, shown(words("Look."), image(png(), "image/webp")))
        url = f"data:image/png;base64,{data}"
        parts: Any = [
            {"type": "input_text", "text": "Look."},
            {"type": "input_image", "image_url": url},
        ]
        await client.responses.create(model="seer", input=[{"role": "user", "content": parts}])
        source = {"type": "base64", "media_type": "image/jpeg", "data": data}
        blocks: Any = [words("Look."), {"type": "image", "source": source}]
        message: Any = {"role": "user", "content": blocks}
        await other.messages.create(model="seer", max_tokens=5, messages=[message])
        blocks[1]["source"] = {"type": "url", "url": url}
        await other.messages.create(model="seer", max_tokens=5, messages=[message])

    contents = [request["messages"][0]["content"] for request in front.text.requests]
    assert contents == [[words("Look."), EXPECTED]] * 4


async def test_a_refusal_names_the_place_of_the_request_and_not_that_of_the_chat() -> None:
    url = f"data:image/png;base64,{base64.b64encode(b'none').decode()}"
    shown_part = {"type": "input_image", "image_url": url}
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "Here."}, shown_part],
        },
    ]
    source = {"type": "base64", "media_type": "image/png", "data": "bm9uZQ=="}
    picture: Any = {"type": "image", "source": source}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "l", "input": {}}],
        },
        {
            "role": "user",
            # In the chat results of tools come first.
            "content": [words("And this?"), picture, {"type": "tool_result", "tool_use_id": "t"}],
        },
    ]
    async with (
        asked() as (front, client),
        AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as other,
    ):
        with pytest.raises(openai.BadRequestError) as told:
            await client.responses.create(model="seer", instructions="Be brief.", input=items)
        shown_part["image_url"] = "data:image/png,plain"
        with pytest.raises(openai.BadRequestError) as odd:
            await client.responses.create(model="seer", instructions="Be brief.", input=items)
        with pytest.raises(anthropic.BadRequestError) as other_told:
            await other.messages.create(model="seer", max_tokens=5, messages=messages, system="a")

    assert told.value.param == odd.value.param == "input[2].output[1]"
    assert "input[2].output[1]: by its bytes it is no image" in told.value.message
    assert "input[2].output[1]: a data: URL has to be" in odd.value.message
    assert "messages[2].content[1]: by its bytes it is no image" in str(other_told.value)


async def test_a_model_that_does_not_take_it_refuses_with_its_name_and_the_part() -> None:
    async with asked() as (front, client):
        refusals = [
            await refusal(client, shown(words("a"), image(png()), model="tiny")),
            await refusal(client, shown(words("a"), image(png()), model="reader")),
            await refusal(client, shown(words("a"), sound(wav()), model="seer")),
        ]
        with pytest.raises(
            openai.BadRequestError, match=r"input\[0\]\.content\[0\]: this part"
        ) as new:
            await client.responses.create(
                model="tiny",
                input=[
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "input_image",
                                "image_url": image(png())["image_url"]["url"],
                                "detail": "auto",
                            }
                        ],
                    }
                ],
            )

    assert [one.body["message"] for one in refusals] == [
        "messages[0].content[1]: this part is an image, and the model tiny takes text only",
        "messages[0].content[1]: this part is an image, and the model reader takes text only",
        "messages[0].content[1]: this part is a sound, and the model seer takes text and image",
    ]
    for one in refusals:
        assert one.body["type"] == "invalid_request_error"
        assert one.body["param"] == "messages[0].content[1]"
        assert one.body["code"] == "unsupported_value"
    assert new.value.status_code == 400
    assert (front.text.requests, front.engine.requests) == ([], [])


async def test_a_model_of_an_earlier_worker_gets_what_is_asked_of_it() -> None:
    async with asked() as (front, client):
        await create(client, shown(image(png()), sound(wav()), model="silent"))

    [request] = front.text.requests
    assert [part["type"] for part in request["messages"][0]["content"]] == [
        "image_url",
        "input_audio",
    ]


async def test_the_limits_are_those_of_the_settings() -> None:
    settings: dict[str, Any] = {
        "media_bytes": 1000,
        "media_total_bytes": 1500,
        "media_parts": 2,
        "media_pixels": 100,
    }
    async with asked(**settings) as (front, client):
        await create(client, shown(image(png()), image(png(1))))
        refusals = [
            await refusal(client, shown(image(png() + bytes(1000)))),
            await refusal(client, shown(*[image(png() + bytes(800))] * 2)),
            await refusal(client, shown(*[image(png())] * 3)),
            await refusal(client, shown(image(png(0, 20, 20)))),
            await refusal(client, shown({"type": "image_url", "image_url": {"url": "http://a/"}})),
        ]

    assert len(front.text.requests) == 1
    assert [one.body["code"] for one in refusals] == [
        "media_too_large",
        "media_too_large",
        "media_too_large",
        "media_too_large",
        "unsupported_value",
    ]


async def test_images_by_url_are_fetched_from_public_addresses_alone() -> None:
    async def private(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for.append(await reader.read(1000))
        writer.close()

    asked_for: list[bytes] = []
    inside = await asyncio.start_server(private, "127.0.0.1", 0)
    port = inside.sockets[0].getsockname()[1]
    hosts = ["*", f"localhost:{port}", f"127.0.0.1:{port}"]
    async with inside, asked(media_hosts=hosts, media_timeout=5.0) as (front, client):
        for host in ("localhost", "127.0.0.1"):
            url = f"http://{host}:{port}/cat.png"
            part = {"type": "image_url", "image_url": {"url": url}}
            error = await refusal(client, shown(part))
            assert error.body["message"] == (
                f"messages[0].content[0]: {host} has no public address"
            )
            assert error.body["code"] == "url_not_fetched"

    assert (asked_for, front.text.requests) == ([], [])


@pytest.mark.parametrize("setting", [{"media_hosts": ["http://a/"]}, {"media_bytes": 0}])
def test_a_setting_that_is_not_usable_is_refused_at_the_start(setting: Any) -> None:
    with pytest.raises(ConfigError):
        HttpSettings(**setting)


async def test_an_image_is_no_text_of_a_tenant_s_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme key-of-acme prompt_tokens_per_minute=5000 max_prompt_tokens=3000\n")
    large = png() + bytes(1_000_000)
    async with asked("key-of-acme", api_keys=keys) as (front, client):
        await create(client, shown(image(large), words("Look.")))
        answer = await create(client, shown(image(large), words("Look."), stream=True))
        chunks = [chunk async for chunk in answer]

    assert chunks
    assert len(front.text.requests) == 2
    assert front.text.requests[0]["cache_salt"] == "acme"


async def test_a_request_is_large_with_images_and_not_with_parts() -> None:
    parts = [image(b"x")] * 10_000
    async with asked() as (front, client):
        with pytest.raises(openai.APIStatusError) as raised:
            await create(client, shown(*parts))
        fewer = await refusal(client, shown(*parts[:5000]))

    assert raised.value.status_code == 413
    assert "5000 images and sounds are too many" in fewer.body["message"]
    assert front.text.requests == []


async def test_a_polyglot_is_told_as_what_its_first_bytes_are() -> None:
    async with asked() as (front, client):
        await create(client, shown(image(png() + b"<script>alert(1)</script>", "text/html")))
        hidden = await refusal(client, shown(image(b"<script>" + png(), "image/png")))

    url = front.text.requests[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    assert "no image of a type that is taken" in hidden.body["message"]


def test_a_card_of_text_alone_says_so_and_one_of_before_says_nothing() -> None:
    plain = msgspec.json.encode(CARDS["reader"])

    assert json.loads(plain)["modalities"] == []
    assert b"modalities" not in msgspec.json.encode(CARDS["silent"])
