"""The cost of sending a request to each candidate, by its load and the tiers (GPU, host, disk) of
what it holds, and the choice among the costs.

A cost function is any callable of a request and its candidates; `KvCost` is that of dynbus,
`DynamoCost` is Dynamo's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.hashing import (
    PlacedObject,
    Tokens,
    block_hashes,
    hash_prefixes,
    objects_by_block,
    token_bytes,
)

from .candidates import Candidate, Candidates

_TOKEN_BYTES: Final = 4
_NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})

LEAST_REQUESTS: Final = 256
"""A part of fewer requests than these says nothing yet."""

DEVIATIONS: Final = 1.5
"""Standard deviations by which a count is taken lower, so that it is hardly too high by chance."""

WINDOW: Final = 512
"""Requests of a generation; the latest one and the one before it count."""

GROWTH: Final = 1.25
"""Each prefix that is counted is so many times as long as the one before."""


def next_length(blocks: int) -> int:
    """The length of the prefix that is counted after one of `blocks` blocks."""
    return max(blocks + 1, int(blocks * GROWTH))


class PrefixCounts(NamedTuple):
    """The numbers of the latest requests that begin as a request does.

    Attributes:
        requests: how many were counted, the request itself among them.
        prefixes: of prefixes of growing length, those that another request had too: (blocks,
            requests that begin with them), the shortest first.
    """

    requests: int = 0
    prefixes: Sequence[tuple[int, int]] = ()


NO_COUNTS: Final = PrefixCounts()


@dataclass(slots=True, eq=False)
class RequestShape:
    """The facts about a request that a cost function may use.

    Attributes:
        block_hashes: of the complete blocks of its prompt; shape [blocks].
        expected_output_tokens: None when nobody said.
        priority: larger is more urgent.
        metadata: of the call; not to be changed.
        popularity: how many of the router's latest requests begin with the same blocks.
    """

    prompt_tokens: int
    block_size: int
    block_hashes: NDArray[np.uint64]
    expected_output_tokens: int | None = None
    priority: int = 0
    metadata: Mapping[str, str] = field(default_factory=lambda: _NO_METADATA)
    popularity: PrefixCounts = NO_COUNTS
    _sequence_hashes: list[int] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        block_size: int,
        *,
        lora_name: str | None = None,
        salt: str | None = None,
        objects: Sequence[PlacedObject] = (),
        expected_output_tokens: int | None = None,
        priority: int = 0,
        metadata: Mapping[str, str] = _NO_METADATA,
    ) -> RequestShape:
        """The shape of a prompt of token ids.

        Args:
            objects: the images and the like among its tokens.

        Raises:
            ValueError: a token or an object does not fit, or `block_size` is below 1.
        """
        content = token_bytes(tokens)
        count = len(content) // _TOKEN_BYTES
        multimodal = objects_by_block(objects, block_size, count // block_size) if objects else ()
        return cls(
            count,
            block_size,
            block_hashes(
                content, block_size, lora_name=lora_name, salt=salt, multimodal=multimodal
            ),
            expected_output_tokens,
            priority,
            metadata,
        )

    @property
    def sequence_hashes(self) -> list[int]:
        """The hash of each prefix of complete blocks; made at the first use."""
        hashes = self._sequence_hashes
        return self.hash_prefixes() if hashes is None else hashes

    def hash_prefixes(self) -> list[int]:
        """Make the sequence hashes now; they are kept."""
        hashes = self._sequence_hashes = hash_prefixes(self.block_hashes)
        return hashes

    def keep_prefixes(self, hashes: list[int]) -> None:
        """Take sequence hashes that were made already."""
        self._sequence_hashes = hashes

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the prompt, an incomplete last one included."""
        return -(-self.prompt_tokens // self.block_size)


CostFunction: TypeAlias = Callable[[RequestShape, Sequence[Candidate]], Sequence[float]]
"""One cost for each candidate, in their order: the lower the better, infinity for never.

It is called on the router's event loop, once for each decision; of a request that an instance turns
away there is another one. It returns at once, and changes nothing that it is given. It
may keep what it likes; it is not told what was chosen.
"""


@dataclass(frozen=True, slots=True)
class KvCost:
    """The prefill that a request waits for and makes, in tokens, and how it is slowed down.

        new    = prompt tokens - block size * (overlap, by tier, and what a peer can send)
        blocks = those in use, with the ones that this request adds
        cost   = (active prefill tokens + work_weight * new) * (1 + slowdown * blocks / total)
                 + block size * (context_weight * blocks + max(0, blocks - full * total))
                 + hop_weight * milliseconds of the way to another zone and back

    The prompts before it and its own are computed before its first token. All requests that
    come later pay for its work as well: therefore that counts more than waiting. Each step of
    prefill also decodes for the requests that run, which takes longer the more they hold. And
    where the cache is about to be full, requests wait for blocks or lose them. Without a total
    the terms that need it are left out.

    Where work counts for more than waiting, a prefix that everybody sends stays where it was
    first. Of a prefix with a part p of the latest requests, n of them, there should be
    p * candidates copies, p being taken as low as chance allows: (n - 1.5 * sqrt(n)) / requests.
    While there are fewer, to compute it once more counts as `copy_weight` a token.

    Attributes:
        full: the part of the cache from which on it counts as full.
        hop_weight: tokens that an engine computes in a millisecond, which the first item waits for
            its way.

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
    peer_credit: float = 0.5
    copy_weight: float = 0.0
    hop_weight: float = 10.0

    def __post_init__(self) -> None:
        _check_weights(self)

    def __call__(self, request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        costs: list[float] = self.columns(request, Candidates.of(candidates)).tolist()
        return costs

    # With absurd weights: what is no number is refused where costs are looked at.
    @np.errstate(over="ignore", invalid="ignore")
    def columns(self, request: RequestShape, candidates: Candidates) -> NDArray[np.float64]:
        """The costs of all candidates at once; shape [candidates]."""
        block_size, overlaps = request.block_size, candidates.overlaps
        host, disk, external = self.host_credit, self.disk_credit, self.external_credit
        held = np.zeros(len(candidates.ranks))
        if overlaps:
            held[list(overlaps)] = [
                on_device + host * on_host + disk * on_disk + external * elsewhere
                for on_device, on_host, on_disk, elsewhere in overlaps.values()
            ]
        if candidates.peer_blocks is not None:
            held += self.peer_credit * candidates.peer_blocks
        work = self.work_weight * np.maximum(request.prompt_tokens - block_size * held, 0.0)
        wanted = self._wanted_blocks(request, candidates)
        if wanted:
            missing = np.maximum(wanted - held, 0.0)
            work -= (self.work_weight - self.copy_weight) * block_size * missing
        blocks = candidates.active_blocks + candidates.added_blocks
        totals = candidates.totals
        cost = candidates.active_prefill_tokens + work
        cost *= 1.0 + self.slowdown * blocks / totals
        counted = self.context_weight * blocks
        if self.full:
            counted += np.maximum(blocks - self.full * totals, 0.0)
        else:
            counted += np.where(np.isfinite(totals), blocks, 0.0)
        cost += block_size * counted
        if candidates.hop_ms is not None:
            cost += self.hop_weight * candidates.hop_ms
        return cost

    def _wanted_blocks(self, request: RequestShape, candidates: Candidates) -> int:
        """Blocks at the beginning of the prompt of which there should be more copies."""
        counted, prefixes = request.popularity
        if not prefixes or not candidates.overlaps:
            return 0
        requests = max(LEAST_REQUESTS, counted)
        wanted, count = 0, len(candidates.ranks)
        held = sorted([overlap[0] for overlap in candidates.overlaps.values()])
        for blocks, times in prefixes:
            holders = len(held) - bisect_left(held, blocks)
            # In a large fleet two requests of the latest are more than a fair share: chance.
            certain = times - DEVIATIONS * math.sqrt(times)
            if 0 < holders < count * certain / requests:
                wanted = blocks
        # What they share ends somewhere before the next length that is counted.
        return min(held[-1], next_length(wanted) - 1) if wanted else 0


@dataclass(frozen=True, slots=True)
class DynamoCost:
    """Dynamo's cost: prefill work that is left after the overlap, and decode work, in blocks.

        prefill = max(0, (active prefill tokens + prompt tokens) / block size - credit)
        credit  = overlap_credit * decay * device + host_credit * host + disk_credit * disk
                  + external_credit * external
        decay   = 1 / (1 + overlap_credit_decay * excess / prompt blocks)
        cost    = prefill_scale * prefill + active blocks + added blocks
                  + active_request_weight * active requests

    Attributes:
        overlap_credit_decay: how fast the credit for device memory falls with the prefill work
            above that of the least loaded candidate (`excess`); 0 for not at all.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    overlap_credit: float = 1.0
    overlap_credit_decay: float = 0.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    external_credit: float = 0.5
    prefill_scale: float = 1.0
    active_request_weight: float = 0.0

    def __post_init__(self) -> None:
        _check_weights(self)

    def __call__(self, request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        costs: list[float] = self.columns(request, Candidates.of(candidates)).tolist()
        return costs

    # With absurd weights: what is no number is refused where costs are looked at.
    @np.errstate(over="ignore", invalid="ignore")
    def columns(self, request: RequestShape, candidates: Candidates) -> NDArray[np.float64]:
        """The costs of all candidates at once; shape [candidates]."""
        prefill_tokens = candidates.active_prefill_tokens
        prefill = (prefill_tokens + request.prompt_tokens) / request.block_size
        if candidates.overlaps:
            holders = list(candidates.overlaps)
            credits = self._device_credits(request, prefill_tokens)[holders].tolist()
            host, disk, external = self.host_credit, self.disk_credit, self.external_credit
            credit = [
                device * on_device + host * on_host + disk * on_disk + external * elsewhere
                for device, (on_device, on_host, on_disk, elsewhere) in zip(
                    credits, candidates.overlaps.values(), strict=True
                )
            ]
            prefill[holders] = np.maximum(prefill[holders] - credit, 0.0)
        return (
            self.prefill_scale * prefill
            + candidates.active_blocks
            + candidates.added_blocks
            + self.active_request_weight * candidates.active_requests
        )

    def _device_credits(
        self, request: RequestShape, prefill_tokens: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The credit for a block in device memory, of each candidate."""
        decay = self.overlap_credit_decay
        if not decay or not request.prompt_tokens:
            return np.full(prefill_tokens.size, self.overlap_credit)
        unit = request.block_size * request.prompt_blocks
        excess = prefill_tokens - prefill_tokens.min()
        credits: NDArray[np.float64] = self.overlap_credit / (1.0 + decay * excess / unit)
        return credits


def _check_weights(cost: KvCost | DynamoCost) -> None:
    for name in cost.__slots__:
        weight = getattr(cost, name)
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} = {weight}: a weight is 0 or more, and finite")


def choose(costs: NDArray[np.float64], temperature: float, random: Random) -> int | None:
    """The position of the chosen cost; None when there is none below infinity.

    At temperature 0 the lowest, equal ones with the same chance. Above it each with a
    probability that falls with its cost: the softmax of the costs over their range.
    """
    least = float(costs.min()) if costs.size else math.inf
    if least == math.inf:
        return None
    if temperature <= 0.0:
        best = (costs == least).nonzero()[0]
        return int(best[0] if best.size == 1 else random.choice(best))
    possible = np.flatnonzero(costs < math.inf)
    unit = (float(costs[possible].max()) - least) * temperature
    if unit <= 0.0:
        return int(random.choice(possible))
    if unit == math.inf:
        # The range of the costs is no number: what is a half of it is as far apart.
        return choose(costs / 2 / max(1.0, temperature), temperature, random)
    weights = [math.exp((least - cost) / unit) for cost in costs[possible].tolist()]
    return int(random.choices(possible, weights)[0])


class Popularity:
    """Counts the prefixes of the latest requests, at growing lengths. Its memory is bounded.

    Args:
        window: requests after which the older half of what is counted is forgotten.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._requests = 0

    def __repr__(self) -> str:
        return f"<Popularity [{len(self._now) + len(self._before)} prefixes]>"

    def note(self, sequence_hashes: Sequence[int]) -> PrefixCounts:
        """Count a request, and say how many others begin as it does."""
        if self._requests >= self._window:
            self._before, self._now, self._requests = self._now, {}, 0
        self._requests += 1
        counts: list[tuple[int, int]] = []
        blocks = 1
        while blocks <= len(sequence_hashes):
            key = sequence_hashes[blocks - 1]
            count = self._now[key] = self._now.get(key, 0) + 1
            count += self._before.get(key, 0)
            if count > 1:
                counts.append((blocks, count))
            blocks = next_length(blocks)
        counted = self._requests + (self._window if self._before else 0)
        return PrefixCounts(counted, counts)
