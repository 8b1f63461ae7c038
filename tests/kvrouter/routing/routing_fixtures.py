"""What tests of routing share: instances, requests, and an index that is filled by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus.bus.clock import monotonic
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.cost import CostFunction, RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.profiles import InstanceProfile, read_profile
from dynbus.kvrouter.routing.queue import SchedulingRequest, Ticket
from dynbus.kvrouter.routing.requests import NO_CONSTRAINTS, Constraints
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness

BLOCK = 16


async def until(holds: Callable[[], bool], limit: float = 20.0) -> float:
    """Seconds of the loop's clock until something holds.

    Raises:
        AssertionError: it does not within `limit`.
    """
    begun = monotonic()
    for _ in range(int(limit * 1000)):
        if holds():
            return monotonic() - begun
        await asyncio.sleep(0.001)
    raise AssertionError(f"not within {limit} s: {holds}")


class At(NamedTuple):
    """A place in a stream."""

    sequence: int


class HandIndex:
    """An index that says what the test puts into it, whatever is asked."""

    def __init__(self, **device_blocks: int) -> None:
        self.position = At(7)
        self.resyncs: list[tuple[Rank, str]] = []
        self.held = {Rank(name, 0): Overlap(n, 0, 0, 0) for name, n in device_blocks.items() if n}

    def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
        return self.held

    def awareness(self) -> CacheAwareness:
        return CacheAwareness(AwarenessLevel.EXACT)

    def ask_resync(self, rank: Rank, reason: str) -> None:
        self.resyncs.append((rank, reason))


def profile(name: str, **metadata: object) -> InstanceProfile:
    """An instance with events, whose other metadata is given without the `kv_`."""
    texts = {f"kv_{key}": str(value) for key, value in metadata.items()}
    return read_profile(name, {"kv_block_size": str(BLOCK), "kv_events": "true"} | texts)


def shape(blocks: int, *, of: int = 0, priority: int = 0) -> RequestShape:
    """A prompt of so many whole blocks; another one for each `of`."""
    tokens = np.arange(blocks * BLOCK, dtype=np.uint32) + of * 100_000
    return RequestShape.of(tokens, BLOCK, priority=priority)


def request(
    request_id: str,
    profiles: Sequence[InstanceProfile],
    *,
    blocks: int = 4,
    of: int = 0,
    now: float = 0.0,
    priority: int = 0,
    attempt: int = 1,
    session: str = "",
    constraints: Constraints = NO_CONSTRAINTS,
) -> SchedulingRequest:
    return SchedulingRequest(
        request_id,
        shape(blocks, of=of, priority=priority),
        profiles,
        now,
        attempt,
        session,
        constraints,
    )


def by_name(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
    """A policy that prefers the first name of the alphabet."""
    names = sorted(candidate.rank.instance for candidate in candidates)
    return [float(names.index(candidate.rank.instance)) for candidate in candidates]


def always(cost: float) -> CostFunction:
    """A policy for which all candidates are alike."""
    return lambda request, candidates: [cost] * len(candidates)


def decide(scheduler: KvScheduler, wanted: SchedulingRequest, now: float = 0.0) -> Decision:
    answer = scheduler.submit(wanted, now)
    assert isinstance(answer, Decision)
    return answer


def wait(scheduler: KvScheduler, wanted: SchedulingRequest, now: float = 0.0) -> Ticket:
    answer = scheduler.submit(wanted, now)
    assert isinstance(answer, Ticket)
    return answer
