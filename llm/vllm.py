"""vLLM on the bus: `dynbus run dynbus.llm.vllm:VllmWorker --VllmWorker.model=Qwen/Qwen3-0.6B`.

The package is imported where an engine is made, and so by no supervisor. The engine computes in
processes of its own, which end with this one; its KV-cache events come over sockets that nobody
else has.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import logging
import os
import re
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

import anyio
import anyio.to_thread
import msgspec
import pydantic
from anyio.abc import TaskGroup

from dynbus import handler
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.config import suggestion
from dynbus.bus.context import context
from dynbus.bus.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    describe_exception,
)
from dynbus.kvrouter.routing import DP_RANK_KEY, profiles

from .engine.interface import (
    EngineLimits,
    EngineLoad,
    Listener,
    Prefill,
    RunningEngine,
    Step,
)
from .engine.requests import check_request
from .engine.runner import EventSink
from .generation import FinishReason, Generated, GenerateRequest, TokenLogprob
from .named import NamedWorker

if TYPE_CHECKING:
    from dynbus.kvrouter.engines.engine_events import EngineEvents
    from dynbus.kvrouter.engines.zmq_subscriber import ZmqSource

logger = logging.getLogger(__name__)

TOLD_EVERY: Final = 15.0
"""Seconds between two records that say how long the engine has been starting."""
HEALTH_INTERVAL: Final = 0.5
"""Seconds between two looks at whether the engine's processes are there."""
STOP_TIMEOUT: Final = 10.0
"""Seconds that the engine's processes have to end."""
CPU_BLOCK: Final = 32
"""vLLM's attention on CPUs takes blocks of a multiple of so many tokens."""

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    # Its last tokens were always the same.
    "repetition": "stop",
}

_OWNED: Final = {
    "served_model_name": "give model_name",
    "kv_events_config": "give kv_events",
}
"""Arguments of vLLM's that the worker itself sets, and what to give instead."""


