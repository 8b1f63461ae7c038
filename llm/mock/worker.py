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
from .profile import read_profile
from .timing import Timing


@dataclass(frozen=True, kw_only=True)
class MockOptions(MockSize, HangOptions):
    """The size of a mock engine, its speed, and how long a step may take."""

    speedup_ratio: SpeedupRatio = Timing().speedup_ratio
    profile: Annotated[
        str,
        Option(
            "a file of `dynbus profile`, of the engine that it plays: its steps take what those of "
            "that one do, and sizes that are not given, or equal their defaults here, are its own. "
            "Empty for Dynamo's formula",
            guide="planning.md#engines-that-play-a-profile",
        ),
    ] = ""
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

    @property
    def engine(self) -> MockConfig:
        """The engine with these options.

        Raises:
            ConfigError: the profile cannot be read.
            OutsideProfile: a size is beyond what the profile was fitted to.
        """
        size = self.shared(MockSize)
        if not self.profile:
            return MockConfig(**size, timing=Timing(speedup_ratio=self.speedup_ratio))
        profile = read_profile(Path(self.profile))
        given = {name: value for name, value in size.items() if value != getattr(MockSize(), name)}
        return MockConfig(**profile.size(**given), timing=profile.timing(self.speedup_ratio))


class MockWorker(EngineWorker, namespace="llm"):
    """Serves tokens that no model made, in the time and with the cache of a real engine.

    Attributes:
        tier: of the blocks that its cache has no room for; None for none.
    """

    @takes(MockOptions)
    def __init__(self, options: MockOptions) -> None:
        self._bound_steps(options)
        self._config = options.engine
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
