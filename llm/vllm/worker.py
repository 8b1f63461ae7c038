"""vLLM as an actor: `VllmWorker`, and what its endpoints take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
)
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import anyio
import anyio.to_thread
import msgspec

from dynbus import ConfigError, InvalidRequest, Option, Unavailable, context, handler, takes
from dynbus.kvrouter import profiles
from dynbus.llm.disaggregated.roles import Role
from dynbus.llm.disaggregated.settings import DisaggregationOption, DisaggregationSettings
from dynbus.llm.engine.interface import EngineLimits
from dynbus.llm.engine.options import KvEvents
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.engine.worker import LONGEST_PREFILL, EngineWorker
from dynbus.llm.hand_over.messages import Prefilled, PrefillRequest
from dynbus.llm.hand_over.observing import HandOverEvents, HandOverFigures, HandOverWatch
from dynbus.llm.hand_over.source import Source
from dynbus.llm.models.card import ModelType, check_lora_name, check_reasoning_parser
from dynbus.llm.models.register import register_adapter
from dynbus.llm.models.source import LocalModel
from dynbus.llm.served_model import LOADING, ModelPath, ServedModel, ServedModelOptions
from dynbus.spi import ComponentName, Grant, monotonic, task_group

from .engine import VllmEngine
from .handing_over import ConnectorKeeper, HandedOver, HandOver, KvIdentity
from .starting import (
    EngineFolder,
    HandOverSettings,
    StartProgress,
    check_arguments,
    maps_of_processes,
    reachable_address,
    weight_files,
)

if TYPE_CHECKING:
    from dynbus.kvrouter import EngineEvents, KvRouter
    from dynbus.llm.hand_over.sink import Sink

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at how far the engine is in its start."""
TOLD_EVERY: Final = 15.0
"""Seconds without news after which it is said how far that is."""

MIN_LEASE: Final = 6
"""vLLM renews a lease six times, in whole seconds."""

_ROLES: Final[Mapping[str, Role]] = {"prefill": "prefill", "decode": "decode"}
"""The roles of engines that run as nodes of these names."""

_OWNED: Final = {
    "served_model_name": "give model_name",
    "kv_events_config": "give kv_events",
}
"""Arguments of vLLM's that the worker itself sets, and what to give instead."""


