"""Which instance gets a request: the policies that a replay compares.

A policy that looks at costs sees what a router sees: the radix index as the events have told it
so far, and the load of the requests that it sent itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.radix.index import Overlap, RadixIndex, Rank
from dynbus.kvrouter.routing.active_load import ActiveLoad
from dynbus.kvrouter.routing.cost import (
    NO_OVERLAP,
    Candidate,
    Popularity,
    RequestShape,
    choose,
)
from dynbus.kvrouter.routing.policies import COST_FUNCTIONS
from dynbus.kvrouter.routing.policies import Policy as CostPolicy

POLICIES: Final = ("round_robin", "random", *COST_FUNCTIONS)


class Policy(Protocol):
    """Chooses an instance for each request.

    Attributes:
        index: where the events of the instances go; None when it does not look at them.
    """

    index: RadixIndex | None

    def choose(self, request_id: str, shape: RequestShape, sequence_hashes: Sequence[int]) -> int:
        """The position of the instance that gets a request.

        Args:
            sequence_hashes: of the complete blocks of its prompt, not to be changed.
        """
        ...

    def first_token(self, request_id: str) -> None:
        """A request has its first token."""
        ...

    def ended(self, request_id: str) -> None:
        """A request has its last token."""
        ...


class RoundRobin:
    """Each instance in turn."""

    index: RadixIndex | None = None

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._next = 0

    def choose(self, request_id: str, shape: RequestShape, sequence_hashes: Sequence[int]) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._instances
        return chosen

    def first_token(self, request_id: str) -> None:
        """It does not matter to this policy."""

    def ended(self, request_id: str) -> None:
        """It does not matter to this policy."""


class Uniform(RoundRobin):
    """Any instance, all with the same chance."""

    def __init__(self, instances: int, seed: int) -> None:
        super().__init__(instances)
        self._random = Random(seed)

    def choose(self, request_id: str, shape: RequestShape, sequence_hashes: Sequence[int]) -> int:
        return self._random.randrange(self._instances)


class ByCost:
    """The instance with the lowest cost, of equal ones any.

    Args:
        names: of the instances, as their events have them.
        total_blocks: of the cache of each instance.
        max_batched_tokens: that an instance computes in one step.
    """

    def __init__(
        self,
        names: Sequence[str],
        cost: CostPolicy,
        *,
        block_size: int,
        total_blocks: int,
        max_batched_tokens: int,
        seed: int = 0,
    ) -> None:
        self._index = RadixIndex()
        self.index: RadixIndex | None = self._index
        self._ranks = [Rank(name, 0) for name in names]
        self._cost = cost
        self._popularity = Popularity()
        self._load = ActiveLoad()
        self._block_size = block_size
        self._total_blocks = total_blocks
        self._max_batched_tokens = max_batched_tokens
        self._random = Random(seed)

    def choose(self, request_id: str, shape: RequestShape, sequence_hashes: Sequence[int]) -> int:
        held = self._index.lookup(shape.block_hashes)
        candidates: list[Candidate] = []
        for rank in self._ranks:
            blocks = held.get(rank.instance, 0)
            load = self._load.of(rank)
            candidates.append(
                Candidate(
                    rank,
                    Overlap(blocks, 0, 0, 0) if blocks else NO_OVERLAP,
                    load.prefill_tokens,
                    load.blocks,
                    self._load.added_blocks(rank, sequence_hashes),
                    load.requests,
                    self._total_blocks,
                    self._max_batched_tokens,
                )
            )
        shape.popularity = self._popularity.note(shape.block_hashes)
        costs = self._cost.costs(shape, candidates, request_id=request_id)
        chosen = choose(costs, 0.0, self._random)
        if chosen is None:
            raise ConfigError(
                f"policy {self._cost.name} gives infinity to all {len(candidates)} instances for "
                f"request {request_id}: one of them must get it"
            )
        cached = candidates[chosen].overlap.device * self._block_size
        self._load.add(
            request_id,
            self._ranks[chosen],
            sequence_hashes,
            shape.prompt_tokens,
            cached,
            shape.expected_output_tokens,
        )
        return chosen

    def first_token(self, request_id: str) -> None:
        self._load.prefill_completed(request_id)

    def ended(self, request_id: str) -> None:
        self._load.free(request_id)


def make_policy(
    name: str,
    names: Sequence[str],
    *,
    block_size: int,
    total_blocks: int,
    max_batched_tokens: int,
    seed: int = 0,
) -> Policy:
    """The policy of a name: one of `POLICIES`, or the cost function that `module:function` names.

    Args:
        names: of the instances.
        seed: of what the policy leaves to chance.

    Raises:
        ConfigError: there is none.
    """
    if name == "round_robin":
        return RoundRobin(len(names))
    if name == "random":
        return Uniform(len(names), seed)
    return ByCost(
        names,
        CostPolicy.of(name, known_names=POLICIES),
        block_size=block_size,
        total_blocks=total_blocks,
        max_batched_tokens=max_batched_tokens,
        seed=seed,
    )