class LoadMetrics(msgspec.Struct, frozen=True):
    """How busy an engine is, by the names that routers of Dynamo's workers know.

    Attributes:
        request_active_slots, num_requests_waiting: requests that run, and that wait.
        request_total_slots: how many may run.
        kv_active_blocks, kv_total_blocks: blocks of the cache that requests use, and all.
        gpu_cache_usage_perc: their ratio, from 0 to 1.
        gpu_prefix_cache_hit_rate: share of all prompt tokens so far that were found in the cache.
    """

    request_active_slots: int
    request_total_slots: int
    num_requests_waiting: int
    kv_active_blocks: int
    kv_total_blocks: int
    gpu_cache_usage_perc: float
    gpu_prefix_cache_hit_rate: float

    @classmethod
    def of(cls, load: EngineLoad, limits: EngineLimits) -> LoadMetrics:
        return cls(
            load.running,
            limits.max_num_seqs,
            load.waiting,
            load.active_blocks,
            limits.blocks,
            load.active_blocks / limits.blocks,
            load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
        )


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
        **engine: Any,
    ) -> None:
        super().__init__(model, model_name, default_sampling)
        for name, remedy in _OWNED.items():
            if name in engine:
                raise ConfigError(f"{type(self).__name__} sets vLLM's {name} itself: {remedy}")
        self._arguments = engine
        self._kv_events = kv_events
        self._vllm: VllmEngine | None = None
        self._events: EngineEvents | None = None

    def make_engine(self) -> VllmEngine:
        started = monotonic()
        logger.info("vLLM starts for %s", self.found.origin)
        self._vllm = VllmEngine.start(
            str(self.found.path), self._arguments, kv_events=self._kv_events
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
        async with task_group() as tasks:
            tasks.start_soon(self._tell_of_start)
            await super().on_start()
            tasks.cancel_scope.cancel()

    async def _tell_of_start(self) -> None:
        began = monotonic()
        while True:
            await anyio.sleep(TOLD_EVERY)
            logger.info("vLLM has been starting for %.0f s", monotonic() - began)

    def instance_metadata(self) -> Mapping[str, str]:
        ranks = self._engine().ranks
        own = {profiles.DP_SIZE_KEY: str(ranks)} if ranks > 1 else {}
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
    async def load_metrics(self) -> LoadMetrics:
        """How busy the engine is."""
        return LoadMetrics.of(self._running().load, self._engine().limits)

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
        """Load a LoRA adapter; vLLM needs `enable_lora`."""
        await self._engine().load_adapter(request)

    @handler
    async def unload_adapter(self, request: Adapter) -> None:
        """Forget a LoRA adapter."""
        await self._engine().unload_adapter(request.name)

    @handler
    async def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return sorted(self._engine().adapters)


class EngineGone(Exception):
    """Raised when the processes of an engine have ended by themselves."""


class VllmEngine(RunningEngine):
    """An `AsyncLLM` of vLLM as an engine; `start` makes it.

    Attributes:
        llm: the engine itself, with all that it can beside generating.
        ranks: how many data-parallel ranks it has.
        adapters: LoRA adapters by name, as vLLM knows them.
        report_mode: what vLLM is to say of the blocks that a request reuses; None to leave it.
    """

    def __init__(
        self, llm: Any, folder: tempfile.TemporaryDirectory[str], counts: list[RankLoad]
    ) -> None:
        config = llm.vllm_config
        cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
        events = config.kv_events_config
        self.llm = llm
        self.ranks: int = config.parallel_config.data_parallel_size
        self.adapters: dict[str, Any] = {}
        self.report_mode: Callable[[], str] | None = None
        self.limits = EngineLimits(
            block_size=cache.block_size,
            blocks=cache.num_gpu_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            context_length=model.max_model_len,
            has_events=events is not None and events.enable_kv_cache_events,
            vocabulary=model.get_vocab_size(),
        )
        self._folder = folder
        self._counts = counts
        self._adapter_numbers = 0

    def __repr__(self) -> str:
        return f"<VllmEngine {self.llm.model_config.model}>"

    @classmethod
    def start(cls, model: str, arguments: Mapping[str, Any], *, kv_events: bool) -> VllmEngine:
        """Start vLLM; takes from seconds to minutes, and belongs into a thread.

        Raises:
            ConfigError: vLLM is not installed, or an argument is none of its own or not usable.
            RuntimeError: it does not start, and why.
        """
        # This process has threads, which a fork would leave in the middle of their work.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        try:
            engine = _module("v1.engine.async_llm").AsyncLLM
        except ImportError as error:
            raise ConfigError(
                f"vLLM cannot be imported: {error}; install it, see docs/guides/vllm.md"
            ) from error
        folder = tempfile.TemporaryDirectory(prefix="dynbus-vllm-", ignore_cleanup_errors=True)
        counts: list[RankLoad] = []
        try:
            given = engine_arguments(model, arguments, Path(folder.name) if kv_events else None)
            errors = _errors_kept_in(Path(folder.name))
            try:
                llm = engine.from_vllm_config(
                    _config(given),
                    stat_loggers=[_counting(counts)],
                    enable_log_requests=given.enable_log_requests,
                    disable_log_stats=given.disable_log_stats,
                )
            except ConfigError:
                raise
            except Exception as error:
                cause = _first_error(errors)
                if cause is None:
                    raise
                raise RuntimeError(f"vLLM does not start: {cause}") from error
            return cls(llm, folder, counts)
        except BaseException:
            folder.cleanup()
            raise

    @property
    def load(self) -> EngineLoad:
        """How busy it is, as of its last step."""
        counts, blocks = self._counts, self.limits.blocks
        return EngineLoad(
            running=sum(one.running for one in counts),
            waiting=sum(one.waiting for one in counts),
            active_blocks=sum(round(one.usage * blocks) for one in counts),
            cached_tokens=sum(one.hits for one in counts),
            prompt_tokens=sum(one.queries for one in counts),
            preempted=sum(one.preempted for one in counts),
        )

    def event_source(self) -> ZmqSource:
        """Where its KV-cache events come from."""
        from dynbus.kvrouter.engines.zmq_subscriber import ZmqSource

        found = self.llm.get_kv_event_sources()
        ranks = sorted(found)
        return ZmqSource(
            [_reachable(found[rank].endpoint) for rank in ranks],
            [_reachable(found[rank].replay_endpoint) for rank in ranks],
            ranks=ranks if self.ranks > 1 else None,
        )

    def stepper(self, listener: Listener) -> _Stepper:
        return _Stepper(self, listener)

    async def load_adapter(self, adapter: AdapterAt) -> None:
        """Load a LoRA adapter, in place of one of the same name.

        Raises:
            InvalidRequest: vLLM does not take it, and why.
        """
        self._adapter_numbers += 1
        request = _module("lora.request").LoRARequest(
            adapter.name, self._adapter_numbers, adapter.path
        )
        try:
            await self.llm.add_lora(request)
        except Exception as error:
            raise InvalidRequest(
                f"vLLM does not load the adapter {adapter.name!r}: {describe_exception(error)}"
            ) from error
        former = self.adapters.get(adapter.name)
        self.adapters[adapter.name] = request
        if former is not None:
            await self.llm.remove_lora(former.lora_int_id)

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            InvalidRequest: there is none of the name.
        """
        if name not in self.adapters:
            raise InvalidRequest(f"no adapter {name!r} is loaded{suggestion(name, self.adapters)}")
        await self.llm.remove_lora(self.adapters.pop(name).lora_int_id)

    def check(self) -> None:
        """Make sure that its processes are there.

        Raises:
            EngineGone: they are not.
        """
        if self.llm.errored:
            cause = _first_error(Path(self._folder.name) / _ERRORS)
            raise EngineGone(f"vLLM has ended: {cause or 'its processes are gone'}")

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.llm.shutdown, STOP_TIMEOUT)
            await anyio.to_thread.run_sync(self._folder.cleanup)


# Requests -----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that vLLM has.

    Attributes:
        sampling: of each continuation, by its name in vLLM.
        options: what else `AsyncLLM.generate` gets.
        has_output: whether something was made for it.
    """

    request: GenerateRequest
    sampling: dict[str, Any]
    options: dict[str, Any]
    has_output: bool = False


class _Stepper:
    """Gives requests to vLLM, and hands over at once what its steps make for all of them."""

    def __init__(self, engine: VllmEngine, listener: Listener) -> None:
        self._engine = engine
        self._listener = listener
        self._asked: dict[str, _Asked] = {}
        self._tasks: TaskGroup | None = None
        self._early: list[str] = []
        self._outputs: list[tuple[str, Generated]] = []
        self._prefilled: list[Prefill] = []
        self._failures: list[tuple[str, str]] = []
        self._aborted: list[str] = []
        self._news = asyncio.Event()

    def add(self, request_id: str, request: GenerateRequest) -> None:
        try:
            self._asked[request_id] = self._prepare(request_id, request)
        except Exception as error:  # noqa: BLE001 - a client's mistake, as vLLM sees it too
            self._listener.on_refused(request_id, error)
            return
        if self._tasks is None:
            self._early.append(request_id)
        else:
            self._begin(self._tasks, request_id)

    def cancel(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._abort(*asked.sampling)

    async def run(self) -> None:
        engine = self._engine
        async with task_group() as self._tasks:
            self._tasks.start_soon(self._watch)
            for request_id in self._early:
                self._begin(self._tasks, request_id)
            while True:
                await self._news.wait()
                self._news.clear()
                self._hand_over()
                aborted, self._aborted = self._aborted, []
                if aborted:
                    await engine.llm.abort(aborted)

    async def _watch(self) -> None:
        while True:
            self._engine.check()
            # What is shown of its load is that of its last step.
            self._news.set()
            await anyio.sleep(HEALTH_INTERVAL)

    def _hand_over(self) -> None:
        outputs, self._outputs = self._outputs, []
        prefilled, self._prefilled = self._prefilled, []
        failures, self._failures = self._failures, []
        step = Step(outputs, failures=failures, prefilled=prefilled)
        self._listener.on_step(step, self._engine.load, monotonic())

    def _prepare(self, request_id: str, request: GenerateRequest) -> _Asked:
        """What vLLM gets for a request.

        Raises:
            ValueError, VLLMClientError: a value is not usable.
        """
        engine = self._engine
        check_request(request, engine.limits)
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        options: dict[str, Any] = {"prompt": prompt}
        if request.lora_name is not None:
            if request.lora_name not in engine.adapters:
                raise ValueError(
                    f"no adapter {request.lora_name!r} is loaded"
                    f"{suggestion(request.lora_name, engine.adapters)}"
                )
            options["lora_request"] = engine.adapters[request.lora_name]
        config = engine.llm.vllm_config
        if request.priority and config.scheduler_config.policy == "priority":
            # vLLM computes lower ones first.
            options["priority"] = -request.priority
        running = context()
        if config.observability_config.otlp_traces_endpoint is not None:
            options["trace_headers"] = running.trace_headers()
        if engine.ranks > 1 and (rank := running.metadata.get(DP_RANK_KEY)):
            options["data_parallel_rank"] = int(rank)
        report = None if engine.report_mode is None else engine.report_mode()
        sampling = {
            f"{request_id}-{number}": _sampling(request, number, report)
            for number in range(request.n)
        }
        return _Asked(request, sampling, options)

    def _begin(self, tasks: TaskGroup, request_id: str) -> None:
        asked = self._asked.get(request_id)
        if asked is None:
            return
        for number, name in enumerate(asked.sampling):
            tasks.start_soon(self._follow, request_id, asked, name, asked.request.index + number)

    async def _follow(self, request_id: str, asked: _Asked, name: str, index: int) -> None:
        """Read what vLLM makes for one continuation."""
        errors: Any = _module("exceptions")
        engine = self._engine
        generate = engine.llm.generate
        output: Any = None
        try:
            async for output in generate(
                sampling_params=asked.sampling[name], request_id=name, **asked.options
            ):
                if self._asked.get(request_id) is asked:
                    self._take(request_id, asked, index, output)
                elif not output.finished:
                    # It was cancelled before vLLM had it.
                    self._abort(name)
            if self._asked.get(request_id) is asked and (output is None or not output.finished):
                self._fail(request_id, "vLLM has lost it")
        except _module("v1.engine.exceptions").EngineDeadError as error:
            engine.check()
            raise EngineGone("vLLM has ended") from error
        except errors.VLLMClientError as error:
            self._refuse(request_id, asked, ValueError(str(error)))
        except errors.GracefulHTTPError as error:
            self._refuse(request_id, asked, Overloaded(str(error)))
        except Exception as error:  # noqa: BLE001 - of this request alone
            self._fail(request_id, describe_exception(error))

    def _take(self, request_id: str, asked: _Asked, index: int, output: Any) -> None:
        made = output.outputs[0]
        reason = made.finish_reason
        if reason is not None and reason not in _FINISH_REASONS:
            self._fail(request_id, f"vLLM ended it with {reason!r}")
            return
        if not made.token_ids and reason is None:
            return
        cached = None
        if not asked.has_output:
            asked.has_output = True
            cached = output.num_cached_tokens or 0
            self._prefilled.append(Prefill(request_id, cached, 1))
        logprobs = None if made.logprobs is None else _logprobs(made, asked.request)
        item = Generated(
            list(made.token_ids),
            index,
            logprobs,
            None if reason is None else _FINISH_REASONS[reason],
            cached,
        )
        self._outputs.append((request_id, item))
        self._news.set()

    def _refuse(self, request_id: str, asked: _Asked, error: Exception) -> None:
        if self._asked.get(request_id) is asked:
            del self._asked[request_id]
            self._listener.on_refused(request_id, error)

    def _fail(self, request_id: str, reason: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._failures.append((request_id, reason))
            self._abort(*asked.sampling)

    def _abort(self, *names: str) -> None:
        self._aborted += names
        self._news.set()


def _sampling(request: GenerateRequest, number: int, report: str | None) -> Any:
    """vLLM's parameters for one continuation.

    Raises:
        VLLMClientError: a value is not usable.
    """
    given, module = request.sampling, _module("sampling_params")
    return module.SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        seed=None if given.seed is None else given.seed + request.index + number,
        logit_bias=given.logit_bias or None,
        logprobs=given.logprobs,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        # Whoever asks turns tokens into text, and applies stop strings to it.
        detokenize=False,
        output_kind=module.RequestOutputKind.DELTA,
        extra_args=None if report is None else {"kv_cache_report_mode": report},
    )


def _logprobs(made: Any, request: GenerateRequest) -> list[TokenLogprob]:
    wanted = request.sampling.logprobs or 0
    found: list[TokenLogprob] = []
    for token_id, each in zip(made.token_ids, made.logprobs, strict=True):
        likeliest = sorted(each.items(), key=lambda one: -one[1].logprob)[:wanted]
        top = [(one, value.logprob) for one, value in likeliest]
        found.append(TokenLogprob(token_id, each[token_id].logprob, top))
    return found


def _module(name: str) -> Any:
    """A module of vLLM's, which is untyped here, as it may be absent."""
    return importlib.import_module(f"vllm.{name}" if name else "vllm")


# How vLLM is started ------------------------------------------------------------------------


def engine_arguments(model: str, arguments: Mapping[str, Any], folder: Path | None) -> Any:
    """vLLM's `AsyncEngineArgs`, read by its own parser.

    Args:
        model: the path of its files.
        folder: for the sockets of its KV-cache events; None for no events.

    Raises:
        ConfigError: an argument is none of vLLM's, or does not fit.
    """
    engine_args = _module("").AsyncEngineArgs
    known = [one.name for one in fields(engine_args)]
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"vLLM has no argument {name!r}{suggestion(name, known)}; see vllm serve --help"
            )

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"vLLM does not take its arguments: {message}")

    parser = _module("utils.argparse_utils").FlexibleArgumentParser(add_help=False)
    parser = engine_args.add_cli_args(parser)
    # It would print its usage and end this process.
    parser.error = refuse
    given = engine_args.from_cli_args(parser.parse_args(_words({"model": model, **arguments})))
    size = arguments.get("block_size")
    if size and _module("platforms").current_platform.is_cpu() and given.block_size % CPU_BLOCK:
        raise ConfigError(f"block_size = {size}: on a CPU vLLM takes a multiple of {CPU_BLOCK}")
    if folder is None or given.enable_prefix_caching is False:
        return given
    own = given.data_parallel_size == 1
    given.kv_events_config = _module("config").KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        # Sockets of files have no port for each rank: the system gives one.
        endpoint=f"ipc://{folder}/events" if own else "tcp://*:0",
        replay_endpoint=f"ipc://{folder}/replay" if own else "tcp://*:0",
    )
    return given


