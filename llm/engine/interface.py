"""What an engine is: something that takes requests, and makes tokens for many of them by steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from dynbus.kvrouter.events import KvEvent
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.generation import Generated, GenerateRequest

ANY_TOKENS: Final = 1 << 32
"""A vocabulary that no token id is above: they are from 0 to 2^32 - 1."""

NO_EMBEDDINGS: Final = "this engine makes no embeddings: ask for tokens"


class RequestTooLong(ValueError):
    """A request does not fit into the context or the cache of the engine, even alone."""


class StepFailed(Exception):
    """Raised by `Engine.step` where it is known which requests may have made it fail.

    Attributes:
        request_ids: these requests; all that have had a token where it is empty. They end with
            `HandlerError`, which nobody sends again: it would break the next engine. All others
            may go elsewhere.
    """

    def __init__(self, reason: str, request_ids: Collection[str]) -> None:
        super().__init__(reason)
        self.request_ids = request_ids


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine tells of itself.

    Attributes:
        block_size: tokens of a block of its KV cache.
        blocks: how many blocks the cache has.
        max_num_seqs: requests that run at a time; others wait.
        max_num_batched_tokens: tokens that one step computes.
        context_length: the most tokens that a prompt and its output may have.
        has_events: whether its steps tell what the cache stored and removed.
        vocabulary: token ids are below it.

    Raises:
        ValueError: a limit is below 1, or more requests may run than a step has tokens.
    """

    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int
    has_events: bool = True
    vocabulary: int = ANY_TOKENS

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks", "max_num_seqs", "context_length", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be 1 at least")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than "
                f"max_num_seqs = {self.max_num_seqs}: every running request needs a token of a "
                "step"
            )


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, between two steps.

    Attributes:
        running, waiting: requests, or continuations of them.
        active_blocks: blocks that running requests use.
        cached_tokens, prompt_tokens: of all requests so far; their ratio is the hit rate.
        preempted: how many requests lost their blocks so far.
    """

    running: int
    waiting: int
    active_blocks: int
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preempted: int = 0


class LoadMetrics(msgspec.Struct, frozen=True):
    """How busy an engine is, as its endpoint `load_metrics` says it, by the names that routers of
    Dynamo's workers know.

    Attributes:
        request_active_slots, num_requests_waiting: requests that run, and that wait.
        request_total_slots: how many may run.
        kv_active_blocks, kv_total_blocks: blocks of the cache that requests use, and all.
        gpu_cache_usage_perc: their ratio, from 0 to 1.
        gpu_prefix_cache_hit_rate: share of all prompt tokens so far that were found in the cache.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0

    @classmethod
    def of(cls, load: EngineLoad, limits: EngineLimits) -> LoadMetrics:
        return cls(
            request_active_slots=load.running,
            request_total_slots=limits.max_num_seqs,
            kv_active_blocks=load.active_blocks,
            kv_total_blocks=limits.blocks,
            num_requests_waiting=load.waiting,
            gpu_cache_usage_perc=load.active_blocks / limits.blocks,
            gpu_prefix_cache_hit_rate=(
                load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
            ),
        )


class Prefill(NamedTuple):
    """How the prompt of a request was computed.

    Attributes:
        cached_tokens: that were found in the cache.
        chunks: steps that computed a part of it.
    """

    request_id: str
    cached_tokens: int
    chunks: int


