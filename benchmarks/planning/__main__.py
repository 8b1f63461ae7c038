"""`python -m benchmarks.planning`: the engines of a plan, and those that drawn cases take."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from msgspec.structs import asdict

from benchmarks.serving.model import write_model
from dynbus.llm.mock.profile import read_profile, write_profile
from dynbus.llm.profiling import (
    Effort,
    HeldOut,
    SteppedBench,
    TrafficShape,
    check_profile,
)
from dynbus.llm.profiling import make_profile as profile_of
from dynbus.llm.profiling import measure as measure_on
from dynbus.llm.small import SmallConfig, SmallEngine

from .cases import draw_case, maker

CONTEXT = 1024


@click.command()
@click.option("--profile", "path", type=click.Path(path_type=Path), required=True)
@click.option("--cases", type=int, default=10, show_default=True)
@click.option("--first", type=int, default=1, show_default=True, help="Seed of the first case.")
@click.option("--cpu", is_flag=True, help="By the processor's time: for a machine that is busy.")
def main(path: Path, cases: int, first: int, cpu: bool) -> None:
    """Print a JSON line for each case: what is planned, what it takes, and the times of each.

    The profile is measured where there is no such file.
    """
    clock = time.process_time if cpu else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", 4096)
        make = maker(model)
        engine = make(
            SmallConfig(
                backend="numpy",
                threads=1,
                blocks=1024,
                max_num_seqs=16,
                max_num_batched_tokens=512,
                pooling=None,
            )
        )
        if not path.exists():
            measure(path, engine, clock)
        profile = read_profile(path)
        right = 0
        for seed in range(first, first + cases):
            began = time.perf_counter()
            case = draw_case(seed, profile, engine.limits.vocabulary, clock)
            plan = case.plan()
            real, known = case.fewest_really(plan.total or 1, make)
            is_right = None not in (plan.total, real) and abs((plan.total or 0) - (real or 0)) <= 1
            right += is_right
            row = {
                "seed": seed,
                "planned": plan.total,
                "range": [plan.least, plan.most],
                "real": real,
                "within_one": is_right,
                "policy": case.configuration.policy,
                "blocks": case.configuration.blocks,
                "max_num_seqs": case.configuration.profile.max_num_seqs,
                "limits_ms": [round(1000 * each.seconds, 2) for each in case.targets],
                "simulated_ms": [
                    [sum(one.engines), *(round(1000 * each, 2) for each in one.seconds or ())]
                    for one in plan.attempts
                ],
                "real_ms": [
                    [number, *(round(1000 * each, 2) for each in seconds)]
                    for number, seconds in sorted(known.items())
                ],
                "seconds": round(time.perf_counter() - began, 1),
            }
            click.echo(json.dumps(row))
        click.echo(f"{right} of {cases} within one engine")


def measure(path: Path, engine: SmallEngine, clock: Callable[[], float]) -> None:
    """Measure the profile of an engine, and write it."""
    bench = SteppedBench(engine, clock=clock)
    measured = asyncio.run(measure_on(bench, Effort(CONTEXT)))
    profile = profile_of(
        measured,
        engine.limits,
        engine=f"small, {engine.backend}",
        model="bench",
        how="steps",
        context=CONTEXT,
        block_bytes=engine.memory.layout.block_bytes,
    )
    held_out = HeldOut(TrafficShape(128, 32, CONTEXT))
    errors = asyncio.run(check_profile(profile, bench, held_out))
    write_profile(path, profile.with_errors(errors))
    for each in errors:
        click.echo(json.dumps(asdict(each)))


if __name__ == "__main__":
    main()
