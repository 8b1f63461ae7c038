"""Figures of an engine for operators: a line in `dynbus ps`, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dynbus.llm.instance_watch import InstanceWatch
from dynbus.spi import Bus, InstanceName, Metrics, Readings

from .hang_watch import HangWatch
from .interface import EngineLimits, EngineLoad
from .runner import EngineRunner, RequestTotals

SUMS: Final = (
    "requests",
    "requests_ended",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "first_tokens",
    "first_token_seconds",
    "decoded_tokens",
    "decode_seconds",
)
"""The figures of an engine that only grow."""
STATUS_KEY: Final = "engine"
SILENCE_SHOWN: Final = 2.0
"""Seconds without a step from which on that is shown."""


class EngineWatch(InstanceWatch):
    """Shows an engine to operators, while in the `async with`.

    Args:
        shown: under which name its instance is found now.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        runner: EngineRunner,
        hangs: HangWatch | None,
        shown: Callable[[], InstanceName],
    ) -> None:
        super().__init__(bus, name, "engine", _readings)
        self._shown = shown
        self._runner = runner
        self._hangs = hangs

    def look(self) -> None:
        """Show how the engine is now."""
        runner = self._runner
        load, limits = runner.load, runner.limits
        figures = engine_figures(load, limits, runner.totals, runner.output_tokens)
        text = _text(load, limits)
        hangs = self._hangs
        if hangs is not None:
            self.put("step_limit", hangs.limit)
            if hangs.reason:
                text = f"hangs, {text}"
            elif hangs.silence >= SILENCE_SHOWN:
                text += f", no step for {hangs.silence:.0f} s of {hangs.limit:.0f} s"
        self.show(STATUS_KEY, text, figures, self._shown(), SUMS)
        requests = {"running": load.running, "waiting": load.waiting}
        self.put_by("requests", "dynbus.state", requests)
        blocks = {"active": load.active_blocks, "free": limits.blocks - load.active_blocks}
        self.put_by("blocks", "dynbus.state", blocks)
        tokens = {
            "prompt": load.prompt_tokens,
            "cached": load.cached_tokens,
            "output": runner.output_tokens,
        }
        self.put_by("tokens", "dynbus.kind", tokens)
        self.put("held_blocks", load.held_blocks)
        self.put("preemptions", load.preempted)
        self.put("failed_requests", runner.failed_requests)
        if load.prompt_tokens:
            self.put("hit_rate", load.cached_tokens / load.prompt_tokens)


def engine_figures(
    load: EngineLoad, limits: EngineLimits, totals: RequestTotals, output_tokens: int
) -> dict[str, float]:
    """The figures that an engine tells of itself, by their names.

    Args:
        output_tokens: that it has made so far.
    """
    return {
        "kv_blocks": limits.blocks,
        "kv_blocks_used": load.active_blocks,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "output_tokens": output_tokens,
        "block_size": limits.block_size,
        "slots": limits.max_num_seqs,
        "running": load.running,
        "waiting": load.waiting,
        "requests": totals.submitted,
        "requests_ended": totals.ended,
        "first_tokens": totals.firsts,
        "first_token_seconds": totals.first_seconds,
        "decoded_tokens": totals.decoded_tokens,
        "decode_seconds": totals.decode_seconds,
    }


def _text(load: EngineLoad, limits: EngineLimits) -> str:
    text = (
        f"{load.running} running, {load.waiting} waiting, "
        f"{load.active_blocks} of {limits.blocks} blocks"
    )
    if load.held_blocks:
        text += f", {load.held_blocks} held for transfers"
    if load.prompt_tokens:
        text += f", hit rate {load.cached_tokens / load.prompt_tokens:.2f}"
    return text


def _readings(metrics: Metrics) -> dict[str, Readings]:
    """The measurements of engines."""
    return {
        "requests": metrics.gauge(
            "engine.requests", "{request}", "Requests in engines, by whether they run."
        ),
        "blocks": metrics.gauge(
            "engine.blocks", "{block}", "Blocks of KV caches, by whether requests use them."
        ),
        "held_blocks": metrics.gauge(
            "engine.held_blocks",
            "{block}",
            "Blocks of KV caches that are held for transfers, each as often as it is held.",
        ),
        "tokens": metrics.counter(
            "engine.tokens", "{token}", "Tokens of prompts and outputs, by what they are."
        ),
        "hit_rate": metrics.gauge(
            "engine.hit_rate", "1", "Share of prompt tokens found in the cache.", max
        ),
        "preemptions": metrics.counter(
            "engine.preemptions", "{preemption}", "Requests that lost their blocks."
        ),
        "step_limit": metrics.gauge(
            "engine.step_limit", "s", "Seconds that a step may take before its engine hangs.", max
        ),
        "failed_requests": metrics.counter(
            "engine.failed_requests", "{request}", "Requests that could not go on."
        ),
    }
