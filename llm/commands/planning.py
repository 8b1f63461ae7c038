"""The work and the output of `dynbus plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any, NamedTuple

from dynbus import ConfigError
from dynbus.kvrouter import RouterConfig
from dynbus.llm.mock.profile import read_profile
from dynbus.llm.planning import Configuration, Plan, Target, make_plan
from dynbus.llm.planning.configuration import Engines
from dynbus.llm.planning.plot import MOST, plot_engines
from dynbus.llm.replay.policies import with_policy
from dynbus.llm.replay.trace import Trace, read_trace
from dynbus.spi import terminal

from .progress import progress_bar
from .replaying import check_room


class Choices(NamedTuple):
    """The configurations to compare, of each profile.

    Attributes:
        blocks: sizes of the cache; that of the profile where there is none.
        layouts: `together`, `apart` or both.
        bandwidth: bytes a second, apart.
    """

    policies: Sequence[str]
    blocks: Sequence[int]
    host_blocks: Sequence[int]
    layouts: Sequence[str]
    bandwidth: float


def parse_objective(text: str) -> list[Target]:
    """The targets of `--objective`, such as `ttft_p95=500ms,itl_p95=50ms`.

    Raises:
        ConfigError: one of them cannot be read, or is there twice, or there is none.
    """
    targets: list[Target] = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, time = part.partition("=")
        metric, underscore, statistic = name.strip().partition("_")
        if not equals or not underscore:
            raise ConfigError(
                f"objective {part!r} is not METRIC_STATISTIC=TIME: write ttft_p95=500ms"
            )
        target = Target(metric, statistic, terminal.parse_span(time, f"objective {name.strip()}"))
        if any(target.name == other.name for other in targets):
            raise ConfigError(f"objective {target.name} is there twice: give it one time")
        targets.append(target)
    if not targets:
        raise ConfigError("the objective is empty: write ttft_p95=500ms, several with commas")
    return targets


def configurations(
    profiles: Sequence[Path], prices: Sequence[float], choices: Choices
) -> list[Configuration]:
    """The configurations to compare.

    Args:
        prices: of an engine of each profile, as far as they are given.

    Raises:
        ConfigError: a profile cannot be read, or a policy is unknown.
    """
    for policy in choices.policies:
        # What is not known is said before anything is simulated.
        with_policy(RouterConfig(), policy)
    planned: list[Configuration] = []
    read = {path: read_profile(path) for path in profiles}
    names = [profile.name for profile in read.values()]
    for path, price in zip(profiles, chain(prices, repeat(1.0)), strict=False):
        profile = read[path]
        label = f"{profile.name}, {path}" if names.count(profile.name) > 1 else ""
        every = product(
            choices.layouts,
            choices.policies,
            choices.blocks or [profile.blocks],
            choices.host_blocks,
        )
        for layout, policy, blocks, host_blocks in every:
            bandwidth = choices.bandwidth if layout == "apart" else None
            planned.append(
                Configuration(profile, policy, blocks, host_blocks, price, bandwidth, label)
            )
    return planned


def plan_trace(
    path: Path,
    planned: Sequence[Configuration],
    targets: Sequence[Target],
    *,
    speed: float,
    limit: int | None,
    allowed: int,
    seeds: int,
) -> list[Plan]:
    """The plans of configurations on a trace, the cheapest first, with a progress bar on standard
    error.

    Raises:
        ConfigError: the trace is none.
        OSError: it cannot be read.
        ValueError: a request does not fit into an engine, or the blocks are of another size.
    """
    traces: dict[int, Trace] = {}
    for configuration in planned:
        size = configuration.profile.block_size
        if size not in traces:
            traces[size] = read_trace(path, block_size=size, limit=limit)
        check_room(traces[size], path, configuration.engine())
    plans: list[Plan] = []
    with progress_bar() as bar:
        for configuration in planned:
            name = terminal.plain(describe(configuration))
            task = bar.add_task(f"{name}: simulations", total=None)
            plans.append(
                make_plan(
                    configuration,
                    traces[configuration.profile.block_size],
                    targets,
                    speed=speed,
                    allowed=allowed,
                    seeds=seeds,
                    progress=partial(bar.advance, task),
                )
            )
    return sorted(plans, key=lambda plan: math.inf if plan.cost is None else plan.cost)


def describe(configuration: Configuration) -> str:
    """A configuration in a line."""
    parts = [configuration.name, configuration.policy, f"{configuration.blocks:,} blocks"]
    if configuration.host_blocks:
        parts.append(f"{configuration.host_blocks:,} on the host")
    if configuration.bandwidth is not None:
        parts.append("apart")
    return ", ".join(parts)


def worst(seconds: Sequence[float], targets: Sequence[Target]) -> float:
    """The largest of these times as a part of its limit."""
    return max(time / target.seconds for time, target in zip(seconds, targets, strict=True))


def spread(plan: Plan) -> str:
    """The range of a number of engines."""
    if plan.engines is None:
        return ""
    most = "more than are tried" if plan.most is None else f"{plan.most}"
    return f"{plan.least} to {most}"


def print_plans(plans: Sequence[Plan], targets: Sequence[Target], allowed: int) -> None:
    """Print a table: a row for each configuration, the cheapest first."""
    rows: list[tuple[str, ...]] = []
    for plan in plans:
        configuration = plan.configuration
        times = plan.seconds or [math.nan] * len(targets)
        rows.append(
            (
                "-" if plan.cost is None else f"{plan.cost:g}",
                f"not {allowed}" if plan.engines is None else str(plan.engines),
                spread(plan),
                terminal.plain(configuration.name),
                terminal.plain(configuration.policy),
                "together" if configuration.bandwidth is None else "apart",
                f"{configuration.blocks:,}",
                f"{configuration.host_blocks:,}",
                *(f"{1000 * time:,.1f}" for time in times),
            )
        )
    columns = ("COST", "ENGINES", "RANGE", "PROFILE", "POLICY", "LAYOUT", "BLOCKS", "HOST")
    terminal.print_table((*columns, *(f"{each.name}, ms" for each in targets)), rows)
    for plan in plans:
        if plan.why_none:
            terminal.notice(f"{describe(plan.configuration)}: {plan.why_none}")
    if any(not plan.configuration.profile.held_out for plan in plans):
        terminal.notice("a profile has no errors of held-out runs: its range is of seeds alone")


def plan_as_json(plan: Plan, targets: Sequence[Target]) -> dict[str, Any]:
    """A plan for programs."""
    configuration = plan.configuration
    return {
        "profile": configuration.name,
        "policy": configuration.policy,
        "layout": "together" if configuration.bandwidth is None else "apart",
        "blocks": configuration.blocks,
        "host_blocks": configuration.host_blocks,
        "engines": plan.total,
        **_apart(plan.engines),
        "least": plan.least,
        "most": plan.most,
        "cost": plan.cost,
        "objective": [
            {
                "name": target.name,
                "limit_ms": 1000 * target.seconds,
                "attained_ms": None if plan.seconds is None else round(1000 * plan.seconds[at], 3),
            }
            for at, target in enumerate(targets)
        ],
        "tried": [
            {
                "engines": sum(attempt.engines),
                **_apart(attempt.engines),
                "attained_ms": None
                if attempt.seconds is None
                else [round(1000 * time, 3) for time in attempt.seconds],
            }
            for attempt in plan.attempts
        ],
        "why_none": plan.why_none or None,
    }


def _apart(engines: Engines | None) -> dict[str, int | None]:
    """The engines that compute prompts, and those that decode; None where each does both."""
    if engines is None or not engines.decoding:
        return {"prefill": None, "decode": None}
    return {"prefill": engines.serving, "decode": engines.decoding}


def attained_by(
    plans: Sequence[Plan], targets: Sequence[Target]
) -> dict[str, list[tuple[int, float]]]:
    """By the configuration, each number of engines that was simulated, and the largest of the times
    by their limits."""
    attained: dict[str, list[tuple[int, float]]] = {}
    for plan in plans:
        points: dict[int, float] = {}
        for attempt in plan.attempts:
            if attempt.seconds is not None:
                # Of several splits of as many engines, the best.
                number, part = sum(attempt.engines), worst(attempt.seconds, targets)
                points[number] = min(part, points.get(number, math.inf))
        attained[describe(plan.configuration)] = sorted(points.items())
    return attained


def attempt_bars(plans: Sequence[Plan], targets: Sequence[Target]) -> list[tuple[str, float, str]]:
    """The bars of what numbers of engines attain, of all configurations behind each other."""
    return [
        (f"{number:,}  {name}", min(part, MOST), f"{part:.2g}{' kept' * (part <= 1.0)}")
        for name, points in attained_by(plans, targets).items()
        for number, part in points
    ]


def write_plot(path: Path, plans: Sequence[Plan], targets: Sequence[Target]) -> None:
    """Write what numbers of engines attain as an SVG image."""
    attained = attained_by(plans, targets)
    path.write_text(
        plot_engines({name: each or [(1, math.inf)] for name, each in attained.items()})
    )
