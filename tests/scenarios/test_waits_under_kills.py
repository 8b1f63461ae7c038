"""Jobs that sleep or wait for a signal while their takers, the server, or both are killed."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import PATIENCE, eventually

from dynbus import JobHandle, Runtime
from dynbus.bus.nats.server_process import RunningServer

from .job_shop import LEDGER, Note
from .processes import Processes
from .wait_shop import VERSION, Contracts, Wait

pytestmark = pytest.mark.anyio

STAYS, LEAVES = 3.0, 9.0
"""Seconds that a job waits in its process, and such that it waits in its queue."""
TAKERS = 2


@pytest.mark.timeout(300)
@pytest.mark.nightly(
    "tests/contracts/test_steps_contract.py::test_a_sleep_survives_the_instance",
    "tests/contracts/test_steps_contract.py::test_a_signal_that_does_not_come_times_out",
)
@pytest.mark.parametrize("killed", ["takers", "server", "both"])
async def test_a_wait_ends_at_its_time_or_signal_in_a_new_version_and_no_step_is_repeated(
    own_server: RunningServer,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: str,
) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    monkeypatch.setenv(VERSION, "1")
    takers = [processes.begin_wait_shop(own_server.url) for _ in range(TAKERS)]

    def steps(name: str) -> dict[int, float]:
        notes = [Note.read(line) for line in ledger.read_text().splitlines()]
        assert not [of for of, times in Counter(n[1:4] for n in notes).items() if times > 1]
        return {one.number: one.when for one in notes if one.name == name}

    async with Runtime.connect(own_server.url, wait=PATIENCE) as runtime:
        client = runtime.client(Contracts)
        for taker in takers:
            await taker.says("takes jobs")
        # Even numbers wait in their process, odd ones in the queue.
        rests: dict[int, JobHandle[Any]] = {}
        timed_out: dict[int, JobHandle[Any]] = {}
        approved: dict[int, JobHandle[Any]] = {}
        for number in range(10):
            seconds = LEAVES if number % 2 else STAYS
            rests[number] = await client.rest.submit(Wait(number, seconds))
            timed_out[100 + number] = await client.approve.submit(Wait(100 + number, seconds))
            approved[200 + number] = await client.approve.submit(Wait(200 + number, 3600.0))
        every = {**rests, **timed_out, **approved}
        await eventually(lambda: steps("before").keys() == every.keys(), what="all jobs wait")

        monkeypatch.setenv(VERSION, "2")
        if killed != "server":
            for taker in takers:
                taker.kill()
        if killed != "takers":
            own_server.kill()
            await own_server.start()
        for taker in takers:
            # Where the server alone was killed, this is a deploy after it.
            taker.kill()
        for number in (200, 201):
            await approved[number].signal("approved", f"clerk {number}")
        takers = [processes.begin_wait_shop(own_server.url) for _ in range(TAKERS)]
        for number in range(202, 210):
            await approved[number].signal("approved", f"clerk {number}")

        results = {number: await job.result(PATIENCE) for number, job in every.items()}

    first, last = steps("before"), steps("after")
    for number, result in results.items():
        who = [] if number in rests else ["nobody" if number in timed_out else f"clerk {number}"]
        assert result[0] == "before of version 1"
        assert result[1:-1] == [*who, "after of version 2"]
        assert result[-1] == "added of version 2"
        if number not in approved:
            waited = last[number] - first[number]
            assert waited > (LEAVES if number % 2 else STAYS) - 0.5, (number, waited)
    late = max(
        last[number] - first[number] - LEAVES for number in (*rests, *timed_out) if number % 2
    )
    print(f"{killed} killed: {late:.2f} s after its time at most; {time.monotonic():.0f}")
