"""What runs in processes of their own: the engine with its publisher, and the follower."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

import numpy as np

from dynbus.bus.lane import new_event_loop
from dynbus.bus.nats.connection import connect
from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.publisher import KvEventPublisher

NAMESPACE, COMPONENT, INSTANCE = "bench", "Engine", "engine"
STEP = 0.002
"""Seconds between two steps of the engine, each with a call of `publish`."""


class Engine:
    """A cache that stores prompts of 64 blocks and removes the oldest once it is full.

    Its events are made in advance, and come round again: what is measured is not their making.
    """

    def __init__(self, blocks_per_event: int, capacity: int) -> None:
        random = np.random.default_rng(1)
        per_prompt = 64 // blocks_per_event
        self._capacity = capacity // blocks_per_event
        self._stored: list[KvEvent] = []
        self._removed: list[KvEvent] = []
        for _ in range(2 * capacity // 64):
            parent: int | None = None
            for _ in range(per_prompt):
                chain = random.integers(1, 1 << 63, blocks_per_event, dtype=np.uint64).tolist()
                self._stored.append(BlockStored(parent, chain, chain))
                self._removed.append(BlockRemoved(chain[::-1]))
                parent = chain[-1]
        self._at = 0

    def step(self, count: int) -> list[KvEvent]:
        """`count` events that store blocks, and as many that remove some once it is full."""
        pool = len(self._stored)
        events = [self._stored[at % pool] for at in range(self._at, self._at + count)]
        oldest = self._at - self._capacity
        events += [self._removed[at % pool] for at in range(max(0, oldest), max(0, oldest + count))]
        self._at += count
        return events


async def publish(url: str, rate: float, seconds: float, blocks_per_event: int) -> None:
    """Publish at `rate` blocks a second from a thread, then print what it took as JSON."""
    connection = await connect([url], name="publisher")
    async with KvEventPublisher(connection, NAMESPACE, COMPONENT, INSTANCE) as publisher:
        await publisher.flush()
        engine = Engine(blocks_per_event, capacity=100_000)
        took: list[float] = []
        published = 0

        def run() -> None:
            nonlocal published
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < seconds:
                due = min(1024, (int(rate * passed) - published) // blocks_per_event)
                if due > 0:
                    events = engine.step(due)
                    published += due * blocks_per_event
                    before = time.perf_counter()
                    publisher.publish(events)
                    took.append((time.perf_counter() - before) / len(events))
                time.sleep(STEP)

        thread = threading.Thread(target=run)
        begun, used = time.monotonic(), time.process_time()
        thread.start()
        await asyncio.to_thread(thread.join)
        await publisher.flush(60.0)
        [rank] = publisher.status().ranks
        print(
            json.dumps(
                {
                    "blocks": published,
                    "seconds": time.monotonic() - begun,
                    "cpu": time.process_time() - used,
                    "publish_us_per_event": 1e6 * float(np.median(took)),
                    "batches": rank.statistics.batches,
                    "bytes": rank.statistics.bytes,
                    "epochs": rank.statistics.epochs,
                    "held": rank.blocks,
                }
            ),
            flush=True,
        )
        await asyncio.to_thread(sys.stdin.readline)
    await connection.close()


async def follow(url: str) -> None:
    """Follow until a line is read, then print how stale the events were as JSON."""
    connection = await connect([url], name="follower")
    async with IndexFollower(connection, NAMESPACE, COMPONENT) as follower:
        print("ready", flush=True)
        used = time.process_time()
        await asyncio.to_thread(sys.stdin.readline)
        staleness = follower.status().staleness
        print(
            json.dumps(
                {
                    "cpu": time.process_time() - used,
                    "messages": staleness.messages,
                    "p50_ms": 1e3 * staleness.p50,
                    "p99_ms": 1e3 * staleness.p99,
                    "worst_ms": 1e3 * staleness.worst,
                    "held": index_digest(follower.index, Rank(INSTANCE, 0)).blocks,
                    "awareness": str(follower.awareness()),
                }
            ),
            flush=True,
        )
    await connection.close()


def main() -> None:
    role, url, *rest = sys.argv[1:]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if role == "follow":
            runner.run(follow(url))
        else:
            rate, seconds, size = rest
            runner.run(publish(url, float(rate), float(seconds), int(size)))


if __name__ == "__main__":
    main()
