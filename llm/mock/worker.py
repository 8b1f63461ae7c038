"""The mock engine as an actor: `dynbus run dynbus.llm:MockWorker`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dynbus import ConfigError, Option, takes
from dynbus.llm.engine import EngineLimits
from dynbus.llm.engine.options import HangOptions, SpeedupRatio
from dynbus.llm.engine.worker import EngineWorker

from .engine import MockConfig, MockEngine, MockSize
from .host_tier import MockTier
from .timing import Timing


@dataclass(frozen=True, kw_only=True)
class MockOptions(MockSize, HangOptions):
    """The size of a mock engine, its speed, and how long a step may take."""

    speedup_ratio: SpeedupRatio = Timing().speedup_ratio
    host_folder: Annotated[
        str,
        Option(
            "a folder for the list of `host_blocks`, as files that the next process goes on with; "
            "empty for a list that ends with its process",
            guide="tiers.md#kept-beyond-a-process",
        ),
    ] = ""

    def check(self) -> None:
        super().check()
        if self.host_folder and not self.host_blocks:
            raise ConfigError("host_folder: needs host_blocks")


class MockWorker(EngineWorker, namespace="llm"):
    """Serves tokens that no model made, in the time and with the cache of a real engine.

    Attributes:
        tier: of the blocks that its cache has no room for; None for none.
    """

    @takes(MockOptions)
    def __init__(self, options: MockOptions) -> None:
        timing = Timing(speedup_ratio=options.speedup_ratio)
        self._bound_steps(options)
        self._config = MockConfig(**options.shared(MockSize), timing=timing)
        self._host_folder = options.host_folder
        self.tier: MockTier | None = None

    def make_engine(self) -> MockEngine:
        size = self._config
        if size.host_blocks:
            folder = Path(self._host_folder) if self._host_folder else None
            self.tier = MockTier(size.host_blocks, folder=folder, block_size=size.block_size)
        return MockEngine(size, tier=self.tier)

    async def on_engine(self, limits: EngineLimits) -> None:
        if self.tier is not None:
            await self.hold(_leaving(self.tier))


@asynccontextmanager
async def _leaving(tier: MockTier) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        tier.leave()
