"""`TieredWorker`: an engine whose blocks are kept elsewhere, too, and come from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, Final

import anyio

from dynbus import ConfigError, InvalidRequest, Reply, Unavailable, context, handler, with_options
from dynbus.kvrouter import profiles
from dynbus.llm.engine import ModelEngine
from dynbus.llm.engine.interface import EngineLimits
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.hand_over.messages import LendRequest, Lent
from dynbus.llm.hand_over.mover import AgentMover
from dynbus.llm.hand_over.observing import TransferSpans
from dynbus.llm.hand_over.sink import Sink
from dynbus.llm.hand_over.source import MAX_SECONDS, Leases, Source
from dynbus.llm.named import NamedWorker
from dynbus.llm.weights.fingerprint import fingerprint
from dynbus.transfer import KvMemory, Settled, Settlement, Settling, open_agent

from .cost import Rates
from .fetching import MOST_PATIENCE, PrefixFetcher
from .host_store import HostStore
from .observing import TierWatch

MAX_SHARE: Final = 0.5
"""Of the cache that is lent at a time: the rest stays for the requests that run here."""
LENDS_NONE: Final = "this instance lends no blocks: set fetch_prefixes"


class TieredWorker(NamedWorker, abstract=True):
    """Keeps what its engine's cache evicts, and fetches prefixes that other instances hold.

    A subclass says in its constructor which of the two it does; unless it does, neither costs
    anything.

    Attributes:
        host_memory: bytes of the host's memory for evicted blocks; 0 for none.
        fetches_prefixes: whether prefixes are fetched from other instances, and lent to them.
        lends_share: of its cache that is lent at a time, from 0 to 1.
        checksums: whether blocks that come from other instances are compared with the checksums
            of those that these have.
    """

    host_memory: int = 0
    fetches_prefixes: bool = False
    lends_share: float = MAX_SHARE
    checksums: bool = False

    _fingerprint: str = ""
    _rates: Rates | None = None
    _store: HostStore | None = None
    _settling: Settling | None = None
    _source: Source | None = None
    _fetcher: PrefixFetcher | None = None
    _tier_exits: AsyncExitStack | None = None

    def keep_evicted(self, engine: ModelEngine) -> None:
        """Have a new engine keep what it evicts, and measure how fast it computes; for
        `make_engine` of subclasses.

        Raises:
            ConfigError: not one block fits, or the engine's blocks are on a GPU.
        """
        if not self.host_memory and not self.fetches_prefixes:
            return
        memory = engine.memory
        rates = self._rates = Rates(memory.layout.block_size, memory.layout.block_bytes)
        engine.watch_prefill(rates.note_prefill)
        if self.host_memory:
            self._store = HostStore(memory, self.host_memory, rates)
            engine.keep_evicted(self._store)

    async def on_engine(self, limits: EngineLimits) -> None:
        if not self.host_memory and not self.fetches_prefixes:
            await super().on_engine(limits)
            return
        async with AsyncExitStack() as exits:
            if self.fetches_prefixes:
                await self._open_fetching(exits, limits)
            watch = TierWatch(
                self.runtime.bus, self.__dynbus_name__, self._store, self._fetcher, self._source
            )
            await exits.enter_async_context(watch)
            await super().on_engine(limits)
            self._tier_exits = exits.pop_all()

    async def _open_fetching(self, exits: AsyncExitStack, limits: EngineLimits) -> None:
        runner, runtime, rates = self._running(), self.runtime, self._rates
        try:
            memory: KvMemory = runner.memory
        except InvalidRequest as error:
            raise ConfigError(
                f"fetch_prefixes: {error}: leave it out, or take engine=small"
            ) from None
        self.check_checksums(memory)
        if rates is None:
            rates = self._rates = Rates(limits.block_size, memory.layout.block_bytes)
        await self.read_fingerprint()
        own = self.__dynbus_name__
        agent = await exits.enter_async_context(
            open_agent(runtime.bus, self._agent_of(own.instance_id), memory)
        )
        client = runtime.client(type(self), node=own.component, namespace=own.namespace, wait=0.0)
        settling = self._settling = Settling(memory, agent.leases)
        spans = TransferSpans(runtime.bus.telemetry, own)
        sink = Sink(runner, runtime.bus.background, spans)

        def peer(instance: str) -> TieredWorker:
            return with_options(client, instance=instance)

        mover = AgentMover(
            agent,
            memory,
            lambda settlement, instance: peer(instance).settle(settlement),
            compares=self.checksums,
            patience=MOST_PATIENCE,
        )
        self._fetcher = PrefixFetcher(
            sink, mover, rates, peer=peer, agent_of=self._agent_of, model=self._fingerprint
        )
        self._source = Source(
            runner,
            Leases.of(agent, settling),
            self._fetcher.figures,
            instance=own.instance_id,
            lease=MAX_SECONDS,
            most_lent=max(1, int(self.lends_share * limits.blocks)),
            model=self._fingerprint,
        )

    async def read_fingerprint(self) -> str:
        """The fingerprint of the model, with which peers' are compared from now on.

        Raises:
            OSError: its files cannot be read.
        """
        self._fingerprint = await asyncio.to_thread(fingerprint, self.found.path)
        return self._fingerprint

    def check_checksums(self, memory: KvMemory) -> None:
        """See that blocks of this memory can be compared, where they are to be.

        Raises:
            ConfigError: they are on a GPU.
        """
        if self.checksums and any(region.kind != "DRAM" for region in memory.regions):
            raise ConfigError(
                "checksums are made of blocks in memory of the host, and these are "
                "on a GPU: leave checksums out"
            )

    def _agent_of(self, instance: str) -> str:
        """The name of an instance's agent."""
        own = self.__dynbus_name__
        return f"{own.namespace}.{own.component}.{instance}.blocks"

    async def on_stop(self) -> None:
        try:
            if self._tier_exits is not None:
                with anyio.CancelScope(shield=True):
                    await self._tier_exits.aclose()
        finally:
            await super().on_stop()

    def instance_metadata(self) -> Mapping[str, str]:
        told = dict(super().instance_metadata())
        if self._fetcher is not None:
            told[profiles.FETCHES_KEY] = "true"
            told[profiles.LENDS_KEY] = str(self._lending().most_lent)
        if self._fingerprint:
            told[profiles.MODEL_KEY] = self._fingerprint
        return told

    # Fetching -------------------------------------------------------------------------

    async def serve_request(
        self, name: str, request: GenerateRequest, reply: Reply[Generated]
    ) -> None:
        here = partial(super().serve_request, name, request, reply)
        if self._fetcher is None:
            await here()
        else:
            await self._fetcher.serve(name, request, reply, here)

    # Lending --------------------------------------------------------------------------

    @handler(concurrency=None)
    async def lend_prefix(self, request: LendRequest) -> AsyncGenerator[Lent]:
        """Lease the cached blocks of a prefix to another instance, until the call ends."""
        lending: Any = self._lending().lend(request, context())
        async with aclosing(lending):
            async for lent in lending:
                yield lent

    @handler(concurrency=None)
    async def settle(self, settlement: Settlement) -> Settled:
        """Whether a lease on this instance's blocks has held until now, which ends it."""
        if self._settling is None:
            raise Unavailable(LENDS_NONE)
        return await self._settling.settle(settlement)

    def _lending(self) -> Source:
        if self._source is None:
            raise Unavailable(LENDS_NONE)
        return self._source
