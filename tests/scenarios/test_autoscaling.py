"""A pool of engines in processes of their own, scaled by `dynbus scale`, in real time.

`scripts/test tests/scenarios/test_autoscaling.py -m soak --numprocesses 0 -s` has the load rise for
half an hour and fall for another; `AUTOSCALING_SECONDS=600` less.
"""

from __future__ import annotations

import asyncio
import os
import sys
from random import Random
from typing import Final, NamedTuple

import anyio
import pytest
from tests.conditions import eventually

from dynbus.actors.runtime import Runtime
from dynbus.bus.clock import monotonic
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.worker import MockWorker

from .project import Folder

pytestmark = pytest.mark.anyio

UNIT: Final = 4.0
"""Requests each second that one engine bears."""
LEAST, MOST = 0.1, 3.0
"""The load at the beginning and the end, and in the middle, in engines."""
OUTPUT: Final = 40
TTFT, ITL = 2.0, 0.1
SOAKED: Final = float(os.environ.get("AUTOSCALING_SECONDS", "3600"))


class Answer(NamedTuple):
    """What came of a request, in seconds."""

    tokens: int
    first: float
    between: float


async def ask(runtime: Runtime, number: int) -> Answer:
    """Ask for a prompt that no cache has."""
    random, began = Random(number), monotonic()
    prompt = [random.randrange(30_000) for _ in range(2000)]
    tokens, first, now = 0, began, began
    async for item in runtime.client(MockWorker).generate(GenerateRequest(prompt, OUTPUT)):
        now = monotonic()
        first = first if tokens else now
        tokens += len(item.token_ids)
    return Answer(tokens, first - began, (now - first) / max(1, tokens - 1))


class Rise(NamedTuple):
    """What a load that rose and fell has seen.

    Attributes:
        instances: that were there in each second.
    """

    answers: list[Answer]
    instances: list[int]

    def __str__(self) -> str:
        good = sum(each.first <= TTFT and each.between <= ITL for each in self.answers)
        hours = sum(self.instances) / 3600
        always = max(self.instances) * len(self.instances) / 3600
        return (
            f"{good} of {len(self.answers)} requests within {TTFT:g} s and {ITL:g} s, "
            f"{min(self.instances)} to {max(self.instances)} instances, {hours:.3f} instance hours "
            f"of {always:.3f}"
        )


async def rise_and_fall(runtime: Runtime, seconds: float) -> Rise:
    """A load that rises from `LEAST` to `MOST` in half of the time, and falls in the other."""
    random, began = Random(1), monotonic()
    answers: list[Answer] = []
    instances: list[int] = []

    async def answer(number: int) -> None:
        answers.append(await ask(runtime, number))

    async def count() -> None:
        while True:
            instances.append(len(runtime.instance_ids(MockWorker)))
            await anyio.sleep(1.0)

    async with asyncio.TaskGroup() as asking:
        counting = asking.create_task(count())
        number = 0
        while (at := (monotonic() - began) / seconds) < 1.0:
            load = LEAST + (MOST - LEAST) * (1.0 - abs(2.0 * at - 1.0))
            await anyio.sleep(random.expovariate(UNIT * load))
            asking.create_task(answer(number))
            number += 1
        counting.cancel()
    return Rise(answers, instances)


async def scaled(folder: Folder, seconds: float, *options: str) -> Rise:
    """The same on a pool that is scaled; it comes back to one instance."""
    folder.start_ready(
        *("dynbus.llm:MockWorker", "dynbus.llm.scaling:Autoscaler"),
        *("--MockWorker.speedup_ratio=0.2", "--MockWorker.max_num_seqs=32"),
        *("--Autoscaler.pools=llm.MockWorker=1:6", f"--Autoscaler.ttft={TTFT}"),
        f"--Autoscaler.itl={ITL}",
        f"--Autoscaler.command={sys.executable} -m dynbus scale {{node}}={{count}}",
        *options,
        instances=2,
    )
    async with Runtime.connect(folder.url) as runtime:
        rise = await rise_and_fall(runtime, seconds)
        await eventually(
            lambda: len(runtime.instance_ids(MockWorker)) == 1, 600.0, what="one is left"
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
    rise = await scaled(folder, SOAKED, "--Autoscaler.cold_start=10", "--Autoscaler.down_after=120")

    print(rise)
    assert {each.tokens for each in rise.answers} == {OUTPUT}
    assert max(rise.instances) >= MOST
