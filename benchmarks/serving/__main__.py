"""What serving costs: `python -m benchmarks.serving`; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from .engines import EngineSettings
from .guidellm import ask
from .load import Spec
from .model import write_model
from .stack import measure, stack
from .workload import Workload

LATENCY_TOKENS = 512
CONTEXT = 131_072
STEP_MS = 20.0
GUIDELLM = 500_000
"""What is added to a seed for its prompts: no two clients ask the same."""


@dataclass(frozen=True)
class Options:
    """What is asked for on the command line."""

    runs: int
    seconds: float
    streams: int
    open_streams: int
    long_tokens: int
    rate: float
    small_rate: float
    guidellm: str
    folder: Path

    def engines(self, **settings: Any) -> EngineSettings:
        """Engines of the model."""
        given: dict[str, Any] = {"context_length": CONTEXT, **settings}
        return EngineSettings(str(self.folder), **given)


Rows = dict[str, list[float]]
"""Figures by what they are, one of each run."""


def _add(rows: Rows, **figures: float) -> None:
    for name, value in figures.items():
        rows.setdefault(name.replace("_", " "), []).append(value)


async def latency(options: Options) -> Rows:
    """Times of one stream at a time: through the front end, and of the engine in process; ms."""
    rows: Rows = {}
    settings = options.engines()
    async with stack(settings) as served:
        for run in range(options.runs):
            spec = Spec(
                engine=settings,
                seconds=options.seconds,
                prompt_tokens=LATENCY_TOKENS,
                seed=1_000_000 * run,
            )
            bare = _medians(await measure("bare", spec))
            through = _medians(await served.measure("served", spec))
            _add(
                rows,
                engine_TTFT=bare[0],
                served_TTFT=through[0],
                added_to_TTFT=through[0] - bare[0],
                engine_ITL=bare[1],
                served_ITL=through[1],
                added_to_ITL=through[1] - bare[1],
            )
            if options.guidellm:
                public = await ask(
                    options.guidellm,
                    served.http,
                    options.folder,
                    spec.seed + GUIDELLM,
                    LATENCY_TOKENS,
                    options.seconds,
                )
                _add(
                    rows,
                    guidellm_TTFT=public.ttft_ms,
                    guidellm_added_to_TTFT=public.ttft_ms - bare[0],
                    guidellm_ITL=public.itl_ms,
                    guidellm_added_to_ITL=public.itl_ms - bare[1],
                )
    return rows


def _medians(told: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Medians in milliseconds of the times to a first token, and of those between tokens.

    Of each stream the mean of its gaps is taken: an engine's timers fire late, and it catches up.
    """
    return (
        1e3 * median(one["ttft"] for one in told),
        1e3 * median(fmean(one["gaps"]) for one in told),
    )


async def cpu(options: Options) -> Rows:
    """Time on a core for each token of many streams: through the front end, over the bus alone; us.

    The engine's own time is that of the same streams without the bus, in the same steps.
    """
    rows: Rows = {}
    settings = options.engines(
        prefill_ms=(1.0, 0.0, 0.0), decode_ms=(STEP_MS, 0.0, 0.0), max_num_seqs=options.streams
    )
    async with stack(settings) as served:
        for run in range(options.runs):
            spec = Spec(
                engine=settings,
                seconds=options.seconds,
                streams=options.streams,
                seed=1_000_000 * run,
            )
            alone = _per_token(await measure("stepped", spec), "engine")
            bus = await served.measure("bus", spec)
            through = await served.measure("many", spec)
            of_bus = _per_token(bus, "engines", "relay") - alone
            both = _per_token(through, "engines", "front end") - alone
            _add(
                rows,
                engine_alone=alone,
                bus_alone=of_bus,
                front_end_and_bus=both,
                of_which_front_end=_per_token(through, "front end"),
                # In a window too short to tell the bus from the engine there is no ratio.
                ratio=both / of_bus if of_bus > 0 else nan,
                with_engine_ratio=(both + alone) / (of_bus + alone) if of_bus > 0 else nan,
                broker_under_the_bus=_per_token(bus, "broker"),
                broker_under_the_front_end=_per_token(through, "broker"),
                client=_per_token(through, "client"),
                tokens_per_second=through["tokens"] / through["seconds"],
            )
            if options.guidellm:
                public = await ask(
                    options.guidellm,
                    served.http,
                    options.folder,
                    spec.seed + GUIDELLM,
                    spec.prompt_tokens,
                    options.seconds,
                    options.streams,
                )
                _add(
                    rows,
                    guidellm=1e6 * public.cpu_seconds / public.tokens,
                    guidellm_ITL_ms=public.itl_ms,
                )
    return rows


