"""Ordinary use: light, now and then idle, people come and go, and nothing is broken.

Between the flood and the fault lies what a deployment does all day. Each idle time is drawn near
one of the system's own timers, where two sides may disagree about who owes the other a sign.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
from tests.bus.servers import server_stopped

from dynbus import DynbusError, Runtime
from dynbus.bus.nats.server_process import run_server
from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL, RECONNECT_GRACE, SILENCE_LIMIT

from .workload import Count, Source, Wait

pytestmark = pytest.mark.anyio

LEASE_TTL = 10.0
CLIENTS = 16
TIMERS = (HEARTBEAT_INTERVAL, SILENCE_LIMIT, RECONNECT_GRACE, LEASE_TTL)
STREAM_OF_SECONDS = 6.0


class Neighbourhood:
    """Instances and clients that live beside each other for a while, as the seed says.

    Attributes:
        ended: calls that ended well, by kind.
        failed: what the others ended with.
    """

    def __init__(self, url: str, instances: int, seed: int, seconds: float) -> None:
        self._url = url
        self._instances = instances
        self._random = random.Random(seed)
        self._until = time.monotonic() + seconds
        self.ended: Counter[str] = Counter()
        self.failed: list[str] = []

    async def live(self) -> None:
        """Live until the time is over, everybody with a runtime of their own."""
        async with self._runtime() as serving:
            # One is always there; the others join and leave.
            await serving.start(Source)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._instances - 1):
                    tasks.create_task(self._serve(random.Random(self._random.random())))
                for _ in range(CLIENTS):
                    tasks.create_task(self._call(random.Random(self._random.random())))

    def _runtime(self) -> AbstractAsyncContextManager[Runtime]:
        return Runtime.connect(self._url, lease_ttl=LEASE_TTL, drain_grace=2 * STREAM_OF_SECONDS)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    async def _serve(self, dice: random.Random) -> None:
        while not self._is_over:
            async with self._runtime() as runtime:
                await runtime.start(Source)
                await self._idle(dice.uniform(1.0, 2 * LEASE_TTL))
            # Now and then long enough for one instance to have all the calls.
            await self._idle(dice.choice((*TIMERS, 60.0)) * dice.uniform(0.5, 1.5))

    async def _call(self, dice: random.Random) -> None:
        while not self._is_over:
            async with self._runtime() as runtime:
                source = runtime.client(Source)
                leaves_at = time.monotonic() + dice.uniform(5.0, 60.0)
                # Some call all the time, some now and then.
                rate = dice.choice((0.5, 4.0, 8.0, 8.0, 8.0, 20.0))
                while not self._is_over and time.monotonic() < leaves_at:
                    await self._one_call(source, dice)
                    if dice.random() < 0.01:
                        await self._idle(dice.choice(TIMERS) * dice.uniform(0.9, 1.1))
                    else:
                        await self._idle(dice.expovariate(rate))

    async def _one_call(self, source: Source, dice: random.Random) -> None:
        kind = dice.choices(("short", "long", "stream", "slow stream"), (80, 4, 13, 3))[0]
        begun = time.monotonic()
        try:
            if kind == "short":
                await source.work(Wait(seconds=dice.choice((0.0, 0.04, 0.04, 0.4))))
            elif kind == "long":
                await source.work(Wait(seconds=dice.choice(TIMERS[:3]) * dice.uniform(0.9, 1.1)))
            else:
                pause = 0.01 if kind == "stream" else dice.choice(TIMERS[:2])
                items = dice.randint(1, 8) if kind == "stream" else int(STREAM_OF_SECONDS / pause)
                request = Count(items=items, pause=pause)
                seen = [item.index async for item in source.count(request)]
                assert seen == list(range(items))
        except DynbusError as error:
            took = time.monotonic() - begun
            self.failed.append(f"{kind} after {took:.3f} s: {error.code}: {error}")
        else:
            self.ended[kind] += 1

    async def _idle(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, self._until - time.monotonic())))


def of_a_busy_machine(warning: str) -> bool:
    """Whether it says that a new thread, which `Thread.start` waits for, got no processor."""
    return "has been blocked" in warning and "self._started.wait()" in warning


SHORT = ((1, 7, 25.0), (4, 8, 35.0))
AN_HOUR = ((4, time.time_ns(), 3600.0),)


@pytest.mark.nightly(
    "tests/bus/test_liveness.py::test_several_heartbeats_may_be_lost",
    "tests/bus/test_liveness.py::test_an_outage_of_ours_gives_the_remote_time_and_no_more",
)
@pytest.mark.parametrize(
    "lives",
    [
        SHORT,
        pytest.param(AN_HOUR, marks=[pytest.mark.soak, pytest.mark.timeout(3900)]),
    ],
    ids=["half a minute", "an hour"],
)
async def test_ordinary_use_sees_no_error_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lives: tuple[tuple[int, int, float], ...]
) -> None:
    """Neighbourhoods of so many instances each, with a seed and for some seconds."""
    async with AsyncExitStack() as exits:
        neighbourhoods: list[Neighbourhood] = []
        for instances, seed, seconds in lives:
            # Each has a server of its own, so that one of them has one instance in all.
            server = await run_server(store_dir=tmp_path / str(seed))
            await exits.enter_async_context(server_stopped(server))
            neighbourhoods.append(Neighbourhood(server.url, instances, seed, seconds))

        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*(each.live() for each in neighbourhoods))

    for life, neighbourhood in zip(lives, neighbourhoods, strict=True):
        print(f"{life}: {dict(neighbourhood.ended)}")
        assert neighbourhood.failed == []
        assert neighbourhood.ended["short"] > 0
    warnings = [record.getMessage() for record in caplog.records]
    assert [warning for warning in warnings if not of_a_busy_machine(warning)] == []
