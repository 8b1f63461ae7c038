"""The work and the output of `dynbus profile`."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from dynbus import ConfigError, Runtime
from dynbus.llm.engine import EngineLimits
from dynbus.llm.mock.profile import EngineProfile, OutsideProfile
from dynbus.llm.models.source import resolve
from dynbus.llm.profiling import (
    Effort,
    EngineBench,
    HeldOut,
    SteppedBench,
    TrafficShape,
    check_profile,
    longest_request,
    make_profile,
    measure,
    open_served_bench,
)
from dynbus.llm.small.engine import SmallConfig, SmallEngine
from dynbus.spi import ComponentName, terminal

from .progress import add_counter, progress_bar


class Traffic(NamedTuple):
    """The requests that are held out.

    Attributes:
        prompt_tokens, output_tokens: their means; None for 128 and 32, or a quarter of the longest
            request where that is less.
        requests: at each load.
        seed: of them.
    """

    prompt_tokens: int | None
    output_tokens: int | None
    requests: int
    seed: int

    def held_out(self, limits: EngineLimits, context: int) -> HeldOut:
        """The traffic that an engine of these limits is checked with.

        Args:
            context: tokens of the longest request.

        Raises:
            ConfigError: most requests would be longer.
        """
        longest = longest_request(limits, context)
        prompt = self.prompt_tokens or max(1, min(128, longest // 4))
        output = self.output_tokens or max(2, min(32, longest // 4))
        if prompt + output > longest:
            raise ConfigError(
                f"--prompt-tokens {prompt} and --output-tokens {output}: no request is longer than "
                f"{longest} tokens, by --context or the engine: give less, or raise that"
            )
        shape = TrafficShape(prompt, output, longest)
        return HeldOut(shape, requests=self.requests, seed=self.seed)


class Profiled(NamedTuple):
    """A profile, and the reason for which its error is not known; empty where it is."""

    profile: EngineProfile
    unchecked: str


def profile_small(model: str, config: SmallConfig, effort: Effort, traffic: Traffic) -> Profiled:
    """The profile of the small engine with a model, with a progress bar on standard error.

    Raises:
        ConfigError, ModelUnavailable: the model cannot be had, or the requests are too long.
        ImportError, ValueError: the engine cannot compute it.
    """
    local = asyncio.run(resolve(model))
    engine = SmallEngine(local.path, config)
    of = Subject(f"small, {engine.backend}", local.name, "steps", engine.memory.layout.block_bytes)
    return asyncio.run(_profile(SteppedBench(engine), of, effort, traffic))


async def profile_served(
    component: ComponentName, instance: str, nats: str | None, effort: Effort, traffic: Traffic
) -> Profiled:
    """The profile of an instance on the bus, likewise; an empty `instance` for any.

    Raises:
        ConfigError: it does not say how large it is, or the requests are too long.
        DynbusError: it is not there, or does not answer.
        ValueError: nothing can be told of its steps.
    """
    terminal.settings(nats)
    async with Runtime.connect(nats, name="dynbus-profile") as runtime:
        bench = await open_served_bench(runtime, component, instance)
        of = Subject("the bus", str(component), "streams")
        return await _profile(bench, of, effort, traffic)


class Subject(NamedTuple):
    """The engine that is measured, as its profile names it: see `EngineProfile`."""

    engine: str
    model: str
    measured: str
    block_bytes: int = 0


async def _profile(bench: EngineBench, of: Subject, effort: Effort, traffic: Traffic) -> Profiled:
    held_out = traffic.held_out(bench.limits, effort.context)
    with progress_bar() as bar:
        measured = await measure(bench, effort, add_counter(bar, "measuring"))
        profile = make_profile(
            measured,
            bench.limits,
            engine=of.engine,
            model=of.model,
            how=of.measured,
            context=effort.context,
            block_bytes=of.block_bytes,
        )
        try:
            errors = await check_profile(profile, bench, held_out, add_counter(bar, "checking"))
        except (OutsideProfile, ValueError) as error:
            return Profiled(profile, str(error))
    return Profiled(profile.with_errors(errors), "")


def print_profile(profile: EngineProfile) -> None:
    """Print what was fitted, to what, and with which errors."""
    costs, fitted = profile.costs, profile.range
    counts = [count for count, _ in costs.sequences]
    shown = {counts[0], counts[-1], *(count for count in counts if not count & (count - 1))}
    rows = [
        *(
            (f"a step of {count} request{'s' * (count > 1)}, ms", f"{1000 * seconds:.3f}")
            for count, seconds in costs.sequences
            if count in shown
        ),
        *(
            (f"with {count} prompt tokens, more ms", f"{1000 * seconds:.3f}")
            for count, seconds in costs.prompt_tokens
        ),
        ("each prompt token on each before it, ns", f"{1e9 * costs.attention:.2f}"),
        ("each token of context decoded, ns", f"{1e9 * costs.context_tokens:.2f}"),
        *(
            [("served: until a first token, more ms", f"{1000 * profile.latency:.3f}")]
            * bool(profile.latency)
        ),
        ("fitted up to: requests in a step", f"{fitted.sequences:,}"),
        ("prompt tokens in a step", f"{fitted.prompt_tokens:,}"),
        ("context decoded in a step", f"{fitted.context_tokens:,}"),
        ("tokens of a request", f"{fitted.context:,}"),
    ]
    terminal.print_table(("PROFILE", terminal.plain(profile.name)), rows)
    if not profile.held_out:
        return
    terminal.print_table(
        ("LOAD", "REQUESTS", "TTFT mean", "TTFT p99", "TPOT mean", "TPOT p99"),
        [
            (
                f"{each.load:.0%}",
                f"{each.requests:,}",
                *(
                    f"{error:+.1%}"
                    for error in (each.ttft_mean, each.ttft_p99, each.tpot_mean, each.tpot_p99)
                ),
            )
            for each in profile.held_out
        ],
    )
