"""Streams that clients resume: read in pieces, at several front ends, each event once."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import httpx2
import pytest
from openai import AsyncOpenAI, AsyncStream, NotFoundError
from openai.types.chat import ChatCompletionChunk
from tests.conditions import PATIENCE, eventually

from dynbus.bus.clock import unix_time
from dynbus.bus.errors import Unavailable
from dynbus.llm.http import streams
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.resumable import readers, records, running, store
from dynbus.llm.resumable.names import STREAM_LOGS, STREAM_LOGS_MARK
from dynbus.llm.resumable.records import log_key
from dynbus.llm.resumable.streams import MOST_UNREAD

from .served import Served, served

pytestmark = pytest.mark.anyio

SAID: Final = "the quick brown fox jumps over the lazy dog and runs away"
WORDS: Final = f"say {SAID}"

BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": WORDS}],
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": f"<|im_start|>user\n{WORDS}<|im_end|>\n<|im_start|>assistant"},
    "/v1/responses": {"input": WORDS},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 500},
}


LONG_WAIT: Final = "dynbus.llm.resumable.streams.LONG_WAIT"

NAMED: Final = {"X-Request-Id": "one"}


@asynccontextmanager
async def two_front_ends(
    second_settings: dict[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[tuple[Served, HttpFrontEnd]]:
    async with served(**settings) as first:
        config = HttpSettings(port=0, grace=1.0, **(settings | (second_settings or {})))
        async with HttpFrontEnd(first.kit.caller, first.catalog, config) as second:
            await eventually(lambda: len(second.shared.models.served) == 4)
            yield first, second


def events_of(text: str) -> list[str]:
    """The events of a stream, without comments."""
    lines = [line for line in text.split("\n") if not line.startswith(":")]
    return [event for event in "\n".join(lines).split("\n\n") if event]


@pytest.fixture
async def reader() -> AsyncGenerator[Reader]:
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        yield Reader(client)


class Reader:
    """A client, which may leave after so many events."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def post(self, url: str, body: dict[str, Any], **options: Any) -> Read:
        """Ask for a stream."""
        path = options.pop("path", "/v1/chat/completions")
        headers = {"Dynbus-Resumable": "1", **options.pop("headers", {})}
        body = {"model": "tiny", "stream": True, **body}
        return await self._read("POST", url + path, headers=headers, json=body, **options)

    async def events(self, url: str, body: dict[str, Any]) -> AsyncGenerator[str]:
        """The events of a stream as they come."""
        told = {"model": "tiny", "stream": True, **body}
        headers = {"Dynbus-Resumable": "1", **NAMED}
        path, text = "/v1/chat/completions", ""
        async with self._client.stream("POST", url + path, headers=headers, json=told) as answer:
            async for piece in answer.aiter_text():
                *events, text = (text + piece).split("\n\n")
                for event in events:
                    yield event

    async def read_on(self, url: str, body: dict[str, Any], name: str) -> None:
        """Ask for a stream and read all that comes."""
        await self.post(url, body, headers={"X-Request-Id": name})

    async def go_on(self, url: str, name: str, after: int = 0, **options: Any) -> Read:
        """Read a stream on."""
        headers = {"Last-Event-ID": f"{name}.{after}"} if after else {}
        headers |= options.pop("headers", {})
        return await self._read("GET", f"{url}/v1/streams/{name}", headers=headers, **options)

    async def _read(self, method: str, url: str, *, most: int = 10**6, **options: Any) -> Read:
        text = ""
        async with self._client.stream(method, url, **options) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if len(events_of(text)) > most:
                    break
        told = text if answer.status_code != 200 else ""
        return Read(answer.status_code, answer.headers, events_of(text)[:most], told)


class Read(NamedTuple):
    """What came of an answer: its events, or its refusal."""

    status: int
    headers: Any
    events: list[str]
    refusal: str


def number(event: str) -> int:
    return int(event.partition("\n")[0].rpartition(".")[2])


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def test_a_stream_that_is_cut_anywhere_is_resumed_at_another_front_end(
    reader: Reader,
) -> None:
    async with two_front_ends() as (first, second):
        for place, (path, body) in enumerate(BODIES.items()):
            name = f"request/{place}"
            headers = {"X-Request-Id": name}
            whole = await reader.post(first.url, body, path=path, headers=headers)
            assert whole.headers["dynbus-resumable"] == "1"
            assert [number(event) for event in whole.events] == [*range(1, len(whole.events) + 1)]
            assert len(whole.events) > 5

            for cut in (0, 1, 2, 7, len(whole.events) - 1, len(whole.events)):
                rest = await reader.go_on(second.url, name, cut)

                assert whole.events[:cut] + rest.events == whole.events