def _per_token(figures: Mapping[str, Any], *processes: str) -> float:
    """Microseconds of some processes for each token; nan in a window too short for any."""
    used = sum(figures["cpu"][name] for name in processes)
    return 1e6 * float(used) / float(figures["tokens"]) if figures["tokens"] else nan


async def open_streams(options: Options) -> Rows:
    """What a stream takes of the front end's memory with very many open, and how even they are."""
    rows: Rows = {}
    count = options.open_streams
    settings = options.engines(
        prefill_ms=(1.0, 0.0, 0.0),
        decode_ms=(max(STEP_MS, count / 8), 0.0, 0.0),
        max_num_seqs=count,
        max_num_batched_tokens=max(8192, count),
    )
    for run in range(options.runs):
        # A front end of its own for each: what one has freed the next would take again.
        async with stack(settings) as served:
            spec = Spec(
                engine=settings, seconds=options.seconds, streams=count, seed=1_000_000 * run
            )
            told = await served.measure("many", spec)
            gaps = told["gaps"]
            _add(
                rows,
                KiB_for_each=told["memory"] / 1024,
                slowest_to_median=max(gaps) / median(gaps),
                median_gap_ms=1e3 * median(gaps),
                streams=len(gaps),
            )
    return rows


async def routing(options: Options) -> Rows:
    """Requests with shared prefixes over four engines: by what is cached, and in turn."""
    return await _routing(options, Workload(rate=options.rate, seconds=options.seconds * 4))


async def routing_small(options: Options) -> Rows:
    """The same over four small engines that compute, a process each."""
    workload = Workload(
        prefixes=16,
        prefix_tokens=2048,
        own_tokens=32,
        rate=options.small_rate,
        seconds=options.seconds * 4,
    )
    return await _routing(
        options,
        workload,
        computes=True,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        context_length=8192,
    )


