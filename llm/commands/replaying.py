"""The work and the output of `dynbus lab replay`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Protocol

import click
import numpy as np
from click.core import ParameterSource
from numpy.typing import NDArray

from dynbus import ConfigError
from dynbus.kvrouter import COST_FUNCTIONS
from dynbus.llm.mock.engine import MockConfig, MockSize
from dynbus.llm.mock.profile import read_profile
from dynbus.llm.replay.plot import plot_ttft
from dynbus.llm.replay.report import Objective, Report, summarize, ttft_seconds
from dynbus.llm.replay.scaled import Decide, Fault, ScaledFleet, ScaledResult
from dynbus.llm.replay.simulation import POOL, Simulation
from dynbus.llm.replay.trace import Trace, TraceRequest, read_trace
from dynbus.llm.scaling import PoolConfig, ScalingConfig, ScalingPolicy
from dynbus.spi import suggestion, terminal

from .progress import progress_bar, show

INTERVAL: Final = 5.0
"""Seconds between two decisions of a simulated autoscaler, as between those of a real one."""


class Scaled(NamedTuple):
    """The instances of a fleet that an autoscaler has scaled.

    Attributes:
        least, most: that served at a decision.
        hours: that were paid for, those of starts and drains among them.
        changes: how often the target was another one.
    """

    least: int
    most: int
    hours: float
    changes: int

    @classmethod
    def of(cls, result: ScaledResult) -> Scaled:
        """Those of a replay."""
        served = [sample.ready for sample in result.samples]
        hours = result.instance_seconds / 3600.0
        return cls(min(served), max(served), hours, result.changes(POOL))


class Replay(NamedTuple):
    """A policy's figures, the seconds to the first token, of shape [requests], and the instances
    of a fleet that was scaled."""

    report: Report
    ttft: NDArray[np.float64]
    scaled: Scaled | None = None

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        scaled = {} if self.scaled is None else {"scaled": self.scaled._asdict()}
        return {**self.report.as_json(), **scaled}


def replay_trace(
    path: Path,
    simulation: Simulation,
    policies: Sequence[str],
    objective: Objective,
    *,
    limit: int | None = None,
    faults: Sequence[Fault] = (),
    cold_start: float = 0.0,
    autoscale: PoolConfig | None = None,
) -> list[Replay]:
    """Replay a trace with each policy, with a progress bar on standard error.

    Args:
        faults: what happens to the fleet meanwhile.
        cold_start: seconds until an instance serves that is started for them, or by an autoscaler.
        autoscale: the pool of an autoscaler, whose objective is the same; None for none.

    Raises:
        ConfigError: there is no such policy, or it returns no costs.
        InvalidTrace: the trace is none.
        OSError: the trace cannot be read.
        ValueError: the simulation does not fit the trace, and which option to change.
    """
    for policy in policies:
        # What is not known is said before anything is simulated.
        simulation.config(policy)
    replays: list[Replay] = []
    with progress_bar() as bar:
        reading = bar.add_task("reading", total=limit)
        trace = read_trace(
            path,
            block_size=simulation.engine.block_size,
            limit=limit,
            progress=partial(show, bar, reading),
        )
        bar.update(reading, completed=len(trace.requests), total=len(trace.requests))
        check_room(trace, path, simulation.engine)
        for policy in policies:
            task = bar.add_task(terminal.plain(policy), total=len(trace.requests))
            progress = partial(show, bar, task)
            scaled: ScaledResult | None = None
            if faults or autoscale is not None:
                simulation.check(trace)
                fleet = ScaledFleet(
                    simulation,
                    policy,
                    None if autoscale is None else _decide(autoscale, objective, cold_start),
                    cold_start=cold_start,
                    interval=INTERVAL,
                    faults=faults,
                    first=None if autoscale is None else {POOL: _first(simulation, autoscale)},
                )
                scaled = fleet.run(trace, progress=progress)
                result = scaled.replay
                for fault in scaled.missed:
                    click.echo(
                        f"{policy}: --kill {fault.at:g} met no instance with requests", err=True
                    )
            else:
                result = simulation.run(trace, policy, progress=progress)
            bar.update(task, completed=len(trace.requests))
            report = summarize(policy, result, objective=objective)
            of = Scaled.of(scaled) if scaled is not None and autoscale is not None else None
            replays.append(Replay(report, ttft_seconds(result.requests), of))
    return replays


def _first(simulation: Simulation, pool: PoolConfig) -> int:
    """The instances at the beginning: as many as are told, within the bounds."""
    return min(max(simulation.instances, pool.least), pool.most)


def _decide(pool: PoolConfig, objective: Objective, cold_start: float) -> Decide:
    """The decisions of an autoscaler that knows nothing of the engines at the beginning."""
    config = ScalingConfig(
        {POOL: pool}, objective.ttft, objective.itl, cold_start=max(cold_start, INTERVAL)
    )
    return ScalingPolicy(config).decide


class FleetOnRecord(Protocol):
    """The instances that requests of a flight could go to; see `dynbus.fleets` in recordings."""

    @property
    def target(self) -> str: ...
    @property
    def began(self) -> float: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks(self) -> int | None: ...
    @property
    def max_batched_tokens(self) -> int | None: ...
    @property
    def policy(self) -> str: ...
    @property
    def offered(self) -> Sequence[tuple[float, Sequence[str]]]: ...


class FleetChanges(Protocol):
    """The ways in which a simulated fleet is another one than that on record, likewise."""

    @property
    def added(self) -> int: ...
    @property
    def kills(self) -> Sequence[tuple[str, float]]: ...
    @property
    def scales(self) -> Sequence[tuple[str, float, int]]: ...
    @property
    def policy(self) -> str: ...
    @property
    def cold_start(self) -> float: ...


class RecordedFleetReplay:
    """The requests of a flight on a simulated fleet, as it was on record and as it might have been.

    Instances come and go as they were offered on record; one that went finishes what it has.

    Args:
        lines: the requests, as `read_trace` reads them.
        profile: a file of `dynbus profile` with the times of engines; None for those of mocks.

    Raises:
        ConfigError: a change is of what was not there, the policy on record has no name, or no
            request fits into an engine.
    """

    def __init__(
        self,
        lines: Iterable[str],
        fleet: FleetOnRecord,
        changes: FleetChanges,
        profile: Path | None,
    ) -> None:
        self._names = list(fleet.offered[0][1])
        policy = fleet.policy if fleet.policy in COST_FUNCTIONS else changes.policy
        if not policy:
            raise ConfigError(
                f"the policy of routers to {fleet.target} is none of dynbus's own, and a file runs "
                "no code: give one by --set policy="
            )
        if policy != fleet.policy:
            terminal.notice(
                f"the policy on record is none of dynbus's own: both sides go by {policy}"
            )
        # Refused before anything is simulated.
        before, after = faults_on_record(fleet), changed_faults(fleet, changes)
        simulation = Simulation(max(1, len(self._names)), _engine_of(fleet, profile))
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            with path.open("w") as file:
                file.writelines(f"{line}\n" for line in lines)
            trace = read_trace(path, block_size=simulation.engine.block_size)
        trace = _with_room(trace, simulation.engine)
        # The simulation begins with the first of them.
        before, after = (
            [fault._replace(at=max(0.0, fault.at - trace.requests[0].arrival)) for fault in faults]
            for faults in (before, after)
        )
        self.sides = [
            self._side("on record", trace, simulation, policy, before, 0.0),
            self._side(
                "changed",
                trace,
                replace(simulation, instances=simulation.instances + changes.added),
                changes.policy or policy,
                after,
                changes.cold_start,
            ),
        ]

    def _side(
        self,
        title: str,
        trace: Trace,
        simulation: Simulation,
        policy: str,
        faults: Sequence[Fault],
        cold_start: float,
    ) -> Replay:
        simulation.check(trace)
        fleet = ScaledFleet(
            simulation, policy, None, cold_start=cold_start, faults=faults, names=self._names
        )
        result = fleet.run(trace)
        for fault in result.missed:
            terminal.notice(f"--kill {fault.instance}: it had no requests then")
        report = summarize(title, result.replay, objective=Objective())
        return Replay(report, ttft_seconds(result.requests))

    def to_json(self) -> list[dict[str, Any]]:
        """The figures of both sides; each has its name as `policy`."""
        return [each.report.as_json() for each in self.sides]

    def print_sides(self, plot: Path | None) -> None:
        """Print the figures of both sides, and plot them, in a terminal or as SVG."""
        print_reports(self.sides)
        to_terminal = plot == terminal.TO_TERMINAL
        terminal.print_bars("Times to the first token", ttft_bars(self.sides), always=to_terminal)
        if plot is not None and not to_terminal:
            write_plot(plot, self.sides)


def faults_on_record(fleet: FleetOnRecord, added: int = 0) -> list[Fault]:
    """The changes of how many instances there were, after the first request: those that came serve
    from then on, as they did."""
    return [
        Fault("hand", max(0.0, at - fleet.began), instances=len(names) + added, cold_start=0.0)
        for at, names in fleet.offered[1:]
    ]


def changed_faults(fleet: FleetOnRecord, changes: FleetChanges) -> list[Fault]:
    """The same with these changes.

    Raises:
        ConfigError: an instance or a component is not that on record, or a time before it.
    """
    first, component = fleet.offered[0][1], fleet.target.rpartition(".")[2]
    faults = faults_on_record(fleet, changes.added)
    for name, at, count in sorted(changes.scales, key=itemgetter(1)):
        if name != component:
            raise ConfigError(f"--scale {name}: the requests on record are to {component}")
        since = _since(fleet, "--scale", at)
        faults = [each for each in faults if each.at < since]
        faults.append(Fault("hand", since, instances=count))
    for name, at in changes.kills:
        if name not in first:
            raise ConfigError(
                f"--kill {name}: it was not there when the requests began"
                f"{suggestion(name, first)}: there were {', '.join(first)}"
            )
        faults.append(Fault("dies", _since(fleet, "--kill", at), instance=name))
    return faults


def _since(fleet: FleetOnRecord, option: str, at: float) -> float:
    if at < fleet.began:
        raise ConfigError(
            f"{option}: {terminal.utc_time(at)} is before the first request on record, which came "
            f"at {terminal.utc_time(fleet.began)}"
        )
    return at - fleet.began


def _engine_of(fleet: FleetOnRecord, profile: Path | None) -> MockConfig:
    """An engine as large as those on record, or as that of a profile."""
    if profile is not None:
        played = read_profile(profile)
        return MockConfig(**played.size(), timing=played.timing())
    mock = MockSize()
    batched = fleet.max_batched_tokens or mock.max_num_batched_tokens
    return MockConfig(
        block_size=fleet.block_size,
        blocks=fleet.blocks or mock.blocks,
        max_num_seqs=min(mock.max_num_seqs, batched),
        max_num_batched_tokens=batched,
    )


def _with_room(trace: Trace, engine: MockConfig) -> Trace:
    """The requests that fit into an engine, alone; an engine on record has refused the others.

    Raises:
        ConfigError: there is none.
    """
    most = min(_room(engine), engine.limits.context_length - 1)
    fitting = [one for one in trace.requests if _needs(one) <= most]
    if left_out := len(trace.requests) - len(fitting):
        terminal.notice(
            f"{left_out} requests are left out: with their outputs they have more tokens than the "
            f"{most} that an engine takes"
        )
    if not fitting:
        raise ConfigError(
            f"no request on record fits into an engine, which takes {most} tokens: give one of "
            "another size by --profile"
        )
    return Trace(fitting, trace.block_size)


def mock_config(profile: Path | None, size: Mapping[str, Any]) -> MockConfig:
    """The configuration of mock engines.

    Args:
        profile: the file whose times and sizes they have; None for those of a mock.
        size: options of the command that runs, which go before the profile's where they are given.

    Raises:
        ConfigError: a value is not usable, or the profile cannot be read.
        OutsideProfile: a size is beyond what the profile was fitted to.
    """
    if profile is None:
        return MockConfig(**size)
    ctx = click.get_current_context()
    played = read_profile(profile)
    given = {
        name: value
        for name, value in size.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return MockConfig(**played.size(**given), timing=played.timing())


def check_room(trace: Trace, path: Path, engine: MockConfig) -> None:
    """Check that each request fits into an engine, alone.

    Raises:
        ValueError: one does not, and which option to change.
    """
    needs = list(map(_needs, trace.requests))
    room = _room(engine)
    context = engine.limits.context_length
    for request, needed in zip(trace.requests, needs, strict=True):
        if needed > room:
            enough = -(-max(needs) // engine.block_size) + engine.headroom
            raise ValueError(
                f"{path}, line {request.line}: the request needs {needed} tokens in the cache, and "
                f"--blocks {engine.blocks} of {engine.block_size} tokens hold {room}: give "
                f"--blocks {enough} or more"
            )
        if needed + 1 > context:
            raise ValueError(
                f"{path}, line {request.line}: the request and its output have {needed + 1} "
                f"tokens, and the profile was fitted to requests of {context}: profile the engine "
                f"with --context {max(needs) + 1}"
            )


def _needs(request: TraceRequest) -> int:
    """The tokens that a request has in the cache at its end; the last one is never computed."""
    return request.prompt_tokens + request.output_tokens - 1


def _room(engine: MockConfig) -> int:
    """The tokens of the cache of an engine that one request may have."""
    return (engine.blocks - engine.headroom) * engine.block_size


def ttft_bars(replays: Sequence[Replay]) -> list[tuple[str, float, str]]:
    """The bars of percentiles of the times to the first token, of all policies."""
    return [
        (f"p{part}  {each.report.policy}", seconds, f"{1000 * seconds:,.0f} ms")
        for part in (50, 90, 95, 99)
        for each in replays
        for seconds in (float(np.percentile(each.ttft, part)),)
    ]


def write_plot(path: Path, replays: Sequence[Replay]) -> None:
    """Write the times to the first token as an SVG image."""
    path.write_text(plot_ttft({each.report.policy: each.ttft for each in replays}))


def print_reports(replays: Sequence[Replay]) -> None:
    """Print a table: a column for each policy."""
    reports = [each.report for each in replays]
    scaled = [each.scaled for each in replays if each.scaled is not None]
    rows = [
        ("requests", [f"{each.requests:,}" for each in reports]),
        ("duration, s", [f"{each.duration_s:,.1f}" for each in reports]),
        ("TTFT mean, ms", [f"{each.ttft_ms.mean:,.1f}" for each in reports]),
        ("TTFT p50, ms", [f"{each.ttft_ms.p50:,.1f}" for each in reports]),
        ("TTFT p99, ms", [f"{each.ttft_ms.p99:,.1f}" for each in reports]),
        ("ITL mean, ms", [f"{each.itl_ms.mean:,.2f}" for each in reports]),
        ("ITL p50, ms", [f"{each.itl_ms.p50:,.2f}" for each in reports]),
        ("ITL p99, ms", [f"{each.itl_ms.p99:,.2f}" for each in reports]),
        ("hit rate", [f"{each.hit_rate:.2%}" for each in reports]),
        ("output tokens/s", [f"{each.output_tokens_per_s:,.1f}" for each in reports]),
        ("goodput, requests/s", [f"{each.goodput:,.2f}" for each in reports]),
        ("balance", [f"{each.balance:.3f}" for each in reports]),
        ("preempted", [f"{each.preempted:,}" for each in reports]),
    ]
    if scaled:
        rows += [
            ("instances", [f"{each.least} to {each.most}" for each in scaled]),
            ("instance hours", [f"{each.hours:,.2f}" for each in scaled]),
            ("changes of the target", [f"{each.changes}" for each in scaled]),
        ]
    terminal.print_table(
        ("FIGURE", *(terminal.plain(each.policy) for each in reports)),
        [(name, *values) for name, values in rows],
    )
