"""Front ends that hold tenants to their limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.llm.http.served import CARDS, FixedCatalog, ScriptedEngine, Served, card, served

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.http.description import DOCUMENT
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.tenants.keys import tenant_token
from dynbus.llm.tenants.limits import BUDGET, Limits
from dynbus.llm.tenants.purse import Purse
from dynbus.llm.tenants.records import KEYS_BUCKET, KeyRecord, LimitsRecord, hash_of
from dynbus.spi import unix_time

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_window")]

KEY = "key-of-ada"


def keys_file(folder: Path, limits: str) -> Path:
    path = folder / "keys"
    path.write_text(f"ada {KEY} {limits}\nbob key-of-bob\n")
    return path


def client_of(url: str, key: str = KEY) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def ask(client: AsyncOpenAI, text: str = "say hi", **fields: Any) -> Any:
    """A chat that is asked for; a stream of it where `fields` say so."""
    create: Any = client.chat.completions.create
    return create(**_chat(text, fields))


def ask_raw(client: AsyncOpenAI, text: str = "say hi", **fields: Any) -> Any:
    """The same with the headers of the answer."""
    create: Any = client.chat.completions.with_raw_response.create
    return create(**_chat(text, fields))


def _chat(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def limited(folder: Path, limits: str) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    """A front end whose tenant has limits, and its client."""
    async with served(api_keys=keys_file(folder, limits)) as front, client_of(front.url) as client:
        yield front, client


async def refused(asking: Any) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as raised:
        await asking
    return raised.value


def limits_told(headers: Mapping[str, str]) -> dict[str, str]:
    told = {name.lower(): value for name, value in headers.items()}
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in told.items()
        if name.startswith("x-ratelimit-") and "reset" not in name
    }


def purse_of(front_end: HttpFrontEnd) -> Purse:
    tenants = front_end.shared.tenants
    assert tenants is not None
    limits = tenants.limits_of("ada")
    assert limits is not None
    return tenants.counts.purse("ada", limits)


async def test_requests_of_a_minute_are_counted_told_and_refused(tmp_path: Path) -> None:
    async with limited(tmp_path, "requests_per_minute=3") as (front, client):
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask(client, model="nobody's")
        answers = [await ask_raw(client) for _ in range(2)]
        error = await refused(ask(client))
        async with client_of(front.url, "key-of-bob") as other:
            unlimited = await ask_raw(other)

    assert [limits_told(one.headers) for one in (unknown.value.response, *answers)] == [
        {"limit-requests": "3", "remaining-requests": left} for left in ("2", "1", "0")
    ]
    assert limits_told(error.response.headers) == {"limit-requests": "3", "remaining-requests": "0"}
    assert error.code == "rate_limit_exceeded"
    assert error.type == "rate_limit_error"
    assert "requests_per_minute=3" in error.message
    assert 1 <= int(error.response.headers["retry-after"]) <= 60
    assert limits_told(unlimited.headers) == {}


async def test_tokens_are_reserved_and_settled_with_what_was_used(tmp_path: Path) -> None:
    limits = "prompt_tokens_per_minute=1000 completion_tokens_per_minute=100"
    async with limited(tmp_path, f"{limits} cached_tokens_per_minute=1000") as (front, client):
        answer = await ask_raw(client, max_tokens=90)
        used = answer.parse().usage
        assert used is not None
        purse = purse_of(front.front_end)
        await eventually(lambda: not purse.open)
        left = {name: purse.remaining(name) for name in purse.limits}
        error = await refused(ask(client, max_tokens=101))
        fits = await ask(client, max_tokens=100 - used.completion_tokens)

    assert limits_told(answer.headers) == {"limit-tokens": "100", "remaining-tokens": "10"}
    assert left == {
        # The engine says that it had three in its cache.
        "prompt_tokens_per_minute": 1000 - (used.prompt_tokens - 3),
        "completion_tokens_per_minute": 100 - used.completion_tokens,
        "cached_tokens_per_minute": 1000 - 3,
    }
    assert "completion_tokens_per_minute" in error.message
    assert fits.choices[0].message.content == "hi"


@pytest.mark.parametrize("how", ["error", "leaves", "refused"])
async def test_whatever_the_end_tokens_are_settled(tmp_path: Path, how: str) -> None:
    limits = "completion_tokens_per_minute=500 requests_at_a_time=1"
    async with limited(tmp_path, limits) as (front, client):
        if how == "leaves":
            stream = await ask(client, "endless word", stream=True, max_tokens=400)
            async for _ in stream:
                break
            await stream.close()
        else:
            text = "fail" if how == "error" else "refuse"
            with pytest.raises(openai.APIStatusError):
                await ask(client, text, max_tokens=400)
        purse = purse_of(front.front_end)
        await eventually(lambda: not purse.open)
        assert purse.remaining("requests_at_a_time") == 1
        left = purse.remaining("completion_tokens_per_minute")

    assert left == 500 if how != "leaves" else 400 < left < 500


async def test_a_budget_that_is_used_up_is_said_as_openai_says_it(tmp_path: Path) -> None:
    async with limited(tmp_path, "tokens_per_month=60") as (_, client):
        first = await ask(client, max_tokens=5)
        error = await refused(ask(client, max_tokens=59))

    assert first.usage is not None
    assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
    assert error.response.headers["x-should-retry"] == "false"


async def test_a_request_that_no_wait_helps_is_told_so(tmp_path: Path) -> None:
    limits = "prompt_tokens_per_minute=100 completion_tokens_per_minute=500"
    async with limited(tmp_path, limits) as (_, client):
        unbounded = await refused(ask(client))
        long = await refused(ask(client, "say " + "hi " * 200, max_tokens=5))
        await ask(client, max_tokens=400)
        later = await refused(ask(client, max_tokens=500))

    assert "takes 1024, and the limit completion_tokens_per_minute=500" in unbounded.message
    assert "ask for fewer max_tokens (1024 count where a request says none" in unbounded.message
    assert "prompt_tokens_per_minute=100 of the tenant ada never leaves so much" in long.message
    assert "shorten the prompt" in long.message
    for error in (unbounded, long):
        assert error.code == "rate_limit_exceeded"
        assert error.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.response.headers
    assert "and this request takes 500: ask again in" in later.message
    assert "retry-after" in later.response.headers


async def test_requests_at_a_time_have_a_limit_for_all_front_ends(tmp_path: Path) -> None:
    file = keys_file(tmp_path, "requests_at_a_time=1")
    async with served(api_keys=file) as first:
        settings = HttpSettings(port=0, grace=1.0, api_keys=file)
        async with (
            HttpFrontEnd(first.kit.caller, first.catalog, settings) as second,
            client_of(first.url) as one,
            client_of(second.url) as other,
        ):
            await eventually(lambda: len(second.shared.models.served) == 4)
            running = asyncio.create_task(ask(one, "silent", timeout=60.0))
            await eventually(lambda: first.engine.running == 1)
            error = await refused(ask(other))
            running.cancel()
            await eventually(lambda: first.engine.running == 0)

            # The first one gives its place back, since it needs it no more.
            patient = other.with_options(max_retries=10)
            await ask(patient)

    assert "requests_at_a_time=1" in error.message
    assert error.response.headers["retry-after"] == "1"


async def test_models_priorities_and_prompts_that_a_key_may_not_have(tmp_path: Path) -> None:
    limits = "models=tiny,mine max_priority=1 max_prompt_tokens=60"
    async with limited(tmp_path, limits) as (front, client):
        listed = [model.id async for model in await client.models.list()]
        with pytest.raises(openai.PermissionDeniedError, match="may not ask the model 'plain'"):
            await ask(client, model="plain")
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.models.retrieve("plain")
        with pytest.raises(openai.NotFoundError) as away:
            await ask(client, model="mine")
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(base_url=front.url, headers=headers) as raw:
            document = (await raw.get("/openapi.json")).text
            tokens = await raw.post("/tokenize", json={"prompt": "hi"})
        with pytest.raises(openai.BadRequestError, match="priority: this key may ask for 1"):
            await ask(client, extra_body={"priority": 2})
        with pytest.raises(openai.BadRequestError, match="those of this key have 60"):
            await ask(client, "say " + "hi " * 200)
        fits = await ask(client, extra_body={"priority": 1})

    assert listed == ["tiny"]
    assert "there is no model 'plain'; the models are: tiny" in unknown.value.message
    assert "there is no model 'mine'; the models are: tiny" in away.value.message
    assert tokens.json()["tokens"]
    for text in (unknown.value.message, away.value.message, document):
        assert "bare" not in text
    assert fits.choices[0].message.content == "hi"


async def test_a_request_that_states_no_priority_has_the_highest_that_its_key_may_ask_for(
    tmp_path: Path,
) -> None:
    cards = {
        **CARDS,
        "vectors": card("vectors", "test.ScriptedEngine.embed", types=["embedding"]),
        "text": card("text", "test.TextEngine.chat", input="text", types=["chat"]),
    }
    messages = [{"role": "user", "content": "say hi"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "tiny", "messages": messages}),
        ("/v1/chat/completions", {"model": "tiny", "messages": messages, "priority": -5}),
        ("/v1/chat/completions", {"model": "text", "messages": messages, "priority": None}),
        ("/v1/completions", {"model": "tiny", "prompt": "say hi"}),
        ("/v1/responses", {"model": "tiny", "input": "say hi"}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": messages}),
        ("/tokenize", {"model": "tiny", "prompt": "hi"}),
        ("/v1/embeddings", {"model": "vectors", "input": "hi"}),
        ("/v1/score", {"model": "vectors", "text_1": "hi", "text_2": "so"}),
        ("/v1/rerank", {"model": "vectors", "query": "hi", "documents": ["so"]}),
        ("/v1/chat/completions", {"model": "tiny", "messages": messages, "priority": 0}),
    ]
    file = keys_file(tmp_path, "max_priority=-1")
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        served(cards, api_keys=file) as front,
        httpx2.AsyncClient(base_url=front.url, headers=headers) as client,
    ):
        answers = [await client.post(path, json=body) for path, body in asked]
        engine, texts = front.engine, front.text.requests

    assert [one.status_code for one in answers] == [200] * (len(asked) - 1) + [400]
    assert "this key may ask for -1 at most, not 0" in answers[-1].text
    assert [one.priority for one in engine.requests] == [-1, -5, -1, -1, -1]
    assert {one.priority for one in engine.texts} == {-1}
    assert [one["priority"] for one in texts] == [-1]


async def test_resumable_streams_and_kept_answers_have_limits(tmp_path: Path) -> None:
    async with limited(tmp_path, "open_streams=1 kept_answers=1") as (front, client):
        resumable = {"Dynbus-Resumable": "1"}
        first = await ask_raw(
            client, "slowly " + "word " * 200, stream=True, extra_headers=resumable
        )
        second = await ask_raw(client, "say hi", stream=True, extra_headers=resumable)
        for key in ("one", "two"):
            await ask(client, extra_headers={"Idempotency-Key": key})
        await eventually(lambda: len(front.front_end.shared.kept_answers) == 1)

    assert first.headers["dynbus-resumable"] == "1"
    assert second.headers["dynbus-resumable"] == "0"
    assert "open_streams=1" in second.headers["dynbus-resumable-reason"]


async def test_a_stream_that_goes_on_at_another_front_end_is_counted_once(tmp_path: Path) -> None:
    file = keys_file(tmp_path, "tokens_per_month=1500")
    key = {"Authorization": f"Bearer {KEY}"}
    async with served(api_keys=file) as front:
        settings = HttpSettings(port=0, grace=1.0, api_keys=file)
        async with (
            HttpFrontEnd(front.kit.caller, front.catalog, settings) as other,
            client_of(other.url) as client,
        ):
            await eventually(lambda: len(other.shared.models.served) == 4)
            stream = await ask(
                client,
                "slowly " + "word " * 40,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"Dynbus-Resumable": "1", "X-Request-Id": "one"},
            )
            async for _ in stream:
                break
            await stream.close()
        async with httpx2.AsyncClient(headers=key, timeout=60.0) as reader:
            rest = await reader.get(
                f"{front.url}/v1/streams/one", headers={"Last-Event-ID": "one.1"}
            )
        usages = [
            json.loads(line[6:])["usage"] for line in rest.text.splitlines() if '"usage":{' in line
        ]
        purse = purse_of(front.front_end)
        await eventually(lambda: not purse.open)
        left = 1500 - usages[-1]["total_tokens"]
        await eventually(lambda: purse.remaining(BUDGET) == left)

    assert front.front_end.shared.resumable.counts["taken_over"] == 1


async def test_embeddings_and_engines_that_take_text_are_counted(tmp_path: Path) -> None:
    cards = {
        "vectors": card("vectors", "test.ScriptedEngine.embed", types=["embedding"]),
        "text": card("text", "test.TextEngine.chat", input="text", types=["chat"]),
    }
    file = keys_file(tmp_path, "prompt_tokens_per_minute=500 completion_tokens_per_minute=2000")
    async with served(cards, api_keys=file) as front, client_of(front.url) as client:
        told = await client.embeddings.create(model="vectors", input="hello there")
        purse = purse_of(front.front_end)
        await eventually(lambda: not purse.open)
        after_embedding = purse.remaining("prompt_tokens_per_minute")
        await ask(client, model="text")
        await eventually(lambda: not purse.open)
        left = [purse.remaining(f"{what}_tokens_per_minute") for what in ("prompt", "completion")]

    assert after_embedding in (500 - told.usage.prompt_tokens, 501 - told.usage.prompt_tokens)
    assert left[0] < after_embedding
    # A chunk of its answer counts for a token.
    assert left[1] == 2000 - 2


async def test_scores_are_counted_by_the_tokens_of_their_texts(tmp_path: Path) -> None:
    cards = {"vectors": card("vectors", "test.ScriptedEngine.embed", types=["embedding"])}
    file = keys_file(tmp_path, "tokens_per_month=500")
    body = {"model": "vectors", "query": "hello there", "documents": ["hi", "hi"]}
    async with served(cards, api_keys=file) as front, client_of(front.url) as client:
        ranked: Any = await client.post("/rerank", body=body, cast_to=object)
        purse = purse_of(front.front_end)
        await eventually(lambda: not purse.open)
        left = purse.remaining(BUDGET)
        with pytest.raises(openai.RateLimitError):
            await client.post(
                "/rerank", body={**body, "documents": ["word " * 300]}, cast_to=object
            )

    assert left == 500 - ranked["usage"]["total_tokens"]


async def test_the_limit_of_a_prompt_is_that_of_each_text_to_embed_or_pair(tmp_path: Path) -> None:
    cards = {"vectors": card("vectors", "test.ScriptedEngine.embed", types=["embedding"])}
    file = keys_file(tmp_path, "max_prompt_tokens=20")
    texts = ["hello there"] * 5
    async with served(cards, api_keys=file) as front, client_of(front.url) as client:
        embedded = await client.embeddings.create(model="vectors", input=texts)
        body = {"model": "vectors", "query": "hello there", "documents": ["hello two", "hello"]}
        ranked: Any = await client.post("/rerank", body=body, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="those of this key have 20"):
            await client.embeddings.create(model="vectors", input=[*texts, "word " * 20])

    assert embedded.usage.prompt_tokens > 20
    assert ranked["usage"]["total_tokens"] > 20


@pytest.mark.parametrize("streams", [False, True])
async def test_an_engine_that_takes_text_is_counted_by_what_it_tells(
    tmp_path: Path, streams: bool
) -> None:
    cards = {"text": card("text", "test.TextEngine.chat", input="text", types=["chat"])}
    file = keys_file(tmp_path, "prompt_tokens_per_minute=500 completion_tokens_per_minute=9000")
    async with served(cards, api_keys=file) as front, client_of(front.url) as client:
        front.text.usage = {
            "prompt_tokens": 100,
            "completion_tokens": 4000,
            "prompt_tokens_details": {"cached_tokens": None},
        }
        answer = await ask(client, model="text", stream=streams)
        if streams:
            assert [one async for one in answer]
        purse = purse_of(front.front_end)
        await eventually(lambda: not purse.open)
        left = [purse.remaining(f"{what}_tokens_per_minute") for what in ("prompt", "completion")]

    assert left == [400, 5000]


async def put_key(front: Served, key: str, record: KeyRecord) -> None:
    """Have a key on the bus, and its front end know it."""
    jetstream = front.kit.caller.bus.data.jetstream
    await jetstream.publish(f"$KV.{KEYS_BUCKET}.key.{hash_of(key)}", msgspec.json.encode(record))
    tenants = front.front_end.shared.tenants
    assert tenants is not None
    await eventually(partial(tenants.holder_of, key))


async def key_of(url: str, key: str = KEY) -> Any:
    """What a front end tells of a key."""
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
        answer = await client.get(f"{url}/v1/key")
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), DOCUMENT["components"]["schemas"]["Key"])
    return answer.json()


async def test_a_key_is_told_what_its_tenant_has_used_and_left(tmp_path: Path) -> None:
    limits = "tokens_per_month=500 requests_per_minute=10 requests_at_a_time=4 models=tiny"
    async with limited(tmp_path, limits) as (front, client):
        before = await key_of(front.url)
        answer = await ask_raw(client, max_tokens=5)
        running = asyncio.create_task(ask(client, "silent", max_tokens=1, timeout=60.0))
        await eventually(lambda: front.engine.running == 1)
        told = (await key_of(front.url))["tenant"]
        running.cancel()
        other = await key_of(front.url, "key-of-bob")
        async with httpx2.AsyncClient() as stranger:
            refused = await stranger.get(f"{front.url}/v1/key")

    assert before["object"] == "key"
    assert (before["is_operator"], len(before["id"])) == (False, 12)
    assert told["name"] == "ada"
    assert told["is_current"]
    assert told["limits"] == {
        "tokens_per_month": 500,
        "requests_per_minute": 10,
        "requests_at_a_time": 4,
        "models": ["tiny"],
    }
    usage = {name: (one["used"], one["remaining"]) for name, one in told["usage"].items()}
    assert answer.headers["x-ratelimit-remaining-requests"] == "9"
    assert usage["requests_per_minute"] == (2, 8)
    assert usage["requests_at_a_time"] == (1, 3)
    # Also what the request that runs may come to.
    assert sum(usage["tokens_per_month"]) == 500
    assert usage["tokens_per_month"][0] > answer.parse().usage.total_tokens
    assert told["usage"]["requests_at_a_time"]["resets_at"] is None
    assert other["tenant"] == {"name": "bob", "limits": {}, "usage": {}, "is_current": True}
    assert refused.status_code == 401


async def test_a_key_that_has_expired_lets_nobody_in() -> None:
    keys = {
        "key-that-expired": KeyRecord(tenant="ada", expires=1_700_000_000.0),
        "key-that-counts": KeyRecord(tenant="ada", name="ci", expires=unix_time() + 3600.0),
    }
    async with served(keys_from_bus=True) as front:
        for key, record in keys.items():
            await put_key(front, key, record)
        told = await key_of(front.url, "key-that-counts")
        async with client_of(front.url, "key-that-counts") as client:
            answer = await ask(client)
        async with client_of(front.url, "key-that-expired") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await ask(client)

    assert (told["name"], told["expires_at"]) == ("ci", keys["key-that-counts"].expires)
    assert answer.choices[0].message.content == "hi"
    assert refused.value.code == "invalid_api_key"
    assert "this key expired at 2023-11-14 22:13:20 UTC" in refused.value.message


async def test_a_key_has_limits_of_its_own_within_those_of_its_tenant() -> None:
    tenant = LimitsRecord(tenant="ada", limits=Limits(models=("tiny", "plain"), max_priority=3))
    own = Limits(requests_per_minute=1, models=("tiny", "bare"), max_priority=1)
    keys = {
        "key-with-limits": KeyRecord(tenant="ada", limits=own),
        "key-without-any": KeyRecord(tenant="ada"),
    }
    async with served(keys_from_bus=True) as front:
        jetstream = front.kit.caller.bus.data.jetstream
        subject = f"$KV.{KEYS_BUCKET}.limits.{tenant_token('ada')}"
        await jetstream.publish(subject, msgspec.json.encode(tenant))
        for key, record in keys.items():
            await put_key(front, key, record)
        await eventually(lambda: front.front_end.shared.limits_of("ada") == tenant.limits)
        async with (
            client_of(front.url, "key-with-limits") as client,
            client_of(front.url, "key-without-any") as free,
        ):
            listed = [
                {model.id async for model in await one.models.list()} for one in (client, free)
            ]
            answer = await ask_raw(client, extra_body={"priority": 1})
            error = await refused(ask(client))
            other = await ask_raw(free, extra_body={"priority": 3})
        told = await key_of(front.url, "key-with-limits")

    assert listed == [{"tiny"}, {"tiny", "plain"}]
    assert limits_told(answer.headers) == {"limit-requests": "1", "remaining-requests": "0"}
    assert "the limit requests_per_minute=1 of this key leaves 0" in error.message
    assert limits_told(other.headers) == {}
    assert told["usage"]["requests_per_minute"]["remaining"] == 0
    assert told["limits"]["models"] == ["tiny", "bare"]
    assert told["tenant"]["usage"] == {}


@asynccontextmanager
async def engine(server: RunningServer) -> AsyncGenerator[None]:
    async with Runtime.connect(server.url) as runtime:
        await runtime.start(ScriptedEngine)
        yield


@asynccontextmanager
async def front_end(
    server: RunningServer, file: Path
) -> AsyncGenerator[tuple[HttpFrontEnd, AsyncOpenAI]]:
    """A front end of a process of its own, as it were, and its client."""
    catalog = FixedCatalog({"tiny": card("tiny", "test.ScriptedEngine.generate")})
    settings = HttpSettings(port=0, grace=1.0, api_keys=file)
    async with (
        Runtime.connect(server.url) as runtime,
        HttpFrontEnd(runtime, catalog, settings) as front,
        client_of(front.url) as client,
    ):
        await eventually(lambda: len(front.shared.models.served) == 1)
        yield front, client


async def test_two_front_ends_on_a_server_share_a_limit(
    own_server: RunningServer, tmp_path: Path
) -> None:
    file = keys_file(tmp_path, "tokens_per_month=1500 requests_per_minute=100000")
    async with (
        engine(own_server),
        front_end(own_server, file) as (first, one),
        front_end(own_server, file) as (second, other),
    ):
        used = 0
        for turn in range(6):
            client = (one, other)[turn % 2]
            answer = await ask(client, max_tokens=10)
            assert answer.usage is not None
            used += answer.usage.total_tokens
        purses = [purse_of(front) for front in (first, second)]
        await eventually(lambda: not any(purse.open for purse in purses))
        async with front_end(own_server, file) as (third, _):
            # It has had no request of the tenant.
            await eventually(lambda: all(one.remaining(BUDGET) == 1500 - used for one in purses))
            told = (await key_of(third.url))["tenant"]["usage"][BUDGET]
        # Each knows what the other has used a second later.
        left = 1500 - used
        await eventually(lambda: [one.remaining(BUDGET) for one in purses] == [left, left])
        error = await refused(ask(other, max_tokens=left))

    assert (told["used"], told["remaining"]) == (used, left)
    assert error.code == "insufficient_quota"
