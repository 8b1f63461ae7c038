"""Jobs and their steps while the processes that do them, and the server, are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from dynbus import JobHandle, Runtime, Unavailable
from dynbus.actors.declaring.durable import DurableMethod
from dynbus.bus.nats.server_process import RunningServer

from .job_shop import LEDGER, Order, Shop
from .processes import Processes

T = TypeVar("T")

pytestmark = pytest.mark.anyio


async def submitted(handler: DurableMethod[Order, T], name: str, number: int) -> JobHandle[T]:
    """A job under its own key, however often the server is away meanwhile."""
    while True:
        try:
            return await handler.submit(Order(number), idempotency_key=f"{name}-{number}")
        except Unavailable:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "kills",
    [
        4,
        pytest.param(
            60,
            marks=pytest.mark.nightly(
                "tests/scenarios/test_jobs_under_kills.py::test_no_job_is_lost_and_no_finished_step_is_done_again"
            ),
        ),
    ],
)
async def test_no_job_is_lost_and_no_finished_step_is_done_again(
    own_server: RunningServer,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    shops = [await processes.job_shop(own_server.url) for _ in range(3)]
    sold: dict[int, list[str]] = {}
    packed: dict[int, int] = {}
    async with Runtime.connect(own_server.url) as runtime:
        client = runtime.client(Shop)
        numbers = count()

        async def orders(killing: asyncio.Future[None]) -> None:
            while not killing.done():
                number = next(numbers)
                pack = await submitted(client.pack, "pack", number)
                sell = await submitted(client.sell, "sell", number)
                packed[number], sold[number] = await pack.result(), await sell.result()

        async def kill() -> None:
            for number in range(1, kills + 1):
                await asyncio.sleep(random.uniform(0.2, 0.6))
                at = random.randrange(len(shops))
                shops[at].kill()
                shops[at] = await processes.job_shop(own_server.url)
                if number % 4 == 0:
                    own_server.kill()
                    await own_server.start()

        killing = asyncio.ensure_future(kill())
        async with asyncio.timeout(600):
            await asyncio.gather(*(orders(killing) for _ in range(10)))
        await killing

        assert packed == {number: number for number in range(len(packed))}
        assert len(packed) == next(numbers) > 10 * kills
        done = Counter(ledger.read_text().splitlines())
        for number, steps in sold.items():
            # What a step gave is what its one record says, whoever went on with the job.
            assert [one.rpartition(" by ")[0] for one in steps] == [
                f"{name} {number}" for name in "abc"
            ]
            assert all(done[f"{name} {number}"] >= 1 for name in "abc")
        # A key has one result, also when it is asked for again.
        again = await client.sell.submit(Order(-1), idempotency_key="sell-0")
        assert await again.result() == sold[0]
