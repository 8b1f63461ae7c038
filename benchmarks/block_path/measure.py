"""One process's measurement, printed as JSON.

`python -m benchmarks.block_path.measure time|bytes PROMPTS`
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import Connection, StoredMessage
from dynbus.kvrouter.engine_events.bridge import RankStream
from dynbus.kvrouter.engine_events.of_actor import EngineEvents
from dynbus.kvrouter.engine_events.zmq_subscriber import ZmqSource
from dynbus.kvrouter.radix.index import Overlap, RadixIndex, Rank
from dynbus.kvrouter.routing.caches import ExpectedCaches
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.profiles import InstanceProfile, read_profile
from dynbus.kvrouter.routing.queue import SchedulingRequest
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.awareness import EXACT, CacheAwareness
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.kvrouter.stream.follower import Position
from dynbus.kvrouter.stream.live_index import LiveIndex
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.kvrouter.stream.resync import ResyncPlan

from .workload import BLOCK_SIZE, OUTPUT_BLOCKS, PROMPT_BLOCKS, make_workload

NAMESPACE: Final = "bench"
INSTANCES: Final = 8
RUNNING: Final = 64
"""Requests that run while another is decided."""


class Engine:
    """An engine's reader and publisher, on a bus in memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.publisher = KvEventPublisher(connection, NAMESPACE, "Engine", "a")
        source = ZmqSource("tcp://127.0.0.1:1")
        self._events = EngineEvents(self.publisher, source, block_size=BLOCK_SIZE)
        self._number = 0

    def connect(self) -> RankStream:
        """Begin to read; nothing comes over a socket here."""
        stream = self._events.bridge.stream(0)
        stream.connected()
        stream.cannot_replay()
        return stream

    async def say(self, stream: RankStream, payloads: list[bytes]) -> None:
        """Read messages, and wait until the stream has what they say."""
        for payload in payloads:
            assert stream.apply(self._number, payload)
            self._number += 1
            # As the reader of the socket does.
            await asyncio.sleep(0)
        await self.publisher.flush(60.0)

    async def read(self) -> list[StoredMessage]:
        """All that the stream holds by now; it is empty afterwards."""
        jetstream, name = self._connection.jetstream, EventStream(NAMESPACE).name
        found: list[StoredMessage] = []
        is_read = asyncio.Event()
        consumer = await jetstream.consume(name, found.append, on_caught_up=is_read.set)
        await is_read.wait()
        await consumer.stop()
        return found


class Meter:
    """CPU seconds, or bytes that are held: whichever a run is for."""

    def __init__(self, *, counts_bytes: bool) -> None:
        self._counts_bytes = counts_bytes
        if counts_bytes:
            tracemalloc.start()

    def now(self) -> float:
        if not self._counts_bytes:
            return time.process_time()
        gc.collect()
        return float(tracemalloc.get_traced_memory()[0])


class Followed:
    """An index as a scheduler wants it."""

    position = Position(1)

    def __init__(self, index: RadixIndex) -> None:
        self._index = index

    def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
        return self._index.overlaps(block_hashes)

    def awareness(self) -> CacheAwareness:
        return EXACT

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """What engines reuse is not said here."""


async def measure(prompts: int, *, counts_bytes: bool) -> dict[str, float]:
    """By stage, what each block took."""
    workload = make_workload(prompts)
    phases = {
        "prompts": (workload.prompts, prompts * PROMPT_BLOCKS),
        "outputs": (workload.outputs, prompts * OUTPUT_BLOCKS),
        "evictions": (workload.evictions, prompts * (PROMPT_BLOCKS + OUTPUT_BLOCKS)),
    }
    found: dict[str, float] = {}
    meter = Meter(counts_bytes=counts_bytes)
    bus = MemoryBus()
    engine = Engine(await bus.connect())
    live = LiveIndex("bench", RadixIndex(), ResyncPlan(), lambda: None)
    async with engine.publisher:
        stream = engine.connect()
        await engine.publisher.flush()
        messages: list[StoredMessage] = await engine.read()
        for message in messages:
            live.apply(message, 0.0, 0.0, is_live=True)
        for name, (payloads, blocks) in phases.items():
            if name == "evictions":
                found |= _decide(workload.tokens, live.index, meter, counts_bytes=counts_bytes)
            seen = len(messages)
            del messages
            before = meter.now()
            await engine.say(stream, payloads)
            told = meter.now() - before
            messages = await engine.read()
            before = meter.now()
            for message in messages[seen:]:
                live.apply(message, 0.0, 0.0, is_live=True)
            applied = meter.now() - before
            if counts_bytes:
                # What the stream keeps is no memory of an engine's.
                told -= sum(sys.getsizeof(message.data) for message in messages[seen:])
            found[f"worker, {name}"] = told / blocks
            found[f"index, {name}"] = applied / blocks
        [rank] = engine.publisher.status().ranks
        assert rank.blocks == live.index.statistics().blocks == 0
    return found


def _decide(
    tokens: NDArray[np.uint32], index: RadixIndex, meter: Meter, *, counts_bytes: bool
) -> dict[str, float]:
    """Decisions for prompts that one instance holds, followed by as much that nobody has."""
    metadata = {"kv_block_size": str(BLOCK_SIZE), "kv_events": "true", "kv_total_blocks": "1000000"}
    names = ["a", *(f"other-{number}" for number in range(INSTANCES - 1))]
    profiles = [read_profile(name, metadata) for name in names]
    random = np.random.default_rng(2)
    new = random.integers(0, 1 << 17, tokens.shape, dtype=np.uint32)
    if counts_bytes:
        return {"guess": _guess(new, profiles[0], index, meter) / (len(tokens) * PROMPT_BLOCKS)}
    asked = np.concatenate([tokens, new], axis=1)
    scheduler = KvScheduler(follower=Followed(index))
    running: list[int] = []
    # As a front end does before it serves: what is here already is not looked at again and again.
    gc.collect()
    gc.freeze()
    before = meter.now()
    for number, prompt in enumerate(asked):
        now = number / 100
        shape = RequestShape.of(prompt, BLOCK_SIZE)
        decision = scheduler.submit(SchedulingRequest(str(number), shape, profiles, now), now)
        assert isinstance(decision, Decision)
        running.append(decision.number)
        if len(running) > RUNNING:
            oldest = running.pop(0)
            scheduler.first_item(oldest, now)
            scheduler.ended(oldest, now)
    spent = meter.now() - before
    return {"decision": spent / (len(asked) * 2 * PROMPT_BLOCKS)}


def _guess(
    prompts: NDArray[np.uint32], profile: InstanceProfile, index: RadixIndex, meter: Meter
) -> float:
    """What is kept of prompts that were sent to an instance and are not told yet."""
    before = meter.now()
    caches = ExpectedCaches(Followed(index), RouterConfig())

    def send(number: int) -> None:
        shape = RequestShape.of(prompts[number], BLOCK_SIZE)
        caches.note_sent(number, profile, profile.ranks[0], 0, shape, 0.0)
        caches.note_computed(number)

    for number in range(len(prompts)):
        send(number)
    return meter.now() - before


def main() -> None:
    what, prompts = sys.argv[1:]
    found = asyncio.run(measure(int(prompts), counts_bytes=what == "bytes"))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
