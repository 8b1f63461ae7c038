"""Schedules while the processes that have them, and the server, are killed, and clocks jump."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.conditions import eventually

from dynbus import EndpointName, Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import job_log_stream

from .processes import Process, Processes
from .schedule_shop import LEDGER, SCHEDULES

pytestmark = pytest.mark.anyio

WRONG_BY = (0.0, 90.0, 86_400.0)
"""Seconds by which the clocks of the instances are ahead and behind in turn."""
KILLS = 12
"""Kills of an instance; with each fourth one of the server."""
NOBODY = 6.0
"""Seconds in which no instance is there."""
PERIODS = {"skipping": 1, "made_up": 1, "by_cron": 2}


def due(key: str) -> datetime:
    return datetime.strptime(key, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


@pytest.mark.timeout(600)
@pytest.mark.nightly(
    "tests/actors/test_schedule.py::test_instances_fire_once_between_them_and_make_up_what_they_missed"
)
async def test_each_firing_is_submitted_once_and_none_is_missed(
    own_server: RunningServer,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))

    async def begin(seconds: float) -> Process:
        process = processes.begin_schedule_shop(own_server.url, seconds)
        await process.says("runs schedules")
        return process

    def begun() -> dict[str, list[str]]:
        found = defaultdict[str, list[str]](list)
        for line in ledger.read_text().splitlines():
            name, key = line.split()
            found[name].append(key)
        return found

    async with asyncio.timeout(500):
        shops = [await begin(seconds) for seconds in WRONG_BY]
        for number in range(1, KILLS + 1):
            await asyncio.sleep(random.uniform(0.5, 1.5))
            at = random.randrange(len(shops))
            shops[at].kill()
            if number % 4 == 0:
                own_server.kill()
                await own_server.start()
            shops[at] = await begin(WRONG_BY[at])
        for shop in shops:
            shop.kill()
        await asyncio.sleep(NOBODY)
        back = datetime.now(UTC)
        shops = [await begin(seconds) for seconds in WRONG_BY]

        def has_fired_since(name: str) -> bool:
            return due(begun()[name][-1]) > back

        for name in SCHEDULES:
            await eventually(partial(has_fired_since, name), what=name)

    async with Runtime.connect(own_server.url) as runtime:
        for name in SCHEDULES:
            keys = begun()[name]
            first, last = due(min(keys)), due(max(keys))
            every = timedelta(seconds=PERIODS[name])
            wanted = [first + every * at for at in range((last - first) // every + 1)]
            print(f"{name}: {len(wanted)} firings, {len(keys) - len(set(keys))} tried again")
            # None is left out: nobody was ever away for a minute.
            assert sorted(map(due, set(keys))) == wanted
            # What is tried again was begun when an instance or the server was killed.
            assert len(keys) - len(set(keys)) <= KILLS + len(WRONG_BY) * (1 + KILLS // 4)
            queue = EndpointName.of("schedules", "Clerk", name)
            ends = [
                one.subject
                for one in await runtime.bus.data.jetstream.read(job_log_stream(queue))
                if one.subject.endswith(".end")
            ]
            assert len(ends) == len(set(ends)) >= len(wanted) - 1
