"""The cost function of dynbus: how long a prompt waits, and how much work it makes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from .cost import Candidate, RequestShape
from .popularity import Popularity, next_length

LEAST_REQUESTS: Final = 256
"""A part of fewer requests than these says nothing yet."""


@dataclass(frozen=True, slots=True)
class KvCost:
    """The prefill that a request waits for and makes, in tokens, and how it is slowed down.

        new    = prompt tokens - block size * overlap, by tier
        blocks = those in use, with the ones that this request adds
        cost   = (active prefill tokens + work_weight * new) * (1 + slowdown * blocks / total)
                 + block size * (context_weight * blocks + max(0, blocks - full * total))

    The prompts before it and its own are computed before its first token. All requests that
    come later pay for its work as well: therefore that counts more than waiting. Each step of
    prefill also decodes for the requests that run, which takes longer the more they hold. And
    where the cache is about to be full, requests wait for blocks or lose them. Without a total
    the terms that need it are left out.

    Where work counts for more than waiting, a prefix that everybody sends stays where it was
    first. Of a prefix with a part p of the latest requests there should be p * candidates copies.
    While there are fewer, to compute it once more counts as `copy_weight` a token.

    Attributes:
        full: the part of the cache from which on it counts as full.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    work_weight: float = 3.0
    slowdown: float = 0.5
    context_weight: float = 0.003
    full: float = 0.9
    host_credit: float = 0.75
    disk_credit: float = 0.25
    external_credit: float = 0.5
    copy_weight: float = 0.0
    _popularity: Popularity = field(
        default_factory=Popularity, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            weight = getattr(self, each.name)
            if each.init and not 0.0 <= weight < math.inf:
                raise ValueError(f"{each.name} = {weight}: a weight is 0 or more, and finite")

    def __call__(self, request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        block_size, prompt_tokens = request.block_size, request.prompt_tokens
        host, disk, external = self.host_credit, self.disk_credit, self.external_credit
        wanted = self._wanted_blocks(request, candidates)
        costs: list[float] = []
        for candidate in candidates:
            _, overlap, prefill_tokens, active, added, _, total, _ = candidate
            on_device, on_host, on_disk, elsewhere = overlap
            held = on_device + host * on_host + disk * on_disk + external * elsewhere
            new = prompt_tokens - block_size * held
            work = self.work_weight * (new if new > 0.0 else 0.0)
            if held < wanted:
                work -= (self.work_weight - self.copy_weight) * block_size * (wanted - held)
            cost = prefill_tokens + work
            blocks = active + added
            counted = self.context_weight * blocks
            if total is not None:
                cost *= 1.0 + self.slowdown * blocks / total
                if blocks > self.full * total:
                    counted += blocks - self.full * total
            costs.append(cost + block_size * counted)
        return costs

    def _wanted_blocks(self, request: RequestShape, candidates: Sequence[Candidate]) -> int:
        """Blocks at the beginning of the prompt of which there should be more copies."""
        popularity = self._popularity
        prefixes = popularity.note(request.block_hashes)
        requests = max(LEAST_REQUESTS, popularity.requests)
        wanted = 0
        held = sorted(candidate.overlap.device for candidate in candidates)
        for blocks, count in prefixes:
            holders = len(held) - bisect_left(held, blocks)
            if 0 < holders < len(held) * count / requests:
                wanted = blocks
        # What they share ends somewhere before the next length that is counted.
        return min(held[-1], next_length(wanted) - 1) if wanted else 0
