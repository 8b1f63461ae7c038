"""Events of topics while the processes that hear them, and the server, are killed."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tests.conditions import eventually

from dynbus import Runtime, Unavailable
from dynbus.bus.nats.server_process import RunningServer

from .event_shop import GROUPS, LEDGER, ORDERED, Sold, sold
from .processes import Processes

pytestmark = pytest.mark.anyio

CUSTOMERS = 10
BETWEEN = 0.1
"""Seconds between two events of a customer at most: members are to keep up between their kills."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills",
    [
        4,
        pytest.param(
            30,
            marks=pytest.mark.nightly(
                "tests/scenarios/test_events_under_kills.py::test_each_group_hears_every_event_and_those_of_a_key_in_order"
            ),
        ),
    ],
)
async def test_each_group_hears_every_event_and_those_of_a_key_in_order(
    own_server: RunningServer,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    shops = [await processes.event_shop(own_server.url) for _ in range(3)]
    numbers = count()
    published: dict[str, list[int]] = {f"c{number}": [] for number in range(CUSTOMERS)}

    async with Runtime.connect(own_server.url) as runtime:

        async def publish(customer: str, killing: asyncio.Future[None]) -> None:
            while not killing.done():
                number = next(numbers)
                event = Sold(number, customer)
                while True:
                    try:
                        await sold.publish(event, key=customer, runtime=runtime)
                        break
                    except Unavailable:
                        await asyncio.sleep(0.1)
                published[customer].append(number)
                await asyncio.sleep(random.uniform(0.0, BETWEEN))

        async def kill() -> None:
            for number in range(1, kills + 1):
                await asyncio.sleep(random.uniform(0.2, 0.6))
                at = random.randrange(len(shops))
                shops[at].kill()
                shops[at] = await processes.event_shop(own_server.url)
                if number % 4 == 0:
                    own_server.kill()
                    await own_server.start()

        killing = asyncio.ensure_future(kill())
        async with asyncio.timeout(600):
            await asyncio.gather(killing, *(publish(customer, killing) for customer in published))
        everything = {(customer, one) for customer, own in published.items() for one in own}

        def has_all(group: str) -> bool:
            return set(heard(group)) == everything

        def heard(group: str) -> list[tuple[str, int]]:
            lines = [line.split() for line in ledger.read_text().splitlines()]
            return [(customer, int(one)) for name, customer, one in lines if name == group]

        for group in GROUPS:
            await eventually(partial(has_all, group), within=60.0)

    assert len(everything) > 10 * kills
    firsts = dict.fromkeys(heard(ORDERED))
    for customer, own in published.items():
        assert [one for of, one in firsts if of == customer] == own