class AdapterAt(msgspec.Struct, frozen=True):
    """A LoRA adapter to load.

    Attributes:
        name: by which requests ask for it.
        path: its folder, on the machine of the engine.
    """

    name: str
    path: str


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that is loaded."""

    name: str


class Sleep(msgspec.Struct, frozen=True):
    """The depth of an engine's sleep: 1 moves its weights to the host's memory, 2 drops them."""

    level: Literal[1, 2] = 1


class WakeUp(msgspec.Struct, frozen=True):
    """The parts of a sleeping engine that wake up, such as `weights` and `kv_cache`; None for
    all.
    """

    tags: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class VllmOptions(ServedModelOptions):
    """A model, and what its engine of vLLM does beside serving it."""

    kv_events: KvEvents = True
    lora_modules: Annotated[
        dict[str, str] | None,
        Option(
            "folders of LoRA adapters by name, which are loaded as the engine starts, and served "
            "as models of these names",
            wanted="folders by names",
            guide="vllm.md#adapters",
        ),
    ] = None
    role: Annotated[
        Literal["auto", "none", "prefill", "decode"],
        Option(
            "`prefill` computes prompts for decode engines and is no model of its own; `decode` "
            "has long prompts computed by prefill engines; `none` does all by itself. `auto` goes "
            "by the name of the node: one that runs as `prefill` or `decode` is that",
            guide="vllm.md#prefill-and-decode",
        ),
    ] = "auto"
    prefill_node: Annotated[
        str,
        Option(
            "of a decode engine: the node of its prefill engines, or `namespace.component`",
            guide="vllm.md#prefill-and-decode",
        ),
    ] = "prefill"
    disaggregation: DisaggregationOption = None
    kv_lease: Annotated[
        int,
        Option(
            "whole seconds for which a prefill engine holds what nobody reads",
            least=MIN_LEASE,
            unit="seconds",
            guide="vllm.md#prefill-and-decode",
        ),
    ] = 30


def _vllm_arguments(
    *,
    model: ModelPath,
    model_name: str = ...,
    default_sampling: dict[str, float] | Literal["model", "openai"] = ...,
    tool_call_parser: str = ...,
    reasoning_parser: str = ...,
    hang_limit: float = ...,
    hang_least: float = ...,
    hang_factor: float = ...,
    kv_events: bool = ...,
    lora_modules: dict[str, str] | None = ...,
    role: Literal["auto", "none", "prefill", "decode"] = ...,
    prefill_node: str = ...,
    disaggregation: dict[str, Any] | None = ...,
    kv_lease: int = ...,
    **engine: Any,
) -> None: ...


class VllmWorker(EngineWorker, namespace="llm"):
    """Serves a model with vLLM, by tokens, and registers it under its name.

    All further arguments are vLLM's own, checked by its own parser: `max_model_len=4096`, or
    `--VllmWorker.max_model_len=4096` on the command line. A `reasoning_parser` that is named is
    vLLM's own too: an output that has a form has it behind its reasoning. A subclass gives it a
    namespace: `class Engine(VllmWorker, namespace="qwen")`.

    Raises:
        ConfigError: a value is not usable.
    """

    @takes(VllmOptions, like=_vllm_arguments)
    def __init__(self, options: VllmOptions, **engine: Any) -> None:
        self._bound_steps(options)
        self.served = ServedModel(options)
        for name, remedy in _OWNED.items():
            if name in engine:
                raise ConfigError(f"{type(self).__name__} sets vLLM's {name} itself: {remedy}")
        self._lora_modules = options.lora_modules or {}
        self._arguments = {"enable_lora": True, **engine} if self._lora_modules else engine
        named = check_reasoning_parser(options.reasoning_parser)
        if named:
            # The form of an output begins behind its reasoning.
            self._arguments = {"reasoning_parser": named, **self._arguments}
        self._kv_events = options.kv_events
        self._asked_role: Role | Literal["auto", "none"] = options.role
        self._prefill_node = options.prefill_node
        self._settings = DisaggregationSettings().changed(options.disaggregation or {})
        self._lease = options.kv_lease
        self._role: Role | None = None
        self._identity: KvIdentity | None = None
        self.figures = HandOverFigures()
        self._keeper: ConnectorKeeper | None = None
        self._source: Source | None = None
        self._vllm: VllmEngine | None = None
        self._folder: EngineFolder | None = None
        self._events: EngineEvents | None = None
        self._adapters: dict[str, asyncio.Event] = {}
        self._changing_adapters = anyio.Lock()

    async def find_model(self) -> LocalModel:
        """The files of the model.

        Raises:
            ConfigError, ModelUnavailable: it cannot be had, or vLLM refuses its arguments.
        """
        self._role = self._role_here()
        # Before gigabytes are had in vain.
        check = partial(check_arguments, self._arguments, hands_over=self._role is not None)
        await anyio.to_thread.run_sync(check, abandon_on_cancel=True)
        return await self.served.find(self.runtime.bus, self.show_step)

    async def before_engine(self) -> None:
        self.served.files = await self.find_model()
        self.show_step(LOADING)

    def _role_here(self) -> Role | None:
        """The part of a request that this engine does; None for all of it.

        Raises:
            ConfigError: something that it is to do does not go together.
        """
        role = _ROLES.get(self.__dynbus_name__.component)
        if self._asked_role != "auto":
            role = None if self._asked_role == "none" else self._asked_role
        if role == "prefill" and self._lora_modules:
            raise ConfigError("lora_modules: a prefill engine serves no adapters, decode ones do")
        return role

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.permissions import registering_models

        return [*super().__dynbus_grants__(address, namespaces), *registering_models(address)]

    def make_engine(self) -> VllmEngine:
        started = monotonic()
        logger.info("vLLM starts for %s", self.served.files.origin)
        folder = self._folder = EngineFolder()
        hand_over = None
        if self._role is not None:
            host = reachable_address(self.runtime.bus.data.server_name)
            hand_over = HandOverSettings(self._role == "prefill", self._lease, host)
        self._vllm = VllmEngine.start(
            str(self.served.files.path),
            self._arguments,
            folder,
            kv_events=self._kv_events,
            hand_over=hand_over,
        )
        if hand_over is not None:
            self._identity = KvIdentity.of(self._vllm.llm.vllm_config, self.served.files.path)
        logger.info("vLLM is ready after %.1f s", monotonic() - started)
        return self._vllm

    @asynccontextmanager
    async def event_sink(self) -> AsyncGenerator[EventSink | None]:
        from dynbus.kvrouter import EngineEvents

        engine = self._engine()
        source = engine.event_source()
        block_size = engine.limits.block_size
        async with EngineEvents.of(self, source, block_size=block_size) as self._events:
            engine.report_mode = self._events.report_mode
            # They come by themselves; its steps have none.
            yield None

    async def on_start(self) -> None:
        try:
            async with task_group() as tasks:
                tasks.start_soon(self._tell_of_start)
                await super().on_start()
                tasks.cancel_scope.cancel()
        except BaseException:
            if self._folder is not None:
                # The thread that waits for vLLM cannot be ended, and is not waited for.
                self._folder.abandon()
            raise

    async def _tell_of_start(self) -> None:
        """Say what vLLM has come to, and now and then how far it is in that."""
        progress: StartProgress | None = None
        began = reported = monotonic()
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            now, folder = monotonic(), self._folder
            if folder is None:
                began = reported = now  # its files are being had
                continue
            if progress is None:
                progress = StartProgress(weight_files(self.served.files.path))
            news = progress.read(await anyio.to_thread.run_sync(folder.messages))
            is_due = now - reported >= TOLD_EVERY
            if is_due and progress.is_loading:
                await anyio.to_thread.run_sync(progress.look, maps_of_processes())
            for phase in news or ([str(progress)] if is_due else []):
                logger.info("vLLM has been starting for %.0f s: %s", now - began, phase)
                reported = now

    @property
    def only_embeds(self) -> bool:
        """True if the engine makes embeddings or scores, and no tokens."""
        return self._engine().only_embeds

    async def on_engine(self, limits: EngineLimits) -> None:
        if self._role is not None and self.only_embeds:
            raise ConfigError("a model that makes no tokens has no prompts to hand over")
        await self._take_role()
        if self._role != "prefill":
            await self._register(limits)

    async def _take_role(self) -> None:
        """Begin with what the engine does beside serving requests from beginning to end."""
        name, role, engine = self.__dynbus_name__, self._role, self._engine()
        if role is None:
            return
        await self.hold(HandOverWatch(self.runtime.bus, name, self.figures, lambda: role))
        if role == "decode":
            self.sink = await self.hold(self._remote_prefill())
        else:
            self._keeper = ConnectorKeeper(engine)
            self._source = Source(
                self._running(),
                self._keeper.keep,
                self.figures,
                events=HandOverEvents(self.runtime.bus, name),
                instance=self.instance_id,
                lease=engine.lease,
                in_parts=False,
            )

    async def _register(self, limits: EngineLimits) -> None:
        """Have front ends find the model, and those of its adapters."""
        pools = None
        if self.only_embeds:
            engine = self._engine()
            engine.pooling = await engine.find_pooling()
            pools = ModelType.Score if engine.pooling.scores else ModelType.Embedding
        await self.served.register(limits, self.generate, self.embed, pools=pools)
        for name, path in self._lora_modules.items():
            try:
                await self._load_adapter(name, path)
            except InvalidRequest as error:
                raise ConfigError(str(error)) from error

    def instance_metadata(self) -> Mapping[str, str]:
        engine = self._engine()
        limits, ranks = engine.limits, engine.ranks
        own: dict[str, str] = {}
        if ranks > 1:
            own = {
                profiles.DP_SIZE_KEY: str(ranks),
                profiles.TOTAL_BLOCKS_KEY: str(limits.blocks // ranks),
                profiles.MAX_BATCHED_TOKENS_KEY: str(limits.max_num_batched_tokens // ranks),
            }
        if self._role == "prefill" and self._identity is not None:
            own[profiles.TAGS_KEY] = self._identity.tag
        if self._role == "decode":
            own |= self._settings.metadata()
        if engine.adapters:
            own[profiles.LORAS_KEY] = ",".join(sorted(engine.adapters))
        return {**super().instance_metadata(), **own}

    def _engine(self) -> VllmEngine:
        if self._vllm is None:
            raise Unavailable("vLLM is not started")
        return self._vllm

    def _cleared(self) -> None:
        # An idle engine says so only with its next step.
        if self._events is not None:
            self._events.cleared()

    # Prompts that others compute, and that are computed for others -----------------------

    def _remote_prefill(self) -> AbstractAsyncContextManager[Sink]:
        """The sink that has prompts computed elsewhere."""
        from .connector_reader import prefill_component, remote_prefill

        assert self._identity is not None, "it is read when the engine is ready"
        runtime, own = self.runtime, self.__dynbus_name__
        prefill = prefill_component(self._prefill_node, ComponentName(own.namespace, own.component))

        def client(router: KvRouter | None) -> VllmWorker:
            return runtime.client(
                VllmWorker, node=prefill.component, namespace=prefill.namespace, routing=router
            )

        return remote_prefill(
            runtime,
            own,
            prefill,
            client,
            self._engine(),
            self._running(),
            self._identity,
            self._settings,
            self.figures,
        )

    @handler(concurrency=None, idle_timeout=LONGEST_PREFILL)
    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[Prefilled]:
        """Compute a prompt and its first token for a decode engine, and hold what is computed while
        the call is open: until it is handed over, and then for its lease."""
        if self._source is None:
            raise self._has_another_role()
        items: Any = self._source.prefill(self._new_name(), request, context())
        async with aclosing(items):
            async for item in items:
                yield item

    @handler(concurrency=None)
    async def hand_over(self, request: HandOver) -> HandedOver:
        """Hand over a prompt that is held; from now on the caller's vLLM says when it has it."""
        if self._keeper is None:
            raise self._has_another_role()
        return self._keeper.hand_over(request.hand_over)

    @handler(concurrency=None, idempotent=True)
    async def give_back(self, request: HandOver) -> None:
        """Free a prompt that was handed over, and that nobody reads."""
        if self._keeper is not None:
            self._keeper.give_back(request.hand_over)

    @handler(concurrency=None, idempotent=True)
    async def kv_identity(self) -> KvIdentity:
        """The properties that decode engines must have in common with this one to read what it
        computes.
        """
        if self._identity is None:
            raise InvalidRequest(
                f"{type(self).__name__} runs with role=none: it hands over nothing"
            )
        return self._identity

    def _has_another_role(self) -> InvalidRequest:
        return InvalidRequest(
            f"{self.__dynbus_name__} runs with role={self._role or 'none'}: ask one that runs "
            "with role=prefill"
        )

    # What operators do ------------------------------------------------------------------

    @handler
    async def reset_prefix_cache(self) -> bool:
        """Forget all blocks that no request uses; False where requests use some."""
        done: bool = await self._engine().llm.reset_prefix_cache()
        if done:
            self._cleared()
        return done

    @handler
    async def sleep(self, request: Sleep) -> None:
        """Give the memory of the device to others; running requests are aborted."""
        if self._role == "prefill":
            raise InvalidRequest(
                "a prefill engine does not sleep: others may be reading its memory; stop it"
            )
        await self._engine().sleep(request.level)
        self._cleared()

    @handler
    async def wake_up(self, request: WakeUp) -> None:
        """Take the memory of the device again."""
        await self._engine().wake_up(request.tags)

    @handler
    async def load_adapter(self, request: AdapterAt) -> None:
        """Load a LoRA adapter, and serve it as a model of its name; vLLM needs `enable_lora`."""
        async with self._changing_adapters:
            await self._load_adapter(request.name, request.path)

    async def _load_adapter(self, name: str, path: str) -> None:
        if self._role == "prefill":
            raise InvalidRequest("a prefill engine serves no adapters: load it in decode engines")
        try:
            check_lora_name(name)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        if await self._engine().load_adapter(name, path):
            self._cleared()
        if name not in self._adapters:
            await self._serve_adapter(name)

    async def _serve_adapter(self, name: str) -> None:
        unloaded = asyncio.Event()
        try:
            await self.__dynbus_instance__.renew_metadata()
            endpoint = self.embed if self.only_embeds else self.generate
            await register_adapter(endpoint, self.served.card, name, name, unloaded)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._engine().unload_adapter(name)
                await self.__dynbus_instance__.renew_metadata()
            if isinstance(error, ConfigError):
                raise InvalidRequest(str(error)) from error
            raise
        self._adapters[name] = unloaded

    @handler
    async def unload_adapter(self, request: Adapter) -> None:
        """Forget a LoRA adapter, and the model of its name."""
        async with self._changing_adapters:
            await self._engine().unload_adapter(request.name)
            self._adapters.pop(request.name).set()
            await self.__dynbus_instance__.renew_metadata()

    @handler(idempotent=True)
    async def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return sorted(self._engine().adapters)
