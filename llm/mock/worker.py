"""The mock engine as an actor: `dynbus run dynbus.llm:MockWorker`."""

from __future__ import annotations

from dataclasses import dataclass

from dynbus import takes
from dynbus.llm.engine.options import HangOptions, SpeedupRatio
from dynbus.llm.engine.worker import EngineWorker

from .engine import MockConfig, MockEngine, MockSize
from .timing import Timing


@dataclass(frozen=True, kw_only=True)
class MockOptions(MockSize, HangOptions):
    """The size of a mock engine, its speed, and how long a step may take."""

    speedup_ratio: SpeedupRatio = Timing().speedup_ratio


class MockWorker(EngineWorker, namespace="llm"):
    """Serves tokens that no model made, in the time and with the cache of a real engine."""

    @takes(MockOptions)
    def __init__(self, options: MockOptions) -> None:
        timing = Timing(speedup_ratio=options.speedup_ratio)
        self._bound_steps(options)
        self._config = MockConfig(**options.shared(MockSize), timing=timing)

    def make_engine(self) -> MockEngine:
        return MockEngine(self._config)
