"""What a scheduler is given and gives: its configuration, requests, tickets and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness

from .active_load import RankLoad
from .affinity import DEFAULT_OVERLOAD
from .affinity import DEFAULT_TTL as DEFAULT_SESSION_TTL
from .approximate import DEFAULT_TTL, PREDICTION_TTL
from .constraints import NO_CONSTRAINTS, Constraints
from .cost import RequestShape
from .decision import MAX_DECISIONS
from .profile import InstanceProfile
from .waiting import MAX_WAITING


class StreamPosition(Protocol):
    """How far a stream of events was applied."""

    @property
    def sequence(self) -> int: ...


class Follower(Protocol):
    """An index that follows the events of engines, as `IndexFollower` does."""

    @property
    def position(self) -> StreamPosition: ...
    def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
        """`RadixIndex.overlaps`, for the instances that are there."""
        ...

    def awareness(self) -> CacheAwareness:
        """How far the index can be relied on."""
        ...

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """Have a rank say again what it holds."""
        ...


class LoadRecord(Protocol):
    """Keeps what runs where: an `ActiveLoad`, or one that is shared with other routers."""

    def add(
        self,
        request_id: str,
        rank: Rank,
        sequence_hashes: Sequence[int],
        prompt_tokens: int,
        cached_tokens: int,
        expected_output_tokens: int | None = None,
    ) -> None: ...
    def prefill_completed(self, request_id: str) -> bool: ...
    def grow(self, request_id: str, output_tokens: int) -> bool: ...
    def free(self, request_id: str) -> bool: ...
    def remove_instance(self, instance: str) -> None: ...
    def load(self, rank: Rank) -> RankLoad: ...
    def added_blocks(self, rank: Rank, sequence_hashes: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How a scheduler decides, beside its cost function.

    Attributes:
        temperature: 0 takes the lowest cost; above it, costs are probabilities (`choose`).
        queue_threshold: requests wait while every candidate has more prompt tokens to compute
            than this times its `max_batched_tokens`; None for no queue.
        queue_limit: how many may wait.
        session_ttl: seconds after its last request until a session is forgotten.
        session_overload: see `SessionAffinity`.
        prediction_ttl: seconds to believe, beside exact events, what own decisions will have
            stored; 0 for not at all.
        approximate_ttl: the same for engines without events; None keeps as much as an
            instance says that it has room for, and 65,536 blocks where it does not say.
        decisions: how many are kept.
        track_output: whether a request's output counts as blocks of its rank while it grows;
            each item is taken for a token. A request may say otherwise.

    Raises:
        ConfigError: a value is not usable.
    """

    temperature: float = 0.0
    queue_threshold: float | None = None
    queue_limit: int = MAX_WAITING
    session_ttl: float = DEFAULT_SESSION_TTL
    session_overload: float = DEFAULT_OVERLOAD
    prediction_ttl: float = PREDICTION_TTL
    approximate_ttl: float | None = DEFAULT_TTL
    decisions: int = MAX_DECISIONS
    track_output: bool = False

    def __post_init__(self) -> None:
        # Not everyone runs a type checker, so the types are looked at as well.
        for name, (least, whole, remedy) in _LIMITS.items():
            value: Any = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            is_number = isinstance(value, int if whole else int | float)
            if not is_number or isinstance(value, bool) or not least <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: give {remedy}")
        track: Any = self.track_output
        if not isinstance(track, bool):
            raise ConfigError(f"track_output={track!r}: give True or False")


_MAY_BE_NONE: Final = ("queue_threshold", "approximate_ttl")
_LIMITS: Final[Mapping[str, tuple[float, bool, str]]] = {
    "temperature": (0, False, "0 for the lowest cost, or more, for example 0.2"),
    "queue_threshold": (0, False, "a number from 0 on, for example 1.0, or None for no queue"),
    "queue_limit": (1, True, "a whole number from 1 on; queue_threshold=None is for no queue"),
    "session_ttl": (0, False, "seconds from 0 on"),
    "session_overload": (1, False, "a factor from 1 on"),
    "prediction_ttl": (0, False, "seconds, or 0 to expect nothing of own decisions"),
    "approximate_ttl": (0, False, "seconds, or None to keep what instances have room for"),
    "decisions": (1, True, "a whole number from 1 on"),
}
"""The least value of each setting, whether it is a whole number, and what to give."""


@dataclass(slots=True, eq=False)
class SchedulingRequest:
    """A request, and who may serve it.

    Attributes:
        profiles: the instances that may be chosen.
        excluded: why others may not, by id.
        arrived: seconds of the scheduler's clock.
    """

    request_id: str
    shape: RequestShape
    profiles: Sequence[InstanceProfile]
    arrived: float
    attempt: int = 1
    session: str = ""
    constraints: Constraints = NO_CONSTRAINTS
    excluded: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_narrow(self) -> bool:
        """Whether it may go to some of the instances only, and so waits for itself alone."""
        return self.constraints.narrows or self.attempt > 1


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits.

    Attributes:
        place: in the queue.
    """

    request: SchedulingRequest
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Figures of a scheduler since it began.

    Attributes:
        running: requests that were sent somewhere and did not end.
        waiting: requests in the queue now.
        waited: decisions that were made after a time in the queue.
        refused: requests that found the queue full.
        prompt_tokens: of all decisions.
        best_tokens, expected_tokens: prompt tokens that the best candidate, and the chosen
            one, were taken to hold.
        reused_tokens: what engines said that they found, of the `compared_tokens` that were
            expected of the same requests.
        resyncs: how often a rank was asked for one because its engine reused something else.
        agreements: by shadow policy, in how many decisions it would have chosen the same.
    """

    decisions: int
    running: int
    waiting: int
    waited: int
    refused: int
    sessions_kept: int
    prompt_tokens: int
    best_tokens: int
    expected_tokens: int
    reused_tokens: int
    compared_tokens: int
    resyncs: int
    agreements: Mapping[str, int]


def base_awareness(follower: Follower | None, config: SchedulerConfig) -> CacheAwareness:
    """What a follower says, or what own decisions are worth without one."""
    if follower is not None:
        return follower.awareness()
    if config.approximate_ttl == 0:
        return CacheAwareness(AwarenessLevel.OFF, "no events are followed, approximate_ttl is 0")
    return CacheAwareness(AwarenessLevel.APPROXIMATE, "own decisions alone, no events are followed")
