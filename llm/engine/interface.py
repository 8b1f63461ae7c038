"""The interface of an engine: it takes requests, and makes tokens for many of them by steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeGuard,
    runtime_checkable,
)

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter import KvEvent
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.generation import Generated, GenerateRequest

if TYPE_CHECKING:
    from dynbus.transfer import KvMemory

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
    """The limits of an engine, as it tells them itself.

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
    """The load of an engine, between two steps.

    Attributes:
        running, waiting: requests, or continuations of them.
        active_blocks: blocks that running requests use, or that are held.
        cached_tokens, prompt_tokens: of all requests so far; their ratio is the hit rate.
        preempted: how many requests lost their blocks so far.
        held_blocks: of all holds, each counted as often as it is held; 0 at rest.
    """

    running: int
    waiting: int
    active_blocks: int
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preempted: int = 0
    held_blocks: int = 0


class LoadMetrics(msgspec.Struct, frozen=True):
    """The load of an engine, as its endpoint `load_metrics` says it, by the names that routers of
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
    """The facts of how the prompt of a request was computed.

    Attributes:
        cached_tokens: that were found in the cache.
        chunks: steps that computed a part of it.
    """

    request_id: str
    cached_tokens: int
    chunks: int


class Held(NamedTuple):
    """Blocks that stay what they are until they are released.

    Attributes:
        hold_id: of the hold; that of its request where it has one.
        blocks: of the prompt, in the order of its tokens.
        computed: how many tokens of the prompt are in them, from the first on. Those of a request
            that waits for its blocks to be delivered are the cached ones.
        cached: how many of these were found in the cache.
    """

    hold_id: str
    blocks: tuple[int, ...]
    computed: int
    cached: int


class Step(NamedTuple):
    """The results of one step.

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
        held: holds that are new or have more tokens than before, of a `TransferringEngine`; and
            what was announced to an `AnnouncedEngine`.
    """

    outputs: Sequence[tuple[str, Generated]]
    events: Sequence[KvEvent] = ()
    delay: float = 0.0
    failures: Sequence[tuple[str, str]] = ()
    admitted: Sequence[str] = ()
    prefilled: Sequence[Prefill] = ()
    embedded: Sequence[tuple[str, Embedded]] = ()
    refusals: Sequence[tuple[str, str]] = ()
    held: Sequence[Held] = ()


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
        """True if there is a request to step for."""
        ...

    @property
    def load(self) -> EngineLoad:
        """The load of the engine now."""
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


class EmbeddingEngine(Engine, Protocol):
    """An engine that embeds texts, too, in the same steps."""

    def add_embedding(self, request_id: str, request: EmbedRequest) -> None:
        """Take in a text; the step that computes the last of it has its embedding.

        Raises:
            RequestTooLong: it does not fit.
            ValueError: a value is not usable, and which; or the id is in use.
        """
        ...


class PreparingEngine(Engine, Protocol):
    """An engine that can do a part of taking in a request beforehand, beside its steps."""

    def prepare(self, request: GenerateRequest) -> None:
        """Have ready what takes time of a request; called in any thread, before `add`.

        Raises:
            ValueError: a value is not usable, and which.
        """
        ...


class TransferringEngine(Engine, Protocol):
    """An engine whose blocks are read and written by others, which it keeps in place for them.

    What is held stays held until `release`, whatever becomes of the request: nobody else gets the
    blocks, and the engine writes into none that it has told of as computed.

    Attributes:
        memory: where its blocks lie.
    """

    memory: KvMemory

    @property
    def is_waiting(self) -> bool:
        """True if it has requests, all of which wait for `deliver` or for `release`."""
        ...

    def reserve(self, request_id: str, request: GenerateRequest) -> None:
        """Take in a request whose prompt is computed elsewhere, and hold its blocks.

        It waits in line for room like others; `Step.held` tells the blocks that it then has, of
        which `Held.cached` tokens need not come. It waits for `deliver`.

        Raises:
            RequestTooLong: its prompt and output do not fit.
            ValueError: a value is not usable, and which; it has several continuations; or the id
                is in use, by a request or a hold.
        """
        ...

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        """End the wait of a reserved request, once; nothing for one that does not wait.

        The request goes on here with what it lacks. Where its whole prompt is delivered and `first`
        given, that is its second token. Otherwise it is computed as if it had been preempted: the
        complete blocks that were delivered are found in the cache, and none of its other blocks is
        written or read any more, so that a transfer that was given up may still end in them.

        Args:
            computed: tokens of the prompt that are in its blocks, from the first on, and proven to
                be; fewer than the cached ones count as these.
            first: the first token of its output, which is not among the outputs of any step here;
                None where it is to be drawn.
        """
        ...

    def add_held(self, request_id: str, request: GenerateRequest) -> None:
        """Take in a request of which the prompt and one token are computed here; hold its blocks.

        The token is the one that `add` would give first, whatever `max_tokens` is. Its
        `finish_reason` is "stop" if it ends the output, else "length". `Step.held` tells after
        each step how much of the prompt is computed.

        Raises:
            RequestTooLong: its prompt does not fit.
            ValueError: as by `reserve`.
        """
        ...

    def hold(self, hold_id: str, request: GenerateRequest) -> None:
        """Hold what is cached of the prompt of a request that is not taken in.

        The next step's `Step.held` tells the blocks, none of them if nothing is cached.

        Raises:
            ValueError: a value is not usable, and which; or the id is in use.
        """
        ...

    def release(self, hold_id: str) -> None:
        """End a hold, or have none for its request; nothing for an unknown one.

        Blocks that no request uses are free then.
        """
        ...


class AnnouncedEngine(Engine, Protocol):
    """An engine that has the blocks of a conversation ready before its next request comes."""

    def announce(self, name: str, owner: str, session: str) -> None:
        """Have what the tier below keeps of a conversation in the cache, as far as there is room
        beside the blocks that are in use; nothing holds it there.

        The next step's `Step.held` tells by this name how many tokens are there then, and how many
        were before (`Held.cached`); it has no blocks.
        """
        ...


class WitnessedEngine(Engine, Protocol):
    """An engine that has a `KvWitness`, and lets it do its checks while there is no work."""

    def idle_for(self) -> float | None:
        """See `KvWitness`; None also while it has requests, such as those that wait for others."""
        ...

    def check(self) -> Step:
        """Have the witness do a piece of work; the step tells what the cache lost by it."""
        ...

    def note_source(self, request_id: str, source: str) -> None:
        """The blocks that are to be delivered to a reserved request come from this instance."""
        ...


# `isinstance` would read an engine's properties, in the thread that asks, while another computes.


def embeds(engine: object) -> TypeGuard[EmbeddingEngine]:
    """True if an engine is an `EmbeddingEngine`: it has `add_embedding`. Any thread may ask."""
    return hasattr(engine, "add_embedding")


def prepares(engine: object) -> TypeGuard[PreparingEngine]:
    """True if an engine is a `PreparingEngine`: it has `prepare`. Any thread may ask."""
    return hasattr(engine, "prepare")


def transfers(engine: object) -> TypeGuard[TransferringEngine]:
    """True if an engine is a `TransferringEngine`: it has `memory`. Any thread may ask."""
    return hasattr(engine, "memory")


def takes_announcements(engine: object) -> TypeGuard[AnnouncedEngine]:
    """True if an engine is an `AnnouncedEngine`: it has `announce`. Any thread may ask."""
    return hasattr(engine, "announce")


def is_witnessed(engine: object) -> TypeGuard[WitnessedEngine]:
    """True if an engine is a `WitnessedEngine`: it has `idle_for`. Any thread may ask."""
    return hasattr(engine, "idle_for")


EngineRequest = GenerateRequest | EmbedRequest


class Listener(Protocol):
    """The hearer of what an engine does, on the event loop."""

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


Came = Literal["computed", "cached", "host", "moved"]
"""The way by which blocks came to a request: it computed them, they were in the engine's cache, on
the host, or came from another instance."""


class KvWitness(Protocol):
    """The observer of where the blocks of requests come from, and of what is made of them.

    The engine's thread calls it.
    """

    def came(
        self,
        name: str,
        sequence_hashes: list[int],
        first: int,
        last: int,
        how: Came,
        source: str,
        stored: Sequence[CachedBlock],
    ) -> None:
        """A request or a hold has blocks from `first` to before `last`.

        With "cached" and `first` 0 it begins, or begins anew.

        Args:
            sequence_hashes: of all its complete blocks; the list grows as they do.
            source: the instance from which they were moved; empty where that is not known.
            stored: those of them that are in the cache from now on.
        """
        ...

    def drawn(self, name: str, token_ids: Sequence[int], logits: NDArray[np.float32]) -> None:
        """The first logits that the engine has computed for a request.

        Args:
            token_ids: before them; the list grows.
            logits: of shape [vocabulary]; to be read in this call only.
        """
        ...

    def idle_for(self) -> float | None:
        """Seconds for which an engine is to have no work until `check` is called; None for not at
        all."""
        ...

    def check(self) -> None:
        """Do a piece of work of one's own, which takes about as long as a step."""
        ...


