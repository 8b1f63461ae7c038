"""How fast a router is warm from a snapshot: python -m benchmarks.kv_events.warm_start

The index is filled from a stream in a real nats-server, a snapshot of it is taken by the writer
as in a router, and a new follower begins with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dynbus.bus.lane import new_event_loop
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import run_server
from dynbus.kvrouter.events import BlockStored, encode_events
from dynbus.kvrouter.stream.event_stream import EventStream, ensure_stream
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.snapshot_writer import SnapshotWriter
from dynbus.kvrouter.stream.snapshots import SnapshotStore
from dynbus.kvrouter.stream.warm_start import warm_index

NAMESPACE, COMPONENT = "bench", "Engine"
PROMPTS_PER_MESSAGE = 16
FOLLOW_TIMEOUT = 300.0
POLL = 0.01


async def fill(connection: NatsConnection, blocks: int, instances: int, prompt: int) -> int:
    """Prompts of `prompt` blocks until all instances hold `blocks` together; returns how many
    they are."""
    random = np.random.default_rng(1)
    per_instance = blocks // instances // (prompt * PROMPTS_PER_MESSAGE)
    for message in range(per_instance):
        for instance in range(instances):
            events = [
                BlockStored(None, hashes, hashes)
                for hashes in random.integers(
                    1, 1 << 63, (PROMPTS_PER_MESSAGE, prompt), dtype=np.uint64
                )
            ]
            data = encode_events(events, event_epoch=1, first_id=message * PROMPTS_PER_MESSAGE)
            await connection.jetstream.publish(f"{NAMESPACE}.{COMPONENT}._kv.e{instance}.0", data)
    return per_instance * instances * prompt * PROMPTS_PER_MESSAGE


@asynccontextmanager
async def watched() -> AsyncGenerator[list[float]]:
    """The seconds by which the loop came late while this is open."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - before - 0.001)

    task = asyncio.create_task(watch())
    try:
        yield late
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(FOLLOW_TIMEOUT):
        while True:
            if condition():
                return
            await asyncio.sleep(POLL)


async def measure(url: str, blocks: int, instances: int, prompt: int) -> dict[str, Any]:
    connection = await connect([url], name="bench")
    jetstream = connection.jetstream
    stream = EventStream(NAMESPACE, max_bytes=8 * 1024**3)
    await ensure_stream(jetstream, stream)
    held = await fill(connection, blocks, instances, prompt)
    last = (await jetstream.stream_info(stream.name)).last_sequence
    begun = time.perf_counter()
    async with IndexFollower(connection, NAMESPACE, COMPONENT, stream=stream) as follower:
        await until(lambda: follower.position.sequence >= last)
        from_stream = time.perf_counter() - begun
        async with watched() as late, SnapshotWriter(jetstream, follower) as writer:
            await until(lambda: writer.status().written)
        status = writer.status()
    begun = time.perf_counter()
    store = SnapshotStore(jetstream, NAMESPACE)
    async with watched() as late_reading:
        start = await warm_index(jetstream, COMPONENT, store, stream.name)
    async with IndexFollower(
        connection,
        NAMESPACE,
        COMPONENT,
        stream=stream,
        index=start.index,
        position=start.position,
    ) as warm:
        await until(lambda: warm.position.sequence >= last)
        took = time.perf_counter() - begun
        assert warm.index.statistics().blocks == held
    await connection.close()
    assert status.latest is not None
    return {
        "blocks": held,
        "snapshot_bytes": status.latest.size,
        "from_stream_s": from_stream,
        "write_s": status.seconds,
        "worst_stall_writing_ms": 1e3 * max(late),
        "worst_stall_reading_ms": 1e3 * max(late_reading),
        "warm_s": took,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="blocks of one prompt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder))
        try:
            found = await measure(server.url, options.blocks, options.instances, options.prompt)
        finally:
            await server.stop()
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
