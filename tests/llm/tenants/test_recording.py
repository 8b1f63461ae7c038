"""Front ends that write what their tenants have used."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.llm.http.served import Served, served
from tests.llm.http.test_embeddings import EMBEDDING
from tests.llm.tenants.test_front_end import ask, client_of, keys_file

from dynbus import ConfigError, Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.answers import Usage
from dynbus.llm.commands.usage import usage as usage_command
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.tenants.keys import key_id
from dynbus.llm.tenants.recording import USAGE_STREAM, UsageRecorder
from dynbus.llm.tenants.records import hash_of
from dynbus.llm.tenants.usage import Payer, Tally
from dynbus.llm.tenants.usage_sums import UsageSum, read_usage, sum_up

pytestmark = pytest.mark.anyio

LATE = 10.0**11


@asynccontextmanager
async def with_keys(folder: Path) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    async with (
        served(EMBEDDING, api_keys=keys_file(folder, "")) as front,
        client_of(front.url) as client,
    ):
        # The bucket is made when something is to be written first.
        await ask(client)
        await eventually(lambda: has_stored(front), what="the bucket is there")
        yield front, client


async def has_stored(front: Served) -> bool:
    return bool(await sums(front))


async def sums(front: Served, *by: str) -> list[UsageSum]:
    jetstream = front.kit.caller.bus.data.jetstream
    return sum_up(await read_usage(jetstream, 0.0, LATE), by)


async def test_what_is_used_is_there_before_its_client_is_told_the_end(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (front, client):
        [before] = await sums(front)
        whole = await ask(client, "say one two")
        [after_whole] = await sums(front)
        stream = await ask(
            client, "say one two three", stream=True, stream_options={"include_usage": True}
        )
        told = [chunk.usage async for chunk in stream if chunk.usage is not None][0]
        [after_stream] = await sums(front)
        texts = await client.embeddings.create(model="tiny", input=["a b", "c"])
        [after_texts] = await sums(front)

    def more(one: UsageSum, other: UsageSum) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(one[1:], other[1:], strict=True))

    # The engine says that it had three in its cache.
    used = whole.usage
    assert more(before, after_whole) == (1, used.prompt_tokens, 3, used.completion_tokens)
    assert more(after_whole, after_stream) == (1, told.prompt_tokens, 3, told.completion_tokens)
    assert more(after_stream, after_texts)[:2] == (1, texts.usage.prompt_tokens)


async def test_usage_is_told_apart_by_tenant_key_model_and_instance(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (front, client), client_of(front.url, "key-of-bob") as bob:
        await ask(bob, "say hi")
        await ask(client, "say hi")
        rows = await sums(front, "tenant", "key", "model", "instance")

    instances = {row.group.pop("instance") for row in rows}
    assert [(row.group, row.requests) for row in rows] == [
        ({"tenant": "ada", "key": key_id(hash_of("key-of-ada")), "model": "tiny"}, 2),
        ({"tenant": "bob", "key": key_id(hash_of("key-of-bob")), "model": "tiny"}, 1),
    ]
    assert len(instances) == 1
    assert "" not in instances


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
async def test_an_engine_that_takes_text_tells_the_usage_of_streams_and_clients_what_they_asked_for(
    tmp_path: Path, options: dict[str, bool] | None
) -> None:
    async with (
        served(api_keys=keys_file(tmp_path, "")) as front,
        client_of(front.url) as client,
    ):
        fields: dict[str, Any] = {} if options is None else {"stream_options": options}
        chunks = [one async for one in await ask(client, model="text", stream=True, **fields)]
        await eventually(lambda: has_stored(front), what="it is written")
        [used] = await sums(front)

    assert (used.requests, used.prompt, used.completion) == (1, 11, 4)
    told = [chunk.usage.total_tokens for chunk in chunks if chunk.usage is not None]
    assert told == ([15] if options == {"include_usage": True} else [])
    assert [bool(chunk.choices) for chunk in chunks] == [True, True, *(False for _ in told)]


async def test_a_client_that_leaves_is_counted_and_one_that_is_refused_is_not(
    tmp_path: Path,
) -> None:
    async with with_keys(tmp_path) as (front, client):
        [before] = await sums(front)
        with pytest.raises(Exception, match="nobody"):
            await ask(client, model="nobody's")
        with pytest.raises(openai.BadRequestError, match="this prompt is refused"):
            await ask(client, "refuse it")
        for streams in (False, True):
            with pytest.raises(openai.RateLimitError, match="the engine is full"):
                await ask(client, "overloaded it", stream=streams)
        stream = await ask(client, "endless word", stream=True)
        count = 0
        async for _ in stream:
            count += 1
            if count > 20:
                break
        # It is counted while it runs.
        await eventually(lambda: has_counted(front, before, 10), what="it is counted meanwhile")
        await stream.close()
        await eventually(lambda: front.engine.running == 0)
        await eventually(lambda: has_counted(front, before, count - 2), what="all is counted")
        [after] = await sums(front)

    assert after.requests == before.requests + 1


async def has_counted(front: Served, before: UsageSum, tokens: int) -> bool:
    [after] = await sums(front)
    return after.completion >= before.completion + tokens


async def test_a_stream_that_goes_on_at_another_front_end_counts_once(tmp_path: Path) -> None:
    file = keys_file(tmp_path, "")
    async with with_keys(tmp_path) as (front, _), httpx2.AsyncClient(timeout=60.0) as client:
        settings = HttpSettings(port=0, grace=1.0, api_keys=file)
        async with HttpFrontEnd(front.kit.caller, front.catalog, settings) as second:
            await eventually(lambda: len(second.shared.models.served) == len(EMBEDDING))
            [before] = await sums(front)
            headers = {"Authorization": "Bearer key-of-ada"}
            asked = {**headers, "Dynbus-Resumable": "1", "X-Request-Id": "one"}
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "slowly a b c d e f g h i j k"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            path = "/v1/chat/completions"
            async with client.stream("POST", front.url + path, json=body, headers=asked) as answer:
                assert answer.headers["dynbus-resumable"] == "1"
                async for _ in answer.aiter_text():
                    break
            await front.front_end.close()
            rest = await client.get(f"{second.url}/v1/streams/one", headers=headers)
            [after] = await sums(front)

    events = [line.removeprefix("data: ") for line in rest.text.splitlines()]
    told = next(json.loads(one)["usage"] for one in reversed(events) if '"usage":{' in one)
    assert after.requests == before.requests + 1
    assert after.prompt == before.prompt + told["prompt_tokens"]
    assert after.completion == before.completion + told["completion_tokens"]


class _Work:
    """Work for a request that has come to some tokens."""

    usage = None
    instances = ("one",)


async def test_what_cannot_be_stored_is_stored_once_it_can(own_server: RunningServer) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        jetstream = runtime.bus.data.jetstream

        async def total() -> int:
            found = sum_up(await read_usage(jetstream, 0.0, LATE), ())
            return found[0].total if found else 0

        async with UsageRecorder(runtime, "front") as recorder:

            def use(tokens: int) -> None:
                tally = Tally(Payer("ada", "k", "tiny"))
                recorder.begin(tally, _Work())
                recorder.end(tally, Usage(tokens, 0))

            use(1)
            await eventually(lambda: total_is(total, 1), what="the first is stored")
            own_server.pause()
            use(10)
            own_server.resume()
            await eventually(lambda: total_is(total, 11), what="the second is stored")
            await jetstream.delete_stream(USAGE_STREAM.name)
            use(100)
            await eventually(lambda: total_is(total, 111), what="all of the hour is stored again")


async def total_is(total: Any, wanted: int) -> bool:
    return bool(await total() == wanted)


async def test_the_command_prints_sums_by_groups_as_table_csv_and_json(
    own_server: RunningServer,
) -> None:
    async def write() -> None:
        async with (
            Runtime.connect(own_server.url) as runtime,
            UsageRecorder(runtime, "front") as recorder,
        ):
            for tenant, tokens in (("ada", 1200), ("bob", 30)):
                tally = Tally(Payer(tenant, "k", "tiny"))
                recorder.begin(tally, _Work())
                recorder.end(tally, Usage(tokens, 5, 600 if tenant == "ada" else 0))

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(usage_command, [*arguments, "--nats", own_server.url])

    empty = await asyncio.to_thread(run)
    await write()
    table = await asyncio.to_thread(run)
    as_csv = await asyncio.to_thread(run, "--by", "month,tenant", "--csv")
    as_json = await asyncio.to_thread(run, "--tenant", "bob", "--since", "all", "--json")
    past = await asyncio.to_thread(run, "--until", "2026-01-01", "--since", "2025-12-01")
    misspelt = await asyncio.to_thread(run, "--tenant", "bobb")
    past_of_bob = await asyncio.to_thread(
        run, "--tenant", "bob", "--until", "2026-01-01", "--since", "2025-12-01"
    )
    no_group = await asyncio.to_thread(run, "--by", "model,tenants")
    one_day = await asyncio.to_thread(run, "--since", "2026-01-01", "--until", "2026-01-01")
    future = await asyncio.to_thread(run, "--since", "2999-01-01")
    nobody = await asyncio.to_thread(run, "--tenant", "")
    two_forms = await asyncio.to_thread(run, "--csv", "--json")

    told = "no use of a tenant bobb is on record (did you mean bob?): "
    assert misspelt.output.startswith(told)
    for none in (empty, past, past_of_bob):
        assert "nothing was used" in none.output
        assert "front ends count where they have keys" in none.output
    assert "--since is not before --until" in str(one_day.exception)
    assert "--since is not before now" in str(future.exception)
    lines = [line.split() for line in table.output.splitlines()]
    assert lines[1] == ["ada", "tiny", "1", "1,200", "600", "5", "1,205", "50.0%"]
    assert lines[3] == ["all", "2", "1,230", "600", "10", "1,240", "48.8%"]
    rows = [*csv.reader(io.StringIO(as_csv.output))]
    assert rows[0] == ["month", "tenant", "requests", "prompt", "cached", "completion", "total"]
    assert [row[1:] for row in rows[1:]] == [
        ["ada", "1", "1200", "600", "5", "1205"],
        ["bob", "1", "30", "0", "5", "35"],
    ]
    [row] = json.loads(as_json.output)
    assert (row["tenant"], row["model"], row["total"]) == ("bob", "tiny", 35)
    assert isinstance(no_group.exception, ConfigError)
    assert "did you mean tenant?" in str(no_group.exception)
    assert isinstance(nobody.exception, ConfigError)
    assert "'' is no tenant" in str(nobody.exception)
    assert isinstance(two_forms.exception, ConfigError)
    assert "give one of them" in str(two_forms.exception)
