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
from dynbus.kvrouter.radix.index import Overlap, Rank

NO_OVERLAP: Final = Overlap(0, 0, 0, 0)
_TOKEN_BYTES: Final = 4
_NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})

LEAST_REQUESTS: Final = 256
"""A part of fewer requests than these says nothing yet."""

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

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the prompt, an incomplete last one included."""
        return -(-self.prompt_tokens // self.block_size)


class Candidate(NamedTuple):
    """A rank that may get a request, and what is known of it.

    Attributes:
        overlap: blocks of the prompt that it holds, by tier.
        active_prefill_tokens: prompt tokens of its running requests that are still to compute.
        active_blocks: blocks that its running requests use, each counted once.
        added_blocks: blocks of this request that none of them uses.
        active_requests: how many run there, those of other routers with shared load among them.
        total_blocks: what its device memory holds; None when it does not say.
        max_batched_tokens: tokens that it computes in one step; None when it does not say.
        peer_blocks: blocks of the prompt beyond its overlap that it may fetch from another
            candidate, which holds them.
        hop_ms: milliseconds of the way there and back, where it is in another zone than the router
            and that was measured.
    """

    rank: Rank
    overlap: Overlap = NO_OVERLAP
    active_prefill_tokens: int = 0
    active_blocks: float = 0.0
    added_blocks: int = 0
    active_requests: int = 0
    total_blocks: int | None = None
    max_batched_tokens: int | None = None
    peer_blocks: int = 0
    hop_ms: float = 0.0


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
    first. Of a prefix with a part p of the latest requests there should be p * candidates copies.
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
        block_size, prompt_tokens = request.block_size, request.prompt_tokens
        host, disk, external = self.host_credit, self.disk_credit, self.external_credit
        peer = self.peer_credit
        wanted = self._wanted_blocks(request, candidates)
        costs: list[float] = []
        for candidate in candidates:
            _, overlap, prefill_tokens, active, added, _, total, _, fetched, hop = candidate
            on_device, on_host, on_disk, elsewhere = overlap
            held = on_device + host * on_host + disk * on_disk + external * elsewhere
            held += peer * fetched
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
            costs.append(cost + block_size * counted + self.hop_weight * hop)
        return costs

    def _wanted_blocks(self, request: RequestShape, candidates: Sequence[Candidate]) -> int:
        """Blocks at the beginning of the prompt of which there should be more copies."""
        counted, prefixes = request.popularity
        if not prefixes:
            return 0
        requests = max(LEAST_REQUESTS, counted)
        wanted = 0
        held = sorted(candidate.overlap.device for candidate in candidates)
        for blocks, count in prefixes:
            holders = len(held) - bisect_left(held, blocks)
            if 0 < holders < len(held) * count / requests:
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
        block_size = request.block_size
        prompt_tokens = request.prompt_tokens
        scale, request_weight = self.prefill_scale, self.active_request_weight
        host, disk, external = self.host_credit, self.disk_credit, self.external_credit
        credits = self._device_credits(request, candidates)
        costs: list[float] = []
        for candidate, device in zip(candidates, credits, strict=True):
            _, overlap, prefill_tokens, active_blocks, added_blocks, requests, *_ = candidate
            prefill = (prefill_tokens + prompt_tokens) / block_size
            if overlap is not NO_OVERLAP:
                on_device, on_host, on_disk, elsewhere = overlap
                prefill -= (
                    device * on_device + host * on_host + disk * on_disk + external * elsewhere
                )
                if prefill < 0.0:
                    prefill = 0.0
            costs.append(scale * prefill + active_blocks + added_blocks + request_weight * requests)
        return costs

    def _device_credits(
        self, request: RequestShape, candidates: Sequence[Candidate]
    ) -> Sequence[float]:
        """The credit for a block in device memory, for each candidate."""
        decay = self.overlap_credit_decay
        if not decay or not request.prompt_tokens:
            return [self.overlap_credit] * len(candidates)
        least = min((one.active_prefill_tokens for one in candidates), default=0)
        unit = request.block_size * request.prompt_blocks
        return [
            self.overlap_credit / (1.0 + decay * (one.active_prefill_tokens - least) / unit)
            for one in candidates
        ]


def _check_weights(cost: KvCost | DynamoCost) -> None:
    for name in cost.__slots__:
        weight = getattr(cost, name)
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} = {weight}: a weight is 0 or more, and finite")


def choose(costs: Sequence[float], temperature: float, random: Random) -> int | None:
    """The position of the chosen cost; None when there is none below infinity.

    At temperature 0 the lowest, equal ones with the same chance. Above it each with a
    probability that falls with its cost: the softmax of the costs over their range.
    """
    least = min(costs, default=math.inf)
    if least == math.inf:
        return None
    if temperature <= 0.0:
        best = [at for at, cost in enumerate(costs) if cost == least]
        return best[0] if len(best) == 1 else random.choice(best)
    possible = [at for at, cost in enumerate(costs) if cost < math.inf]
    unit = (max(costs[at] for at in possible) - least) * temperature
    if unit <= 0.0:
        return random.choice(possible)
    if unit == math.inf:
        # The range of the costs is no number: what is a half of it is as far apart.
        return choose([cost / 2 / max(1.0, temperature) for cost in costs], temperature, random)
    weights = [math.exp((least - costs[at]) / unit) for at in possible]
    return random.choices(possible, weights)[0]


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
