"""A pool of engines in processes of their own, scaled by `dynbus scale`, in real time.

`scripts/test tests/scenarios/test_autoscaling.py -m soak --numprocesses 0 -s` has the load of small
engines rise for half an hour and fall for another; `AUTOSCALING_SECONDS=600` less.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

import anyio
import pytest
from tests.conditions import Stopwatch, eventually

from dynbus.actors.runtime import Runtime
from dynbus.bus.clock import monotonic
from dynbus.llm import SmallConfig, SmallEngine
from dynbus.llm.engine.worker import EngineWorker
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.tiny_model import write_tiny_model
from dynbus.llm.mock.worker import MockWorker
from dynbus.llm.worker import SmallWorker

from .project import Folder

pytestmark = pytest.mark.anyio

LEAST, MOST = 0.1, 3.0
"""The load at the beginning and the end, and in the middle, as a multiple of what one engine bears;
two together bear more than twice as much, as a prompt waits for whichever is free."""
PROMPT, OUTPUT = 2000, 40
SOAKED: Final = float(os.environ.get("AUTOSCALING_SECONDS", "3600"))


class Pool(NamedTuple):
    """The engines of a story.

    Attributes:
        options: of their actor.
        unit: requests each second that one of them bears alone.
        ttft, itl: objectives, in seconds.
        vocabulary: of their model.
    """

    actor: type[EngineWorker]
    options: Sequence[str]
    unit: float
    ttft: float
    itl: float
    vocabulary: int


MOCKS: Final = Pool(
    MockWorker,
    ("--MockWorker.speedup_ratio=0.2", "--MockWorker.max_num_seqs=32"),
    unit=4.0,
    ttft=2.0,
    itl=0.1,
    vocabulary=30_000,
)


def small_engines(folder: Path) -> Pool:
    """Engines that compute a model of two layers, with what they bear by what a prompt takes here.

    One that gives prompts a fifth of its time has a twentieth of them wait for 1.7 times as long
    as they take, by the formula of `capacity.py`; three leave two cores time for their outputs.
    """
    config = write_tiny_model(folder) / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "max_position_embeddings": 4096}))
    vocabulary = 200
    engine = SmallEngine(folder, SmallConfig(backend="numpy", threads=1, blocks=2048))
    took: list[float] = []
    for number in range(5):
        prompt = [Random(number).randrange(vocabulary) for _ in range(PROMPT)]
        engine.add(f"{number}", GenerateRequest(prompt, 1, ignore_eos=True))
        watch = Stopwatch()
        while engine.has_work:
            engine.step()
        took.append(watch.seconds())
    seconds = median(took)
    options = ("backend=numpy", "threads=1", "blocks=2048", f"model={folder}")
    return Pool(
        SmallWorker,
        [f"--SmallWorker.{option}" for option in options],
        unit=0.2 / seconds,
        ttft=2.7 * seconds,
        itl=0.05,
        vocabulary=vocabulary,
    )


class Answer(NamedTuple):
    """What came of a request, in seconds."""

    tokens: int
    first: float
    between: float


async def ask(runtime: Runtime, pool: Pool, number: int) -> Answer:
    """Ask for a prompt that no cache has."""
    random, began = Random(number), monotonic()
    prompt = [random.randrange(pool.vocabulary) for _ in range(PROMPT)]
    tokens, first, now = 0, began, began
    request = GenerateRequest(prompt, OUTPUT, ignore_eos=True)
    async for item in runtime.client(pool.actor).generate(request):
        now = monotonic()
        first = first if tokens else now
        tokens += len(item.token_ids)
    return Answer(tokens, first - began, (now - first) / max(1, tokens - 1))


class Rise(NamedTuple):
    """What a load that rose and fell has seen.

    Attributes:
        instances: that were there in each second.
    """

    pool: Pool
    answers: list[Answer]
    instances: list[int]

    def __str__(self) -> str:
        ttft, itl = self.pool.ttft, self.pool.itl
        good = sum(each.first <= ttft and each.between <= itl for each in self.answers)
        hours = sum(self.instances) / 3600
        always = max(self.instances) * len(self.instances) / 3600
        return (
            f"{good} of {len(self.answers)} requests within {ttft:.3g} s and {itl:g} s, "
            f"{min(self.instances)} to {max(self.instances)} instances, {hours:.3f} instance hours "
            f"of {always:.3f}"
        )


async def rise_and_fall(runtime: Runtime, pool: Pool, seconds: float) -> Rise:
    """A load that rises from `LEAST` to `MOST` in half of the time, and falls in the other."""
    random, began = Random(1), monotonic()
    answers: list[Answer] = []
    instances: list[int] = []

    async def answer(number: int) -> None:
        answers.append(await ask(runtime, pool, number))

    async def count() -> None:
        while True:
            instances.append(len(runtime.instance_ids(pool.actor)))
            await anyio.sleep(1.0)

    async with asyncio.TaskGroup() as asking:
        counting = asking.create_task(count())
        number = 0
        while (at := (monotonic() - began) / seconds) < 1.0:
            load = LEAST + (MOST - LEAST) * (1.0 - abs(2.0 * at - 1.0))
            await anyio.sleep(random.expovariate(pool.unit * load))
            asking.create_task(answer(number))
            number += 1
        counting.cancel()
    return Rise(pool, answers, instances)


async def scaled(folder: Folder, pool: Pool, seconds: float, *options: str) -> Rise:
    """The same on a pool that is scaled; it comes back to one instance."""
    name = pool.actor.__name__
    folder.start_ready(
        *(f"dynbus.llm:{name}", "dynbus.llm.scaling:Autoscaler", *pool.options),
        *(f"--Autoscaler.pools=llm.{name}=1:6", f"--Autoscaler.ttft={pool.ttft}"),
        f"--Autoscaler.itl={pool.itl}",
        f"--Autoscaler.command={sys.executable} -m dynbus scale {{node}}={{count}}",
        *options,
        instances=2,
    )
    async with Runtime.connect(folder.url) as runtime:
        rise = await rise_and_fall(runtime, pool, seconds)
        await eventually(
            lambda: len(runtime.instance_ids(pool.actor)) == 1, 600.0, what="one is left"
        )
    return rise


@pytest.mark.nightly(
    "tests/llm/scaling/test_autoscaler.py"
    "::test_instances_come_with_the_load_go_after_it_and_no_stream_ends_early"
)
@pytest.mark.timeout(300)
async def test_a_pool_follows_a_load_that_rises_and_falls(folder: Folder) -> None:
    rise = await scaled(
        folder,
        MOCKS,
        60.0,
        *("--Autoscaler.interval=1", "--Autoscaler.cold_start=3", "--Autoscaler.drain=3"),
        "--Autoscaler.down_after=10",
    )

    print(rise)
    assert {each.tokens for each in rise.answers} == {OUTPUT}
    assert max(rise.instances) > 1


@pytest.mark.soak
@pytest.mark.timeout(SOAKED + 900)
async def test_a_pool_follows_a_load_over_an_hour(folder: Folder) -> None:
    pool = small_engines(folder.path / "model")
    options = ("--Autoscaler.cold_start=10", "--Autoscaler.down_after=120")
    rise = await scaled(folder, pool, SOAKED, *options)

    print(rise)
    assert {each.tokens for each in rise.answers} == {OUTPUT}
    assert max(rise.instances) > 1
