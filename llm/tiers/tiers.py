"""`Tiers`: blocks of an engine that are kept on the host too, and come from other instances."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from dynbus import ConfigError, InvalidRequest, Unavailable, context, with_options
from dynbus.kvrouter import profiles
from dynbus.llm.engine import EngineRunner, EngineWorker, ModelEngine
from dynbus.llm.hand_over.messages import LendRequest, Lent
from dynbus.llm.hand_over.observing import HandOverEvents, TransferSpans
from dynbus.llm.hand_over.part_reader import LeasedPartReader
from dynbus.llm.hand_over.sink import Sink
from dynbus.llm.hand_over.source import MAX_SECONDS, Leases, Source
from dynbus.llm.served_model import ServedModel
from dynbus.transfer import KvMemory, Mover, Settled, Settlement, Settling

from .cost import Rates
from .fetching import MOST_PATIENCE, Peer, PrefixFetcher
from .host_store import HostStore
from .observing import TierWatch

MAX_SHARE: Final = 0.5
"""Of the cache that is lent at a time: the rest stays for the requests that run here."""
LENDS_NONE: Final = "this instance lends no blocks: set fetch_prefixes"

OpenMover: TypeAlias = Callable[[str, KvMemory], AbstractAsyncContextManager[Mover]]
"""`ModelWorker.open_mover`."""


class LendingPeer(Peer, Protocol):
    """Another instance of the worker, with what is settled there."""

    async def settle(self, settlement: Settlement) -> Settled: ...


class Tiers:
    """The blocks that a worker keeps of its engine's beside the cache, and has from other
    instances.

    Where it is told to do neither, it costs nothing.

    Args:
        host_memory: bytes of the host's memory for what the cache evicts; 0 for none.
        fetches: whether prefixes are fetched from other instances, and lent to them.
        lend_share: of the cache that is lent at a time, from 0 to 1.
        checksums: whether blocks that come from other instances are compared with the checksums
            of those that these have.
        host_folder: where the host's memory is a file, which the next process goes on with; empty
            for memory that ends with this one.
        host_checksums: whether blocks that come back from the host are compared with the checksums
            of those that were kept.
        avoids: whether nothing is to be taken from an instance.
        mismatched: is told of an instance whose blocks came with other checksums.

    Attributes:
        rates: how fast the engine computes, and blocks come; None where nothing is kept or fetched.
        store: of evicted blocks.
        settling, source, fetcher: of prefixes; None until it is open, and where none are fetched.
    """

    def __init__(
        self,
        *,
        host_memory: int = 0,
        fetches: bool = False,
        lend_share: float = MAX_SHARE,
        checksums: bool = False,
        host_checksums: bool = True,
        host_folder: str = "",
        avoids: Callable[[str], bool] = lambda _: False,
        mismatched: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.rates: Rates | None = None
        self.store: HostStore | None = None
        self.settling: Settling | None = None
        self.source: Source | None = None
        self.fetcher: PrefixFetcher | None = None
        self._host_memory = host_memory
        self._fetches = fetches
        self._lend_share = lend_share
        self._checksums = checksums
        self._host_checksums = host_checksums
        self._host_folder = Path(host_folder) if host_folder else None
        self._avoids = avoids
        self._mismatched = mismatched

    def keep_evicted(self, engine: ModelEngine, model: ServedModel) -> None:
        """Have a new engine keep what it evicts, and measure how fast it computes.

        Args:
            model: that it computes.

        Raises:
            ConfigError: not one block fits, the engine's blocks are on a GPU, or the folder cannot
                be used.
            OSError: the files of the model cannot be read.
        """
        if not self._host_memory and not self._fetches:
            return
        memory = engine.memory
        rates = self.rates = Rates(memory.layout.block_size, memory.layout.block_bytes)
        engine.watch_prefill(rates.note_prefill)
        if self._host_memory:
            folder = self._host_folder
            self.store = HostStore(
                memory,
                self._host_memory,
                rates,
                checksums=self._host_checksums,
                folder=folder,
                kind="" if folder is None else model.hash_files(),
            )
            engine.keep_evicted(self.store, key=self.store.key)

    @asynccontextmanager
    async def opened(
        self,
        worker: EngineWorker,
        runner: EngineRunner,
        model: ServedModel,
        open_mover: OpenMover,
    ) -> AsyncGenerator[Sink | None]:
        """Fetch and lend prefixes, and tell operators of all that is kept elsewhere, while it is
        entered. It gives what serves requests with prefixes of others; None where none are fetched.

        Args:
            worker: whose instances are the peers: they have `lend_prefix` and `settle`.
            runner: of its engine.
            open_mover: opens what reads and leases blocks.

        Raises:
            ConfigError: the engine's blocks cannot be moved, or not be compared.
        """
        if not self._host_memory and not self._fetches:
            yield None
            return
        async with AsyncExitStack() as exits:
            if self.store is not None:
                exits.callback(self.store.leave)
            sink: Sink | None = None
            if self._fetches:
                sink = await self._open_fetching(exits, worker, runner, model, open_mover)
            watch = TierWatch(
                worker.runtime.bus, worker.__dynbus_name__, self.store, self.fetcher, self.source
            )
            await exits.enter_async_context(watch)
            yield sink

    async def _open_fetching(
        self,
        exits: AsyncExitStack,
        worker: EngineWorker,
        runner: EngineRunner,
        model: ServedModel,
        open_mover: OpenMover,
    ) -> Sink:
        runtime, own, limits = worker.runtime, worker.__dynbus_name__, runner.limits
        try:
            memory: KvMemory = runner.memory
        except InvalidRequest as error:
            raise ConfigError(
                f"fetch_prefixes: {error}: leave it out, or take engine=small"
            ) from None
        if self._checksums:
            check_comparable(memory)
        if self.rates is None:
            self.rates = Rates(limits.block_size, memory.layout.block_bytes)
        await model.read_fingerprint()

        def mover_of(instance: str) -> str:
            return f"{own.namespace}.{own.component}.{instance}.blocks"

        mover = await exits.enter_async_context(open_mover(mover_of(own.instance_id), memory))
        client: Any = runtime.client(
            type(worker), node=own.component, namespace=own.namespace, wait=0.0
        )

        def peer(instance: str) -> LendingPeer:
            lender: LendingPeer = with_options(client, instance=instance)
            return lender

        self.settling = Settling(memory, mover.leases)
        reader = LeasedPartReader(
            mover,
            memory,
            lambda settlement, instance: peer(instance).settle(settlement),
            compares=self._checksums,
            patience=MOST_PATIENCE,
        )
        self.fetcher = PrefixFetcher(
            reader,
            self.rates,
            peer=peer,
            mover_of=mover_of,
            model=model.fingerprint,
            avoids=self._avoids,
            mismatched=self._mismatched,
        )
        events = HandOverEvents(runtime.bus, own)
        self.source = Source(
            runner,
            Leases.of(mover, self.settling),
            self.fetcher.figures,
            events=events,
            instance=own.instance_id,
            lease=MAX_SECONDS,
            most_lent=max(1, int(self._lend_share * limits.blocks)),
            model=model.fingerprint,
        )
        spans = TransferSpans(runtime.bus.telemetry, own)
        background = runtime.bus.background
        return Sink(runner, background, spans, self.fetcher, events=events, avoids=self._avoids)

    def metadata(self) -> dict[str, str]:
        """The metadata of an instance that has it."""
        if self.source is None:
            return {}
        return {profiles.FETCHES_KEY: "true", profiles.LENDS_KEY: str(self.source.most_lent)}

    def lend(self, request: LendRequest) -> AsyncGenerator[Lent]:
        """Lease the cached blocks of a prefix to another instance, until the call ends.

        Raises:
            Unavailable: this instance lends none.
        """
        if self.source is None:
            raise Unavailable(LENDS_NONE)
        return self.source.lend(request, context())

    async def settle(self, settlement: Settlement) -> Settled:
        """End a lease on this instance's blocks; the result says if it has held until now.

        Raises:
            Unavailable: this instance lends none.
        """
        if self.settling is None:
            raise Unavailable(LENDS_NONE)
        return await self.settling.settle(settlement)


def check_comparable(memory: KvMemory) -> None:
    """See that blocks of this memory can be compared by checksums.

    Raises:
        ConfigError: they are on a GPU.
    """
    if any(region.kind != "DRAM" for region in memory.regions):
        raise ConfigError(
            "checksums are made of blocks in memory of the host, and these are "
            "on a GPU: leave checksums out"
        )