def _config(given: Any) -> Any:
    """The configuration that follows from vLLM's arguments.

    Raises:
        ConfigError: they do not fit together, or not this machine.
    """
    try:
        return given.create_engine_config()
    except pydantic.ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"vLLM does not take its arguments: {why}") from error
    except ValueError as error:
        raise ConfigError(f"vLLM does not take its arguments: {error}") from error


def _words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        text = str(value)
        if value is None:
            continue
        if value is True or text.lower() == "true":
            words.append(flag)
        elif value is False or text.lower() == "false":
            words.append("--no-" + flag.removeprefix("--"))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, cast("list[Any]", value))]
        elif isinstance(value, Mapping):
            words.append(f"{flag}={json.dumps(value)}")
        else:
            words.append(f"{flag}={text}")
    return words


def _reachable(endpoint: str) -> str:
    """Where to connect to what is bound there."""
    return endpoint.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:")


_ERRORS: Final = "errors.log"
_LINE_OF_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")


def _errors_kept_in(folder: Path) -> Path:
    """Have the processes of vLLM write their errors into a file too: where one does not start, the
    exception that says so does not say why."""
    file = folder / _ERRORS
    if "VLLM_LOGGING_CONFIG_PATH" in os.environ or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return file  # its user has said what becomes of its log
    config: dict[str, Any] = copy.deepcopy(_module("logger").DEFAULT_LOGGING_CONFIG)
    config["formatters"]["plain"] = {"format": "%(message)s"}
    config["handlers"]["errors"] = {
        "class": "logging.FileHandler",
        "filename": str(file),
        "delay": True,
        "level": "ERROR",
        "formatter": "plain",
    }
    config["loggers"]["vllm"]["handlers"].append("errors")
    (folder / "logging.json").write_text(json.dumps(config))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(folder / "logging.json")
    return file


