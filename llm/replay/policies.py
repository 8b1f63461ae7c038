"""The policies that a replay compares, as settings of the scheduler that serves.

Cost functions are those of a router, by their names. Two more look at nothing: `round_robin` and
`random`, for a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dynbus.kvrouter import COST_FUNCTIONS, Candidate, Policy, RequestShape, RouterConfig

POLICY_NAMES: Final = ("round_robin", "random", *COST_FUNCTIONS)


class InTurn:
    """A cost function that takes each candidate in turn."""

    def __init__(self) -> None:
        self._requests = 0

    def __call__(self, request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        turn = self._requests % len(candidates)
        self._requests += 1
        return [float(at != turn) for at in range(len(candidates))]


def anywhere(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    """A cost function that finds all candidates alike, so that chance decides."""
    return [0.0] * len(candidates)


def with_policy(config: RouterConfig, name: str) -> RouterConfig:
    """The settings of a router that decides by the policy of a name.

    Args:
        name: one of `POLICY_NAMES`, or the cost function that `module:function` names.

    Raises:
        ConfigError: there is none.
    """
    if name in ("round_robin", "random"):
        policy = InTurn() if name == "round_robin" else anywhere
        # It looks at no cache: nobody has to follow or guess what they hold.
        return replace(config, policy=policy, exact=False, approximate_ttl=0)
    Policy.of(name, known_names=POLICY_NAMES)
    return replace(config, policy=name)
