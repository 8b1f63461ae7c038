"""`python -m benchmarks.autoscaling`: the autoscaler beside one that knows the trace."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.timing import Timing
from dynbus.llm.replay import (
    DECODE,
    POOL,
    PREFILL,
    ApartSimulation,
    Objective,
    Simulation,
    Trace,
    read_trace,
)
from dynbus.llm.scaling import PoolConfig, ScalingConfig, ScalingPolicy

from .clairvoyant import Setup, firsts, search
from .days import draw_day

EXCERPT = Path(__file__).parents[2] / "tests" / "data" / "mooncake" / "conversation.jsonl"


@click.command()
@click.option(
    "--trace", type=click.Path(exists=True, path_type=Path), default=EXCERPT, show_default=True
)
@click.option("--speed", type=float, default=4.0, show_default=True, help="Of the trace.")
@click.option("--days", type=int, default=0, help="So many drawn days in place of the trace.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the first day.")
@click.option("--peak", type=float, default=6.0, show_default=True, help="Of days, requests/s.")
@click.option("--ratio", type=float, default=0.2, show_default=True, help="Speed of days' engines.")
@click.option("--cold-start", type=float, default=60.0, show_default=True, help="Seconds.")
@click.option("--interval", type=float, default=5.0, show_default=True, help="Seconds.")
@click.option("--down-after", type=float, default=180.0, show_default=True, help="Seconds.")
@click.option("--headroom", type=float, default=0.1, show_default=True)
@click.option("--least", type=int, default=1, show_default=True, help="Instances that are tried.")
@click.option("--most", type=int, default=16, show_default=True, help="Instances.")
@click.option("--apart", is_flag=True, default=False, help="Pools of prompts and of outputs.")
@click.option(
    "--token-seconds", type=float, default=5e-6, show_default=True, help="To move a token's blocks."
)
@click.option("--quiet", is_flag=True, default=False)
def main(
    trace: Path,
    speed: float,
    days: int,
    seed: int,
    peak: float,
    ratio: float,
    cold_start: float,
    interval: float,
    down_after: float,
    headroom: float,
    least: int,
    most: int,
    apart: bool,
    token_seconds: float,
    quiet: bool,
) -> None:
    """Print goodput and instance hours of both, and their ratios, as JSON lines."""

    def progress(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    def compare(name: str, trace: Trace, simulation: Simulation, objective: Objective) -> None:
        pools = {POOL: PoolConfig(least=1, most=most)}
        if apart:
            pools = {
                PREFILL: PoolConfig("prefill", least=1, most=most),
                DECODE: PoolConfig("decode", least=1, most=most),
            }
        fleet = ApartSimulation(simulation, 1, token_seconds) if apart else simulation
        setup = Setup(fleet, objective, cold_start, interval, step=30.0)
        known, sizes = search(setup, trace, least, most, progress)
        config = ScalingConfig(
            pools,
            ttft=objective.ttft,
            itl=objective.itl,
            cold_start=cold_start,
            down_after=down_after,
            headroom=headroom,
        )
        policy = ScalingPolicy(config)
        ours = setup.replay(trace, policy.decide, firsts(sizes))
        best, own = known.goodput(objective), ours.goodput(objective)
        row = {
            "trace": name,
            "requests": len(trace.requests),
            "sizes": {pool: f"{min(each)}-{max(each)}" for pool, each in sizes.items()},
            "clairvoyant": [round(best, 4), round(known.instance_seconds / 3600, 3)],
            "autoscaler": [round(own, 4), round(ours.instance_seconds / 3600, 3)],
            "changes": {pool: ours.changes(pool) for pool in sizes},
            "goodput_ratio": round(own / best, 4),
            "hours_ratio": round(ours.instance_seconds / known.instance_seconds, 4),
        }
        click.echo(json.dumps(row))

    if not days:
        simulation = Simulation(1, MockConfig(), speed=speed)
        read = read_trace(trace, block_size=simulation.engine.block_size)
        compare(f"{trace.name} x{speed:g}", read, simulation, Objective())
    for day in range(seed, seed + days):
        engine = MockConfig(timing=Timing(speedup_ratio=ratio))
        drawn = draw_day(day, peak=peak)
        objective = Objective(ttft=2.0 / ratio / 2, itl=0.05 / ratio)
        compare(f"day {day}", drawn, Simulation(1, engine), objective)


if __name__ == "__main__":
    main()
