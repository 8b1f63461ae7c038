"""Workers of a `dynbus run` that are killed at random moments: no call ends but as promised, and
the run is whole again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import psutil
import pytest
from tests.conditions import eventually

from dynbus import Actor, Runtime, StreamLost, UnknownOutcome, handler
from dynbus.actors.running.control import RunShown, ShowRun, ask

from .project import Folder, project_folder

CALLERS = 16
WORKERS = 3
ITEMS = 20


class Counting(Actor, namespace="demo"):
    """Served by the run: this very class, which its processes import from a file of their own."""

    @handler(idempotent=True)
    async def same(self, number: int) -> int:
        await asyncio.sleep(0.002)
        return number

    @handler
    async def once(self, number: int) -> int:
        await asyncio.sleep(0.002)
        return number

    @handler
    async def count(self, upto: int) -> AsyncGenerator[int]:
        for number in range(upto):
            await asyncio.sleep(0.001)
            yield number


HEAD = """
import asyncio
from collections.abc import AsyncGenerator
from dynbus import Actor, handler

"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with project_folder(tmp_path) as project:
        (tmp_path / "counting.py").write_text(HEAD + inspect.getsource(Counting))
        yield project


class Callers:
    """Callers that call until they are told to end, and what became of their calls."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.ends: Counter[str] = Counter()
        self.done = asyncio.Event()

    async def have_made(self, further: int) -> None:
        """Wait until so many further calls have ended."""
        calls = self.ends.total() + further
        await eventually(lambda: self.ends.total() >= calls)

    async def call(self, number: int) -> None:
        client = self._runtime.client(Counting)
        while not self.done.is_set():
            assert await client.same(number) == number
            self.ends["same"] += 1
            try:
                assert await client.once(number) == number
                self.ends["once"] += 1
            except UnknownOutcome:
                self.ends["unknown outcome"] += 1
            items: list[int] = []
            try:
                async for item in client.count(ITEMS):
                    items.append(item)
                assert len(items) == ITEMS
                self.ends["count"] += 1
            except StreamLost:
                self.ends["stream lost"] += 1
            assert items == list(range(len(items)))


def ready(run: int, folder: Folder) -> list[int]:
    """The processes of the instances that are ready."""
    with contextlib.chdir(folder.path):
        (shown,) = (answer for answer in ask(run, ShowRun()) if isinstance(answer, RunShown))
    return [each.pid for each in shown.instances if each.state == "ready" and each.pid is not None]


def kinds(folder: Folder) -> Counter[str]:
    """The processes of the folder by what they are."""
    names: Counter[str] = Counter()
    for process in folder.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            guard = "guard" if "group_guard" in line else ""
            names[guard or line.partition("/")[0]] += 1
    return names


async def kill_at_random(folder: Folder, seed: int, kills: int) -> Counter[str]:
    """What became of the calls that were made while workers were killed."""
    chance = random.Random(seed)
    run = await asyncio.to_thread(
        folder.start_ready, "counting.py", f"--Counting.workers={WORKERS}", instances=WORKERS
    )
    supervisor = psutil.Process(run.pid)

    def whole() -> bool:
        return len(ready(run.pid, folder)) == WORKERS

    async with Runtime.connect(folder.url) as runtime:
        await eventually(whole)
        await eventually(lambda: kinds(folder)["guard"] == WORKERS)
        before, descriptors = kinds(folder), supervisor.num_fds()
        callers = Callers(runtime)
        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLERS):
                tasks.create_task(callers.call(number))
            for _ in range(kills):
                await callers.have_made(chance.randint(1, 200))
                await eventually(lambda: len(ready(run.pid, folder)) >= 2)
                os.kill(chance.choice(ready(run.pid, folder)), signal.SIGKILL)
            await eventually(whole)
            await callers.have_made(10 * CALLERS)
            callers.done.set()
    await eventually(lambda: kinds(folder) == before)
    await eventually(lambda: supervisor.num_fds() == descriptors)
    run.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(folder.exit_of, run) == 0
    assert list((folder.path / ".dynbus").glob("run-*.sock")) == []
    assert f"demo.Counting/{WORKERS}" not in " ".join(kinds(folder))
    return callers.ends


@pytest.mark.nightly(
    "tests/actors/test_invocation.py::test_a_call_whose_instance_dies_is_repeated_only_where_that_is_safe",
    "tests/actors/test_retry_policy.py::test_what_may_have_had_an_effect_is_never_repeated_unasked",
)
@pytest.mark.anyio
async def test_workers_killed_at_random_cost_no_call_that_may_be_repeated(folder: Folder) -> None:
    ends = await kill_at_random(folder, seed=7, kills=4)

    assert ends["same"] > 0
    assert ends["once"] > 0
    assert ends["count"] > 0


@pytest.mark.soak
@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(3))
async def test_many_workers_killed_at_random(folder: Folder, seed: int) -> None:
    ends = await kill_at_random(folder, seed, kills=40)

    print(f"seed {seed}: {dict(ends)}")
    assert ends["same"] > 0
