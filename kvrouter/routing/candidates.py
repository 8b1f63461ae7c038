"""`Candidates`: the ranks that may get a request, and what is known of each, by column.

Of most ranks of a large fleet nothing depends on the request: neither do they hold a part of its
prompt, nor do requests with a part of it run there. So what depends on it is kept by position for
those ranks alone, and all else in arrays, which are computed with at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.index import Overlap, Rank

from .profiles import InstanceProfile

NO_OVERLAP: Final = Overlap(0, 0, 0, 0)


class Candidate(NamedTuple):
    """A rank that may get a request, and what is known of it.

    Of a router that forwards to instances of its own, load and total are those of one of them in
    the mean.

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


@dataclass(frozen=True, eq=False)
class Offer:
    """The ranks that are offered for a request, in their order; the same for many requests.

    Attributes:
        profiles: of their instances.
    """

    profiles: tuple[InstanceProfile, ...]

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """Those of each profile, one after the other."""
        return tuple(rank for profile in self.profiles for rank in profile.ranks)

    @cached_property
    def positions(self) -> Mapping[Rank, int]:
        """The position of each rank."""
        return {rank: at for at, rank in enumerate(self.ranks)}

    @cached_property
    def profile_of(self) -> Sequence[InstanceProfile]:
        """The profile of each rank's instance, by position."""
        return [profile for profile in self.profiles for _ in profile.ranks]

    @cached_property
    def total_blocks(self) -> tuple[int | None, ...]:
        """`Candidate.total_blocks`, by position."""
        return tuple(
            None if (total := profile.total_blocks) is None else max(1, total // profile.stands_for)
            for profile in self.profile_of
        )

    @cached_property
    def routes(self) -> NDArray[np.float64] | None:
        """`InstanceProfile.routes` of shape [ranks]; None where all compute themselves."""
        routes = [profile.stands_for for profile in self.profile_of]
        return np.array(routes, dtype=np.float64) if max(routes, default=1) > 1 else None

    @cached_property
    def max_batched_tokens(self) -> tuple[int | None, ...]:
        """`Candidate.max_batched_tokens`, by position."""
        return tuple(profile.max_batched_tokens for profile in self.profile_of)

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """`total_blocks` as an array of shape [ranks]; infinite where it is not said."""
        return _totals(self.total_blocks)

    @cached_property
    def abroad(self) -> Sequence[int]:
        """The positions of the ranks in other regions."""
        return [at for at, profile in enumerate(self.profile_of) if profile.region]

    @cached_property
    def tells(self) -> Sequence[bool]:
        """True for each rank that tells the events of its cache here, by position."""
        return [profile.has_events and not profile.region for profile in self.profile_of]

    @cached_property
    def fetching(self) -> Mapping[tuple[str, str, str], Sequence[int]]:
        """The positions of the ranks that fetch blocks of each other, by model, region and zone."""
        by_model: dict[tuple[str, str, str], list[int]] = {}
        for at, profile in enumerate(self.profile_of):
            if profile.fetches:
                model = profile.model, profile.region, profile.zone
                by_model.setdefault(model, []).append(at)
        return by_model

    def hops(self, by_instance: Mapping[str, float]) -> NDArray[np.float64]:
        """`Candidate.hop_ms` of shape [ranks], of those of some instances."""
        return np.array([by_instance.get(rank.instance, 0.0) for rank in self.ranks])


class Candidates(Sequence[Candidate]):
    """The candidates for one request. Not to be changed.

    Thousands of tuples that live for some time would be looked at again and again by the garbage
    collector, in pauses longer than a decision. Columns of numbers are not.

    Attributes:
        ranks: of shape [candidates], as all columns.
        overlaps: of those that hold anything, by position.
        totals: `total_blocks`, infinite where it is not said.
        peer_blocks, hop_ms: None where all are 0.
    """

    __slots__ = (
        "active_blocks",
        "active_prefill_tokens",
        "active_requests",
        "added_blocks",
        "hop_ms",
        "max_batched_tokens",
        "overlaps",
        "peer_blocks",
        "ranks",
        "total_blocks",
        "totals",
    )

    def __init__(
        self,
        ranks: Sequence[Rank],
        overlaps: Mapping[int, Overlap],
        active_prefill_tokens: NDArray[np.float64],
        active_blocks: NDArray[np.float64],
        added_blocks: NDArray[np.int64],
        active_requests: NDArray[np.float64],
        total_blocks: Sequence[int | None],
        max_batched_tokens: Sequence[int | None],
        totals: NDArray[np.float64],
        peer_blocks: NDArray[np.int64] | None = None,
        hop_ms: NDArray[np.float64] | None = None,
    ) -> None:
        self.ranks = ranks
        self.overlaps = overlaps
        self.active_prefill_tokens = active_prefill_tokens
        self.active_blocks = active_blocks
        self.added_blocks = added_blocks
        self.active_requests = active_requests
        self.total_blocks = total_blocks
        self.max_batched_tokens = max_batched_tokens
        self.totals = totals
        self.peer_blocks = peer_blocks
        self.hop_ms = hop_ms

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Candidates:
        """These candidates by column."""
        if isinstance(candidates, Candidates):
            return candidates
        columns = zip(*candidates, strict=True) if candidates else ((),) * len(Candidate._fields)
        ranks, overlaps, prefill, active, added, requests, total, batched, peer, hop = columns
        return cls(
            ranks,
            {at: overlap for at, overlap in enumerate(overlaps) if overlap is not NO_OVERLAP},
            np.array(prefill, dtype=np.float64),
            np.array(active, dtype=np.float64),
            np.array(added, dtype=np.int64),
            np.array(requests, dtype=np.float64),
            total,
            batched,
            _totals(total),
            np.array(peer, dtype=np.int64) if any(peer) else None,
            np.array(hop, dtype=np.float64) if any(hop) else None,
        )

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(at, slice):
            return tuple(self)[at]
        # Overlaps are by position, and -1 is none.
        at = range(len(self))[at]
        return Candidate(
            self.ranks[at],
            self.overlaps.get(at, NO_OVERLAP),
            int(self.active_prefill_tokens[at]),
            float(self.active_blocks[at]),
            int(self.added_blocks[at]),
            int(self.active_requests[at]),
            self.total_blocks[at],
            self.max_batched_tokens[at],
            0 if self.peer_blocks is None else int(self.peer_blocks[at]),
            0.0 if self.hop_ms is None else float(self.hop_ms[at]),
        )

    def __iter__(self) -> Iterator[Candidate]:
        count, overlaps = len(self), self.overlaps
        return map(
            Candidate,
            self.ranks,
            [overlaps.get(at, NO_OVERLAP) for at in range(count)],
            map(int, self.active_prefill_tokens.tolist()),
            self.active_blocks.tolist(),
            self.added_blocks.tolist(),
            map(int, self.active_requests.tolist()),
            self.total_blocks,
            self.max_batched_tokens,
            (0,) * count if self.peer_blocks is None else self.peer_blocks.tolist(),
            (0.0,) * count if self.hop_ms is None else self.hop_ms.tolist(),
        )


def _totals(blocks: Sequence[int | None]) -> NDArray[np.float64]:
    return np.array([np.inf if one is None else one for one in blocks], dtype=np.float64)