class CachedBlock(NamedTuple):
    """A block of an engine's cache.

    Attributes:
        block: where its contents are.
        sequence_hash: by which the engine finds it again.
        parent_hash: that of the block before it; None at the beginning.
        block_hash: by which routers know its tokens.
    """

    block: int
    sequence_hash: int
    parent_hash: int | None
    block_hash: int


class BlockTier(Protocol):
    """The store of blocks for which an engine's cache has no room.

    The engine's thread calls it, between computations: what it does, all requests wait for.
    """

    def evicted(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        """These blocks are about to be written over: their contents are there until this returns.

        They are in the order in which they were evicted, the last ones of a prompt first.

        Args:
            cached: the block of a sequence hash that the cache goes on to have, if it does.
        """
        ...

    def find(self, sequence_hashes: Sequence[int]) -> int:
        """The number of these blocks that it has, from the first on."""
        ...

    def fill(self, blocks: Sequence[int], sequence_hashes: Sequence[int]) -> int:
        """Write the contents of what `find` has found into these blocks of the engine.

        Returns:
            How many it has written, from the first on: fewer only where some are lost.
        """
        ...

    def take_events(self) -> Sequence[KvEvent]:
        """The events of what it has stored and removed since the last call, in its order."""
        ...

    def keep_for(
        self,
        owner: str,
        session: str,
        sequence_hashes: Sequence[int],
        seconds: float,
        cached: Callable[[int], CachedBlock | None],
        replaced: str = "",
    ) -> None:
        """Keep blocks of a conversation for so long, those too that the cache gives up later.

        Args:
            owner: whose conversation it is; empty for nobody's.
            session: its name, or that of one of its branches.
            sequence_hashes: of its last request, the first block on.
            cached: the block of a sequence hash that the cache has, if it does.
            replaced: the branch that it goes on from, which is kept no longer; empty for none.
        """
        ...


class KeptBlocks(NamedTuple):
    """The blocks of a conversation, in their order.

    Attributes:
        block_hashes: by which routers know their tokens; 0 for those that the tier has not.
    """

    sequence_hashes: list[int]
    block_hashes: list[int]


class RememberingTier(BlockTier, Protocol):
    """A tier that knows which blocks it keeps for a conversation."""

    def blocks_of(self, owner: str, session: str) -> KeptBlocks:
        """The blocks that were last kept for a conversation; none once its time is over."""
        ...


def remembers(tier: BlockTier | None) -> TypeGuard[RememberingTier]:
    """True if a tier is a `RememberingTier`: it has `blocks_of`."""
    return hasattr(tier, "blocks_of")


class ForgettingTier(BlockTier, Protocol):
    """A tier that forgets blocks which turn out not to be what they should be."""

    def __contains__(self, sequence_hash: object) -> bool: ...

    def forget(self, sequence_hashes: Iterable[int]) -> list[int]:
        """Forget blocks, and all that follow them.

        Returns:
            The sequence hashes of all that were forgotten.
        """
        ...

    def close(self) -> None:
        """Forget all blocks, and keep none from now on."""
        ...


def forgets(tier: BlockTier | None) -> TypeGuard[ForgettingTier]:
    """True if a tier is a `ForgettingTier`: it has `forget`."""
    return hasattr(tier, "forget")


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


@runtime_checkable
class HoldingStepper(Stepper, Protocol):
    """A stepper of an engine that holds blocks for others; see `TransferringEngine` for what it is
    told. What is not done is refused to the listener."""

    @property
    def holds(self) -> bool:
        """True if the stepper's engine does so."""
        ...

    def reserve(self, request_id: str, request: GenerateRequest) -> None: ...
    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None: ...
    def add_held(self, request_id: str, request: GenerateRequest) -> None: ...
    def hold(self, hold_id: str, request: GenerateRequest) -> None: ...
    def release(self, hold_id: str) -> None: ...


class RunningEngine(ABC):
    """An engine that steps itself, in processes of its own.

    Attributes:
        limits: do not change.
    """

    limits: EngineLimits

    @abstractmethod
    def stepper(self, listener: Listener) -> Stepper:
        """The stepper that gives it requests and hears what it makes; asked for once."""

    def describe_processes(self) -> str:
        """The state of its processes as the system knows it, a line for each thread, for the log
        when it hangs; called from any thread."""
        return ""

    @abstractmethod
    async def aclose(self) -> None:
        """End its processes."""
