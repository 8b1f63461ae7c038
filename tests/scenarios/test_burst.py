"""More requests at once than an instance can read in time: each runs once, none is called lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from dynbus import Actor, Runtime, handler
from dynbus.bus.nats.server_process import RunningServer

pytestmark = pytest.mark.anyio

CALLS = 8000
WORK_SECONDS = 0.00025

runs: Counter[int] = Counter()


class Busy(Actor, namespace="burst"):
    """Its loop turns, so nothing is blocked; it is only behind."""

    @handler(concurrency=None, queue=None)
    async def once(self, number: int) -> int:
        runs[number] += 1
        end = time.perf_counter() + WORK_SECONDS
        while time.perf_counter() < end:
            pass
        return number


async def test_calls_that_wait_unread_for_seconds_run_once_and_are_not_called_lost(
    nats_server: RunningServer,
) -> None:
    runs.clear()
    async with (
        Runtime.connect(nats_server.url) as serving,
        Runtime.connect(nats_server.url) as calling,
    ):
        await serving.start(Busy)
        busy = calling.client(Busy)
        await busy.once(-1)

        begun = time.monotonic()
        results = await asyncio.gather(*(busy.once(number) for number in range(CALLS)))
        took = time.monotonic() - begun

    assert took > 1.0, "two heartbeats must have asked after calls that nobody had read"
    assert results == list(range(CALLS))
    assert set(runs.values()) == {1}
