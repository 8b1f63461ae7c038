"""vLLM as an actor: `VllmWorker`, and what its endpoints take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import anyio.to_thread
import msgspec

from dynbus import handler
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, InvalidRequest, Unavailable
from dynbus.kvrouter.routing import profiles
from dynbus.llm.engine.interface import EngineLimits
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.models.card import check_lora_name, check_reasoning_parser
from dynbus.llm.models.register import register_adapter
from dynbus.llm.models.source import LocalModel
from dynbus.llm.named import NamedWorker

from .engine import VllmEngine
from .starting import EngineFolder, StartProgress, check_arguments, maps_of_processes, weight_files

if TYPE_CHECKING:
    from dynbus.kvrouter.engines.engine_events import EngineEvents

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at how far the engine is in its start."""
TOLD_EVERY: Final = 15.0
"""Seconds without news after which it is said how far that is."""

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
    """How far an engine is put to sleep: 1 moves its weights to the host's memory, 2 drops them."""

    level: Literal[1, 2] = 1


class WakeUp(msgspec.Struct, frozen=True):
    """What of a sleeping engine comes back, such as `weights` and `kv_cache`; None for all."""

    tags: list[str] | None = None


class VllmWorker(NamedWorker, namespace="llm"):
    """Serves a model with vLLM, by tokens, and registers it under its name.

    All further arguments are vLLM's own, checked by its own parser: `max_model_len=4096`, or
    `--VllmWorker.max_model_len=4096` on the command line. A subclass gives it a namespace:
    `class Engine(VllmWorker, namespace="qwen")`.

    Args:
        model: where it is: a folder, a repository, or what else `register_llm` takes.
        model_name: by which requests ask for it; unless given, what its files are called.
        default_sampling: for what requests do not say: see `register_llm`.
        kv_events: whether routers are told what the cache holds.
        lora_modules: folders of LoRA adapters by name, which are loaded as the engine starts, and
            served as models of these names.
        tool_call_parser, reasoning_parser: how its outputs have tool calls and reasoning: see
            `register_llm`. A `reasoning_parser` that is named is vLLM's own too: an output that has
            a form has it behind its reasoning.
        engine: arguments of vLLM's, by their names.

    Raises:
        ConfigError: a value is not usable.
    """

    def __init__(
        self,
        model: str,
        model_name: str = "",
        default_sampling: dict[str, float] | Literal["model", "openai"] = "model",
        kv_events: bool = True,
        lora_modules: dict[str, str] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        **engine: Any,
    ) -> None:
        super().__init__(model, model_name, default_sampling, tool_call_parser, reasoning_parser)
        for name, remedy in _OWNED.items():
            if name in engine:
                raise ConfigError(f"{type(self).__name__} sets vLLM's {name} itself: {remedy}")
        self._lora_modules = lora_modules or {}
        self._arguments = {"enable_lora": True, **engine} if lora_modules else engine
        named = check_reasoning_parser(reasoning_parser)
        if named:
            # The form of an output begins behind its reasoning.
            self._arguments = {"reasoning_parser": named, **self._arguments}
        self._kv_events = kv_events
        self._vllm: VllmEngine | None = None
        self._folder: EngineFolder | None = None
        self._events: EngineEvents | None = None
        self._adapters: dict[str, asyncio.Event] = {}
        self._changing_adapters = anyio.Lock()

    async def find_model(self) -> LocalModel | None:
        # Before gigabytes are had in vain.
        await anyio.to_thread.run_sync(check_arguments, self._arguments, abandon_on_cancel=True)
        return await super().find_model()

    def make_engine(self) -> VllmEngine:
        started = monotonic()
        logger.info("vLLM starts for %s", self.found.origin)
        folder = self._folder = EngineFolder()
        self._vllm = VllmEngine.start(
            str(self.found.path), self._arguments, folder, kv_events=self._kv_events
        )
        logger.info("vLLM is ready after %.1f s", monotonic() - started)
        return self._vllm

    @asynccontextmanager
    async def event_sink(self) -> AsyncGenerator[EventSink | None]:
        from dynbus.kvrouter.engines.engine_events import EngineEvents

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
        began = told = monotonic()
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            now, folder = monotonic(), self._folder
            if folder is None:
                began = told = now  # its files are being had
                continue
            if progress is None:
                progress = StartProgress(weight_files(self.found.path))
            news = progress.read(await anyio.to_thread.run_sync(folder.messages))
            is_due = now - told >= TOLD_EVERY
            if is_due and progress.is_loading:
                await anyio.to_thread.run_sync(progress.look, maps_of_processes())
            for phase in news or ([str(progress)] if is_due else []):
                logger.info("vLLM has been starting for %.0f s: %s", now - began, phase)
                told = now

    @property
    def only_embeds(self) -> bool:
        return self._engine().only_embeds

    async def on_engine(self, limits: EngineLimits) -> None:
        if self.only_embeds:
            tasks = await self._engine().llm.get_supported_tasks()
            if "embed" not in tasks:
                raise ConfigError(
                    f"vLLM makes no embeddings with this model; it supports {', '.join(tasks)}"
                )
        await super().on_engine(limits)
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
        await self._engine().llm.sleep(request.level)
        self._cleared()

    @handler
    async def wake_up(self, request: WakeUp) -> None:
        """Take the memory of the device again."""
        await self._engine().llm.wake_up(request.tags)

    @handler
    async def load_adapter(self, request: AdapterAt) -> None:
        """Load a LoRA adapter, and serve it as a model of its name; vLLM needs `enable_lora`."""
        async with self._changing_adapters:
            await self._load_adapter(request.name, request.path)

    async def _load_adapter(self, name: str, path: str) -> None:
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
            await register_adapter(endpoint, self.card, name, name, unloaded)
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

    @handler
    async def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return sorted(self._engine().adapters)
