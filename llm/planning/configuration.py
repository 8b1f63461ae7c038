"""A way to serve a traffic: which engines, with which caches, behind which policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynbus import ConfigError
from dynbus.llm.disaggregated.settings import DisaggregationSettings
from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.profile import EngineProfile
from dynbus.llm.replay import ApartSimulation, ReplayResult, Simulation, Trace


class Engines(NamedTuple):
    """The number of engines: those that serve, or those that compute prompts; and beside these
    those that decode, 0 where none does that alone."""

    serving: int
    decoding: int = 0

    def __str__(self) -> str:
        return f"{self.serving}+{self.decoding}" if self.decoding else f"{self.serving}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """Engines of a kind, and what stands before them.

    Attributes:
        profile: of each engine.
        policy: of the router.
        blocks: of the cache of each engine.
        host_blocks: of its host tier.
        price: of an engine.
        label: in place of the profile's name, which another one may have too.
        bandwidth: bytes that blocks move a second from an engine that computes prompts to one that
            decodes; None where each does both.

    Raises:
        ConfigError: the profile does not say how large blocks are that would have to move.
    """

    profile: EngineProfile
    policy: str
    blocks: int
    host_blocks: int = 0
    price: float = 1.0
    bandwidth: float | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """Of its profile, for people."""
        return self.label or self.profile.name

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not self.profile.block_bytes:
            raise ConfigError(
                f"the profile of {self.profile.name} does not say how many bytes a block of its "
                "cache has: profile it in its process, or leave the layout apart out"
            )

    def engine(self, slower: float = 1.0) -> MockConfig:
        """The configuration of each engine.

        Args:
            slower: by which factor its steps take longer than the profile says.
        """
        return MockConfig(
            **self.profile.size(blocks=self.blocks, host_blocks=self.host_blocks),
            timing=self.profile.timing(1.0 / slower),
        )

    def run(
        self, trace: Trace, engines: Engines, *, speed: float, seed: int = 0, slower: float = 1.0
    ) -> ReplayResult:
        """Replay a trace.

        Args:
            speed: the trace passes so many times faster.
            seed: of what the router leaves to chance.

        Raises:
            ConfigError: there is no such policy.
            OutsideProfile: a step is beyond what the profile was fitted to.
            RequestTooLong: a request does not fit into an engine.
            ValueError: the blocks of the trace are not those of the engine, or it takes too long.
        """
        simulation = Simulation(engines.serving, self.engine(slower), speed=speed, seed=seed)
        if self.bandwidth is None:
            return simulation.run(trace, self.policy)
        block_seconds = self.profile.block_bytes / self.bandwidth
        apart = ApartSimulation(
            simulation,
            engines.decoding,
            block_seconds / self.profile.block_size,
            DisaggregationSettings(mode="remote"),
        )
        return apart.run(trace, self.policy)
