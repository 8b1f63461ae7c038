"""The observations of an autoscaler, and its targets, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

PoolKind = Literal["aggregated", "prefill", "decode"]
"""The work of the instances of a pool: prompts and outputs, or one of them."""


class PoolLoad(msgspec.Struct, frozen=True):
    """The load of all instances of a pool, and what came and went since the observation before.

    Attributes:
        waiting: requests that no instance computes: they wait in engines, or front ends hold them.
        running: requests that instances compute.
        context_tokens: that the caches keep for those.
        capacity_tokens: that the cache of one instance holds; 0 where that is not known.
        slots: requests that one instance runs at a time; 0 where that is not known.
        arrivals, ended: requests that came, and that ended.
        prompt_tokens: of prompts, without those that were in a cache.
        output_tokens: that were made.
        firsts: requests whose first token was among these.
        ttft: mean seconds from the arrival of those to that token; None for none.
        itl: mean seconds between two tokens of a request; None for none.
        turned_away: prompts that these instances computed themselves, as prefill instances had no
            room for them or were not there.
    """

    waiting: int = 0
    running: int = 0
    context_tokens: float = 0.0
    capacity_tokens: int = 0
    slots: int = 0
    arrivals: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    firsts: int = 0
    ttft: float | None = None
    itl: float | None = None
    turned_away: int = 0


class PoolState(msgspec.Struct, frozen=True):
    """A pool as it is seen at one time.

    Attributes:
        ready: instances that serve, and take requests.
        draining: instances that finish what they have.
        load: None where any part of it is missing.
        missing: who does not tell it, for people.
    """

    ready: int
    draining: int = 0
    load: PoolLoad | None = None
    missing: str = ""


class Observation(msgspec.Struct, frozen=True):
    """All pools at one time.

    Attributes:
        time: seconds of a monotonic clock.
        pools: by name.
    """

    time: float
    pools: Mapping[str, PoolState]


class PoolTarget(msgspec.Struct, frozen=True):
    """The number of instances that a pool is to have.

    Attributes:
        reason: for people.
    """

    desired: int
    reason: str