async def test_a_stream_whose_client_leaves_in_the_middle_goes_on_for_the_next(
    reader: Reader,
) -> None:
    async with two_front_ends() as (first, second):
        body = asking("endless word")
        before = await reader.post(first.url, body, headers=NAMED, most=20)
        assert len(before.events) == 20

        more = await reader.go_on(second.url, "one", 20, most=20)
        again = await reader.go_on(first.url, "one", 10, most=30)

        assert first.engine.running == 1
        assert [number(event) for event in more.events] == [*range(21, 41)]
        assert again.events == [*before.events[10:], *more.events]


async def test_a_front_end_that_ends_hands_its_streams_to_the_next(reader: Reader) -> None:
    async with two_front_ends() as (first, second):
        whole = await reader.post(first.url, asking(WORDS), headers={"X-Request-Id": "whole"})
        body = asking(f"slowly {SAID}")
        before = await reader.post(first.url, body, headers=NAMED, most=4)
        await first.front_end.close()

        after = await reader.go_on(second.url, "one", 4)

        told = [contents(event) for event in [*before.events, *after.events]]
        assert told == [contents(event) for event in whole.events]
        assert second.shared.resumable.counts["taken_over"] == 1


@pytest.mark.parametrize("ahead", [300.0, -300.0])
async def test_a_stream_goes_on_at_a_front_end_whose_clock_is_wrong(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    async with two_front_ends() as (first, second):
        body = asking(f"slowly {SAID}")
        before = await reader.post(first.url, body, headers=NAMED, most=4)
        await first.front_end.close()
        real_time = unix_time
        monkeypatch.setattr(running, "unix_time", lambda: real_time() + ahead)

        after = await reader.go_on(second.url, "one", 4)

        assert after.status == 200, after.refusal
        told = "".join(contents(event) for event in [*before.events, *after.events])
        assert told == f"{SAID}[DONE]"


@pytest.mark.parametrize("ahead", [300.0, -300.0])
async def test_a_stream_has_the_time_it_was_given_at_a_front_end_whose_clock_is_wrong(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    async with two_front_ends(request_timeout=3.0) as (first, second):
        await reader.post(first.url, asking("endless word"), headers=NAMED, most=4)
        await first.front_end.close()
        real_time = unix_time
        monkeypatch.setattr(running, "unix_time", lambda: real_time() + ahead)

        after = await reader.go_on(second.url, "one", 4)

        assert len(after.events) > 1
        assert "DeadlineExceeded" in after.events[-1], after.events[-1]


def contents(event: str) -> str:
    """What an event adds to the text."""
    data = event.rpartition("data: ")[2]
    if data == "[DONE]":
        return data
    choices = json.loads(data)["choices"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_whoever_reads_when_a_front_end_ends_is_cut_off_and_goes_on(reader: Reader) -> None:
    async with two_front_ends() as (first, second):
        whole: list[str] = []
        cut = False
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            try:
                async for event in reader.events(first.url, asking("endless word")):
                    if not whole:
                        tasks.start_soon(first.front_end.close)
                    whole.append(event)
            except httpx2.TransportError:
                cut = True

        assert cut
        # It had its grace, in which it read on.
        assert time.monotonic() - began > 0.9
        assert len(whole) > 1
        rest = await reader.go_on(second.url, "one", len(whole), most=20)

        numbers = [number(event) for event in [*whole, *rest.events]]
        assert numbers == [*range(1, len(whole) + 21)]
        assert "error" not in "".join(whole)


async def test_the_log_says_of_who_goes_on_which_stream_it_is(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynbus.llm.http.exchange")
    async with two_front_ends() as (first, second):
        await reader.post(first.url, asking(WORDS), headers={"X-Request-Id": "first"})
        await reader.go_on(second.url, "first", headers={"X-Request-Id": "another"})

        await eventually(lambda: len(caplog.messages) == 2)

    assert caplog.messages[1].startswith(
        "GET /v1/streams/{request} 200 request_id=another stream=first model=tiny "
    )


async def test_each_prompt_of_a_request_goes_on(reader: Reader) -> None:
    async with two_front_ends() as (first, second):
        prompts = [
            f"<|im_start|>user\nslowly {said}<|im_end|>\n<|im_start|>assistant"
            for said in (SAID, "two words")
        ]
        before = await reader.post(
            first.url,
            {"prompt": prompts, "max_tokens": 500},
            path="/v1/completions",
            headers=NAMED,
            most=20,
        )
        await first.front_end.close()

        after = await reader.go_on(second.url, "one", 20)

        texts = ["", ""]
        for event in [*before.events, *after.events[:-1]]:
            [choice] = json.loads(event.rpartition("data: ")[2])["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [SAID, "two words"]
        assert after.events[-1].endswith("data: [DONE]")


@pytest.mark.parametrize("most", [4, 20])
async def test_each_output_of_a_prompt_goes_on(reader: Reader, most: int) -> None:
    async with two_front_ends() as (first, second):
        body = asking(f"slowly {SAID}", n=2)
        before = await reader.post(first.url, body, headers=NAMED, most=most)
        await first.front_end.close()

        after = await reader.go_on(second.url, "one", most)
        again = await reader.go_on(second.url, "one")

        texts = ["", ""]
        for event in [*before.events, *after.events[:-1]]:
            [choice] = json.loads(event.rpartition("data: ")[2])["choices"]
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == [SAID, SAID]
        assert again.events == [*before.events, *after.events]
        assert after.events[-1].endswith("data: [DONE]")


async def test_clients_that_are_cut_at_random_read_each_event_once(
    monkeypatch: Any, reader: Reader
) -> None:
    # However busy the machine is, none of them is paused.
    monkeypatch.setattr(LONG_WAIT, PATIENCE)
    monkeypatch.setattr(readers, "UNREAD_SECONDS", PATIENCE)
    async with two_front_ends() as (first, second):

        async def read(seed: int) -> None:
            chance, name = random.Random(seed), f"seed-{seed}"
            urls = (first.url, second.url)
            body = asking(f"slowly {SAID}", logprobs=True)
            headers = {"X-Request-Id": name}
            told = (await reader.post(first.url, body, headers=headers, most=2)).events
            while not told or not told[-1].endswith("[DONE]"):
                most = chance.randrange(1, 12)
                more = await reader.go_on(chance.choice(urls), name, len(told), most=most)
                assert more.status == 200
                told += more.events

            assert told == (await reader.go_on(chance.choice(urls), name)).events
            assert "".join(map(contents, told)) == f"{SAID}[DONE]"

        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(read, seed)
        assert len(first.engine.requests) == 8


async def test_what_cannot_be_resumed_says_why(reader: Reader) -> None:
    async with two_front_ends() as (first, second):
        text = await reader.post(first.url, {"model": "text", **asking("hello")})
        unknown = await reader.go_on(second.url, "never")
        await reader.post(first.url, asking(WORDS), headers=NAMED)
        twice = await reader.post(first.url, asking(WORDS), headers=NAMED)
        foreign = await reader.go_on(second.url, "one", headers={"Last-Event-ID": "two.1"})
        beyond = await reader.go_on(second.url, "one", 1000)

        for answer, why in ((text, "takes text"), (twice, "already")):
            assert answer.status == 200
            assert answer.headers["dynbus-resumable"] == "0"
            assert why in answer.headers["dynbus-resumable-reason"]
            assert not any(event.startswith("id:") for event in answer.events)
        assert unknown.status == 404
        assert "stream_not_found" in unknown.refusal
        assert foreign.status == beyond.status == 400
        assert "Last-Event-ID" in foreign.refusal


async def test_a_stream_is_there_for_the_key_that_asked_for_it(
    tmp_path: Path, reader: Reader
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada key-of-ada\nbob key-of-bob\n")
    async with two_front_ends(api_keys=keys) as (first, second):
        ada, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ada", "bob"))
        whole = await reader.post(first.url, asking(WORDS), headers={**NAMED, **ada})

        own = await reader.go_on(second.url, "one", headers=ada)
        others = await reader.go_on(second.url, "one", headers=bob)
        nobodys = await reader.go_on(second.url, "one")

        assert own.events == whole.events
        assert (others.status, nobodys.status) == (404, 401)


async def test_a_stream_that_nobody_reads_is_paused_and_goes_on_for_who_comes(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(readers, "UNREAD_SECONDS", 0.1)
    monkeypatch.setattr(running, "LOOK_INTERVAL", 0.02)
    async with two_front_ends() as (first, second):
        counts = first.front_end.shared.resumable.counts
        before = await reader.post(first.url, asking("endless word"), headers=NAMED, most=5)

        await eventually(lambda: first.engine.running == 0)
        elsewhere = await reader.go_on(second.url, "one", 5, most=20)
        await eventually(lambda: second.shared.resumable.counts["paused"] == 1)
        again = await reader.go_on(first.url, "one", most=60)

        assert counts["paused"] == 1
        assert [number(event) for event in again.events] == [*range(1, 61)]
        assert again.events[:25] == [*before.events, *elsewhere.events]


async def test_a_stream_that_nobody_reads_is_paused_before_much_of_it_is_stored(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(readers, "UNREAD_BYTES", 2_000)
    monkeypatch.setattr(readers, "UNREAD_SECONDS", PATIENCE)
    async with two_front_ends() as (first, _):
        await reader.post(first.url, asking("endless word"), headers=NAMED, most=5)

        await eventually(lambda: first.engine.running == 0)

        assert first.front_end.shared.resumable.counts["paused"] == 1


async def test_a_stream_that_is_read_elsewhere_is_not_paused(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(readers, "UNREAD_SECONDS", 0.0)
    monkeypatch.setattr(running, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(readers, "UNREAD_BYTES", 0)
    async with two_front_ends() as (first, second), anyio.create_task_group() as tasks:
        followed = second.shared.resumable.counts
        tasks.start_soon(reader.read_on, first.url, asking("endless word"), "one")
        await eventually(lambda: first.engine.running == 1)
        following = asyncio.ensure_future(reader.go_on(second.url, "one", most=400))
        await eventually(lambda: followed["followed"] == 1)
        tasks.cancel_scope.cancel()

        read = await following

        assert len(read.events) == 400
        assert followed["taken_over"] == 0
        assert len(first.engine.requests) == 1


async def test_few_streams_of_a_tenant_go_on_that_nobody_reads(
    monkeypatch: Any, tmp_path: Path, reader: Reader
) -> None:
    monkeypatch.setattr(readers, "UNREAD_SECONDS", PATIENCE)
    monkeypatch.setattr(LONG_WAIT, PATIENCE)
    keys = tmp_path / "keys"
    keys.write_text("ada key-of-ada\nbob key-of-bob\n")
    async with two_front_ends(api_keys=keys) as (first, second):
        engine, counts = first.engine, first.front_end.shared.resumable.counts

        async def read(name: str, tenant: str) -> None:
            headers = {"X-Request-Id": name, "Authorization": f"Bearer key-of-{tenant}"}
            await reader.post(first.url, asking("endless word"), headers=headers)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, "of-bob", "bob")
            for place in range(40):
                tasks.start_soon(read, f"of-ada-{place}", "ada")
            await eventually(lambda: engine.running == 41)
            tasks.cancel_scope.cancel()

        await eventually(lambda: engine.running == MOST_UNREAD + 1)
        assert counts["paused"] == 40 - MOST_UNREAD
        assert first.front_end.shared.resumable.owns(log_key("bob", "of-bob"))
        headers = {"Authorization": "Bearer key-of-ada"}
        for place in range(40):
            rest = await reader.go_on(second.url, f"of-ada-{place}", headers=headers, most=5)
            assert [*map(number, rest.events)] == [1, 2, 3, 4, 5]


async def test_streams_that_nobody_reads_make_way_for_a_request_that_waits_for_its_first_token(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(readers, "UNREAD_SECONDS", PATIENCE)
    monkeypatch.setattr(LONG_WAIT, PATIENCE)
    async with two_front_ends() as (first, _), anyio.create_task_group() as tasks:
        streams = first.front_end.shared.resumable
        for name in ("one", "two"):
            headers = {"X-Request-Id": name}
            await reader.post(first.url, asking("endless word"), headers=headers, most=3)
        # Nobody waits here for long.
        await reader.post(first.url, asking(WORDS), headers={"Dynbus-Resumable": "0"})
        assert streams.counts["paused"] == 0

        monkeypatch.setattr(LONG_WAIT, 0.02)
        tasks.start_soon(reader.read_on, first.url, asking("silent word"), "waits")

        await eventually(lambda: streams.counts["paused"] == 2)
        await eventually(lambda: first.engine.running == 1)
        tasks.cancel_scope.cancel()


async def test_a_tenant_that_stores_much_loses_its_own_streams_and_takes_no_other(
    monkeypatch: Any, tmp_path: Path, reader: Reader
) -> None:
    monkeypatch.setattr(store, "MOST_OF_TENANT", 8_000)
    keys = tmp_path / "keys"
    keys.write_text("ada key-of-ada\nbob key-of-bob\n")
    async with two_front_ends(api_keys=keys) as (first, second):
        ada, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ada", "bob"))
        bobs = await reader.post(first.url, asking(WORDS), headers={**bob, **NAMED})
        for place in range(8):
            headers = {**ada, "X-Request-Id": f"of-ada-{place}"}
            read = await reader.post(first.url, asking(WORDS), headers=headers)
            assert read.headers["dynbus-resumable"] == "1"
        # What is too much alone is refused, and told to the end all the same.
        long = asking(WORDS, metadata={"long": "x" * 8_000})
        refused = await reader.post(first.url, long, headers={**ada, "X-Request-Id": "long"})
        endless = await reader.post(
            first.url, asking("flood word"), headers={**ada, "X-Request-Id": "endless"}, most=900
        )

        oldest = await reader.go_on(second.url, "of-ada-0", headers=ada)
        kept = await reader.go_on(second.url, "one", headers=bob)

        assert kept.events == bobs.events
        assert (oldest.status, "more streams than are kept" in oldest.refusal) == (410, True)
        assert refused.headers["dynbus-resumable"] == "0"
        assert "may be of one tenant" in refused.headers["dynbus-resumable-reason"]
        assert refused.events[-1] == "data: [DONE]"
        assert endless.headers["dynbus-resumable"] == "1"
        assert not endless.events[-1].startswith("id:")
        assert first.front_end.shared.resumable.counts["over_share"] == 1


async def test_a_stream_that_nobody_has_read_for_long_is_gone(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(readers, "UNREAD_SECONDS", 0.0)
    monkeypatch.setattr(running, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(store, "KEPT_SECONDS", 0.1)
    monkeypatch.setattr(store, "SWEEP_INTERVAL", 0.02)
    async with two_front_ends() as (first, second):
        await reader.post(first.url, asking("endless word"), headers=NAMED, most=5)

        await eventually(lambda: first.engine.running == 0)
        logs, key = first.front_end.shared.resumable.store, log_key("", "one")

        async def is_over() -> bool:
            last = await logs.last(key)
            return last is not None and records.is_over(last.data)

        await eventually(is_over)
        late = await reader.go_on(second.url, "one", 5)

        assert late.status == 410
        assert "stream_gone" in late.refusal
        assert "nobody read it" in late.refusal


async def test_a_stream_that_becomes_too_large_goes_on_without_ids(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 800)
    async with two_front_ends() as (first, second):
        answer = await reader.post(first.url, asking(f"slowly {SAID}"), headers=NAMED)
        late = await reader.go_on(second.url, "one", 1)

        assert answer.events[-1] == "data: [DONE]"
        assert 0 < sum(event.startswith("id:") for event in answer.events) < len(answer.events) - 5
        assert late.status == 410
        assert "too large" in late.refusal
        assert first.front_end.shared.resumable.counts["too_large"] == 1


async def test_a_stream_that_cannot_be_stored_any_longer_goes_on_where_it_is(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(running, "BURY_INTERVAL", 0.02)
    async with two_front_ends() as (first, second):
        told: list[str] = []
        async for event in reader.events(first.url, asking(f"slowly {SAID}")):
            told.append(event)
            if len(told) == 5:
                # As a server does that was started again.
                await first.kit.caller.bus.data.jetstream.delete_stream(STREAM_LOGS)
        late = await reader.go_on(second.url, "one", 5)

        events = events_of("\n\n".join(told))
        assert "".join(map(contents, events)) == f"{SAID}[DONE]"
        assert events[0].startswith("id: one.1\n")
        assert not events[-1].startswith("id:")
        assert first.front_end.shared.resumable.counts["unlogged"] == 1
        assert late.status == 410
        assert "could not be stored" in late.refusal


async def test_a_stream_that_cannot_be_stored_any_longer_is_refused_to_others_while_it_runs(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(running, "BURY_INTERVAL", 0.02)
    async with two_front_ends() as (first, second), anyio.create_task_group() as tasks:
        counts = first.front_end.shared.resumable.counts
        tasks.start_soon(reader.read_on, first.url, asking("endless word"), "one")
        await eventually(lambda: first.engine.running == 1)
        # As a server does that was started again.
        await first.kit.caller.bus.data.jetstream.delete_stream(STREAM_LOGS)
        await eventually(lambda: counts["unlogged"] == 1)

        async with asyncio.timeout(PATIENCE):
            while (late := await reader.go_on(second.url, "one", most=1)).status == 404:
                pass

        assert late.status == 410
        assert "could not be stored" in late.refusal
        assert first.engine.running == 1
        tasks.cancel_scope.cancel()


async def test_a_stream_has_one_task_while_it_is_resumable(reader: Reader) -> None:
    async with served() as first, anyio.create_task_group() as tasks:
        for place in range(4):
            name = f"request-{place}"
            tasks.start_soon(reader.read_on, first.url, asking("endless word"), name)
        await eventually(lambda: first.engine.running == 4)

        def tasks_of_streams() -> list[str]:
            names = [task.get_name() for task in asyncio.all_tasks()]
            return [name for name in names if "RunningStream" in name or "the stream" in name]

        # The request was sent by one more each.
        await eventually(lambda: len(tasks_of_streams()) == 4, what="one task a stream")
        tasks.cancel_scope.cancel()


async def test_a_stream_that_goes_on_without_its_client_does_not_run_again_beside_itself(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, _):
        request: dict[str, Any] = {"headers": {**NAMED, "Idempotency-Key": "key"}, "most": 5}
        before = await reader.post(first.url, asking("endless word"), **request)
        again = await reader.post(first.url, asking("endless word"), **request)

        assert (before.status, again.status) == (200, 409)
        assert (len(first.engine.requests), first.engine.running) == (1, 1)

        monkeypatch.setattr(running, "KEPT_SECONDS", 0.0)
        await eventually(lambda: first.engine.running == 0)
        anew = await reader.post(first.url, asking("endless word"), **request)

        assert anew.status == 200


class LateAnswer:
    """Stands before the bus's stored streams: the answer to one record comes too late, as to a
    process that was frozen meanwhile.

    Attributes:
        stored: set when it is stored.
        woken: the publisher goes on when this is set.
    """

    def __init__(self, publish: Any, after: int) -> None:
        self._publish = publish
        self._left = after
        self.stored, self.woken = anyio.Event(), anyio.Event()

    async def __call__(self, *args: Any, **options: Any) -> int:
        sequence: int = await self._publish(*args, **options)
        if args[0] == STREAM_LOGS_MARK:
            return sequence
        self._left -= 1
        if self._left == 0:
            self.stored.set()
            await self.woken.wait()
            raise Unavailable("there was no answer in time")
        return sequence


async def test_a_record_that_is_stored_ends_nothing_when_the_answer_comes_too_late(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, second):
        jetstream = first.kit.caller.bus.data.jetstream
        late = LateAnswer(jetstream.publish, after=4)
        late.woken.set()
        monkeypatch.setattr(jetstream, "publish", late)

        answer = await reader.post(first.url, asking(f"slowly {SAID}"), headers=NAMED)
        again = await reader.go_on(second.url, "one", 2)

        assert late.stored.is_set()
        numbers = [number(event) for event in answer.events]
        assert numbers == [*range(1, len(answer.events) + 1)]
        assert again.events == answer.events[2:]
        assert first.front_end.shared.resumable.counts["unlogged"] == 0


def _owns_nothing(key: str) -> bool:
    return False


async def test_a_front_end_that_wakes_in_the_middle_of_storing_leaves_a_stream_to_who_took_it_over(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, second):
        streams, jetstream = first.front_end.shared.resumable, first.kit.caller.bus.data.jetstream
        late = LateAnswer(jetstream.publish, after=4)
        monkeypatch.setattr(jetstream, "publish", late)
        # What is frozen does not say that it goes on with the stream.
        monkeypatch.setattr(streams.store, "_owns", _owns_nothing)
        told: list[str] = []

        async def read_first() -> None:
            async for event in reader.events(first.url, asking("endless word")):
                told.append(event)
                assert len(told) < 200, "it is not cut"

        async def read_until_cut() -> None:
            with pytest.raises(httpx2.TransportError):
                await read_first()

        cut = asyncio.ensure_future(read_until_cut())
        await late.stored.wait()
        before = await reader.go_on(second.url, "one", 1, most=20)
        late.woken.set()
        await cut
        after = await reader.go_on(second.url, "one", 1, most=40)

        assert (streams.counts["lost"], streams.counts["unlogged"]) == (1, 0)
        assert (before.status, after.status) == (200, 200)
        assert [number(event) for event in after.events] == [*range(2, 42)]
        assert after.events[:20] == before.events
        assert told[1:] == before.events[: len(told) - 1]


async def test_a_stream_whose_owner_has_been_dead_for_too_long_is_gone_before_any_of_it_is_told(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, second):
        streams, jetstream = first.front_end.shared.resumable, first.kit.caller.bus.data.jetstream
        late = LateAnswer(jetstream.publish, after=4)
        monkeypatch.setattr(jetstream, "publish", late)
        monkeypatch.setattr(streams.store, "_owns", _owns_nothing)
        await reader.post(first.url, asking("endless word"), headers=NAMED, most=1)
        await late.stored.wait()
        monkeypatch.setattr(records, "KEPT_SECONDS", 0.0)

        gone = await reader.go_on(second.url, "one", 1)

        late.woken.set()
        assert gone.status == 410
        assert "its time is over" in gone.refusal


async def test_a_stream_of_which_nothing_came_for_long_is_gone_on_with_once_its_owner_is_dead(
    monkeypatch: Any, reader: Reader
) -> None:
    """It waits for its engine, and its client for it."""
    monkeypatch.setattr(records, "KEPT_SECONDS", 1.0)
    monkeypatch.setattr(running, "QUIET_INTERVAL", 0.1)
    monkeypatch.setattr(running, "LOOK_INTERVAL", 0.02)
    async with two_front_ends() as (first, second), anyio.create_task_group() as tasks:
        store, key = first.front_end.shared.resumable.store, log_key("", "one")
        tasks.start_soon(reader.read_on, first.url, asking("silent word"), "one")
        await eventually(lambda: first.engine.running == 1)
        begun = await store.last(key)
        assert begun is not None
        async with asyncio.timeout(PATIENCE):
            while (last := await store.last(key)) is None or last.time - begun.time < 1.5:
                pass
        monkeypatch.setattr(running, "QUIET_INTERVAL", PATIENCE)
        monkeypatch.setattr(store, "_owns", _owns_nothing)
        # However long it takes until the other one is asked.
        its_store = second.shared.resumable.store
        monkeypatch.setattr(its_store, "server_time", lambda: last.time + 0.5)

        tasks.start_soon(reader.go_on, second.url, "one")

        await eventually(lambda: second.shared.resumable.counts["taken_over"] == 1)
        tasks.cancel_scope.cancel()


async def test_a_stream_whose_model_a_front_end_never_saw_was_begun_all_the_same(
    reader: Reader,
) -> None:
    async with served() as first:
        await reader.post(first.url, asking(WORDS), headers=NAMED)
        first.catalog.change({})
        config = HttpSettings(port=0, grace=1.0)
        async with HttpFrontEnd(first.kit.caller, first.catalog, config) as second:
            refused = await reader.go_on(second.url, "one")

    assert refused.status == 503
    assert "the model tiny of the stream has no instance at present" in refused.refusal


async def test_a_stream_stays_with_who_took_it_over_while_the_reading_of_its_log_ends(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, second), another(first) as third:
        streams, told = second.shared.resumable, anyio.Event()
        reading = streams.store.reading

        @asynccontextmanager
        async def reading_that_ends_late(*args: Any) -> AsyncGenerator[None]:
            async with reading(*args):
                yield
                # As long as a server takes to drop a consumer.
                await told.wait()

        monkeypatch.setattr(streams.store, "reading", reading_that_ends_late)
        await reader.post(first.url, asking("endless word"), headers=NAMED, most=4)
        await first.front_end.close()

        taking = asyncio.ensure_future(reader.go_on(second.url, "one", 4, most=200))
        await eventually(lambda: streams.counts["taken_over"] == 1)
        beside = await reader.go_on(third.url, "one", 4, most=20)
        told.set()
        taken = await taking

        assert third.shared.resumable.counts["taken_over"] == 0
        assert len(taken.events) == 200
        assert beside.events == taken.events[:20]


@asynccontextmanager
async def another(first: Served) -> AsyncGenerator[HttpFrontEnd]:
    async with HttpFrontEnd(first.kit.caller, first.catalog, HttpSettings(port=0)) as third:
        await eventually(lambda: len(third.shared.models.served) == 4)
        yield third


async def test_a_stream_stays_with_who_takes_it_over_before_that_knows_it_is_stored(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, second), another(first) as third:
        await reader.post(first.url, asking(f"slowly {SAID}"), headers=NAMED, most=2)
        await first.front_end.close()
        jetstream = first.kit.caller.bus.data.jetstream
        late = LateAnswer(jetstream.publish, after=1)
        monkeypatch.setattr(jetstream, "publish", late)

        taking = asyncio.ensure_future(reader.go_on(second.url, "one", 2))
        await late.stored.wait()
        beside = await reader.go_on(third.url, "one", most=2)
        late.woken.set()
        taken = await taking

        counts = [one.shared.resumable.counts["taken_over"] for one in (second, third)]
        assert counts == [1, 0]
        numbers = [number(event) for event in [*beside.events, *taken.events]]
        assert numbers == [*range(1, len(taken.events) + 3)]
        assert taken.events[-1].endswith("data: [DONE]")


async def test_a_stream_is_not_taken_from_who_begins_it_before_that_knows_it_is_stored(
    monkeypatch: Any, reader: Reader
) -> None:
    async with two_front_ends() as (first, second):
        jetstream = first.kit.caller.bus.data.jetstream
        late = LateAnswer(jetstream.publish, after=1)
        monkeypatch.setattr(jetstream, "publish", late)
        streams = second.shared.resumable

        beginning = asyncio.ensure_future(
            reader.post(first.url, asking("endless word"), headers=NAMED, most=200)
        )
        await late.stored.wait()
        following = asyncio.ensure_future(reader.go_on(second.url, "one", most=20))
        await eventually(lambda: streams.counts["followed"] == 1)
        late.woken.set()
        begun, followed = await beginning, await following

        assert streams.counts["taken_over"] == 0
        assert len(first.engine.requests) == 1
        assert len(begun.events) == 200
        assert followed.events == begun.events[:20]


async def test_a_stream_of_which_the_bus_tells_nothing_is_refused_in_time(
    monkeypatch: Any, reader: Reader
) -> None:
    monkeypatch.setattr(streams, "SILENCE", 0.1)
    async with two_front_ends() as (first, second):
        whole = await reader.post(first.url, asking(WORDS), headers=NAMED)
        jetstream = first.kit.caller.bus.data.jetstream
        consume = jetstream.consume

        async def consume_nothing(stream: str, take: Any, **options: Any) -> Any:
            # As when the server goes away right after it has made the consumer.
            told: dict[str, Any] = {**options, "on_caught_up": None}
            return await consume(stream, lambda _: None, **told)

        with monkeypatch.context() as silent:
            silent.setattr(jetstream, "consume", consume_nothing)
            refused = await reader.go_on(second.url, "one", 2)
        after = await reader.go_on(second.url, "one", 2)

        assert refused.status == 503
        assert "has told nothing of the log of the stream for 0.1 s" in refused.refusal
        assert after.events == whole.events[2:]


async def test_an_error_in_a_stream_is_an_event_that_is_read_again(reader: Reader) -> None:
    async with two_front_ends() as (first, second):
        whole = await reader.post(first.url, asking("break a"), headers=NAMED)
        rest = await reader.go_on(second.url, "one", 2)
        nothing = await reader.go_on(second.url, "one", len(whole.events))
        too_far = await reader.go_on(second.url, "one", len(whole.events) + 1)

        assert whole.events[-1].startswith(f"id: one.{len(whole.events)}\nevent: error\n")
        assert whole.events[2:] == rest.events
        assert (nothing.status, nothing.events) == (200, [])
        assert too_far.status == 400


async def test_a_stream_that_no_engine_may_begin_any_more_ends_with_the_reason(
    reader: Reader,
) -> None:
    async with two_front_ends() as (first, second):
        operator = await first.kit.bus.connect()
        operator.publish("test._cancel", b"one")
        await eventually(lambda: first.kit.caller.bus.cancels.has("test", "one"))

        refused = await reader.post(first.url, asking("a"), headers=NAMED)
        again = await reader.go_on(second.url, "one")

    assert (refused.status, refused.headers["dynbus-resumable"]) == (499, "1")
    assert "an operator cancelled the requests of this id" in refused.refusal
    assert "an operator cancelled the requests of this id" in again.events[-1]


async def test_a_stream_that_may_not_go_on_where_it_is_taken_over_ends_with_the_reason(
    reader: Reader,
) -> None:
    async with two_front_ends() as (first, second):
        await reader.post(first.url, asking(f"slowly {SAID}"), headers=NAMED, most=4)
        await first.front_end.close()
        operator = await first.kit.bus.connect()
        operator.publish("test._cancel", b"one")
        await eventually(lambda: first.kit.caller.bus.cancels.has("test", "one"))

        rest = await reader.go_on(second.url, "one", 4)

    assert second.shared.resumable.counts["taken_over"] == 1
    assert "an operator cancelled the requests of this id" in rest.events[-1]


async def test_the_openai_package_reads_a_stream_and_goes_on_with_it() -> None:
    async with (
        two_front_ends() as (first, second),
        AsyncOpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0) as asked,
        AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as other,
    ):
        stream = await asked.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": WORDS}],
            stream=True,
            extra_headers={"Dynbus-Resumable": "1"},
        )
        name = stream.response.headers["x-request-id"]
        chunks = [chunk async for chunk in stream]

        rest = await other.get(
            f"/streams/{name}",
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=AsyncStream[ChatCompletionChunk],
            options={"headers": {"Last-Event-ID": f"{name}.3"}},
        )

        assert [chunk async for chunk in rest] == chunks[3:]


async def test_a_response_that_ends_at_another_front_end_can_be_gone_on_from(
    reader: Reader,
) -> None:
    async with two_front_ends() as (first, second):
        async with AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
            before = await client.responses.create(model="tiny", input="say hi")
        body = {"input": f"slowly {SAID}", "previous_response_id": before.id}
        begun = await reader.post(first.url, body, path="/v1/responses", headers=NAMED, most=5)
        await first.front_end.close()
        rest = await reader.go_on(second.url, "one", 5)

        *_, last = begun.events + rest.events
        response = json.loads(last.partition("data: ")[2])["response"]
        async with AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
            kept = await client.responses.retrieve(response["id"])
            after = await client.responses.create(
                model="tiny", input="say ok", previous_response_id=response["id"]
            )

    assert response["store"] is True
    assert response["previous_response_id"] == before.id
    assert kept.to_dict() == response
    assert after.output_text == "hi"


async def test_a_response_that_is_not_kept_where_it_began_is_told_so_where_it_goes_on(
    reader: Reader,
) -> None:
    # As front ends of 0.1.0 are, which keep none and say nothing of it in the log.
    async with two_front_ends({"forget_responses": False}, forget_responses=True) as (
        first,
        second,
    ):
        whole = await reader.post(first.url, {"input": WORDS}, path="/v1/responses", headers=NAMED)
        again = await reader.go_on(second.url, "one")
        async with AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
            with pytest.raises(NotFoundError):
                await client.responses.retrieve("resp_one")

    assert again.events == whole.events
    assert '"id":"resp_one"' in whole.events[-1]
    assert '"store":false' in whole.events[-1]


async def test_a_response_that_is_kept_where_it_began_has_its_id_where_none_is_kept(
    reader: Reader,
) -> None:
    async with two_front_ends({"forget_responses": True}) as (first, second):
        body = {"input": f"slowly {SAID}"}
        begun = await reader.post(first.url, body, path="/v1/responses", headers=NAMED, most=5)
        await first.front_end.close()
        rest = await reader.go_on(second.url, "one", 5)

    told = [
        json.loads(one[-1].partition("data: ")[2])["response"]
        for one in (begun.events[:1], rest.events)
    ]
    assert told[0]["id"] == told[1]["id"]
    assert (told[0]["store"], told[1]["store"]) == (True, False)


async def test_a_response_that_was_deleted_stays_so_whoever_reads_its_stream(
    reader: Reader,
) -> None:
    async with two_front_ends() as (first, second):
        body = {"input": WORDS}
        whole = await reader.post(first.url, body, path="/v1/responses", headers=NAMED)
        again = await reader.go_on(second.url, "one")
        told = json.loads(whole.events[-1].partition("data: ")[2])["response"]
        async with AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
            await client.responses.delete(told["id"])
            after = await reader.go_on(second.url, "one")
            with pytest.raises(NotFoundError):
                await client.responses.retrieve(told["id"])

    assert told["store"] is True
    assert again.events == whole.events
    assert after.events[:-1] == whole.events[:-1]
    assert json.loads(after.events[-1].partition("data: ")[2])["response"]["store"] is False
