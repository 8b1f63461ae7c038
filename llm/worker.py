"""`ModelWorker`: a model behind its name, computed by the small engine or played by a mock; and
`SmallWorker`, `dynbus run dynbus.llm:SmallWorker`."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from dynbus import ConfigError, Option, handler, takes
from dynbus.spi import ComponentName, Grant
from dynbus.transfer import KvMemory, Mover, Settled, Settlement, open_agent

from .engine.interface import Engine, EngineLimits
from .engine.options import SpeedupRatio
from .engine.worker import EngineWorker
from .generation import GenerateRequest
from .hand_over.messages import LendRequest, Lent
from .mock.engine import MockConfig, MockEngine
from .mock.text_model import CONTEXT_LENGTH, END_ID, MOCK_TOKENS, write_mock_model
from .mock.timing import Timing
from .models.origins import ModelUnavailable
from .models.source import LocalModel
from .served_model import LOADING, ModelPath, ServedModel, ServedModelOptions
from .small.engine import BLOCKS, SmallConfig, SmallEngine, SmallSize
from .tiers.tiers import MAX_SHARE, Tiers
from .verifying.findings import kv_damage
from .verifying.options import VerifyOptions
from .verifying.verification import SPARE_SHARE, CacheVerification

logger = logging.getLogger(__name__)

MOCK_NAME: Final = "mock"
"""The name of a mock unless its user gives another."""


@dataclass(frozen=True, kw_only=True)
class ModelEngineOptions(SmallSize, VerifyOptions, ServedModelOptions):
    """A model, and the engine that serves it: the small one, or a mock."""

    engine: Annotated[
        Literal["small", "mock"],
        Option(
            "`small` computes a model of the Llama family, or Qwen; `mock` draws words at random, "
            "in the time and with the cache of a real engine, and needs no model"
        ),
    ] = "small"
    model: ModelPath = "smollm2"
    memory_mib: Annotated[
        int,
        Option("memory of the cache of `small`: give this or `blocks`", least=0, unit="MiB"),
    ] = 0
    kv_events: Annotated[
        bool,
        Option("whether blocks are found again by later requests, and routers are told of them"),
    ] = True
    speedup_ratio: SpeedupRatio = Timing().speedup_ratio
    pooling: Annotated[
        Literal["mean", "last", "none"],
        Option(
            "how `small` makes embeddings: of the states of a text's tokens it takes the mean, or "
            "the last one; `none` for no embeddings",
            guide="small-engine.md#embeddings",
        ),
    ] = "mean"
    host_memory_mib: Annotated[
        int,
        Option(
            "memory of the host for blocks that the cache of `small` has no room for",
            least=0,
            unit="MiB",
            guide="tiers.md",
        ),
    ] = 0
    host_folder: Annotated[
        str,
        Option(
            "a folder for the memory of `host_memory_mib`, as files that the next process goes on "
            "with, such as `/dev/shm/dynbus`; empty for memory that ends with its process",
            guide="tiers.md#kept-beyond-a-process",
        ),
    ] = ""
    host_checksums: Annotated[
        bool,
        Option(
            "whether blocks are brought back from the host only if their checksums are those of "
            "what was kept",
            guide="tiers.md#kept-on-the-host",
        ),
    ] = True
    fallback: Annotated[
        Literal["none", "mock"],
        Option(
            "what is served where the model cannot be had: nothing, so that the instance does not "
            "start, or a mock, which a warning tells"
        ),
    ] = "none"
    checksums: Annotated[
        bool,
        Option(
            "whether blocks that were read from other instances are used only if their checksums "
            "are those of what these have",
            guide="transfer.md#an-agent",
        ),
    ] = False

    def check(self) -> None:
        super().check()
        if self.blocks and self.memory_mib:
            raise ConfigError("give blocks or memory_mib, not both")
        self.check_tiers("host_memory_mib", is_asked=bool(self.host_memory_mib))
        if self.host_folder and not (self.host_memory_mib and self.host_checksums):
            raise ConfigError("host_folder: needs host_memory_mib and host_checksums")

    def check_tiers(self, names: str, *, is_asked: bool) -> None:
        """Check that what keeps and reads blocks elsewhere is of use with this engine."""
        if is_asked and self.engine == "mock":
            raise ConfigError(
                f"{names}: for engine=small alone: a mock has no blocks to keep or to read"
            )
        if is_asked and not self.kv_events:
            raise ConfigError(f"{names}: needs kv_events: without them no block is found again")

    @property
    def small(self) -> SmallConfig:
        """The small engine with these options."""
        return SmallConfig(
            **self.shared(SmallSize),
            memory=self.memory_mib << 20,
            prefix_caching=self.kv_events,
            spare_share=SPARE_SHARE if self.verify and self.kv_events else 0.0,
            pooling=None if self.pooling == "none" else self.pooling,
        )

    @property
    def mock(self) -> MockConfig:
        """The mock with these options; it may have to take the place of a model."""
        blocks = self.blocks or BLOCKS
        return MockConfig(
            block_size=self.block_size,
            blocks=blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.kv_events,
            vocabulary=MOCK_TOKENS,
            context_length=min(self.context_length or CONTEXT_LENGTH, self.block_size * blocks),
            timing=Timing(speedup_ratio=self.speedup_ratio),
        )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelEngineOptions):
    """A model, its engine, and what other instances have of its blocks."""

    fetch_prefixes: Annotated[
        bool,
        Option(
            "whether blocks of prefixes are read from other instances that hold them, and lent to "
            "them; needs `dynbus[transfer]`",
            guide="tiers.md#fetched-from-another-instance",
        ),
    ] = False
    lend_share: Annotated[
        float,
        Option(
            "of the cache, that others may keep in place at a time while they read it",
            above=0,
            most=1,
        ),
    ] = MAX_SHARE

    def check(self) -> None:
        super().check()
        self.check_tiers("fetch_prefixes", is_asked=self.fetch_prefixes)


class ModelWorker(EngineWorker, abstract=True, publishes=[kv_damage]):
    """Serves a model under its name by tokens: completions, and chats where it has a template.

    A subclass gives it a namespace: `class Engine(ModelWorker, namespace="llm")`.

    Attributes:
        engine: `small`, or `mock`.
        served: the model.
        tiers: what is kept of its blocks beside the engine's cache.
        verification: of answers from blocks that were kept or moved.

    Raises:
        ConfigError: a value is not usable.
    """

    @takes(ModelOptions)
    def __init__(self, options: ModelOptions) -> None:
        self.assemble(options, fetches=options.fetch_prefixes, lend_share=options.lend_share)

    def assemble(
        self, options: ModelEngineOptions, *, fetches: bool = False, lend_share: float = MAX_SHARE
    ) -> None:
        """Make the parts of a worker; for constructors of subclasses that take other options."""
        self.engine = options.engine
        self._bound_steps(options)
        self.served = ServedModel(options)
        self.verification = CacheVerification(options)
        self.tiers = Tiers(
            host_memory=options.host_memory_mib << 20,
            fetches=fetches,
            lend_share=lend_share,
            checksums=options.checksums,
            host_checksums=options.host_checksums,
            host_folder=options.host_folder,
            avoids=self.verification.avoids,
            mismatched=self.verification.mismatched,
        )
        self._model = options.model
        self._fallback = options.fallback
        self._small = options.small
        self._mock = options.mock
        self._temporary = ExitStack()

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.permissions import lending_blocks, registering_models

        return [
            *super().__dynbus_grants__(address, namespaces),
            *registering_models(address),
            *lending_blocks(address),
        ]

    async def find_model(self) -> LocalModel | None:
        """The files of the model; None for `stand_in` to take their place.

        Raises:
            ConfigError, ModelUnavailable: it cannot be had.
        """
        if self.engine == "mock":
            return None
        try:
            return await self.served.find(self.runtime.bus, self.show_step)
        except ModelUnavailable as error:
            if self._fallback == "none":
                raise
            logger.warning("a mock takes the model's place, since %s", error)
            return None

    async def stand_in(self) -> LocalModel:
        """The files that a mock serves, which needs no model."""
        self.engine = "mock"
        self.tiers = Tiers()
        folder = self._temporary.enter_context(tempfile.TemporaryDirectory(prefix="dynbus-mock-"))
        await asyncio.to_thread(write_mock_model, Path(folder))
        return LocalModel(Path(folder), "folder", MOCK_NAME, MOCK_NAME)

    async def before_engine(self) -> None:
        model = await self.find_model()
        self.served.files = await self.stand_in() if model is None else model
        self.show_step(LOADING)

    async def on_start(self) -> None:
        # Once the model is registered, what is read of it is in JetStream.
        with self._temporary:
            await super().on_start()

    def make_engine(self) -> Engine:
        if self.engine == "mock":
            return _TalkingMock(self._mock)
        path = self.served.files.path
        try:
            engine = SmallEngine(path, self._small, progress=partial(self.show_step, LOADING))
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(f"the model {self._model!r} cannot be served: {error}") from error
        self.tiers.keep_evicted(engine, self.served)
        if self._small.spare_share:
            verifier = self.verification.watch(engine, engine.limits.block_size)
            if verifier is not None and self.tiers.store is not None:
                self.tiers.store.damaged = verifier.damaged_on_host
        logger.info("%s computes %s", engine.backend, path.name)
        return engine

    def open_mover(self, name: str, memory: KvMemory) -> AbstractAsyncContextManager[Mover]:
        """Open the mover of its blocks, for subclasses that move them otherwise.

        Args:
            name: that its tickets have as their `agent`; no other instance's mover has it.
            memory: of its engine.

        Raises:
            ConfigError: NIXL is missing, without which the one of `TransferAgent` is not.
        """
        return open_agent(self.runtime.bus, name, memory)

    async def on_engine(self, limits: EngineLimits) -> None:
        await self.hold(self.verification.opened(self))
        self.sink = await self.hold(
            self.tiers.opened(self, self._running(), self.served, self.open_mover)
        )
        await self.register_model(limits, self.generate, self.embed)

    async def register_model(self, limits: EngineLimits, generate: Any, embed: Any) -> None:
        """Register the model for what serves it: handlers, or their `Target`.

        Raises:
            ConfigError: another card of the model says otherwise, and in what.
            Unavailable: JetStream does not answer.
        """
        pooling = self._small.pooling if self.engine == "small" else None
        await self.served.register(limits, generate, embed, pooling=pooling)

    def instance_metadata(self) -> Mapping[str, str]:
        own = {**self.tiers.metadata(), **self.served.metadata()}
        return {**super().instance_metadata(), **own}

    @handler(concurrency=None)
    async def lend_prefix(self, request: LendRequest) -> AsyncGenerator[Lent]:
        """Lease the cached blocks of a prefix to another instance, until the call ends."""
        async with aclosing(self.tiers.lend(request)) as lending:
            async for lent in lending:
                yield lent

    @handler(concurrency=None)
    async def settle(self, settlement: Settlement) -> Settled:
        """End a lease on this instance's blocks; the result says if it has held until now."""
        return await self.tiers.settle(settlement)


class SmallWorker(ModelWorker, namespace="llm"):
    """Serves a real model of the Llama family, and registers it for front ends."""


class _TalkingMock(MockEngine):
    """A mock whose texts end, as a model's do, with a token of their own."""

    def add(self, request_id: str, request: GenerateRequest) -> None:
        if not request.ignore_eos:
            stops = [*request.stop_token_ids, END_ID]
            request = msgspec.structs.replace(request, stop_token_ids=stops)
        super().add(request_id, request)