class Step(NamedTuple):
    """What one step made.

    Attributes:
        outputs: request ids, each with what was made for it; a request with `n` may be there
            several times. One that ended with `finish_reason` in all its continuations is gone.
        events: what the KV cache stored and removed, in order.
        failures: ids of requests that cannot go on, and why: they are gone. What stops the whole
            engine is raised.
        refusals: ids of requests that ask for what shows to be impossible only while they run, and
            why, which their callers are told: they are gone.
        delay: seconds until the outputs are there, for an engine that models time and computes
            nothing; 0 for one that computed.
        admitted: ids of requests that waited until this step; an engine that does not know leaves
            them out, and is shown without its queue.
        prefilled: requests whose first token is among the outputs.
        embedded: ids of requests for embeddings that have ended, each with its own.
    """

    outputs: Sequence[tuple[str, Generated]]
    events: Sequence[KvEvent] = ()
    delay: float = 0.0
    failures: Sequence[tuple[str, str]] = ()
    admitted: Sequence[str] = ()
    prefilled: Sequence[Prefill] = ()
    embedded: Sequence[tuple[str, Embedded]] = ()
    refusals: Sequence[tuple[str, str]] = ()


class Engine(Protocol):
    """An engine. One thread at a time uses it: `EngineRunner` sees to that.

    Attributes:
        limits: do not change.
        computes: whether `step` takes its time by computing, so that it belongs into a thread.
    """

    limits: EngineLimits
    computes: bool

    @property
    def has_work(self) -> bool:
        """Whether there is a request to step for."""
        ...

    @property
    def load(self) -> EngineLoad:
        """How busy it is now."""
        ...

    def add(self, request_id: str, request: GenerateRequest) -> None:
        """Take in a request; it waits for a step that has room for it.

        Raises:
            RequestTooLong: its prompt and output do not fit.
            ValueError: a value is not usable, and which; or the id is in use.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its blocks; nothing for an unknown one."""
        ...

    def step(self) -> Step:
        """Compute the next tokens of all requests that have room.

        Raises:
            StepFailed: the engine has failed, and for whose sake.
            Exception: it has failed. Those requests count as the cause that were added just before
                this step; if there are none, all that have had a token.
        """
        ...


@runtime_checkable
class EmbeddingEngine(Engine, Protocol):
    """An engine that embeds texts, too, in the same steps."""

    def add_embedding(self, request_id: str, request: EmbedRequest) -> None:
        """Take in a text; the step that computes the last of it has its embedding.

        Raises:
            RequestTooLong: it does not fit.
            ValueError: a value is not usable, and which; or the id is in use.
        """
        ...


@runtime_checkable
class PreparingEngine(Engine, Protocol):
    """An engine that can do a part of taking in a request beforehand, beside its steps."""

    def prepare(self, request: GenerateRequest) -> None:
        """Have ready what takes time of a request; called in any thread, before `add`.

        Raises:
            ValueError: a value is not usable, and which.
        """
        ...


EngineRequest = GenerateRequest | EmbedRequest


class Listener(Protocol):
    """Who hears what an engine does, on the event loop."""

    def on_step(self, step: Step, load: EngineLoad, began: float) -> None:
        """A step has ended, or requests were taken in or cancelled.

        Args:
            began: when the step did, on the monotonic clock.
        """
        ...

    def on_refused(self, request_id: str, error: Exception) -> None:
        """The engine has not taken in a request: `ValueError`, or an error for its caller."""
        ...

    def on_idle(self, taken: int) -> None:
        """The engine has no work left, after it was given so many requests."""
        ...


class Stepper(Protocol):
    """Steps an engine. `add` and `cancel` are called on the event loop."""

    def add(self, request_id: str, request: EngineRequest) -> None:
        """Have the engine take in a request before its next step."""
        ...

    def cancel(self, request_id: str) -> None:
        """Have the engine forget a request before its next step."""
        ...

    async def run(self) -> None:
        """Step until cancelled.

        Raises:
            StepFailed: the engine raised.
            Exception: what the listener raised, or why the engine is gone.
        """
        ...


class RunningEngine(ABC):
    """An engine that steps itself, in processes of its own.

    Attributes:
        limits: do not change.
    """

    limits: EngineLimits

    @abstractmethod
    def stepper(self, listener: Listener) -> Stepper:
        """What gives it requests and hears what it makes; asked for once."""

    @abstractmethod
    async def aclose(self) -> None:
        """End its processes."""
