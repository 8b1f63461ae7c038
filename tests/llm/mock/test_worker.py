"""The mock engine as an actor: its tokens, its time, what it tells, and how it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.profiles import made_profile

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.events import BlockStored, KvEvent
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.kvrouter.routing.profiles import read_profile
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.generation import GenerateRequest, Sampling, Session
from dynbus.llm.mock.engine import MockEngine
from dynbus.llm.mock.profile import write_profile
from dynbus.llm.mock.timing import Timing
from dynbus.llm.mock.worker import MockWorker
from dynbus.testing import TestKit, run

PROMPT = list(range(100, 260))


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        self.events += events


class RecordedWorker(MockWorker, namespace="mock"):
    """A worker whose events stay here."""

    recorder: Recorder
    made: MockEngine

    def make_engine(self) -> MockEngine:
        self.made = super().make_engine()
        return self.made

    def event_sink(self) -> AbstractAsyncContextManager[EventSink]:
        self.recorder = Recorder()

        @asynccontextmanager
        async def sink() -> AsyncGenerator[EventSink, None]:
            yield self.recorder

        return sink()


def actor_of(kit: TestKit) -> RecordedWorker:
    [instance] = kit.started.values()
    assert isinstance(instance.actor, RecordedWorker)
    return instance.actor


def engine_of(kit: TestKit) -> MockEngine:
    return actor_of(kit).made


async def tokens_of(client: MockWorker, request: GenerateRequest) -> list[int]:
    return [token async for item in client.generate(request) for token in item.token_ids]


def test_a_continued_request_gives_the_rest_of_the_tokens() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, block_size=16)
            client = kit.client(RecordedWorker)
            wanted = GenerateRequest(PROMPT, 40, n=2, sampling=Sampling(seed=7))
            items = [item async for item in client.generate(wanted)]
            for index in range(2):
                whole = [token for one in items if one.index == index for token in one.token_ids]
                assert len(whole) == 40
                rest = [item async for item in client.generate(wanted.continued(whole[:15], index))]
                assert [token for one in rest for token in one.token_ids] == whole[15:]
                assert rest[-1].finish_reason == "length"
                assert {item.index for item in rest} == {index}

    run(story())


def test_the_first_token_says_how_much_of_the_prompt_was_in_the_cache() -> None:
    async def story() -> list[list[int | None]]:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, block_size=16)
            client = kit.client(RecordedWorker)
            return [
                [item.cached_tokens async for item in client.generate(GenerateRequest(PROMPT, 3))]
                for _ in range(2)
            ]

    # The last token of a prompt is computed in any case, and so its whole block.
    assert run(story()) == [[0, None, None], [144, None, None]]


def test_tokens_come_in_the_time_that_the_steps_take() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, speedup_ratio=2.0)
            client = kit.client(RecordedWorker)
            begun = monotonic()
            async for _ in client.generate(GenerateRequest(PROMPT, 3)):
                pass
            return monotonic() - begun

    timing = Timing(speedup_ratio=2.0)
    capacity = 64 * 16_384
    expected = timing.prefill(160) + timing.decode(161, capacity) + timing.decode(162, capacity)
    assert run(story()) == pytest.approx(expected, abs=0.001)


def test_the_sink_is_told_which_blocks_the_cache_has() -> None:
    async def story() -> list[KvEvent]:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, block_size=16)
            client = kit.client(RecordedWorker)
            async for _ in client.generate(GenerateRequest(PROMPT, 1)):
                pass
            return actor_of(kit).recorder.events

    [event] = run(story())

    assert isinstance(event, BlockStored)
    assert list(event.block_hashes) == block_hashes(PROMPT, 16).tolist()


def test_an_index_learns_from_the_stream_what_a_worker_holds() -> None:
    async def story() -> tuple[str, RadixIndex]:
        index = RadixIndex()

        def apply(message: StoredMessage) -> None:
            index.apply(worker.id, message.data)

        async with TestKit() as kit:
            worker = await kit.start(MockWorker, block_size=16)
            async for _ in kit.client(MockWorker).generate(GenerateRequest(PROMPT, 20)):
                pass
            connection = await kit.bus.connect()
            stream = EventStream("llm").name
            consumer = await connection.jetstream.consume(stream, apply)
            await eventually(lambda: index.lookup(block_hashes(PROMPT, 16)))
            await consumer.stop()
            await connection.close()
            return worker.id, index

    worker_id, index = run(story())

    assert index.lookup(block_hashes(PROMPT, 16)) == {worker_id: 10}


def test_a_reader_that_leaves_frees_the_blocks_at_once() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, block_size=16, blocks=64)
            manager = engine_of(kit).manager
            stream = kit.client(RecordedWorker).generate(GenerateRequest(PROMPT, 800))
            async with aclosing(stream):
                await anext(stream)
                assert manager.free < 64
            left = monotonic()
            await eventually(lambda: manager.free == 64)
            # Sooner than the kill, which comes a second after the stop.
            assert monotonic() - left < 0.5

    run(story())


def test_a_request_that_waits_for_its_turn_can_be_left_too() -> None:
    async def story() -> list[int]:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, block_size=16, blocks=64, max_num_seqs=1)
            client = kit.client(RecordedWorker)
            first = client.generate(GenerateRequest(PROMPT, 30))
            async with aclosing(first):
                await anext(first)
                second = asyncio.create_task(anext(client.generate(GenerateRequest(PROMPT, 5))))
                await eventually(lambda: engine_of(kit).load.waiting == 1)
                second.cancel()
                await asyncio.wait({second})
                await eventually(lambda: engine_of(kit).load.waiting == 0)
                return [token async for item in first for token in item.token_ids]

    assert len(run(story())) == 29


def test_routers_learn_the_size_of_the_cache() -> None:
    async def story() -> Mapping[str, str]:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, block_size=32, blocks=128, max_num_batched_tokens=4096)
            return actor_of(kit).instance_metadata()

    profile = read_profile("a", run(story()))

    assert (profile.block_size, profile.total_blocks) == (32, 128)
    assert (profile.max_batched_tokens, profile.has_events) == (4096, True)


def test_limits_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        MockWorker(max_num_seqs=512, max_num_batched_tokens=256)


def test_the_next_instance_goes_on_with_a_folder(tmp_path: Path) -> None:
    async def story() -> int:
        options: dict[str, Any] = {"block_size": 16, "blocks": 64, "host_blocks": 64}
        wanted = GenerateRequest(PROMPT, 2, session=Session("chat", 600.0))
        async with TestKit() as kit:
            await kit.start(RecordedWorker, host_folder=str(tmp_path), **options)
            items = [item async for item in kit.client(RecordedWorker).generate(wanted)]
            return max(item.cached_tokens or 0 for item in items)

    assert run(story()) == 0
    # The last token is computed in any case.
    assert run(story()) == len(PROMPT) - 16
    assert len([*tmp_path.iterdir()]) == 1


def test_a_folder_for_no_blocks_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="host_folder: needs host_blocks"):
        MockWorker(host_folder="kept")


def profiled(folder: Path, *, context_tokens: int) -> str:
    """The file of a profile that was fitted to so much context in a step."""
    profile = made_profile()
    fitted = msgspec.structs.replace(profile.range, context_tokens=context_tokens)
    write_profile(folder / "p.json", msgspec.structs.replace(profile, range=fitted))
    return str(folder / "p.json")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (1000, "has a prompt of 160 tokens and may have 1000 of output, and the context has 1024"),
        (60, "tokens of context: the profile of m on e was fitted to 4, 256 and 200 at most"),
    ],
)
def test_what_a_profile_was_not_fitted_to_is_refused(
    output: int, reason: str, tmp_path: Path
) -> None:
    async def story() -> list[int]:
        async with TestKit() as kit:
            await kit.start(RecordedWorker, profile=profiled(tmp_path, context_tokens=200))
            return await tokens_of(kit.client(RecordedWorker), GenerateRequest(PROMPT, output))

    with pytest.raises(DynbusError) as caught:
        run(story())

    assert reason in str(caught.value)


def test_a_worker_with_a_profile_takes_the_time_of_its_steps(tmp_path: Path) -> None:
    async def story() -> float:
        async with TestKit() as kit:
            path = profiled(tmp_path, context_tokens=4096)
            await kit.start(RecordedWorker, profile=path, speedup_ratio=0.5)
            began = monotonic()
            await tokens_of(kit.client(RecordedWorker), GenerateRequest(PROMPT, 30))
            return monotonic() - began

    # Prompt and tokens take 52 ms, and twice that at half the speed.
    assert run(story()) > 0.1
