"""How soon a worker that is killed or frozen is noticed, and for how long its streams stall."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from statistics import median, quantiles

import pytest
from tests.conditions import eventually

from dynbus import Runtime, StreamLost, call_options
from dynbus.bus.nats.server_process import RunningServer

from .processes import Processes
from .workload import Count, Source

pytestmark = [pytest.mark.anyio, pytest.mark.soak]

RUNS = int(os.environ.get("DETECTION_RUNS", "20"))
STREAMS = 64
WORKERS = 3
PROMISED = 1.5
"""Seconds from the fault."""


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_worker_is_noticed_and_its_streams_go_on_within_a_second_and_a_half(
    own_server: RunningServer, processes: Processes, how: str
) -> None:
    noticed: list[float] = []
    stalls: list[float] = []
    for number in range(WORKERS):
        await processes.worker(own_server.url, instance_id=f"w{number}")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(60.0)

        async def find_out(instance: str) -> float:
            """When a stream that cannot go on is told."""
            with call_options(instance=instance), suppress(StreamLost):
                async for _ in source.count(Count(items=10**9, pause=0.02)):
                    pass
            return time.monotonic()

        for run in range(RUNS):
            victim = f"w{run}"
            worker = processes.named(victim)
            readers = [Reader() for _ in range(STREAMS)]
            reading = [asyncio.create_task(reader.read(source)) for reader in readers]
            telling = asyncio.create_task(find_out(victim))
            await eventually(lambda readers=readers: all(r.place for r in readers))  # type: ignore[misc]
            # The heartbeats are at any point of their interval.
            await asyncio.sleep(0.5 + 0.037 * run)
            hit = [reader for reader in readers if reader.place == victim]
            for reader in readers:
                reader.longest = 0.0

            begun = time.monotonic()
            if how == "kill":
                worker.kill()
            else:
                worker.freeze()
            noticed.append(await telling - begun)
            await eventually(lambda hit=hit, v=victim: all(r.place != v for r in hit))  # type: ignore[misc]

            stalls += [reader.longest for reader in hit]
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)
            assert all(task.cancelled() for task in reading)
            worker.thaw()
            worker.kill()
            await processes.worker(own_server.url, instance_id=f"w{run + WORKERS}")

    p99 = quantiles(stalls, n=100)[98]
    print(
        f"\n{how}: noticed after {median(noticed):.2f} s, {max(noticed):.2f} s at most of {RUNS}; "
        f"{len(stalls)} streams stalled for {median(stalls):.2f} s, "
        f"p99 {p99:.2f} s, {max(stalls):.2f} s at most"
    )
    assert max(noticed) <= PROMISED
    assert p99 <= PROMISED


class Reader:
    """Reads a stream that goes on.

    Attributes:
        place: the instance of its last item.
        longest: seconds between two items, at most.
    """

    def __init__(self) -> None:
        self.place = ""
        self.longest = 0.0

    async def read(self, source: Source) -> None:
        before, expected = time.monotonic(), 0
        async for item in source.lasting(Count(items=10**9, pause=0.02)):
            now = time.monotonic()
            self.longest = max(self.longest, now - before)
            self.place, before = item.instance, now
            assert item.index == expected
            expected += 1