def _first_error(file: Path) -> str | None:
    """The exception that was the first to be written into a file."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        # That one says only that there is another.
        if _LINE_OF_ERROR.fullmatch(line) and "EngineDeadError" not in line:
            return line
    return None


# How busy it is -----------------------------------------------------------------------------


@dataclass(slots=True)
class RankLoad:
    """How busy a data-parallel rank is, after its last step; tokens and preemptions of all time.

    Attributes:
        usage: share of its blocks that requests use.
    """

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    queries: int = 0
    hits: int = 0
    preempted: int = 0


class _Counter:
    """Has vLLM say after each step how busy a rank is; see its `StatLoggerBase`."""

    counts: list[RankLoad]

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._load = RankLoad()
        self.counts.append(self._load)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *ignored: Any, **named: Any
    ) -> None:
        load = self._load
        if scheduler_stats is not None:
            load.running = scheduler_stats.num_running_reqs
            load.waiting = scheduler_stats.num_waiting_reqs
            load.usage = scheduler_stats.kv_cache_usage
            load.queries += scheduler_stats.prefix_cache_stats.queries
            load.hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            load.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing is to be said."""


def _counting(counts: list[RankLoad]) -> type:
    """What has vLLM count into `counts`, once for each rank."""
    base: type = _module("v1.metrics.loggers").StatLoggerBase
    return type("Counter", (_Counter, base), {"counts": counts})
