"""Jobs survive kill -9 of the server and of those who take them: none is lost, and none that was
acknowledged is handed out again."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from pathlib import Path

import anyio
import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import Unavailable
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import cancel_subject, holder_subject
from dynbus.bus.work_queue import DeadLetters, Job, JobEnd, WorkQueue

from .processes import Processes
from .taker import CONFIG, QUEUE

pytestmark = pytest.mark.anyio

TAKERS = 3
ON_ITS_WAY = 1.0
"""Seconds in which a taker writes down a job that it was handed before another was done with it."""


class Ledger:
    """What the takers say."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[tuple[float, str, str]]:
        """When, what, and of which job."""
        if not self.path.exists():
            return []
        whole = self.path.read_text().rpartition("\n")[0].splitlines()
        parts = (line.split() for line in whole)
        return [(float(when), what, job_id) for when, what, job_id in parts]

    def has_more_than(self, lines: int, all_put: asyncio.Event) -> bool:
        """Whether something has happened since, or nothing more needs to."""
        return len(self.lines()) > lines or all_put.is_set()

    def worked(self) -> set[str]:
        """The jobs whose work came to its end, confirmed or not."""
        return {job_id for _, what, job_id in self.lines() if what == "worked"}

    def begun_after_done(self) -> list[str]:
        done: dict[str, float] = {}
        wrong: list[str] = []
        for when, what, job_id in self.lines():
            if what == "done":
                done.setdefault(job_id, when)
            elif when > done.get(job_id, when) + ON_ITS_WAY:
                wrong.append(job_id)
        return wrong


async def put(queue: WorkQueue, job_id: str) -> None:
    """Put a job until the server confirms it, as often as that takes."""
    with anyio.fail_after(PATIENCE):
        while True:
            try:
                await queue.put(b"page", job_id=job_id)
                return
            except Unavailable:
                continue


async def run_story(
    server: RunningServer, processes: Processes, ledger: Ledger, *, jobs: int, kills: int, seed: int
) -> None:
    choices = random.Random(seed)
    bus = await Bus.connect(BusConfig(servers=(server.url,)), name="putter")
    queue = WorkQueue(bus, QUEUE, CONFIG)
    takers = [processes.begin_taker(server.url, ledger.path) for _ in range(TAKERS)]
    all_put = asyncio.Event()

    async def put_all() -> None:
        for number in range(jobs):
            await put(queue, f"job-{number}")
            await asyncio.sleep(0.002)
        all_put.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put_all)
        await takers[0].says("taking")
        for kill in range(kills):
            # At any moment: while jobs are put, held, acknowledged, asked for.
            before = len(ledger.lines())
            await eventually(partial(ledger.has_more_than, before, all_put))
            await asyncio.sleep(choices.uniform(0.0, 0.15))
            if kill % 2:
                server.kill()
                await server.restart()
            else:
                victim = choices.randrange(TAKERS)
                takers[victim].kill()
                takers[victim] = processes.begin_taker(server.url, ledger.path)

    async def is_empty() -> bool:
        return (await queue.depth(max_age=0.0)).jobs == 0

    await eventually(is_empty, what="the queue is empty")
    assert ledger.worked() == {f"job-{number}" for number in range(jobs)}
    assert ledger.begun_after_done() == []
    assert await DeadLetters(bus.data.jetstream, QUEUE.namespace).find() == []
    await bus.close()


@pytest.mark.parametrize("ahead", [300.0, -300.0])
async def test_the_deadline_of_a_job_is_the_same_where_clocks_differ(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    bus = await Bus.connect(BusConfig(servers=(own_server.url,)), name="putter and taker")
    queue = WorkQueue(bus, QUEUE, CONFIG)
    for number in range(10):
        await queue.put(b"", job_id=f"job-{number}", deadline=monotonic() + 60)
    await queue.put(b"", job_id="cancelled")
    await queue.put(b"", job_id="late", deadline=monotonic() + 0.05)
    true_time = time.time
    taken: list[Job] = []
    waited: list[float] = []

    # From here on this is another host, whose clock is wrong.
    monkeypatch.setattr(time, "time", lambda: true_time() + ahead)
    async with queue.take() as taker:
        heard = bus.cancels.hear(QUEUE.namespace)
        await bus.lane.run(bus.lane.connection.barrier())
        bus.data.publish(cancel_subject(QUEUE.namespace), b"cancelled")
        await eventually(lambda: len(heard) == 1)
        await anyio.sleep(0.1)
        while len(taken) < 10:
            with anyio.fail_after(PATIENCE):
                async with await anext(taker) as job:
                    assert job.deadline is not None
                    waited.append(60 - (job.deadline - monotonic()))
                    taken.append(job)
        with anyio.move_on_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, taker)
                await eventually(lambda: sum(queue.ended.values()) == 12)
                tasks.cancel_scope.cancel()
    monkeypatch.undo()
    await bus.close()

    assert [job.job_id for job in taken] == [f"job-{number}" for number in range(10)]
    assert queue.ended == {JobEnd.DONE: 10, JobEnd.CANCELLED: 1, JobEnd.EXPIRED: 1}
    assert all(0 <= seconds < 30 for seconds in waited), waited


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


async def test_no_job_is_lost_when_the_server_and_takers_are_killed(
    own_server: RunningServer, processes: Processes, ledger: Ledger
) -> None:
    await run_story(own_server, processes, ledger, jobs=300, kills=6, seed=1)


async def test_the_job_of_a_process_that_is_killed_begins_elsewhere_long_before_ack_wait(
    own_server: RunningServer, processes: Processes, ledger: Ledger
) -> None:
    config = CONFIG._replace(ack_wait=PATIENCE)
    bus = await Bus.connect(BusConfig(servers=(own_server.url,)), name="putter and taker")
    queue = WorkQueue(bus, QUEUE, config)
    killed = processes.begin_taker(own_server.url, ledger.path, config.ack_wait, 3600.0)
    await killed.says("taking")
    await put(queue, "job")
    await eventually(lambda: len(ledger.lines()) == 1, what="the job is begun")

    async def is_told() -> bool:
        subject = holder_subject(QUEUE, "*")
        return bool(await bus.data.jetstream.read("KV_dynbus_jobs", subject))

    async with queue.take() as taker:
        await eventually(is_told, what="the bus knows who has it")
        killed.kill()
        killed_at = monotonic()
        with anyio.fail_after(PATIENCE):
            async with await anext(taker) as job:
                seconds = monotonic() - killed_at
    await bus.close()

    assert (job.job_id, job.tries) == ("job", 2)
    assert seconds < PATIENCE / 4
    print(f"begun elsewhere {seconds:.2f} s after the kill")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
async def test_no_job_is_lost_in_200_kills(
    own_server: RunningServer, processes: Processes, ledger: Ledger, seed: int
) -> None:
    await run_story(own_server, processes, ledger, jobs=5000, kills=50, seed=seed)
