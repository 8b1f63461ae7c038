"""An instance on the bus is measured by its streams, and its profile checked by them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.llm.profiles import made_profile

from dynbus import Actor, ConfigError, NoInstances, Reply, handler
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.engine import EngineLimits
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.mock.profile import write_profile
from dynbus.llm.mock.worker import MockWorker
from dynbus.llm.profiling import (
    Effort,
    HeldOut,
    ServedBench,
    TrafficShape,
    check_profile,
    make_profile,
    measure,
    open_served_bench,
)
from dynbus.llm.profiling.batches import Batch
from dynbus.testing import TestKit, run

ENGINE = ComponentName("llm", "MockWorker")


@asynccontextmanager
async def serving(folder: Path, speed: float = 1.0) -> AsyncGenerator[TestKit]:
    profile = folder / "p.json"
    write_profile(profile, made_profile())
    async with TestKit() as kit:
        options: dict[str, Any] = {"max_num_seqs": 2, "blocks": 32, "speedup_ratio": speed}
        await kit.start(MockWorker, profile=str(profile), **options)
        yield kit


def test_an_instance_says_how_large_it_is(tmp_path: Path) -> None:
    async def story() -> ServedBench:
        async with serving(tmp_path) as kit:
            return await open_served_bench(kit.caller, ENGINE)

    limits = run(story()).limits

    assert (limits.block_size, limits.blocks, limits.max_num_seqs) == (16, 32, 2)
    assert (limits.max_num_batched_tokens, limits.context_length) == (256, 1024)


def test_its_steps_are_measured_and_its_profile_checked(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as kit:
            bench = await open_served_bench(kit.caller, ENGINE)
            measured = await measure(bench, Effort(80, repeats=1))
            profile = make_profile(
                measured, bench.limits, engine="e", model="m", how="streams", context=80
            )
            held_out = HeldOut(TrafficShape(20, 4, 60), requests=20, loads=(0.3,))
            (error,) = await check_profile(profile, bench, held_out)

        assert profile.range.sequences == 2
        assert profile.max_num_seqs == 2
        assert [count for count, _ in profile.costs.sequences] == [1, 2]
        assert any(one.is_answer for one in measured)
        assert any(work.prompts and work.requests for one in measured for work in one.works)
        assert (error.requests, error.load) == (20, 0.3)
        # In virtual time steps take just what the profile of the mock engine says.
        assert abs(error.ttft_mean) < 1e-6
        assert abs(error.tpot_mean) < 1e-6

    run(story())


def test_requests_of_a_batch_come_at_their_steps(tmp_path: Path) -> None:
    async def story() -> None:
        # Steps of some 20 ms: shorter ones come together where the machine is busy.
        async with serving(tmp_path, speed=0.05) as kit:
            bench = await open_served_bench(kit.caller, ENGINE)
            measured = await bench.carry_out(Batch([(0, 20, 8), (4, 20, 2)]))

        steps = [work for one in measured for work in one.works]
        began = [at for at, work in enumerate(steps) if work.prompts]
        assert began[0] == 0
        # It is sent with the fourth token at the earliest, and is in the step behind that.
        assert began[1] >= 4

    # In real time, by which tokens are told apart.
    asyncio.run(story())


@pytest.mark.parametrize("made", [0, 1, 5])
def test_an_engine_that_makes_another_number_of_tokens_is_refused(made: int) -> None:
    async def ask(request: GenerateRequest) -> AsyncGenerator[Generated]:
        yield Generated([7] * made, finish_reason="stop")

    async def story() -> None:
        bench = ServedBench(ask, EngineLimits(16, 64, 4, 256, 1024, False, 256))
        # The second request waits for the step of the third token.
        with anyio.fail_after(60.0):
            await bench.carry_out(Batch([(0, 20, 4), (3, 20, 4)]))

    with pytest.raises(ValueError, match=f"the engine made {made} tokens of 4 for a request"):
        run(story())


class Silent(Actor, namespace="llm"):
    """An actor that generates, and does not say how."""

    @handler
    async def generate(self, request: GenerateRequest, reply: Reply[Generated]) -> None: ...


def test_what_does_not_say_its_size_or_is_not_there_is_refused() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Silent)
            with pytest.raises(ConfigError, match="does not say the size of its cache and steps"):
                await open_served_bench(kit.caller, ComponentName("llm", "Silent"))
            with pytest.raises(NoInstances, match=r"no instance serves llm.MockWorker.generate"):
                await open_served_bench(kit.caller, ENGINE)

    run(story())
