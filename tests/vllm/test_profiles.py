"""vLLM is profiled over the bus, by its streams, as it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.conftest import ENGINE, Run
from tests.vllm.test_vllm_worker import calling

from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.mock.profile import read_profile, write_profile
from dynbus.llm.profiling import (
    Effort,
    HeldOut,
    TrafficShape,
    check_profile,
    make_profile,
    measure,
    open_served_bench,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


async def test_the_steps_of_vllm_are_told_from_its_streams(
    fleet: Run, nats_server: RunningServer, tmp_path: Path
) -> None:
    async with calling(fleet, nats_server.url, 2) as (runtime, _):
        bench = await open_served_bench(runtime, ComponentName("vllm", "Engine"))
        measured = await measure(bench, Effort(128, repeats=1))
        profile = make_profile(
            measured, bench.limits, engine="the bus", model="tiny", how="streams", context=128
        )
        held_out = HeldOut(TrafficShape(24.0, 8.0, 100), requests=20, loads=(0.2,))
        (error,) = await check_profile(profile, bench, held_out)

    write_profile(tmp_path / "vllm.json", profile)
    read = read_profile(tmp_path / "vllm.json")
    assert read.costs == profile.costs
    assert read.block_size == ENGINE["block_size"]
    assert read.range.sequences == read.max_num_seqs == ENGINE["max_num_seqs"]
    assert read.latency > 0.0
    # Machines of tests are busy: what is right here is that these are the steps of its scheduler.
    assert error.requests == 20
    assert -0.95 < error.tpot_mean < 10.0
