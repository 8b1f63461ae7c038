"""Prefixes that other instances hold: planned by measured rates, and read as hand-overs without a
prefill.

Whatever fails, the request goes on with what has come and is proven: the engine computes the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, Protocol

from dynbus import context
from dynbus.kvrouter import requests as routed
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.hand_over.messages import LendRequest, Lent, Prefilled, PrefillRequest
from dynbus.llm.hand_over.observing import HandOverFigures
from dynbus.llm.hand_over.part_reader import PartReader
from dynbus.llm.hand_over.sink import Limits, Origin, Plan, Receiving
from dynbus.llm.hand_over.source import MAX_SECONDS
from dynbus.spi import monotonic
from dynbus.transfer import BadDescription, ChecksumMismatch

from .cost import Rates, Verdict

PATIENCE: Final = 4.0
"""The factor by which a transfer may take longer than expected before its fetch is given up."""
LEAST_PATIENCE: Final = 0.5
"""Seconds that it may take in any case."""
MOST_PATIENCE: Final = MAX_SECONDS / 2
"""Seconds after which it is given up in any case: blocks are lent for twice its patience."""
MAX_FETCHES: Final = 8
"""Fetches that run at a time; more requests than these compute."""


class Peer(Protocol):
    """An instance that lends blocks."""

    def lend_prefix(self, request: LendRequest) -> AsyncGenerator[Lent]: ...


class Fetch(NamedTuple):
    """A prefix that is to be fetched.

    Attributes:
        peer: the instance that holds it.
        tokens: of the prompt that it is said to have, whole blocks.
        verdict: what was expected.
        spare: seconds that its request has beside those of computing the same.
    """

    peer: str
    tokens: int
    verdict: Verdict
    spare: float = math.inf

    @property
    def patience(self) -> float:
        """Seconds until it is given up: about those that computing takes.

        Its peer answers between two steps of its engine, and these are long just where requests are
        sent elsewhere. Of one that is dead or frozen the bus tells sooner.
        """
        return min(MOST_PATIENCE, self.spare, max(LEAST_PATIENCE, self.verdict.compute_s))

    @property
    def transfer_patience(self) -> float:
        """Seconds that the transfer may take, once the peer has answered."""
        return min(self.patience, max(LEAST_PATIENCE, PATIENCE * self.verdict.move_s))


@dataclass(slots=True)
class FetchStatistics:
    """Figures of an instance's fetches.

    Attributes:
        results: how many ended, by "fetched", "gone" (the peer had no more than is here), and the
            code of the error of those that failed.
        blocks, bytes: that were fetched and used.
        seconds: that fetches took which brought some.
    """

    results: Counter[str] = field(default_factory=Counter[str])
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


class PrefixFetcher:
    """Plans which prefixes are fetched from peers for the requests of one engine.

    Args:
        reader: reads into the engine's memory.
        rates: measured; they decide.
        peer: gives an instance by its id.
        mover_of: the name of an instance's mover, by its id.
        model: its fingerprint, which peers compare with their own; empty for none.
        avoids: whether nothing is to be taken from a peer.
        mismatched: is told of a peer whose blocks came with other checksums.

    Attributes:
        statistics, figures: of its fetches.
    """

    def __init__(
        self,
        reader: PartReader,
        rates: Rates,
        *,
        peer: Callable[[str], Peer],
        mover_of: Callable[[str], str],
        model: str = "",
        avoids: Callable[[str], bool] = lambda _: False,
        mismatched: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.avoids = avoids
        self.mismatched = mismatched
        self.reader = reader
        self.rates = rates
        self.peer = peer
        self.mover_of = mover_of
        self.model = model
        self.statistics = FetchStatistics()
        self.figures = HandOverFigures()

    def __repr__(self) -> str:
        return f"<PrefixFetcher [{self.figures.open} running]>"

    async def plan(self, request: GenerateRequest) -> Plan | None:
        """See `Planner.plan`."""
        running = context()
        fetch = self.choose(request, running.metadata, running.deadline)
        if fetch is None:
            return None
        lender = _Lender(self, fetch)
        return Plan(
            lender,
            fetch.tokens,
            is_worth=lambda cached: cached < fetch.tokens,
            ended=lender.ended,
        )

    def choose(
        self, request: GenerateRequest, metadata: Mapping[str, str], deadline: float | None
    ) -> Fetch | None:
        """The blocks to fetch for a request, by the holder that its router has named.

        Args:
            metadata: of its call.
            deadline: of its call, on the monotonic clock; None without.

        Returns:
            None where computing is faster, or nobody holds anything.
        """
        peer, running = metadata.get(routed.PEER_KEY), self.figures.open
        if not peer or request.n != 1 or running >= MAX_FETCHES or self.avoids(peer):
            return None
        size = self.rates.block_size
        # The last token is computed in any case.
        most = (len(request.token_ids) - 1) // size
        blocks = min(most, routed.routed_blocks(metadata, routed.PEER_BLOCKS_KEY))
        lacking = blocks - routed.routed_blocks(metadata, routed.OVERLAP_KEY)
        if lacking <= 0:
            return None
        now = monotonic()
        verdict = self.rates.fetches(peer, lacking, now=now, deadline=deadline, running=running)
        if not verdict.moves:
            return None
        spare = math.inf if deadline is None else deadline - now - verdict.compute_s
        return Fetch(peer, blocks * size, verdict, spare)


class _Lender(Origin):
    """The peer of one fetch."""

    computes: ClassVar[bool] = False

    def __init__(self, fetcher: PrefixFetcher, fetch: Fetch) -> None:
        patience = fetch.patience
        self.limits = Limits(patience, patience, fetch.transfer_patience, settle=patience)
        self.reader = fetcher.reader
        self.figures = fetcher.figures
        self._fetcher = fetcher
        self._fetch = fetch

    async def ask(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        fetcher, fetch = self._fetcher, self._fetch
        wanted = LendRequest(
            request.request.token_ids[: fetch.tokens],
            2 * fetch.patience,
            request.cached,
            request.request.lora_name,
            request.request.cache_salt,
            fetcher.model,
        )
        async with aclosing(fetcher.peer(fetch.peer).lend_prefix(wanted)) as lending:
            async for lent in lending:
                yield self._checked(lent, request.cached)

    def _checked(self, lent: Lent, start: int) -> Prefilled:
        """Convert the loan of a peer, from a token on, to an item.

        Raises:
            BadDescription: it says what cannot be.
        """
        fetch, ticket = self._fetch, lent.ticket
        if ticket is None:
            return Prefilled(start, instance=fetch.peer)
        if ticket.agent != self._fetcher.mover_of(fetch.peer):
            raise BadDescription(f"{fetch.peer} lends blocks of {ticket.agent!r}, not of its own")
        tokens = lent.tokens - start
        if not 0 < tokens == ticket.tokens or tokens % self._fetcher.rates.block_size:
            raise BadDescription(
                f"{fetch.peer} lends {ticket.tokens} tokens from {start} on, up to {lent.tokens}"
            )
        return Prefilled(lent.tokens, start, ticket, fetch.peer)

    def ended(self, receiving: Receiving) -> None:
        machine, fetcher = receiving.machine, self._fetcher
        statistics, rates = fetcher.statistics, fetcher.rates
        blocks = (machine.settled - machine.cached) // rates.block_size
        if machine.outcome == "cancelled":
            return
        if machine.reason and machine.reason != "cached":
            code = BadDescription.code if receiving.error is None else receiving.error.code
            statistics.results[code] += 1
            rates.note_failure(self._fetch.peer, monotonic())
            if code == ChecksumMismatch.code:
                fetcher.mismatched(self._fetch.peer)
            return
        statistics.results["fetched" if blocks else "gone"] += 1
        if not blocks:
            return
        now = monotonic()
        rates.note_transfer(
            self._fetch.peer,
            receiving.bytes,
            receiving.read_at - receiving.answered_at,
            receiving.answered_at - receiving.asked_at + now - receiving.read_at,
        )
        statistics.blocks += blocks
        statistics.bytes += receiving.bytes
        statistics.seconds += now - receiving.asked_at
