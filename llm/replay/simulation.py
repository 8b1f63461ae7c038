"""A fleet and its load, on which policies are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dynbus.kvrouter import RouterConfig
from dynbus.llm.mock.engine import MockConfig

from .fleet import EVENT_DELAY, Fleet, ReplayResult
from .policies import with_policy
from .trace import Trace

MOST_SECONDS: Final = 1e9
"""Virtual time that a replay may take: in 31 years a clock of floats still knows microseconds."""

POOL: Final = "fleet"
"""The name of a pool that is the only one."""

AT_ONCE: Final = 1e9
"""A speed at which all requests of a trace are there at once."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The part of a simulation that is the same for all policies.

    Attributes:
        speed: the trace passes so many times faster; the engines do not.
        event_delay: seconds until the router knows what an instance stored or removed.
        seed: of what policies leave to chance.
        router: the settings of the router but for its policy.

    Raises:
        ValueError: there is no instance, `speed` is not above 0, or `event_delay` below 0.
    """

    instances: int
    engine: MockConfig = field(default_factory=MockConfig)
    speed: float = 1.0
    event_delay: float = EVENT_DELAY
    seed: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ValueError(f"instances = {self.instances}: a fleet has one at least")
        if not 0.0 < self.speed < math.inf:
            raise ValueError(f"speed = {self.speed}: it must be above 0")
        if not self.event_delay >= 0.0:
            raise ValueError(f"event_delay = {self.event_delay}: it must be 0 or more")

    @property
    def counts(self) -> Mapping[str, int]:
        """The instances of each pool."""
        return {POOL: self.instances}

    def fleets(self, policy: str) -> Mapping[str, Fleet]:
        """The pools, without instances; requests go to the last of them.

        Raises:
            ConfigError: there is no such policy.
        """
        return {POOL: self._fleet(policy, [])}

    def _fleet(self, policy: str, names: Sequence[str]) -> Fleet:
        return Fleet(
            names,
            self.config(policy),
            self.engine,
            event_delay=self.event_delay,
            seed=self.seed,
        )

    @property
    def names(self) -> list[str]:
        """Of the instances."""
        return [f"engine-{number}" for number in range(self.instances)]

    def config(self, policy: str) -> RouterConfig:
        """The settings of this fleet's router with the policy of a name.

        Raises:
            ConfigError: there is none.
        """
        return with_policy(self.router, policy)

    def run(
        self, trace: Trace, policy: str, *, progress: Callable[[int], None] | None = None
    ) -> ReplayResult:
        """Replay a trace with the policy of a name.

        Raises:
            ConfigError: there is no such policy, or it returns no costs.
            RequestTooLong: a request does not fit into an engine.
            ValueError: the blocks of the trace are not those of the engine, or it takes too long.
        """
        self.check(trace)
        fleet = self._fleet(policy, self.names)
        return fleet.run(trace, speed=self.speed, progress=progress)

    def check(self, trace: Trace) -> None:
        """Check that a trace can be replayed.

        Raises:
            ValueError: its blocks are not those of the engine, or it takes too long.
        """
        if trace.block_size != self.engine.block_size:
            raise ValueError(
                f"the trace has blocks of {trace.block_size} tokens and the engine of "
                f"{self.engine.block_size}: read the trace with the engine's block size"
            )
        lasts = trace.duration / self.speed
        if lasts > MOST_SECONDS:
            raise ValueError(
                f"at speed {self.speed:g} the last request arrives {lasts:g} s after the first, "
                f"and {MOST_SECONDS:g} s are the most: look at its timestamp, in milliseconds, or "
                "give more speed"
            )

    def saturating_speed(self, trace: Trace, policy: str = "round_robin") -> float:
        """The speed at which a trace brings as much work as this fleet can do.

        With all requests there at once the fleet needs some time for them. A trace that takes
        less than this for their arrival brings more than the fleet can do.
        """
        result = replace(self, speed=AT_ONCE).run(trace, policy)
        return trace.duration / max(request.last_token for request in result.requests)
