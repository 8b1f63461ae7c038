"""The cost function of dynbus: how long a prompt waits, and how much work it makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cost import Candidate, RequestShape


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

    def __post_init__(self) -> None:
        for name in self.__slots__:
            weight = getattr(self, name)
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"{name} = {weight}: a weight is 0 or more, and finite")

    def __call__(self, request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        block_size, prompt_tokens = request.block_size, request.prompt_tokens
        host, disk, external = self.host_credit, self.disk_credit, self.external_credit
        costs: list[float] = []
        for candidate in candidates:
            _, overlap, prefill_tokens, active, added, _, total, _ = candidate
            on_device, on_host, on_disk, elsewhere = overlap
            held = on_device + host * on_host + disk * on_disk + external * elsewhere
            new = prompt_tokens - block_size * held
            cost = prefill_tokens + self.work_weight * (new if new > 0.0 else 0.0)
            blocks = active + added
            counted = self.context_weight * blocks
            if total is not None:
                cost *= 1.0 + self.slowdown * blocks / total
                if blocks > self.full * total:
                    counted += blocks - self.full * total
            costs.append(cost + block_size * counted)
        return costs
