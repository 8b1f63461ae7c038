"""vLLM as an engine: an `AsyncLLM`, and what gives it requests and hands over what it makes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from dynbus import ConfigError, InvalidRequest, Overloaded, ResumeMismatch, Unavailable, context
from dynbus.kvrouter import DP_RANK_KEY
from dynbus.llm.continuing import Again
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.engine.interface import (
    NO_EMBEDDINGS,
    EngineLimits,
    EngineLoad,
    EngineRequest,
    Held,
    Listener,
    Prefill,
    RunningEngine,
    Step,
)
from dynbus.llm.engine.requests import check_embedding, check_request
from dynbus.llm.engine.step_watch import Turn
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.spi import describe_exception, monotonic, suggestion, task_group

from .connector import FREE
from .requests import (
    FINISH_REASONS,
    Pooling,
    PromptRequest,
    ReadingRequest,
    embedded,
    generated,
    pooling_params,
    sampling_params,
)
from .starting import (
    EngineFolder,
    HandOverSettings,
    describe_processes,
    start_vllm,
    vllm_module,
)

if TYPE_CHECKING:
    from dynbus.kvrouter import ZmqSource

logger = logging.getLogger(__name__)

HEALTH_INTERVAL: Final = 0.5
"""Seconds between two looks at whether the engine's processes are there."""
UNLOAD_KNOWN_AFTER: Final = 10.0
"""Seconds after which a caller that asks for an adapter should know that it was unloaded."""
STOP_TIMEOUT: Final = 10.0
"""Seconds that the engine's processes have to end."""


@dataclass(frozen=True, slots=True)
class ConnectorTicket:
    """A ticket for another vLLM to read a prompt that this one has computed, and holds for it.

    Attributes:
        kv_transfer_params: for its connector.
        until: how long it is held at least, on the monotonic clock.
    """

    kv_transfer_params: dict[str, Any]
    until: float


class EngineGone(Exception):
    """Raised when the processes of an engine have ended by themselves."""


