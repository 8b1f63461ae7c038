"""The side of a fetch that lacks the blocks: it reads them from a peer, or computes them.

Whatever fails, the request goes on with what has come and is proven: the engine computes the rest.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import anyio

from dynbus import Cancelled, DynbusError
from dynbus.kvrouter import requests as routed
from dynbus.llm.engine.interface import Held
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.spi import Background, monotonic
from dynbus.transfer import (
    BadDescription,
    LeaseLost,
    Settled,
    Settlement,
    Transfer,
    TransferAgent,
    compare,
    wanted,
)

from .cost import Rates, Verdict
from .lending import MAX_SECONDS
from .messages import LendRequest, Lent

logger = logging.getLogger(__name__)

PATIENCE: Final = 4.0
"""How many times longer than expected a transfer may take before its fetch is given up."""
LEAST_PATIENCE: Final = 0.5
"""Seconds that it may take in any case."""
MOST_PATIENCE: Final = MAX_SECONDS / 2
"""Seconds after which it is given up in any case: blocks are lent for twice its patience."""
MAX_FETCHES: Final = 8
"""Fetches that run at a time; more requests than these compute."""


class Peer(Protocol):
    """An instance that lends blocks."""

    def lend_prefix(self, request: LendRequest) -> AsyncGenerator[Lent]: ...
    async def settle(self, settlement: Settlement) -> Settled: ...


class Reserving(Protocol):
    """What an engine's runner does for requests whose prompt comes from elsewhere."""

    async def next_held(self, hold_id: str) -> Held: ...
    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None: ...
    def release(self, hold_id: str) -> None: ...


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
        running: at this moment.
        results: how many ended, by "fetched", "gone" (the peer had no more than is here), and the
            code of the error of those that failed.
        blocks, bytes: that were fetched and used.
        seconds: that fetches took which brought some.
    """

    running: int = 0
    results: Counter[str] = field(default_factory=Counter[str])
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


class PrefixFetcher:
    """Fetches prefixes from peers for the requests of one engine.

    Args:
        runner: of the engine.
        agent: which reads into the engine's memory.
        rates: measured; they decide.
        peer: gives an instance by its id.
        agent_of: the name of an instance's agent, by its id.
        background: where what is left of given-up transfers is waited for.
        model: its fingerprint, which peers compare with their own; empty for none.
        compares: whether what was read is compared with the checksums of its source.

    Attributes:
        statistics: figures.
    """

    def __init__(
        self,
        runner: Reserving,
        agent: TransferAgent,
        rates: Rates,
        *,
        peer: Callable[[str], Peer],
        agent_of: Callable[[str], str],
        background: Background,
        model: str = "",
        compares: bool = False,
    ) -> None:
        self._runner = runner
        self._agent = agent
        self._compares = compares
        self._rates = rates
        self.peer = peer
        self._agent_of = agent_of
        self._model = model
        self._background = background
        self.statistics = FetchStatistics()

    def __repr__(self) -> str:
        return f"<PrefixFetcher [{self.statistics.running} running]>"

    def plan(
        self, request: GenerateRequest, metadata: Mapping[str, str], deadline: float | None
    ) -> Fetch | None:
        """What is to be fetched for a request, as its router has said who holds it.

        Args:
            metadata: of its call.
            deadline: of its call, on the monotonic clock; None without.

        Returns:
            None where computing is faster, or nobody holds anything.
        """
        peer = metadata.get(routed.PEER_KEY)
        if not peer or request.n != 1 or self.statistics.running >= MAX_FETCHES:
            return None
        size = self._rates.block_size
        # The last token is computed in any case.
        most = (len(request.token_ids) - 1) // size
        blocks = min(most, routed.routed_blocks(metadata, routed.PEER_BLOCKS_KEY))
        lacking = blocks - routed.routed_blocks(metadata, routed.OVERLAP_KEY)
        if lacking <= 0:
            return None
        now = monotonic()
        verdict = self._rates.fetches(
            peer, lacking, now=now, deadline=deadline, running=self.statistics.running
        )
        if not verdict.moves:
            return None
        spare = math.inf if deadline is None else deadline - now - verdict.compute_s
        return Fetch(peer, blocks * size, verdict, spare)

    async def fetch(self, request_id: str, request: GenerateRequest, fetch: Fetch) -> None:
        """Have a reserved request go on with what comes of its prefix.

        It ends when the engine goes on with the request, whatever became of the transfer.
        """
        statistics = self.statistics
        reading = _Reading()
        computed = 0
        statistics.running += 1
        try:
            # Where the request has ended meanwhile, nobody is to blame for what is left out here.
            held = await self._runner.next_held(request_id)
            computed = held.computed
            computed = await self._try_to_read(request, fetch, held, reading)
        except DynbusError:
            # Its caller is told by the engine, which has refused or lost the request.
            pass
        finally:
            statistics.running -= 1
            self._runner.deliver(request_id, computed, None)
            self._free(request_id, reading.transfer)

    async def _try_to_read(
        self, request: GenerateRequest, fetch: Fetch, held: Held, reading: _Reading
    ) -> int:
        """As `_read`; where that fails, what was there before."""
        results = self.statistics.results
        try:
            with anyio.fail_after(fetch.patience):
                computed = await self._read(request, fetch, held, reading)
        except Cancelled:
            # Nobody wants the request any more.
            return held.computed
        except (DynbusError, TimeoutError, StopAsyncIteration) as error:
            code = error.code if isinstance(error, DynbusError) else "DeadlineExceeded"
            results[code] += 1
            self._rates.note_failure(fetch.peer, monotonic())
            logger.warning(
                "a prefix of %d tokens could not be fetched from %s, and is computed: %s: %s",
                fetch.tokens,
                fetch.peer,
                code,
                error,
            )
            return held.computed
        results["fetched" if computed > held.computed else "gone"] += 1
        return computed

    async def _read(
        self, request: GenerateRequest, fetch: Fetch, held: Held, reading: _Reading
    ) -> int:
        """Read blocks into those that are held; how many tokens of the prompt are there then.

        Raises:
            DynbusError: they could not be had, or the peer does not vouch for them.
        """
        size = self._rates.block_size
        start = held.computed
        if start >= fetch.tokens:
            return start
        peer = self.peer(fetch.peer)
        began = monotonic()
        lend = LendRequest(
            request.token_ids[: fetch.tokens],
            2 * fetch.patience,
            start,
            request.lora_name,
            request.cache_salt,
            self._model,
        )
        async with aclosing(peer.lend_prefix(lend)) as lending:
            lent = await anext(lending)
            answered = monotonic()
            ticket = lent.ticket
            if ticket is None:
                return start
            blocks = self._checked(lent, fetch, start)
            first = start // size
            reading.transfer = transfer = self._agent.start(
                "read",
                ticket,
                ticket.blocks[:blocks],
                held.blocks[first : first + blocks],
                tokens=blocks * size,
                deadline=min(began + fetch.patience, answered + fetch.transfer_patience),
            )
            await transfer.result()
            read = monotonic()
            tokens, asked = blocks * size, None
            if self._compares:
                asked = wanted(self._agent.memory, tokens, 0)
            settled = await peer.settle(Settlement(ticket.lease_id, ticket.epoch, asked))
            if not settled.held:
                raise LeaseLost(f"{fetch.peer} does not vouch for the blocks that were read")
            if self._compares:
                await compare(
                    self._agent.memory,
                    held.blocks[first : first + blocks],
                    tokens,
                    settled.vouched,
                    source=fetch.peer,
                )
        ended = monotonic()
        self._rates.note_transfer(
            fetch.peer, transfer.bytes, read - answered, answered - began + ended - read
        )
        self.statistics.blocks += blocks
        self.statistics.bytes += transfer.bytes
        self.statistics.seconds += ended - began
        return start + blocks * size

    def _checked(self, lent: Lent, fetch: Fetch, start: int) -> int:
        """How many blocks of what a peer lends are read.

        Raises:
            BadDescription: it says what cannot be.
        """
        size, ticket = self._rates.block_size, lent.ticket
        assert ticket is not None, "something is lent"
        if ticket.agent != self._agent_of(fetch.peer):
            raise BadDescription(f"{fetch.peer} lends blocks of {ticket.agent!r}, not of its own")
        tokens = min(lent.tokens, fetch.tokens) - start
        if tokens <= 0 or tokens % size or ticket.tokens < tokens:
            raise BadDescription(
                f"{fetch.peer} lends {ticket.tokens} tokens from {start} on, up to {lent.tokens}"
            )
        return tokens // size

    def _free(self, request_id: str, transfer: Transfer | None) -> None:
        """End the hold of the blocks, once nothing writes into them any more."""
        if transfer is None:
            self._runner.release(request_id)
            return
        transfer.cancel()
        self._background.start(self._free_when_quiet, request_id, transfer, name="fetched blocks")

    async def _free_when_quiet(self, request_id: str, transfer: Transfer) -> None:
        try:
            await transfer.quiet()
        finally:
            self._runner.release(request_id)


class _Reading:
    """The transfer of a fetch, from its start on."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
