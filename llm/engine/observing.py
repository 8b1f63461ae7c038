"""What operators see of an engine: a line in `dynbus ps`, and metrics."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dynbus.bus.background import Openable
from dynbus.bus.bus import Bus
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.telemetry.metrics import Labels, Metrics, Readings

from .interface import EngineLimits, EngineLoad
from .runner import EngineRunner

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at an engine."""

STATUS_KEY: Final = "engine"


class EngineWatch(Openable):
    """Shows an engine to operators, while in the `async with`."""

    def __init__(self, bus: Bus, name: InstanceName, runner: EngineRunner) -> None:
        super().__init__(bus.background)
        namespace, component, instance_id = name
        # Not the component alone: its own instances show what is about others.
        self._name = f"{namespace}.{component}/{instance_id}"
        self._instance = str(name)
        self._bus = bus
        self._runner = runner
        metrics = bus.telemetry.metrics if bus.telemetry is not None else None
        self._metrics = (
            None if metrics is None else _EngineMetrics(metrics, self._name, namespace, component)
        )

    def __repr__(self) -> str:
        return f"<EngineWatch {self._name}>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                yield
                tasks.cancel_scope.cancel()
            # What its last steps made is counted.
            self.look()
        finally:
            self._bus.status.remove(self._name)
            if self._metrics is not None:
                self._metrics.remove()

    async def _run(self) -> None:
        while True:
            self.look()
            await anyio.sleep(LOOK_INTERVAL)

    def look(self) -> None:
        """Show how the engine is now."""
        runner = self._runner
        load, limits = runner.load, runner.limits
        self._bus.status.put(self._name, self._name, {STATUS_KEY: _text(load, limits)})
        figures = {
            "kv_blocks": limits.blocks,
            "kv_blocks_used": load.active_blocks,
            "prompt_tokens": load.prompt_tokens,
            "cached_tokens": load.cached_tokens,
            "output_tokens": runner.output_tokens,
        }
        self._bus.status.put_figures(self._name, self._instance, figures)
        if self._metrics is not None:
            self._metrics.put(load, limits, runner)


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


class _EngineMetrics:
    """The metrics of one engine; those of several in one process with the same labels add up."""

    def __init__(self, metrics: Metrics, source: str, namespace: str, component: str) -> None:
        self._source = source
        self._labels: Labels = (("dynbus.namespace", namespace), ("dynbus.component", component))
        self._readings: dict[str, Readings] = {
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
            "failed_requests": metrics.counter(
                "engine.failed_requests", "{request}", "Requests that could not go on."
            ),
        }

    def put(self, load: EngineLoad, limits: EngineLimits, runner: EngineRunner) -> None:
        """Replace all values."""
        source, labels, readings = self._source, self._labels, self._readings
        requests = {"running": load.running, "waiting": load.waiting}
        blocks = {"active": load.active_blocks, "free": limits.blocks - load.active_blocks}
        tokens = {
            "prompt": load.prompt_tokens,
            "cached": load.cached_tokens,
            "output": runner.output_tokens,
        }
        for key, label, values in (
            ("requests", "dynbus.state", requests),
            ("blocks", "dynbus.state", blocks),
            ("tokens", "dynbus.kind", tokens),
        ):
            readings[key].put(
                source, {(*labels, (label, name)): value for name, value in values.items()}
            )
        readings["held_blocks"].put(source, {labels: load.held_blocks})
        readings["preemptions"].put(source, {labels: load.preempted})
        readings["failed_requests"].put(source, {labels: runner.failed_requests})
        if load.prompt_tokens:
            rate = load.cached_tokens / load.prompt_tokens
            readings["hit_rate"].put(source, {labels: rate})

    def remove(self) -> None:
        """The engine is gone."""
        for readings in self._readings.values():
            readings.remove(self._source)
