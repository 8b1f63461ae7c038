"""A server of OpenAI's API behind its worker: what passes, what ends it, and what is said of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, RateLimitError
from tests.conditions import eventually
from tests.llm.media.samples import digest, image, png, sound, wav
from tests.llm.proxy.scripted_server import ScriptedServer, scripted_server
from tests.llm.text.tiny_tokenizer import CHATML, tiny_json

from dynbus import call_options
from dynbus.bus.errors import (
    ConfigError,
    DynbusError,
    HandlerError,
    InvalidRequest,
    Migrate,
    Overloaded,
    StreamLost,
    Unavailable,
)
from dynbus.llm.http.frontend import Frontend, HttpFrontEnd
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.proxy import OpenAiWorker
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio


class Front(Frontend, namespace="llm"):
    """The front end as an actor."""


@asynccontextmanager
async def worker(**options: Any) -> AsyncGenerator[tuple[TestKit, ScriptedServer, OpenAiWorker]]:
    """A worker of a server, and a client of the worker."""
    async with scripted_server() as server, TestKit() as kit:
        await kit.start(OpenAiWorker, url=server.url, **options)
        yield kit, server, kit.caller.client(OpenAiWorker)


def chat(text: str, **more: Any) -> Any:
    """A request whose answer is to be a stream."""
    asked = {"model": "served", "messages": [{"role": "user", "content": text}], "stream": True}
    return raw({**asked, **more})


def raw(value: Any) -> Any:
    return msgspec.Raw(msgspec.json.encode(value))


async def texts_of(client: OpenAiWorker, request: Any) -> list[str]:
    found: list[str] = []
    async for item in client.generate(request):
        [choice] = msgspec.json.decode(item)["choices"]
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        found.append(said["content"])
    return found


VLLM_METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n'


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynbus.llm.proxy.worker.LOOK_INTERVAL", 0.05)


async def test_chunks_pass_as_they_are() -> None:
    async with worker() as (_, server, client):
        for way in ("stream", "cut", "undone"):
            assert await texts_of(client, chat(f"{way} one two")) == ["one", "two", ""]
        completion = raw({"model": "served", "prompt": "stream three", "stream": True})
        assert await texts_of(client, completion) == ["three", ""]
    assert server.asked[0].path == "/v1/chat/completions"
    assert server.asked[-1].path == "/v1/completions"


def shown(*parts: Any, **more: Any) -> Any:
    content = [{"type": "text", "text": "say yes"}, *parts]
    return {"model": "served", "messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize(
    ("named", "takes", "modalities"),
    [
        ("auto", {"image_url"}, ["image"]),
        ("auto", {"image_url", "input_audio"}, ["image", "audio"]),
        ("auto", set[str](), []),
        ("none", {"image_url"}, []),
        ("audio, image", set[str](), ["image", "audio"]),
    ],
)
async def test_a_server_is_asked_what_it_takes_unless_it_is_named(
    named: str, takes: set[str], modalities: list[str]
) -> None:
    async with scripted_server() as server, TestKit() as kit:
        server.takes = takes
        await kit.start(OpenAiWorker, url=server.url, modalities=named)
        async with Catalog(kit.caller) as catalog:
            card = await catalog.wait_for("served", ModelType.Chat, timeout=5.0)

    assert card.modalities == modalities


async def test_a_server_that_is_busy_when_it_is_asked_gets_all_parts() -> None:
    async with scripted_server() as server, TestKit() as kit:
        server.is_full = True
        await kit.start(OpenAiWorker, url=server.url)
        async with Catalog(kit.caller) as catalog:
            card = await catalog.wait_for("served", ModelType.Chat, timeout=5.0)

    assert card.modalities is None


async def test_a_modality_that_nobody_knows_is_refused() -> None:
    async with TestKit() as kit:
        with pytest.raises(ConfigError, match="modalities has 'smell': it may have image, audio"):
            await kit.start(OpenAiWorker, url="http://127.0.0.1:1", modalities="image,smell")


async def test_a_server_that_tokenizes_tells_what_stands_for_an_image() -> None:
    async with scripted_server() as server, TestKit() as kit:
        server.takes, server.tokenizes = {"image_url"}, True
        await kit.start(OpenAiWorker, url=server.url)
        [instance] = kit.started.values()

        assert instance.actor.instance_metadata()["media_tokens"] == "7"


@pytest.mark.parametrize("is_vllm", [True, False])
async def test_the_digest_of_an_image_is_for_servers_that_know_it(is_vllm: bool) -> None:
    async with scripted_server() as server, TestKit() as kit:
        server.takes = {"image_url"}
        server.metrics = VLLM_METRICS if is_vllm else None
        await kit.start(OpenAiWorker, url=server.url)
        client = kit.caller.client(OpenAiWorker)
        part = {"type": "image_url", "image_url": {"url": "data:"}}
        await texts_of(client, raw(shown({**part, "uuid": "ab"}, stream=True)))

    [asked] = server.asked
    assert asked.body["messages"][0]["content"][1] == {
        **part,
        **({"uuid": "ab"} if is_vllm else {}),
    }


async def test_requests_for_embeddings_and_scores_pass_as_they_are() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "served", "input": "a"},
        "/v1/score": {"model": "served", "text_1": "a", "text_2": "b"},
        "/v1/rerank": {"model": "served", "query": "a", "documents": ["b"], "top_n": 1},
    }
    for path, body in bodies.items():
        is_embedding = path == "/v1/embeddings"
        async with worker(task="embed" if is_embedding else "score") as (kit, server, client):
            [answer] = [item async for item in client.generate(raw(body))]
            async with Catalog(kit.caller) as catalog:
                kind = ModelType.Embedding if is_embedding else ModelType.Score
                card = await catalog.wait_for("served", kind)
            [asked] = server.asked

        assert msgspec.json.decode(answer)["path"] == path
        assert (asked.path, asked.body) == (path, body)
        assert (card.types, card.input) == (kind.names, ModelInput.Text)
        # Nobody asks such a server for a token.
        assert server.probes == 0


async def test_only_servers_of_tokens_are_routed_by_their_caches() -> None:
    with pytest.raises(ConfigError, match="task=embed: kv_events and model are for task=generate"):
        async with worker(task="embed", model="hf://a/b"):
            pass


async def test_streams_that_end_leave_their_connection_to_others() -> None:
    async with worker() as (_, server, client):
        for number in range(20):
            assert await texts_of(client, chat(f"say {number}")) == [str(number), ""]
        assert server.connections < 10


async def test_a_whole_answer_is_one_item() -> None:
    async with worker() as (_, _server, client):
        assert await texts_of(client, chat("say all of it", stream=False)) == ["all of it"]


async def test_a_request_passes_with_its_id_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-first\n")
    async with scripted_server() as server, TestKit() as kit:
        server.key = "sk-first"
        await kit.start(OpenAiWorker, url=f"{server.url}/v1/", key_file=str(file))
        client = kit.caller.client(OpenAiWorker)
        with call_options(request_id="mine"):
            await texts_of(client, chat("say yes", tools=[{"type": "function"}], temperature=0.5))
        [asked] = server.asked
        assert asked.headers["x-request-id"] == "mine"
        assert asked.body["tools"] == [{"type": "function"}]
        assert asked.body["temperature"] == 0.5

        # A key that is changed in its file is taken with the next look at the server.
        file.write_text("sk-second")
        server.key = "sk-second"

        async def is_taken() -> bool:
            try:
                return await texts_of(client, chat("say yes")) == ["yes", ""]
            except Unavailable:
                return False

        await eventually(is_taken)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_has_the_server_stop(stream: bool) -> None:
    async with worker() as (_, server, client):
        call = client.generate(chat("silent", stream=stream))
        task = asyncio.ensure_future(anext(call))
        await eventually(lambda: server.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await call.aclose()
        await server.asked[0].is_left.wait()


async def test_a_deadline_has_the_server_stop() -> None:
    async with worker() as (_, server, client):
        # Enough for a busy machine to ask the server.
        with call_options(timeout=2.0), pytest.raises(DynbusError):
            await texts_of(client, chat("endless"))
        await server.asked[0].is_left.wait()


async def test_errors_are_those_of_the_bus() -> None:
    expected: list[tuple[int, str, type[DynbusError], str]] = [
        (400, '{"error": {"message": "bad tools"}}', InvalidRequest, "bad tools"),
        (422, '{"detail": [{"loc": ["body", "n"], "msg": "no"}]}', InvalidRequest, "n: no"),
        (404, '{"message": "The model x does not exist."}', Migrate, "does not exist"),
        (404, '{"detail": "Not Found"}', InvalidRequest, "Not Found"),
        (429, '{"error": "slow down"}', Overloaded, "slow down"),
        (401, "{}", Unavailable, "key"),
        (503, "{}", Migrate, "not ready"),
        (500, '{"error": {"message": "a secret"}}', HandlerError, "a secret"),
        (302, "{}", Unavailable, "302"),
    ]
    async with worker() as (_, _server, client):
        for status, body, kind, text in expected:
            with pytest.raises(kind, match=text) as raised:
                await texts_of(client, chat(f"status {status} {body}"))
            if isinstance(raised.value, Overloaded):
                assert raised.value.retry_after == 7


async def test_a_stream_that_breaks_says_so() -> None:
    kinds = {"die": StreamLost, "unfinished": StreamLost, "fails": InvalidRequest, "drop": Migrate}
    async with worker() as (_, _server, client):
        for word, kind in kinds.items():
            with pytest.raises(kind):
                await texts_of(client, chat(f"{word} one"))


async def test_what_is_no_request_is_refused() -> None:
    wrong: list[Any] = [[], "text", {"model": "served"}, 7]
    async with worker() as (_, server, client):
        for request in wrong:
            with pytest.raises(InvalidRequest):
                await texts_of(client, raw(request))
    assert not server.asked


async def test_a_worker_waits_for_its_server_and_goes_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_server() as server, TestKit() as kit:
        await server.kill()
        starting = asyncio.ensure_future(kit.start(OpenAiWorker, url=server.url))
        await eventually(lambda: "waiting for" in caplog.text)
        assert not starting.done()
        await server.start()
        instance = await starting
        client = kit.caller.client(OpenAiWorker)
        assert await texts_of(client, chat("say yes")) == ["yes", ""]

        call = client.generate(chat("endless"))
        await anext(call)
        await server.kill()
        with pytest.raises(DynbusError):
            await anext(call)
        await instance.stopped.wait()
    assert "is away" in instance.broken


async def test_a_server_whose_engine_is_dead_is_away() -> None:
    async with worker() as (kit, server, _):
        [instance] = kit.started.values()
        server.health = 503
        await eventually(lambda: instance.broken)
        assert "503" in instance.broken


async def test_the_models_of_a_server_are_those_of_the_bus() -> None:
    async with worker() as (kit, server, _), Catalog(kit.caller) as catalog:
        server.models.append({"id": "later", "max_model_len": 100})
        server.models.append({"id": " no name "})
        await eventually(lambda: [one.card.name for one in catalog.models] == ["later", "served"])
        card = catalog.models[1].card
        assert (card.input, card.context_length) == (ModelInput.Text, 2000)

        server.models.append({"id": "legal", "parent": "served"})
        await eventually(lambda: len(catalog.models) == 3)
        adapter = catalog.models[1].card
        assert (adapter.base_model, adapter.lora_name) == ("served", "legal")
        [instance] = kit.started.values()
        assert instance.actor.instance_metadata()["kv_loras"] == "legal"
        server.models.pop()
        await eventually(lambda: [one.card.name for one in catalog.models] == ["later", "served"])
        server.models = server.models[1:]
        await eventually(lambda: "no longer serves served" in instance.broken)


@asynccontextmanager
async def front_end(kit: TestKit) -> AsyncGenerator[AsyncOpenAI]:
    """A client of a front end that serves the model."""
    front = (await kit.start(Front, port=0)).actor
    assert isinstance(front, Front)
    url = f"{front.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def is_served() -> bool:
            return [model.id async for model in client.models.list()] == ["served"]

        await eventually(is_served)
        yield client


def front_end_of(kit: TestKit) -> HttpFrontEnd:
    """What serves in the front end."""
    [front] = [one.actor for one in kit.started.values() if isinstance(one.actor, Front)]
    serving = front._front_end  # pyright: ignore[reportPrivateUsage]
    assert serving is not None
    return serving


def own_tokenizer(folder: Path) -> dict[str, str]:
    """The option of a worker that names a tokenizer for front ends."""
    (folder / "tokenizer.json").write_bytes(tiny_json())
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    (folder / "chat_template.jinja").write_text(CHATML)
    return {"model": str(folder)}


async def ask(client: AsyncOpenAI, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    create: Any = client.chat.completions.create
    return await create(model="served", messages=messages, **more)


async def test_openai_s_clients_are_answered_through_a_front_end() -> None:
    trace = "a" * 32
    async with worker() as (kit, server, _), front_end(kit) as client:
        headers = {"traceparent": f"00-{trace}-{'b' * 16}-01"}
        answer = await ask(client, "say all of it", extra_headers=headers)
        assert server.asked[0].headers["traceparent"].split("-")[1] == trace
        assert answer.choices[0].message.content == "all of it"
        stream = await ask(client, "say a b", stream=True)
        said = [chunk.choices[0].delta.content async for chunk in stream]
        assert said == ["a", "b", ""]
        with pytest.raises(BadRequestError, match="bad tools"):
            await ask(client, 'status 400 {"error": {"message": "bad tools"}}')
        with pytest.raises(RateLimitError):
            await ask(client, 'status 429 {"error": {"message": "full"}}')
        with pytest.raises(APIError) as failed:
            await ask(client, 'status 500 {"error": {"message": "a secret"}}')
        assert "a secret" not in str(failed.value)


@pytest.mark.parametrize("reader", ["card", "server"])
async def test_an_image_goes_inline_to_the_server_that_had_it_before(
    reader: str, tmp_path: Path
) -> None:
    """Of the same text with another image nothing is expected to be cached."""
    text = {"type": "text", "text": "say " + "the same words again " * 20}
    options = own_tokenizer(tmp_path) if reader == "card" else {}
    async with scripted_server() as server, TestKit() as kit:
        server.takes, server.tokenizes, server.metrics = {"image_url"}, True, VLLM_METRICS
        await kit.start(OpenAiWorker, url=server.url, **options)
        async with front_end(kit) as client:
            create: Any = client.chat.completions.create

            async def reused(data: bytes, *parts: Any) -> int:
                messages = [{"role": "user", "content": [image(data), *parts]}]
                await create(model="served", messages=messages)
                [model] = front_end_of(kit).shared.models.served
                assert model.router is not None
                return model.router.latest_decisions(1)[0].expected_reuse

            first = await reused(png(1), text)
            again = [await reused(png(1), text) for _ in range(2)]
            other = await reused(png(2), text)
            with pytest.raises(BadRequestError, match="this part is a sound"):
                await create(model="served", messages=[{"role": "user", "content": [sound(wav())]}])

    assert first == 0
    assert min(again) > 300
    assert other < 16 if reader == "server" else other < 64
    expected = {**image(png(1)), "uuid": digest(png(1))}
    assert server.asked[0].body["messages"][0]["content"] == [expected, text]


@pytest.mark.parametrize("reader", ["card", "server"])
async def test_requests_go_to_the_server_that_has_cached_most_of_them(
    reader: str, tmp_path: Path
) -> None:
    """By the tokenizer of the card, or by what the servers tell of their prompts."""
    options = own_tokenizer(tmp_path) if reader == "card" else {}
    async with scripted_server() as one, scripted_server() as other, TestKit() as kit:
        for server in (one, other):
            server.metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="500"} 1.0\n'
            server.tokenizes = reader == "server"
            await kit.start(OpenAiWorker, url=server.url, **options)
        rounds = 0
        async with front_end(kit) as client:
            for number in range(60):
                # A prompt that nobody holds goes to either: of six, all may go to the same.
                if number >= 6 and one.asked and other.asked:
                    break
                rounds = number + 1
                text = f"say {number} " * 40
                for stream in (False, True):
                    await ask(client, text, stream=stream)
                completion: Any = client.completions.create
                await completion(model="served", prompt=f"{number} of it " * 40)
                await completion(model="served", prompt=f"{number} of it " * 40)

    def prompts(server: ScriptedServer) -> list[str]:
        return [str(asked.body.get("messages") or asked.body["prompt"]) for asked in server.asked]

    assert all(prompts(one).count(prompt) == 2 for prompt in prompts(one))
    assert len(set(prompts(one))) + len(set(prompts(other))) == 2 * rounds
    assert prompts(one)
    assert prompts(other)


async def test_what_cannot_be_used_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"url": "ftp://x"}, "give http://HOST:PORT"),
        ({"url": "http://me:secret@x"}, "key_file or key_variable"),
        ({"url": "http://x:99999"}, "not usable"),
        ({"url": "http://x/v1?a=b"}, "query"),
        ({"url": "http://a,"}, "url has 2 values|not usable"),
        ({"url": "http://x", "key_file": "/no/such/file"}, "cannot be read"),
        ({"url": "http://x", "key_variable": "NO_SUCH_KEY"}, "no usable key"),
        ({"url": "http://x", "key_variable": "A", "key_file": "b"}, "not both"),
        ({"url": "http://x", "ranks": 0}, "ranks=0: give a whole number from 1 to"),
        ({"url": "http://x", "kv_replay": "tcp://x:1"}, "needs kv_events"),
        ({"url": "http://x,http://y", "kv_events": "tcp://x:1"}, "one for each url"),
        ({"url": f"http://{'x' * 300}"}, "not usable"),
    ]
    async with TestKit() as kit:
        for options, reason in refused:
            with pytest.raises(ConfigError, match=reason) as raised:
                await kit.start(OpenAiWorker, **options)
            assert "secret" not in str(raised.value)


async def test_a_wrong_key_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-wrong")
    async with scripted_server() as server, TestKit() as kit:
        server.key = "sk-right"
        with pytest.raises(ConfigError, match="refuses its key") as raised:
            await kit.start(OpenAiWorker, url=server.url, key_variable="SERVER_KEY")
    assert "sk-" not in str(raised.value)


FAST: dict[str, Any] = {"hang_least": 0.5, "hang_limit": 1.0}


async def test_a_server_that_hangs_is_withdrawn_and_served_again_when_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_server() as hanging, scripted_server() as other, TestKit() as kit:
        first = await kit.start(OpenAiWorker, url=hanging.url, **FAST)
        client = kit.caller.client(OpenAiWorker)
        assert await texts_of(client, chat("stream one")) == ["one", ""]
        hanging.hangs = True
        waiting = asyncio.create_task(texts_of(client, chat("stream two three")))
        await eventually(lambda: len(hanging.asked) == 2)
        second = await kit.start(OpenAiWorker, url=other.url, **FAST)

        # It has got nothing yet, so that it is asked elsewhere.
        assert await waiting == ["two", "three", ""]
        await first.stopped.wait()
        # Its list of models is there all the time.
        starting = asyncio.create_task(kit.start(OpenAiWorker, url=hanging.url, **FAST))
        await eventually(lambda: hanging.probes >= 4)
        assert not starting.done()
        hanging.hangs = False
        third = await starting

        assert [second.broken, third.broken] == ["", ""]
    assert "hangs: nothing has come for any open request (1) in" in first.hung
    assert "It is not ended, which is for its owner" in first.hung
    assert "it answers no request for a token" in caplog.text


async def test_a_server_that_says_nothing_for_long_and_answers_a_probe_does_not_hang() -> None:
    async with worker(**FAST) as (kit, server, client):
        [instance] = kit.started.values()
        reading = asyncio.create_task(texts_of(client, chat("silent")))
        await eventually(lambda: server.probes >= 3)
        assert instance.broken == ""
        reading.cancel()


async def test_a_reader_that_takes_nothing_makes_no_server_hang() -> None:
    async with worker(**FAST) as (kit, server, client):
        [instance] = kit.started.values()
        stream = client.generate(chat("stream " + "word" * 2000 + " " + "more " * 20_000))
        await anext(stream)
        probes = server.probes
        await asyncio.sleep(3.0)
        assert (server.probes, instance.broken) == (probes, "")
        await stream.aclose()