class VllmEngine(RunningEngine):
    """An `AsyncLLM` of vLLM as an engine; `start` makes it.

    Attributes:
        llm: the engine itself, with all that it can beside generating.
        only_embeds: whether it makes embeddings or scores, and no tokens.
        pooling: which of these, once `find_pooling` has found it.
        is_cpu: whether it computes on CPUs.
        ranks: how many data-parallel ranks it has.
        adapters: LoRA adapters by name, as vLLM knows them.
        unloaded: when adapters were unloaded that are not loaded now, by their names.
        rests: whether it sleeps, or is about to: it makes no steps then.
        report_mode: what vLLM is to say of the blocks that a request reuses; None to leave it.
        lease: seconds for which it holds the blocks of a prompt for another engine.
        hands_over: whether it reads and holds such blocks at all.
    """

    def __init__(self, llm: Any, folder: EngineFolder, counts: list[RankLoad]) -> None:
        config = llm.vllm_config
        cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
        events = config.kv_events_config
        self.llm = llm
        self.only_embeds: bool = model.runner_type == "pooling"
        self.pooling = Pooling(scores=False)
        self.is_cpu: bool = vllm_module("platforms").current_platform.is_cpu()
        self.ranks: int = config.parallel_config.data_parallel_size
        self.adapters: dict[str, Any] = {}
        self.unloaded: dict[str, float] = {}
        self.rests = False
        self.report_mode: Callable[[], str] | None = None
        self.limits = EngineLimits(
            block_size=cache.block_size,
            # Of all ranks together, each of which has so many.
            blocks=cache.num_gpu_blocks * self.ranks,
            max_num_seqs=scheduler.max_num_seqs * self.ranks,
            max_num_batched_tokens=scheduler.max_num_batched_tokens * self.ranks,
            context_length=model.max_model_len,
            has_events=events is not None and events.enable_kv_cache_events,
            vocabulary=model.get_vocab_size(),
        )
        transfer = config.kv_transfer_config
        self.hands_over = transfer is not None
        self.lease: float = (
            0.0 if transfer is None else transfer.get_from_extra_config("kv_lease_duration", 0)
        )
        self._folder = folder
        self._counts = counts
        self._adapter_numbers = 0
        self._stepper: VllmStepper | None = None

    def __repr__(self) -> str:
        return f"<VllmEngine {self.llm.model_config.model}>"

    @classmethod
    def start(
        cls,
        model: str,
        arguments: Mapping[str, Any],
        folder: EngineFolder,
        *,
        kv_events: bool,
        hand_over: HandOverSettings | None = None,
    ) -> VllmEngine:
        """Start vLLM; takes from seconds to minutes, and belongs into a thread.

        Args:
            folder: for what it needs while it runs; removed with it, also where it does not start.
            hand_over: how it hands over KV caches; None where it does not.

        Raises:
            ConfigError: an argument is none of vLLM's, or does not fit.
            RuntimeError: it does not start, and why.
        """
        counts: list[RankLoad] = []
        try:
            llm = start_vllm(
                model,
                arguments,
                folder,
                kv_events=kv_events,
                hand_over=hand_over,
                stat_logger=lambda: counting(counts),
            )
            return cls(llm, folder, counts)
        except BaseException:
            folder.remove()
            raise

    @property
    def load(self) -> EngineLoad:
        """Its load, as of its last step."""
        counts, blocks = self._counts, self.limits.blocks // self.ranks
        return EngineLoad(
            running=sum(one.running for one in counts),
            waiting=sum(one.waiting for one in counts),
            active_blocks=sum(round(one.usage * blocks) for one in counts),
            cached_tokens=sum(one.hits for one in counts),
            prompt_tokens=sum(one.queries for one in counts),
            preempted=sum(one.preempted for one in counts),
        )

    @property
    def steps_ended(self) -> int:
        """The steps that its ranks have told of."""
        return sum(one.steps for one in self._counts)

    def event_source(self) -> ZmqSource:
        """The source of its KV-cache events."""
        from dynbus.kvrouter import ZmqSource

        if self.ranks == 1:
            events = self.llm.vllm_config.kv_events_config
            return ZmqSource([events.endpoint], [events.replay_endpoint])
        sources = self.llm.get_kv_event_sources()
        ranks = sorted(sources)
        return ZmqSource(
            [_reachable(sources[rank].endpoint) for rank in ranks],
            [_reachable(sources[rank].replay_endpoint) for rank in ranks],
            ranks=ranks,
        )

    def stepper(self, listener: Listener) -> VllmStepper:
        self._stepper = VllmStepper(self, listener)
        return self._stepper

    # KV caches that are handed over ---------------------------------------------------

    @property
    def steps(self) -> VllmStepper:
        """The stepper that gives it requests.

        Raises:
            Unavailable: it is not started.
        """
        if self._stepper is None:
            raise Unavailable("vLLM is not started")
        return self._stepper

    async def aborted(self, request_id: str) -> None:
        """Wait until nothing is used any more that is read for a request which was given up."""
        await self.steps.left(request_id)
        # Whatever it was told before, it has done when it answers.
        await self.llm.is_sleeping()

    async def free(self, request_id: str) -> None:
        """Free the prompt of a request that was computed for another engine, where it is held; one
        that is still computed is not held."""
        await self.llm.abort(f"{request_id}-0")
        for rank in range(self.ranks):
            params: dict[str, Any] = {
                "do_remote_prefill": True,
                "remote_block_ids": [],
                "remote_engine_id": "",
                "remote_request_id": f"{request_id}-0",
                "remote_host": FREE,
                "remote_port": 0,
            }
            await self.llm.notify_kv_transfer_request_rejected(
                f"{request_id}-free-{rank}",
                params,
                data_parallel_rank=rank if self.ranks > 1 else None,
            )

    async def load_adapter(self, name: str, path: str) -> bool:
        """Load a LoRA adapter, in place of one of the same name.

        Returns:
            Whether the KV cache was forgotten: blocks of another adapter of the name were in it.

        Raises:
            InvalidRequest: vLLM does not take it, and why.
        """
        self._adapter_numbers += 1
        request = vllm_module("lora.request").LoRARequest(name, self._adapter_numbers, path)
        try:
            await self.llm.add_lora(request)
        except Exception as error:
            raise InvalidRequest(
                f"vLLM does not load the adapter {name!r}: {describe_exception(error)}"
            ) from error
        if name in self.adapters:
            # None may run with it while blocks of the former are in the cache.
            await self.unload_adapter(name)
        had_another = name in self.unloaded
        if had_another:
            await self.llm.reset_prefix_cache(reset_running_requests=True)
            del self.unloaded[name]
        self.adapters[name] = request
        return had_another

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            InvalidRequest: there is none of the name.
        """
        if name not in self.adapters:
            raise InvalidRequest(f"no adapter {name!r} is loaded{suggestion(name, self.adapters)}")
        self.unloaded[name] = monotonic()
        await self.llm.remove_lora(self.adapters.pop(name).lora_int_id)

    async def find_pooling(self) -> Pooling:
        """The output of a model that it runs for pooling.

        Raises:
            ConfigError: neither embeddings nor scores of pairs that a front end can put together.
        """
        tasks: list[str] = list(await self.llm.get_supported_tasks())
        if "embed" in tasks:
            return Pooling(scores=False)
        config = self.llm.vllm_config.model_config
        labels = getattr(config.hf_config, "num_labels", 0)
        if "classify" not in tasks or labels != 1:
            raise ConfigError(
                "vLLM makes neither embeddings nor scores with this model; it supports "
                f"{', '.join(tasks)}, with {labels} labels"
            )
        if not config.use_sep_token:
            raise ConfigError(
                "this model scores prompts that are written for it, and not pairs of texts: serve "
                "it by `vllm serve`, and that by OpenAiWorker with task=score"
            )
        types = getattr(config.hf_config, "type_vocab_size", 0) or 0
        return Pooling(scores=True, tells_texts_apart=types > 1)

    async def sleep(self, level: int) -> None:
        """Give the memory of the device to others; running requests are aborted."""
        self.rests = True
        try:
            await self.llm.sleep(level)
        except BaseException:
            self.rests = False
            raise

    async def wake_up(self, tags: list[str] | None) -> None:
        """Take the memory of the device again, or such parts of it."""
        await self.llm.wake_up(tags)
        self.rests = await self.llm.is_sleeping()

    def describe_processes(self) -> str:
        return describe_processes()

    def check(self) -> None:
        """Make sure that its processes are there.

        Raises:
            EngineGone: they are not.
        """
        if self.llm.errored:
            cause = self._folder.first_error()
            raise EngineGone(f"vLLM has ended: {cause or 'its processes are gone'}")

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.llm.shutdown, STOP_TIMEOUT)
            await anyio.to_thread.run_sync(self._folder.remove)


def _reachable(endpoint: str) -> str:
    """The address at which others connect to an endpoint that is bound there."""
    return endpoint.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:")


# Requests -----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Submitted:
    """A request that vLLM has.

    Attributes:
        sampling: of each continuation, by its name in vLLM; of a text to embed its pooling.
        options: what else `AsyncLLM.generate` or `AsyncLLM.encode` gets.
        has_output: whether something was made for it.
        again: its output that was sent before, where vLLM makes that once more; None elsewhere.
        restarts: whether its sampler begins anew in the middle of an output.
        reads: whether vLLM was told to read what another engine has computed.
        decided: set once something was made for it, or it has ended.
        attempts: how often vLLM was given it anew.
        open: continuations that have not ended.
    """

    request: EngineRequest
    sampling: dict[str, Any]
    options: dict[str, Any]
    has_output: bool = False
    again: Again | None = None
    restarts: bool = False
    reads: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    attempts: int = 0
    open: int = 1


class VllmStepper:
    """Gives requests to vLLM, and hands over at once what its steps make for all of them."""

    def __init__(self, engine: VllmEngine, listener: Listener) -> None:
        self._engine = engine
        self._listener = listener
        self._submitted: dict[str, _Submitted] = {}
        self._followed: dict[str, asyncio.Event] = {}
        self._tasks: TaskGroup | None = None
        self._early: list[str] = []
        self._outputs: list[tuple[str, Generated]] = []
        self._prefilled: list[Prefill] = []
        self._failures: list[tuple[str, str]] = []
        self._held: list[Held] = []
        self._reserved: dict[str, GenerateRequest] = {}
        # Prompts that are computed for others: what is held of them is None before.
        self._prompts: dict[str, ConnectorTicket | None] = {}
        self._embedded: list[tuple[str, Embedded]] = []
        self._aborted: list[str] = []
        self._news = asyncio.Event()

    def count_steps(self) -> tuple[Turn, int]:
        """See `WatchedStepper`. The steps are those of all ranks together; one that reads what
        another engine has computed waits for that one."""
        engine = self._engine
        has_work = not engine.rests and any(
            entry.has_output or not entry.reads for entry in list(self._submitted.values())
        )
        return (Turn.BUSY if has_work else Turn.IDLE), engine.steps_ended

    def add(self, request_id: str, request: EngineRequest) -> None:
        try:
            self._submitted[request_id] = self._prepare(request_id, request)
        except Exception as error:  # noqa: BLE001 - a client's mistake, as vLLM sees it too
            self._listener.on_refused(request_id, error)
            return
        if self._tasks is None:
            self._early.append(request_id)
        else:
            self._begin(self._tasks, request_id)

    def cancel(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
        entry = self._remove(request_id)
        if entry is not None:
            self._abort(*entry.sampling)

    # Prompts that others compute, and that are computed for others ----------------------------

    @property
    def holds(self) -> bool:
        return self._engine.hands_over

    def reserve(self, request_id: str, request: GenerateRequest) -> None:
        """Have a request wait for `read` or `deliver`: vLLM finds its blocks when it reads."""
        try:
            check_request(request, self._engine.limits)
            sampling_params(request, 0, None)
        except Exception as error:  # noqa: BLE001 - a client's mistake, as vLLM sees it too
            self._listener.on_refused(request_id, error)
            return
        self._reserved[request_id] = request
        self._hold(Held(request_id, (), 0, 0))

    def read(
        self, request_id: str, ticket: ConnectorTicket, seed: int, shown: Generated | None
    ) -> None:
        """Have a request that waits read what another engine has computed, and go on from there.

        Args:
            ticket: of that engine, by the clock of this one.
            seed: of its draws where it has none, and is none of a CPU's.
            shown: the first token of its output, which was sent already.
        """
        request = self._reserved.pop(request_id, None)
        if request is not None:
            self.add(request_id, _reading(drawn_alike(request, seed, self._engine), ticket, shown))

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        """Have a request go on that waits, or that reads and has not read all: its prompt is
        computed here. Blocks that may still be written into are not used for others."""
        request = self._reserved.pop(request_id, None)
        entry = self._submitted.get(request_id)
        if request is not None:
            self.add(request_id, _reading(request, None, first))
        elif entry is not None and entry.reads and not entry.has_output:
            reading = cast("ReadingRequest", entry.request)
            self._begin_anew(
                request_id, entry, msgspec.structs.replace(reading, kv_transfer_params=None)
            )

    def add_held(self, request_id: str, request: GenerateRequest) -> None:
        self._prompts[request_id] = None
        self.add(request_id, PromptRequest(**_fields(request)))

    def hold(self, hold_id: str, request: GenerateRequest) -> None:
        self._listener.on_refused(hold_id, ValueError("vLLM lends nothing of its cache"))

    def take_ticket(self, request_id: str) -> ConnectorTicket | None:
        """The ticket of a prompt that was computed for another engine, once: from now on that one
        says when it has read it. None where nothing is held."""
        ticket = self._prompts.get(request_id)
        if ticket is not None:
            del self._prompts[request_id]
        return ticket

    def release(self, hold_id: str) -> None:
        """Free what was computed for another engine, and not taken by it."""
        if hold_id in self._prompts:
            del self._prompts[hold_id]
            self.free(hold_id)

    def free(self, request_id: str) -> None:
        """Free what was computed for another engine, soon."""
        assert self._tasks is not None, "it was computed"
        self._tasks.start_soon(self._free, request_id)

    async def _free(self, request_id: str) -> None:
        try:
            await self._engine.free(request_id)
        except Exception:
            # They are free when their lease is over.
            logger.exception("%s: its blocks cannot be freed now", request_id)

    def _hold(self, held: Held) -> None:
        self._held.append(held)
        self._news.set()

    async def own_output(self, request_id: str) -> bool:
        """Wait until vLLM has made something for a request, or has it no longer.

        Returns:
            Whether it has made something, and so has read what it will read.
        """
        entry = self._submitted.get(request_id)
        if entry is None:
            return False
        await entry.decided.wait()
        return entry.has_output

    async def left(self, request_id: str) -> None:
        """Wait until vLLM says nothing more of a request, as it was given it first."""
        followed = self._followed.get(f"{request_id}-0")
        if followed is not None:
            await followed.wait()

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
        embedded, self._embedded = self._embedded, []
        held, self._held = self._held, []
        step = Step(outputs, failures=failures, prefilled=prefilled, embedded=embedded, held=held)
        self._listener.on_step(step, self._engine.load, monotonic())

    def _prepare(self, request_id: str, request: EngineRequest) -> _Submitted:
        """The arguments of vLLM for a request.

        Raises:
            ValueError, VLLMClientError: a value is not usable.
            Unavailable: its adapter was unloaded.
        """
        engine = self._engine
        options = self._options(request)
        if isinstance(request, EmbedRequest):
            if not engine.only_embeds:
                raise ValueError(NO_EMBEDDINGS)
            check_embedding(request, engine.limits)
            return _Submitted(
                request, {request_id: pooling_params(request, engine.pooling)}, options
            )
        if engine.only_embeds:
            made = "scores" if engine.pooling.scores else "embeddings"
            raise ValueError(f"this engine makes {made} alone: ask another one for tokens")
        check_request(request, engine.limits)
        again = _shown_of(request)
        restarts = request.generated > 0
        form = request.structured
        if form is not None and request.generated:
            again = Again(request.output)
            request = request.from_its_beginning()
            options["prompt"]["prompt_token_ids"] = request.token_ids
            restarts = False
        reasoning = engine.llm.vllm_config.structured_outputs_config.reasoning_parser
        if reasoning and form is not None and not (form.thinking and form.thinking.begun):
            # It would wait for the end of what may never be thought.
            options["reasoning_ended"] = True
        rank = context().metadata.get(DP_RANK_KEY)
        if engine.ranks > 1 and rank:
            options["data_parallel_rank"] = int(rank)
        report = None if engine.report_mode is None else engine.report_mode()
        sampling = {
            f"{request_id}-{number}": sampling_params(request, number, report)
            for number in range(request.n)
        }
        entry = _Submitted(
            request, sampling, options, again=again, restarts=restarts, open=request.n
        )
        if isinstance(request, ReadingRequest):
            entry.reads = request.kv_transfer_params is not None
        return entry

    def _begin_anew(self, request_id: str, former: _Submitted, request: GenerateRequest) -> None:
        """Give vLLM another request in place of one that it has, of one continuation."""
        assert self._tasks is not None, "vLLM has it already"
        self._abort(*former.sampling)
        attempts = former.attempts + 1
        prompt = {**former.options["prompt"], "prompt_token_ids": request.token_ids}
        entry = _Submitted(
            request,
            {f"{request_id}-0-{attempts}": sampling_params(request, 0, None)},
            {**former.options, "prompt": prompt},
            has_output=former.has_output,
            again=_shown_of(request),
            decided=former.decided,
            attempts=attempts,
            restarts=former.restarts,
        )
        self._submitted[request_id] = entry
        self._begin(self._tasks, request_id)

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        """The arguments of vLLM for a request of either kind.

        Raises:
            ValueError: there is no such adapter.
            Unavailable: its adapter was unloaded.
        """
        engine = self._engine
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        options: dict[str, Any] = {"prompt": prompt}
        if request.lora_name is not None:
            unloaded = engine.unloaded.get(request.lora_name, -UNLOAD_KNOWN_AFTER)
            if monotonic() - unloaded < UNLOAD_KNOWN_AFTER:
                # Another instance may have it.
                raise Unavailable(f"the adapter {request.lora_name!r} was unloaded", started=False)
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
        if config.observability_config.otlp_traces_endpoint is not None:
            options["trace_headers"] = context().trace_headers()
        return options

    def _begin(self, tasks: TaskGroup, request_id: str) -> None:
        entry = self._submitted.get(request_id)
        if entry is None:
            return
        if isinstance(entry.request, EmbedRequest):
            tasks.start_soon(self._embed, request_id, entry)
            return
        for number, name in enumerate(entry.sampling):
            self._followed[name] = asyncio.Event()
            tasks.start_soon(self._follow, request_id, entry, name, entry.request.index + number)

    async def _follow(self, request_id: str, entry: _Submitted, name: str, index: int) -> None:
        """Read what vLLM makes for one continuation."""
        try:
            await self._read(request_id, entry, name, index)
        finally:
            self._followed.pop(name).set()

    async def _read(self, request_id: str, entry: _Submitted, name: str, index: int) -> None:
        generate = self._engine.llm.generate
        output: Any = None
        with self._ending(request_id, entry):
            async for output in generate(
                sampling_params=entry.sampling[name], request_id=name, **entry.options
            ):
                if self._submitted.get(request_id) is entry:
                    self._accept(request_id, entry, index, output)
                elif not output.finished:
                    # It was cancelled before vLLM had it.
                    self._abort(name)
                elif isinstance(entry.request, PromptRequest):
                    # The same, and nobody else knows that it is held.
                    await self._engine.free(request_id)
            if self._submitted.get(request_id) is entry and (output is None or not output.finished):
                self._fail(request_id, "vLLM ended its stream without a finish reason")

    async def _embed(self, request_id: str, entry: _Submitted) -> None:
        """Read the embedding that vLLM makes of a text."""
        encode = self._engine.llm.encode
        with self._ending(request_id, entry):
            async for output in encode(
                pooling_params=entry.sampling[request_id],
                request_id=request_id,
                **entry.options,
            ):
                if self._submitted.get(request_id) is entry and output.finished:
                    self._remove(request_id)
                    self._embedded.append((request_id, embedded(output)))
                    self._news.set()
            if self._submitted.get(request_id) is entry:
                self._fail(request_id, "vLLM ended its stream without a finish reason")

    @contextmanager
    def _ending(self, request_id: str, entry: _Submitted) -> Generator[None]:
        """End a request with what vLLM raises for it.

        Raises:
            EngineGone: all of vLLM has ended.
        """
        errors: Any = vllm_module("exceptions")
        try:
            yield
        except vllm_module("v1.engine.exceptions").EngineDeadError as error:
            self._engine.check()
            raise EngineGone("vLLM has ended") from error
        except errors.VLLMClientError as error:
            self._refuse(request_id, entry, ValueError(str(error)))
        except getattr(errors, "GracefulHTTPError", ()) as error:  # which vLLM 0.28 has not
            self._refuse(request_id, entry, Overloaded(str(error)))
        except Exception as error:  # noqa: BLE001 - of this request alone
            self._fail(request_id, describe_exception(error))

    def _accept(self, request_id: str, entry: _Submitted, index: int, output: Any) -> None:
        made = output.outputs[0]
        reason = made.finish_reason
        if reason is not None and reason not in FINISH_REASONS:
            self._fail(request_id, f"vLLM ended it with {reason!r}")
            return
        if not made.token_ids and reason is None:
            return
        cached = None
        if not entry.has_output:
            entry.has_output = True
            entry.decided.set()
            if not entry.reads:
                cached = output.num_cached_tokens or 0
            self._prefilled.append(Prefill(request_id, cached or 0, 1))
        request = cast("GenerateRequest", entry.request)
        item = generated(made, request, index, cached)
        if entry.again is not None:
            try:
                new = entry.again.new_of(item)
            except ResumeMismatch as error:
                if _shown_of(request) is not None:
                    self._go_on_from_shown(request_id, entry)
                else:
                    self._refuse(request_id, entry, error)
                    self._abort(*entry.sampling)
                return
            if new is None:
                return
            item = new
        if entry.restarts and reason is not None:
            item = msgspec.structs.replace(item, sampler_restarted=True)
        if isinstance(request, PromptRequest):
            if output.kv_transfer_params is None or item.finish_reason is None:
                self._fail(request_id, "vLLM does not hold what it has computed")
                return
            until = monotonic() + self._engine.lease
            self._prompts[request_id] = ConnectorTicket(output.kv_transfer_params, until)
            self._held.append(Held(request_id, (), len(request.token_ids), cached or 0))
        self._outputs.append((request_id, item))
        self._news.set()
        if reason is not None:
            entry.open -= 1
            if not entry.open:
                self._remove(request_id)

    def _go_on_from_shown(self, request_id: str, entry: _Submitted) -> None:
        """Go on from the first token that was sent: this engine has drawn another, as engines do
        that round otherwise, or draw at random."""
        logger.debug("%s: the engine that computed the prompt drew another token", request_id)
        request = cast("ReadingRequest", entry.request)
        assert request.shown is not None, "another token was shown"
        rest = request.continued([request.shown], request.index)
        rest = msgspec.structs.replace(rest, kv_transfer_params=None, shown=None)
        try:
            self._begin_anew(request_id, entry, rest)
        except ValueError as error:
            self._fail(request_id, str(error))

    def _refuse(self, request_id: str, entry: _Submitted, error: Exception) -> None:
        if self._submitted.get(request_id) is entry:
            self._remove(request_id)
            self._listener.on_refused(request_id, error)

    def _remove(self, request_id: str) -> _Submitted | None:
        entry = self._submitted.pop(request_id, None)
        if entry is not None:
            entry.decided.set()
        return entry

    def _fail(self, request_id: str, reason: str) -> None:
        entry = self._remove(request_id)
        if entry is not None:
            self._failures.append((request_id, reason))
            self._abort(*entry.sampling)

    def _abort(self, *names: str) -> None:
        self._aborted += names
        self._news.set()


def _fields(request: GenerateRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in GenerateRequest.__struct_fields__}


def _shown_of(request: GenerateRequest) -> Again | None:
    """The first token that was sent already of a request; None where none was."""
    shown = request.shown if isinstance(request, ReadingRequest) else None
    return None if shown is None else Again([shown])


def _reading(
    request: GenerateRequest, ticket: ConnectorTicket | None, shown: Generated | None
) -> ReadingRequest:
    """The request of which another engine has computed the prompt, or was to."""
    return ReadingRequest(
        **_fields(request),
        kv_transfer_params=None if ticket is None else ticket.kv_transfer_params,
        held_until=0.0 if ticket is None else ticket.until,
        shown=None if shown is None else shown.token_ids[0],
    )


def drawn_alike(request: GenerateRequest, seed: int, engine: VllmEngine) -> GenerateRequest:
    """The request with a seed, where two engines would draw different first tokens without one.

    On CPUs it has none: vLLM fails there with a seeded request whose prompt takes several steps.
    """
    sampling = request.sampling
    if engine.is_cpu or sampling.temperature == 0 or sampling.seed is not None:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=seed))


# How busy it is -----------------------------------------------------------------------------


@dataclass(slots=True)
class RankLoad:
    """The load of a data-parallel rank after its last step; tokens, preemptions and steps of all
    time.

    Attributes:
        usage: share of its blocks that requests use.
        steps: that it has told of.
    """

    steps: int = 0
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
            load.steps += 1
            load.running = scheduler_stats.num_running_reqs
            load.waiting = scheduler_stats.num_waiting_reqs
            load.usage = scheduler_stats.kv_cache_usage
            load.queries += scheduler_stats.prefix_cache_stats.queries
            load.hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            load.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing is to be said."""


def counting(counts: list[RankLoad]) -> type:
    """The class by which vLLM counts into `counts`, once for each rank."""
    base: type = vllm_module("v1.metrics.loggers").StatLoggerBase
    return type("Counter", (_Counter, base), {"counts": counts})
