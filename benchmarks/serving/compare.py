"""Front ends side by side: `python -m benchmarks.serving.compare`; see benchmarks/README.md.

All run at once, each with an engine that makes a token for each stream and step, and are asked in
turn by the same client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from .load import Spec
from .model import write_model
from .peers import Peer, Settings, peers
from .processes import allow_many_files
from .stack import measure

CONTEXT = 131_072
ANSWER_TOKENS = 16

Kind = Literal["tokens", "requests"]
Figures = dict[str, float]

FIGURES: Mapping[Kind, str] = {
    "tokens": "streams that go on: microseconds of a core for each token",
    "requests": f"answers of {ANSWER_TOKENS} tokens: microseconds of a core for each answer",
}
RATE: Mapping[Kind, str] = {"tokens": "tokens/s", "requests": "answers/s"}
BARE = "bare engine"
OURS = "dynbus"
RECORDED = "dynbus on record"
"""Beside ours alone: what its flight costs."""


class Comparison:
    """Front ends that run, and what is found of them.

    Attributes:
        found: by kind, front end and figure, one of each run.
    """

    def __init__(self, settings: Settings, seconds: float, streams: Mapping[Kind, int]) -> None:
        self.found: dict[Kind, dict[str, dict[str, list[float]]]] = {"tokens": {}, "requests": {}}
        self._settings = settings
        self._seconds = seconds
        self._streams = streams

    async def warm(self, running: Mapping[str, Peer]) -> None:
        """Ask each front end, so that it starts what it needs."""
        for peer in running.values():
            await measure("requests", Spec(url=peer.url, seconds=0.5, streams=16))

    async def run(self, running: Mapping[str, Peer], number: int) -> None:
        """Ask each front end once for tokens and once for answers."""
        for kind in self.found:
            spec = Spec(
                engine=self._settings.engine(),
                seconds=self._seconds,
                streams=self._streams[kind],
                max_tokens=ANSWER_TOKENS,
                seed=10_000_000 * number,
            )
            alone = await self._alone(kind, spec)
            for name, peer in running.items():
                self._add(kind, name, await _ask(kind, spec, peer, alone))

    async def _alone(self, kind: Kind, spec: Spec) -> float:
        told = await measure("stepped" if kind == "tokens" else "stepped_requests", spec)
        each = _each(kind, told)
        self._add(kind, BARE, {"engine": each["engine"], RATE[kind]: each["rate"]})
        return each["engine"]

    def _add(self, kind: Kind, name: str, figures: Figures) -> None:
        rows = self.found[kind].setdefault(name, {})
        for figure, value in figures.items():
            rows.setdefault(figure, []).append(value)

    def ratios(self, kind: Kind, figure: str, peer: str) -> list[float]:
        """A figure of ours to that of another front end, run by run."""
        ours, theirs = self.found[kind][OURS], self.found[kind][peer]
        return [
            one / other for one, other in zip(ours[figure], theirs[figure], strict=True) if other
        ]


def _each(kind: Kind, told: Mapping[str, Any]) -> Figures:
    """Microseconds of each process for each token, or answer; and how many of them a second."""
    count = told["tokens"] if kind == "tokens" else told["tokens"] / ANSWER_TOKENS
    each = {name: 1e6 * used / count for name, used in told["cpu"].items()}
    return {**each, "rate": count / told["seconds"]}


async def _ask(kind: Kind, spec: Spec, peer: Peer, alone: float) -> Figures:
    processes = peer.processes()
    pids = {f"{role} {pid}": pid for role, own in processes.items() for pid in own}
    spec = msgspec.structs.replace(spec, url=peer.url, pids=pids, front=peer.front)
    told = await measure("many" if kind == "tokens" else "requests", spec)
    each = _each(kind, told)
    parts = {role: sum(each[f"{role} {pid}"] for pid in own) for role, own in processes.items()}
    if peer.has_mock_engine:
        # What the engine's process does beside the engine's own work.
        parts["bus"] += parts["engine"] - alone
        parts["engine"] = alone
    both = parts["front end"] + parts["bus"]
    figures = {"front end": parts["front end"], "bus": parts["bus"], "front end and bus": both}
    figures |= {"engine": parts["engine"], "client": each["client"], RATE[kind]: each["rate"]}
    return figures


def _show(comparison: Comparison, names: list[str]) -> None:
    for kind, title in FIGURES.items():
        rows = comparison.found[kind]
        print(f"\n{title}; medians, and the least and the most")
        print(f"  {'':18}" + "".join(f"{name:>24}" for name in rows))
        for figure in ("front end", "bus", "front end and bus", "engine", "client", RATE[kind]):
            cells = (_cell(rows[name].get(figure)) for name in rows)
            print(f"  {figure:18}" + "".join(f"{cell:>24}" for cell in cells))
        for name in names:
            if OURS in names and name != OURS:
                ratios = (
                    f"{figure} {_cell(comparison.ratios(kind, figure, name), 2)}"
                    for figure in ("front end", "front end and bus", RATE[kind])
                )
                print(f"  {OURS} to {name}: {'; '.join(ratios)}")


def _cell(values: list[float] | None, digits: int = 1) -> str:
    if not values:
        return "-"
    middle, least, most = median(values), min(values), max(values)
    if middle >= 1000:
        digits = 0
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


async def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.compare", description=__doc__
    )
    parser.add_argument("--python-vllm", default="", help="a Python that has vLLM and dynbus")
    parser.add_argument("--python-dynamo", default="", help="a Python that has ai-dynamo")
    parser.add_argument("--only", default="", help="names of front ends, with semicolons")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--side-by-side", type=int, default=512, help="answers at once")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="where to write the figures of all runs")
    given = parser.parse_args()
    chosen = peers(given.python_vllm, given.python_dynamo)
    if given.only:
        names = given.only.split(";")
        if unknown := [name for name in names if name not in chosen]:
            parser.error(f"there is no {', '.join(unknown)}: choose of {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in names}
    else:
        del chosen[RECORDED]
    allow_many_files()
    streams: dict[Kind, int] = {"tokens": given.streams, "requests": given.side_by_side}
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory())) / "model"
        settings = Settings(
            str(write_model(folder, CONTEXT)), CONTEXT, given.step_ms, max(streams.values())
        )
        running = {
            name: await exits.enter_async_context(start(settings)) for name, start in chosen.items()
        }
        comparison = Comparison(settings, given.seconds, streams)
        await comparison.warm(running)
        for number in range(given.runs):
            await comparison.run(running, number)
    _show(comparison, list(running))
    if given.json is not None:
        given.json.write_text(json.dumps(comparison.found, indent=1))


if __name__ == "__main__":
    asyncio.run(_main())