async def _routing(options: Options, workload: Workload, **settings: Any) -> Rows:
    rows: Rows = {}
    for run in range(options.runs):
        workload = msgspec.structs.replace(workload, seed=20 + run)
        # A cache holds the prefixes of a quarter of them, and some of what requests add.
        blocks = workload.prefixes * workload.prefix_tokens // 16 // 4 * 5 // 4
        told: dict[str, Any] = {}
        for name, count, policy in (
            ("kv", 4, "kv"),
            ("round_robin", 4, "round_robin"),
            ("one", 1, "round_robin"),
        ):
            where = "processes" if settings.get("computes") else "instances"
            own: dict[str, Any] = {where: count, "blocks": blocks * 4 // count}
            engines = options.engines(**own, **settings)
            async with stack(engines, policy) as served:
                told[name] = await served.measure("poisson", Spec(workload=workload))
        kv, others, one = told["kv"], told["round_robin"], told["one"]
        _add(
            rows,
            hit_rate_by_KV=kv["hit_rate"],
            hit_rate_in_turn=others["hit_rate"],
            hit_rate_of_one_engine=one["hit_rate"],
            hit_rate_to_that_of_one=kv["hit_rate"] / one["hit_rate"],
            mean_TTFT_by_KV_ms=1e3 * fmean(kv["ttft"]),
            mean_TTFT_in_turn_ms=1e3 * fmean(others["ttft"]),
            times_better=fmean(others["ttft"]) / fmean(kv["ttft"]),
            requests=len(kv["ttft"]),
        )
    return rows


async def long_prompt(options: Options) -> Rows:
    """The longest gap of other streams while a very long prompt is answered, and while none is."""
    rows: Rows = {}
    # No step takes longer because of a prompt: what is late is so for the front end and the bus.
    settings = options.engines(prefill_ms=(0.0, 0.0, 0.0), decode_ms=(STEP_MS, 0.0, 0.0))
    async with stack(settings) as served:
        for run in range(options.runs):
            spec = Spec(
                engine=settings,
                seconds=options.seconds,
                streams=min(16, options.streams),
                seed=1_000_000 * run,
                long_tokens=options.long_tokens,
            )
            for one in await served.measure("beside", spec):
                beside, alone = 1e3 * one["beside"], 1e3 * one["alone"]
                _add(
                    rows,
                    longest_gap_beside_it_ms=beside,
                    longest_gap_without_ms=alone,
                    added_ms=beside - alone,
                    late_by_ms=beside - STEP_MS,
                    the_prompt_took_ms=1e3 * one["took"],
                )
    return rows


async def turns(options: Options) -> Rows:
    """Processor time of a long conversation that is new, and of its next turn; ms."""
    rows: Rows = {}
    settings = options.engines(prefill_ms=(1.0, 0.0, 0.0), decode_ms=(STEP_MS, 0.0, 0.0))
    async with stack(settings) as served:
        for run in range(options.runs):
            spec = Spec(
                engine=settings,
                seconds=options.seconds,
                seed=1_000_000 * run,
                long_tokens=options.long_tokens,
            )
            for kind, rounds in (await served.measure("turns", spec)).items():
                front = median(one["front"] for one in rounds)
                found = {
                    "front_end_ms": 1e3 * front,
                    "a_second_on_a_core": 1 / front,
                    "engine_ms": 1e3 * median(one["engine"] for one in rounds),
                    "broker_ms": 1e3 * median(one["broker"] for one in rounds),
                    "TTFT_ms": 1e3 * median(one["ttft"] for one in rounds),
                    "tokens": median(one["tokens"] for one in rounds),
                    "cached_tokens": median(one["cached"] for one in rounds),
                }
                _add(rows, **{f"{kind}_{name}": value for name, value in found.items()})
    return rows


MEASUREMENTS: Mapping[str, Callable[[Options], Awaitable[Rows]]] = {
    "latency": latency,
    "cpu": cpu,
    "open": open_streams,
    "routing": routing,
    "routing-small": routing_small,
    "long": long_prompt,
    "turns": turns,
}


def _show(name: str, rows: Rows) -> None:
    print(f"\n{name}: {(MEASUREMENTS[name].__doc__ or '').splitlines()[0]}")
    for label, values in rows.items():
        low, high = min(values), max(values)
        print(f"  {label:32} {median(values):10.2f}   ({low:.2f} to {high:.2f})", flush=True)


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="names, with commas")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--open-streams", type=int, default=4096)
    parser.add_argument("--long-tokens", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s of the routing")
    parser.add_argument("--small-rate", type=float, default=4.0, help="of small engines'")
    parser.add_argument("--guidellm", default="", metavar="PROGRAM", help="asks beside our client")
    parser.add_argument("--json", type=Path, help="where to write the figures of all runs")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        parser.error(f"there is no {', '.join(unknown)}: choose of {', '.join(MEASUREMENTS)}")
    figures: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            given.runs,
            given.seconds,
            given.streams,
            given.open_streams,
            given.long_tokens,
            given.rate,
            given.small_rate,
            given.guidellm,
            write_model(Path(folder) / "model", CONTEXT),
        )
        for name in names:
            figures[name] = await MEASUREMENTS[name](options)
            _show(name, figures[name])
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    asyncio.run(_main())
