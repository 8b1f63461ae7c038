"""Instances join and leave all the time, and no request hangs."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from dynbus import Runtime
from dynbus.actors.calling.options import call_options
from dynbus.actors.runtime import ActorInstance
from dynbus.bus.errors import DynbusError
from dynbus.bus.nats.server_process import RunningServer

from .observation import leftovers
from .workload import Count, Source

pytestmark = [pytest.mark.anyio, pytest.mark.soak]

MINUTES = float(os.environ.get("CHURN_MINUTES", "4"))
JOINS, LEAVES = 250, 150
"""In a minute."""
CALLERS = 96
TIMEOUT = 10.0
HANG = 5.0
"""Seconds after its deadline at which a request hangs."""


@pytest.mark.timeout(120 + 60 * MINUTES)
async def test_no_request_hangs_or_fails_while_instances_join_and_leave(
    own_server: RunningServer,
) -> None:
    """250 join and 150 leave a minute: of these one in two drains, the others stop at once."""
    ends: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    chance = random.Random(7)
    serving: list[ActorInstance] = []

    async with (
        Runtime.connect(own_server.url) as host,
        Runtime.connect(own_server.url) as caller,
    ):
        source = caller.client(Source)
        loop = asyncio.get_running_loop()
        end = loop.time() + 60.0 * MINUTES

        async def join() -> None:
            serving.append(await host.start(Source))
            changes["joined"] += 1

        async def leave() -> None:
            instance = serving.pop(chance.randrange(len(serving)))
            if chance.random() < 0.5:
                instance.stop_now()
            await instance.stop()
            changes["left"] += 1

        async def churn(tasks: asyncio.TaskGroup) -> None:
            rate = (JOINS + LEAVES) / 60.0
            while loop.time() < end:
                # So many of a few at a time are of either kind.
                joins = chance.random() < JOINS / (JOINS + LEAVES) or len(serving) < 6
                tasks.create_task(join() if joins else leave())
                await asyncio.sleep(chance.expovariate(rate))

        async def one(number: int) -> None:
            if number % 2:
                await source.where()
                return
            items = [item async for item in source.lasting(Count(items=5, pause=0.02))]
            assert [item.index for item in items] == list(range(5))

        async def call(first: int) -> None:
            number = first
            while loop.time() < end:
                try:
                    async with asyncio.timeout(TIMEOUT + HANG):
                        with call_options(timeout=TIMEOUT, wait=TIMEOUT, retries=5):
                            await one(number)
                    ends["well"] += 1
                except TimeoutError:
                    ends["hung"] += 1
                except DynbusError as error:
                    ends[error.code] += 1
                number += 1
                await asyncio.sleep(0.01)

        for _ in range(8):
            await join()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(churn(tasks))
            for number in range(CALLERS):
                tasks.create_task(call(number))

        print(f"\n{dict(ends)} while {dict(changes)} in {MINUTES:g} minutes")
        assert ends["hung"] == 0
        assert leftovers(caller) == {}
    assert changes["joined"] > 0.8 * JOINS * MINUTES
    assert changes["left"] > 0.8 * LEAVES * MINUTES
    # A call that may not be repeated and whose instance stopped at once is told as unknown.
    assert set(ends) <= {"well", "hung", "UnknownOutcome"}
