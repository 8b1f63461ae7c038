"""Batches, as the `openai` package asks for them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.llm.media.samples import digest, image, png

from dynbus.actors.calling.jobs import JobQueue
from dynbus.bus.records.objects import ObjectBucket, ObjectStore
from dynbus.llm.batches import asking, looks, service, store, worker
from dynbus.llm.batches.lines import LineChecker
from dynbus.llm.batches.store import FILES
from dynbus.llm.http.batches import MAX_FORM, Form
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.tenants.limits import Limits
from dynbus.llm.tenants.records import KEYS_BUCKET, KeyRecord, hash_of
from dynbus.llm.tenants.usage_sums import read_usage, sum_up

from .served import CARDS, Served, card, served

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@asynccontextmanager
async def asked(key: str = "none", **settings: Any) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    """A front end that does batches, and a client of it that repeats nothing."""
    cards = {**CARDS, "vectors": card("vectors", "test.ScriptedEngine.embed", types=["embedding"])}
    async with (
        served(cards, batches=True, **settings) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield front, client


def line(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def as_file(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def begun(client: AsyncOpenAI, data: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    window: Any = fields.pop("completion_window", "24h")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields
    )


async def ended(client: AsyncOpenAI, batch: Any) -> Any:
    async def has_ended() -> bool:
        nonlocal batch
        batch = await client.batches.retrieve(batch.id)
        return batch.status in ENDED

    await eventually(has_ended, what="the batch ends")
    return batch


async def told(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(one) for one in content.content.splitlines()]


async def test_the_lines_of_a_batch_are_answered_and_those_that_are_refused_are_errors() -> None:
    lines = [line(f"ok-{number}", f"say number {number}") for number in range(70)]
    lines.insert(3, line("unknown", "say it", model="nope"))
    lines.insert(9, line("hot", "say it", temperature=9))
    lines.insert(11, line("broken", "fail"))
    async with asked() as (front, client):
        batch = await begun(client, as_file(lines), metadata={"for": "us"})
        first = batch.status
        batch = await ended(client, batch)
        output = await told(client, batch.output_file_id)
        errors = await told(client, batch.error_file_id)
        written = await client.files.retrieve(batch.output_file_id)
        requests = front.engine.requests

    assert first == "validating"
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"for": "us"})
    assert batch.request_counts.to_dict() == {"total": 73, "completed": 70, "failed": 3}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert [one["custom_id"] for one in output] == [f"ok-{number}" for number in range(70)]
    assert len({one["id"] for one in output}) == 70
    for number, one in enumerate(output):
        response = one["response"]
        assert (response["status_code"], one["error"]) == (200, None)
        assert response["body"]["choices"][0]["message"]["content"] == f"number {number}"
        assert response["body"]["usage"]["completion_tokens"] > 0
    found = {one["custom_id"]: one["response"]["body"]["error"] for one in errors}
    assert found["unknown"]["code"] == "model_not_found"
    assert found["hot"]["param"] == "temperature"
    assert "secret" not in found["broken"]["message"]
    assert [one["response"]["status_code"] for one in errors] == [404, 400, 500]
    assert (written.purpose, written.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert {one.priority for one in requests} == {-9999}


async def test_each_endpoint_has_batches_and_others_are_refused() -> None:
    asked_for: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "tiny", "prompt": "say hi"},
        "/v1/embeddings": {"model": "vectors", "input": "hi"},
        "/v1/responses": {"model": "tiny", "input": "say hi"},
    }
    bodies: dict[str, Any] = {}
    data = b""
    async with asked() as (_, client):
        for url, body in asked_for.items():
            data = as_file([{"custom_id": "a", "method": "POST", "url": url, "body": body}])
            batch = await ended(client, await begun(client, data, url))
            [one] = await told(client, batch.output_file_id)
            bodies[url] = one["response"]["body"]
        with pytest.raises(openai.BadRequestError, match=r"takes no batches here: give /v1/chat"):
            await begun(client, data, "/v1/moderations")

    assert bodies["/v1/completions"]["choices"][0]["text"] == "hi"
    assert len(bodies["/v1/embeddings"]["data"][0]["embedding"]) == 3
    assert bodies["/v1/responses"]["output"][0]["content"][0]["text"] == "hi"


async def test_a_batch_that_nobody_can_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: LineChecker, data: bytes) -> None:
        raise RecursionError

    monkeypatch.setattr(LineChecker, "add", fails)
    async with asked() as (_, client):
        batch = await ended(client, await begun(client, as_file([line("a", "hi")])))

    assert (batch.status, batch.errors.data[0].code) == ("failed", "server_error")


@pytest.mark.parametrize(
    ("told", "counted"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": None}, (100, 7)),
        ({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": None}}, (100, 0)),
        ({"prompt_tokens": None, "completion_tokens": "many"}, None),
    ],
)
async def test_whatever_usage_an_engine_tells_its_batch_ends_and_counts(
    tmp_path: Path, told: dict[str, Any], counted: tuple[int, int] | None
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada first-key\n")
    async with asked("first-key", api_keys=keys) as (front, client):
        front.text.usage = told
        batch = await ended(client, await begun(client, as_file([line("a", "hi", model="text")])))
        jetstream = front.kit.caller.bus.data.jetstream
        [used] = sum_up(await read_usage(jetstream, 0.0, 10.0**11), ("tenant", "model"))

    assert batch.status == "completed"
    assert used.group == {"tenant": "ada", "model": "text"}
    if counted is not None:
        assert (used.prompt, used.completion) == counted
    else:
        # A token for four bytes, and one for each chunk.
        assert (used.prompt > 0, used.completion) == (True, 3)


async def test_lines_with_images_have_the_rules_of_other_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada first-key\n")
    url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
    large = png() + bytes(100_000)
    lines = [
        line("seen", "", model="text", messages=[{"role": "user", "content": [image(large)]}]),
        line("fetched", "", model="text", messages=[{"role": "user", "content": [url]}]),
        line("blind", "", messages=[{"role": "user", "content": [image(large)]}]),
        line("none", "", model="text", messages=[{"role": "user", "content": [image(b"x")]}]),
    ]
    async with asked("first-key", api_keys=keys, media_hosts=["*"]) as (front, client):
        # It says of no request what it has used.
        front.text.usage = {}
        batch = await ended(client, await begun(client, as_file(lines)))
        errors = await told(client, batch.error_file_id)
        jetstream = front.kit.caller.bus.data.jetstream
        [used] = sum_up(await read_usage(jetstream, 0.0, 10.0**11), ("tenant", "model"))

    assert batch.request_counts.completed == 1
    [request] = front.text.requests
    assert request["messages"][0]["content"] == [{**image(large), "uuid": digest(large)}]
    assert 1000 < used.prompt < 1200
    messages = {one["custom_id"]: one["response"]["body"]["error"]["message"] for one in errors}
    assert "127.0.0.1 has no public address" in messages["fetched"]
    assert "the model tiny takes text only" in messages["blind"]
    assert "no image of a type" in messages["none"]


@pytest.mark.parametrize("endpoint", ["chats", "responses"])
async def test_what_a_batch_has_used_is_told_and_counted_for_its_tenant(
    tmp_path: Path, endpoint: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada first-key\n")
    lines = [line(f"ok-{number}", f"say number {number}") for number in range(70)]
    lines.append(line("broken", "fail"))
    url: Any = CHAT
    if endpoint == "responses":
        url = "/v1/responses"
        body = {"model": "tiny", "input": "say hi"}
        lines = [{"custom_id": "a", "method": "POST", "url": url, "body": body}]
    async with asked("first-key", api_keys=keys) as (front, client):
        batch = await ended(client, await begun(client, as_file(lines), url))
        output = await told(client, batch.output_file_id)
        jetstream = front.kit.caller.bus.data.jetstream
        [counted] = sum_up(await read_usage(jetstream, 0.0, 10.0**11), ("tenant", "model"))

    used = [one["response"]["body"]["usage"] for one in output]
    totals = [one["total_tokens"] for one in used]
    prompts = [one.get("prompt_tokens", 0) + one.get("input_tokens", 0) for one in used]
    assert (batch.usage.total_tokens, batch.usage.input_tokens) == (sum(totals), sum(prompts))
    # The engine says of each that it had three in its cache.
    assert batch.usage.input_tokens_details.cached_tokens == 3 * len(used)
    assert (counted.group, counted.requests) == ({"tenant": "ada", "model": "tiny"}, len(used))
    assert (counted.total, counted.prompt) == (sum(totals), sum(prompts))


async def test_a_file_that_is_not_valid_fails_its_batch_with_the_lines() -> None:
    data = as_file([line("a", "say a"), line("a", "say b")]) + b"\nnonsense\n"
    async with asked() as (front, client):
        batch = await ended(client, await begun(client, data))
        requests = front.engine.requests

    assert batch.status == "failed"
    errors = [(one.line, one.code, one.param) for one in batch.errors.data]
    assert errors == [(2, "duplicate_custom_id", "custom_id"), (4, "invalid_json_line", None)]
    assert (batch.output_file_id, requests) == (None, [])


async def test_a_file_that_is_lost_fails_its_batch() -> None:
    async with asked() as (front, client):
        file = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        await ObjectStore(front.kit.caller.bus.data.jetstream, FILES).delete(f"{file.id}.0")
        endpoint: Any = CHAT
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        batch = await ended(client, batch)

    assert batch.status == "failed"
    assert [one.code for one in batch.errors.data] == ["file_not_found"]


async def test_a_batch_that_is_cancelled_keeps_what_it_has() -> None:
    lines = [line("quick", "say it"), *(line(f"slow-{one}", "silent") for one in range(3))]
    async with asked() as (front, client):
        batch = await begun(client, as_file(lines))
        await eventually(lambda: front.engine.running == 3, what="its lines are asked")
        cancelling = await client.batches.cancel(batch.id)
        batch = await ended(client, batch)
        await eventually(lambda: front.engine.running == 0, what="the engine stops")
        output = await told(client, batch.output_file_id)
        errors = await told(client, batch.error_file_id)
        with pytest.raises(openai.ConflictError, match="cannot be cancelled any more"):
            await client.batches.cancel((await ended(client, await begun(client, b"x"))).id)

    assert (cancelling.status, batch.status) == ("cancelling", "cancelled")
    assert [one["custom_id"] for one in output] == ["quick"]
    assert [one["error"]["code"] for one in errors] == ["batch_cancelled"] * 3
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 1, "failed": 3}


async def test_no_line_begins_once_a_worker_has_looked_at_a_batch_that_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def looks_away(_: worker.BatchRun) -> None:
        """What runs the batch does not look: its lines do."""

    monkeypatch.setattr(worker.BatchRun, "_look", looks_away)
    monkeypatch.setattr(looks, "LOOK_INTERVAL", 0.0)
    lines = [line("first", "slowly " + "word " * 60)]
    lines += [line(f"later-{number}", "say it") for number in range(40)]
    async with asked(batch_concurrency=1) as (front, client):
        batch = await begun(client, as_file(lines))
        await eventually(lambda: front.engine.running == 1, what="its first line is asked")
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch)
        errors = await told(client, batch.error_file_id)
        requests = front.engine.requests

    assert batch.status == "cancelled"
    assert len(requests) == 1
    assert [one["error"]["code"] for one in errors] == ["batch_cancelled"] * 40


async def test_the_lines_of_a_batch_are_cancelled_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancel = JobQueue.cancel
    begun_by_now: set[str] = set()
    most = 0

    async def counted(jobs: JobQueue, name: str) -> bool:
        nonlocal most
        begun_by_now.add(name)
        # Whatever begins in the same turn of the loop has begun after it.
        await asyncio.sleep(0)
        most = max(most, len(begun_by_now))
        try:
            return await cancel(jobs, name)
        finally:
            begun_by_now.discard(name)

    async with asked() as (front, client):
        batch = await begun(client, as_file([line(f"{one}", "silent") for one in range(3)]))
        await eventually(lambda: front.engine.running == 3, what="its lines are asked")
        monkeypatch.setattr(JobQueue, "cancel", counted)
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch)

    assert (batch.status, most) == ("cancelled", 3)


async def test_batches_that_are_made_at_the_same_time_are_held_to_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 2)
    url: Any = CHAT
    refused: list[openai.RateLimitError] = []
    async with asked() as (_, client):
        data = as_file([line("slow", "silent")])
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")

        async def create() -> None:
            try:
                await client.batches.create(
                    input_file_id=file.id, endpoint=url, completion_window="24h"
                )
            except openai.RateLimitError as error:
                refused.append(error)

        await asyncio.gather(*(create() for _ in range(10)))
        listed = [one.id async for one in client.batches.list()]
        for one in listed:
            await client.batches.cancel(one)

    # A few may each have seen itself among the first ones.
    assert 2 <= len(listed) <= 5
    assert len(refused) == 10 - len(listed)
    assert {error.code for error in refused} == {"too_many_batches"}


async def test_what_is_not_done_within_the_window_expires() -> None:
    lines = [line("quick", "say it"), line("slow", "silent")]
    async with asked() as (_, client):
        batch = await begun(client, as_file(lines), completion_window="2s")
        batch = await ended(client, batch)
        errors = await told(client, batch.error_file_id)

    assert batch.status == "expired"
    assert batch.output_file_id is not None
    [one] = errors
    assert (one["custom_id"], one["response"]) == ("slow", None)
    assert one["error"]["code"] == "batch_expired"


async def test_a_batch_ends_where_there_is_no_room_for_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = ObjectBucket("dynbus_files", max_bytes=400_000)
    monkeypatch.setattr(store, "FILES", small)
    monkeypatch.setattr(worker, "ROOM_INTERVAL", 0.05)
    data = as_file([line(f"{number}", "say " + "it " * 100) for number in range(100)])
    async with asked() as (front, client):
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        others = ObjectStore(front.kit.caller.bus.data.jetstream, small)
        await others.put("others", b"x" * (390_000 - len(data)))
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=("in.jsonl", data), purpose="batch")
        endpoint: Any = CHAT
        windows: Any = ("2s", "24h")
        batches = [
            await client.batches.create(
                input_file_id=file.id, endpoint=endpoint, completion_window=window
            )
            for window in windows
        ]
        in_vain = await ended(client, batches[0])
        await others.delete("others")
        in_time = await ended(client, batches[1])

    assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
    [error] = in_vain.errors.data
    assert error.code == "storage_full"
    assert "there was no room for the answers of " in error.message
    assert in_vain.request_counts.failed > 50
    # The other one has waited for room.
    assert (in_time.status, in_time.request_counts.completed) == ("completed", 100)


async def test_a_line_whose_asking_breaks_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(*_: object) -> None:
        raise ValueError("it breaks")

    monkeypatch.setattr(asking.LineAsker, "_complete", breaks)
    async with asked() as (_, client):
        batch = await ended(client, await begun(client, as_file([line("a", "say it")])))
        [error] = await told(client, batch.error_file_id)

    assert error["response"]["status_code"] == 500


@pytest.mark.parametrize("word", ["endless", "break"])
async def test_a_line_that_gets_no_answer_costs_what_was_made_of_it(
    tmp_path: Path, word: str
) -> None:
    keys = _one_key(tmp_path / "keys", "tokens_per_month=1000000")
    async with asked("first-key", api_keys=keys) as (front, client):
        batch = await begun(client, as_file([line("a", word, max_tokens=1000)]))
        if word == "endless":
            await eventually(lambda: front.engine.running == 1, what="its line is asked")
            await eventually(lambda: front.engine.made >= 20, what="tokens come")
            await client.batches.cancel(batch.id)
        batch = await ended(client, batch)
        async with httpx2.AsyncClient(headers={"authorization": "Bearer first-key"}) as plain:

            async def used() -> int:
                told = (await plain.get(f"{front.url}/v1/key")).json()
                return int(told["tenant"]["usage"]["tokens_per_month"]["used"])

            async def is_settled() -> bool:
                # What it might have come to is given back.
                return 3 <= await used() < 1000

            await eventually(is_settled)

    assert batch.request_counts.failed == 1


async def test_files_are_listed_read_and_deleted_by_their_tenant_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada first-key\nbob second-key\n")
    data = as_file([line("a", "silent")])
    async with (
        asked("first-key", api_keys=keys) as (front, ada),
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="second-key", max_retries=0) as bob,
    ):
        files = [await ada.files.create(file=("in.jsonl", data), purpose="batch") for _ in range(3)]
        listed = [one.id async for one in ada.files.list(limit=2)]
        content = (await ada.files.content(files[0].id)).content
        endpoint: Any = CHAT
        batch = await ada.batches.create(
            input_file_id=files[0].id, endpoint=endpoint, completion_window="24h"
        )
        mine = [one.id async for one in ada.batches.list(limit=1)]
        others = [one.id async for one in bob.files.list()]
        theirs = [one.id async for one in bob.batches.list()]
        for asking in (
            bob.files.retrieve(files[0].id),
            bob.files.content(files[0].id),
            bob.files.delete(files[0].id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await asking
        await eventually(lambda: front.engine.running == 1, what="its line is asked")
        with pytest.raises(openai.ConflictError, match="has not ended"):
            await ada.files.delete(files[0].id)
        deleted = await ada.files.delete(files[1].id)
        left = [one.id async for one in ada.files.list()]
        tenants = [one["tenant"] for one in front.engine.metadata]

    assert (len(files[0].id), files[0].bytes, files[0].status) == (37, len(data), "processed")
    assert set(listed) == {one.id for one in files}
    assert content == data
    assert (mine, others, theirs) == ([batch.id], [], [])
    assert deleted.deleted
    assert set(left) == {files[0].id, files[2].id}
    assert tenants == ["ada"]


async def test_the_limits_of_a_tenant_hold_for_its_batches(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "ada first-key models=plain\n"
        "bob second-key requests_per_minute=1 requests_at_a_time=1 max_prompt_tokens=60\n"
    )
    data = as_file([line("a", "say it", model="plain"), line("b", "say it", model="tiny")])
    mine = [line(f"{number}", "say it") for number in range(40)]
    mine.append(line("long", "say " + "it " * 100))
    async with (
        asked("first-key", api_keys=keys) as (front, ada),
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="second-key", max_retries=0) as bob,
    ):
        batch = await ended(ada, await begun(ada, data))
        asked_for = list(front.engine.requests)
        other = await ended(bob, await begun(bob, as_file(mine)))
        [error] = await told(bob, other.error_file_id)

    assert batch.status == "failed"
    assert [(one.line, one.code) for one in batch.errors.data] == [(2, "model_not_found")]
    assert asked_for == []
    # Those of a minute, and of requests at a time, are for requests that somebody waits for.
    assert other.request_counts.completed == 40
    refusal = error["response"]
    assert (error["custom_id"], refusal["status_code"]) == ("long", 400)
    assert refusal["body"]["error"]["code"] == "context_length_exceeded"


HEAD = b'--B\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
ENDLESS = {
    "behind its end": b"x" * 1000,
    "parts without data": HEAD % b"purpose" + b"\r\n",
    "heads of parts": b"--B\r\n" + (b"X-A: " + b"y" * 300 + b"\r\n") * 3 + b"\r\n\r\n",
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_form_has_a_bound_for_what_is_not_its_file(what: str) -> None:
    file = HEAD % b"file" + b"x" * 200_000 + b"\r\n"
    fed: list[bytes] = []

    async def pieces() -> AsyncGenerator[bytes]:
        yield HEAD % b"purpose" + b"batch\r\n" + file
        if what == "behind its end":
            yield b"--B--\r\n"
        while len(fed) < 10_000:
            fed.append(ENDLESS[what])
            yield ENDLESS[what]

    form = Form("multipart/form-data; boundary=B")
    body = pieces()
    await form.read_to_file(body)
    taken: list[int] = []

    async def take() -> None:
        async for data in form.file(body):
            taken.append(len(data))

    with pytest.raises(BadRequest, match="more than 65536 bytes beside its file"):
        await take()

    assert sum(taken) == 200_000
    assert sum(map(len, fed)) < MAX_FORM + 1000


async def test_texts_to_embed_have_the_limit_of_a_prompt_each(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    texts = ["hello there"] * 2
    url = "/v1/embeddings"
    async with asked("first-key", api_keys=_one_key(keys, "max_prompt_tokens=20")) as (_, client):
        data = as_file(
            [
                {"custom_id": name, "method": "POST", "url": url, "body": body}
                for name, body in (
                    ("short", {"model": "vectors", "input": texts}),
                    ("long", {"model": "vectors", "input": [*texts, "word " * 50]}),
                )
            ]
        )
        batch = await ended(client, await begun(client, data, url))
        [output] = await told(client, batch.output_file_id)
        [error] = await told(client, batch.error_file_id)

    assert output["custom_id"] == "short"
    assert output["response"]["body"]["usage"]["prompt_tokens"] > 20
    assert error["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_a_batch_uses_the_budget_of_its_tenant_and_ends_with_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    async with asked("first-key", api_keys=_one_key(keys, "")) as (_, client):
        alone = await ended(client, await begun(client, as_file([line("a", "say it")])))
    each = alone.usage.total_tokens

    # Room for so many, and for what the last one may come to before that is known.
    budget = 10 * each + 20
    lines = [line(f"{number}", "say it", max_tokens=20) for number in range(50)]
    async with asked("first-key", api_keys=_one_key(keys, f"tokens_per_month={budget}")) as (
        front,
        client,
    ):
        batch = await ended(client, await begun(client, as_file(lines)))
        errors = await told(client, batch.error_file_id)
        messages: Any = [{"role": "user", "content": "say it"}]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)

    assert batch.status == "completed"
    assert batch.request_counts.completed == 10
    assert batch.usage.total_tokens == 10 * each
    assert {one["response"]["status_code"] for one in errors} == {429}
    assert {one["response"]["body"]["error"]["code"] for one in errors} == {"insufficient_quota"}
    assert len(front.engine.requests) == 10
    assert refused.value.code == "insufficient_quota"


async def test_a_batch_uses_the_budget_of_the_key_that_made_it() -> None:
    async with asked("first-key", keys_from_bus=True) as (front, client):
        jetstream = front.kit.caller.bus.data.jetstream
        tenants = front.front_end.shared.tenants
        assert tenants is not None
        limits = Limits(tokens_per_month=400, models=("tiny",))
        for key, own in (("first-key", limits), ("second-key", None)):
            record = msgspec.json.encode(KeyRecord(tenant="ada", limits=own))
            await jetstream.publish(f"$KV.{KEYS_BUCKET}.key.{hash_of(key)}", record)
            await eventually(partial(tenants.holder_of, key))
        lines = [line(f"{number}", "say it", max_tokens=20) for number in range(50)]
        batch = await ended(client, await begun(client, as_file(lines)))
        errors = await told(client, batch.error_file_id)
        wrong = await ended(
            client, await begun(client, as_file([line("a", "say it", model="plain")]))
        )
        async with AsyncOpenAI(
            base_url=f"{front.url}/v1", api_key="second-key", max_retries=0
        ) as other:
            free = await ended(other, await begun(other, as_file(lines)))

    assert 0 < batch.request_counts.completed < 50
    assert 0 < batch.usage.total_tokens <= 400
    assert {one["response"]["body"]["error"]["code"] for one in errors} == {"insufficient_quota"}
    assert "tokens_per_month=400 of this key" in str(errors)
    assert [one.code for one in wrong.errors.data] == ["model_not_found"]
    assert free.request_counts.completed == 50
    assert "key" not in batch.model_dump()


def _one_key(path: Path, limits: str) -> Path:
    path.write_text(f"ada first-key {limits}\n")
    return path


async def test_a_request_while_the_bus_is_away_is_told_so_as_soon_as_a_chat() -> None:
    async with (
        asked(batch_concurrency=0) as (front, _),
        # Half of what work has that nobody waits for.
        httpx2.AsyncClient(timeout=store.RETRY_FOR / 2) as plain,
    ):
        front.kit.bus.stop()
        try:
            answers = await asyncio.gather(
                plain.get(f"{front.url}/v1/files"),
                plain.get(f"{front.url}/v1/batches/batch_x"),
                plain.get(f"{front.url}/v1/batches"),
            )
        finally:
            front.kit.bus.start()

    assert [one.status_code for one in answers] == [503] * 3
    messages = {one.json()["error"]["message"] for one in answers}
    assert messages == {"the bus cannot be reached"}


async def test_a_request_for_files_or_batches_is_a_line_of_the_log_as_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = _one_key(tmp_path / "keys", "")
    caplog.set_level(logging.INFO, "dynbus.llm.http.batches")
    headers = {"authorization": "Bearer first-key", "x-request-id": "req-7"}
    async with (
        asked("first-key", api_keys=keys) as (front, _),
        httpx2.AsyncClient(headers=headers) as plain,
    ):
        await plain.get(f"{front.url}/v1/files")
        await plain.get(f"{front.url}/v1/batches/nope")

    assert caplog.messages == [
        "GET /v1/files 200 request_id=req-7 tenant=ada",
        "GET /v1/batches/{id} 404 request_id=req-7 tenant=ada error=NotThere",
    ]


async def test_forms_that_are_none_are_refused_and_leave_nothing() -> None:
    data = as_file([line("a", "say it")])
    async with asked(max_file_bytes=2000) as (front, client), httpx2.AsyncClient() as plain:
        url = f"{front.url}/v1/files"
        refused = [
            await plain.post(url, files={"file": ("a", data)}, data={"purpose": "fine-tune"}),
            await plain.post(url, files={"file": ("a", data)}),
            await plain.post(url, data={"purpose": "batch"}),
            await plain.post(url, files={"file": ("a", data * 100)}, data={"purpose": "batch"}),
            await plain.post(
                url,
                content=b"--x\r\nnonsense",
                headers={"content-type": "multipart/form-data; boundary=x"},
            ),
            await plain.get(f"{url}?limit=0"),
            await plain.get(f"{url}/nope"),
            await plain.delete(f"{front.url}/v1/batches/nope"),
        ]
        left = [one.id async for one in client.files.list()]

    assert "(--max-file)" in refused[3].text
    told = [(one.status_code, one.json()["error"]["param"]) for one in refused]
    assert told == [
        (400, "purpose"),
        (400, "purpose"),
        (400, "file"),
        (413, "file"),
        (400, "file"),
        (400, "limit"),
        (404, None),
        (405, None),
    ]
    assert left == []


async def test_a_front_end_without_batches_says_how_it_has_them() -> None:
    async with served() as front, httpx2.AsyncClient() as client:
        answer = await client.get(f"{front.url}/v1/batches")

    assert answer.status_code == 404
    assert "--batches" in answer.json()["error"]["message"]


async def test_a_long_file_comes_back_as_it_was_sent() -> None:
    data = as_file([line(f"line-{number}", "say " + "x" * 500) for number in range(6000)])
    async with asked() as (_, client):
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        content = (await client.files.content(file.id)).content
        await asyncio.sleep(0)

    assert file.bytes == len(data)
    assert content == data
