"""Runs an engine for many streams: what a step makes leaves at once, and nobody waits for others.

A stream whose reader has no credit gets no more items: what the engine makes for it is kept here,
joined to few items, until the reader goes on. It is at most what the request may have; and a reader
that takes nothing for `reader_stall_timeout` ends its call.

What is made for a request that does not want a stream is kept in the same way, but for its first
item: until a continuation ends, an item is full, or it has been kept for long enough.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import msgspec

from dynbus import (
    Cancelled,
    DynbusError,
    HandlerError,
    InvalidRequest,
    Reply,
    Unavailable,
    push_each,
)
from dynbus.kvrouter import KvEvent
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.generation import FinishReason, Generated, GenerateRequest, TokenLogprob
from dynbus.llm.structured import check_grammar
from dynbus.llm.turns import TenantThreads
from dynbus.spi import Openable, describe_exception, monotonic

from .interface import (
    Engine,
    EngineLoad,
    EngineRequest,
    Held,
    HoldingStepper,
    RunningEngine,
    Step,
    StepFailed,
    prepares,
    transfers,
)
from .step_watch import StepProgress, WatchedStepper
from .stepping import EngineStepper, stepper_of
from .tracing import EngineTrace

if TYPE_CHECKING:
    from dynbus.transfer import KvMemory

logger = logging.getLogger(__name__)

MAX_JOINED_TOKENS: Final = 128
"""Tokens of one continuation that are joined to one item at most."""


class EventSink(Protocol):
    """The receiver of an engine's KV events."""

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Hand over events, in order; must not block."""
        ...


@dataclass(slots=True)
class RequestTotals:
    """The sums over the requests of an engine so far.

    Attributes:
        submitted: requests that came.
        firsts, first_seconds: those with a first token, and the seconds from their coming until
            then.
        ended: those with a token that have ended, in whatever way.
        decoded_tokens, decode_seconds: the tokens of these but the first, and the seconds that
            they took.
    """

    submitted: int = 0
    firsts: int = 0
    first_seconds: float = 0.0
    ended: int = 0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0


class _Piece:
    """Items of one continuation that are sent as one."""

    __slots__ = ("cached_tokens", "finish_reason", "index", "logprobs", "token_ids")

    def __init__(self, item: Generated) -> None:
        self.index = item.index
        self.token_ids = list(item.token_ids)
        self.logprobs: list[TokenLogprob] | None = None
        if item.logprobs is not None:
            self.logprobs = list(item.logprobs)
        self.finish_reason: FinishReason | None = item.finish_reason
        self.cached_tokens = item.cached_tokens

    def join(self, item: Generated) -> bool:
        """Take in the next item, if it fits."""
        if self.finish_reason is not None or len(self.token_ids) >= MAX_JOINED_TOKENS:
            return False
        self.token_ids += item.token_ids
        if self.logprobs is not None and item.logprobs is not None:
            self.logprobs += item.logprobs
        self.finish_reason = item.finish_reason
        return True

    def item(self) -> Generated:
        return Generated(
            self.token_ids, self.index, self.logprobs, self.finish_reason, self.cached_tokens
        )


class _Stream:
    """One request's stream.

    Attributes:
        began: when it came, on the monotonic clock.
        first_at: when its first token was made.
        made: tokens that the engine has made for it.
        has_tokens: whether the engine has made a token for it.
        number: of the request, from 1 on in the order of their submission.
        open: continuations that have not ended.
        prompt: how many tokens its prompt has.
        gathers: whether few items are wanted.
        is_single: whether it ends with its first token in any case.
        kept: what is to be sent later; None where each item is sent at once.
        is_blocked: whether the reader has no credit.
    """

    __slots__ = (
        "began",
        "first_at",
        "gathers",
        "has_tokens",
        "is_blocked",
        "is_single",
        "kept",
        "made",
        "number",
        "open",
        "prompt",
        "reply",
        "request_id",
    )

    def __init__(
        self, number: int, request_id: str, reply: Reply[Generated], request: GenerateRequest
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.reply = reply
        self.open = set(range(request.index, request.index + request.n))
        self.prompt = len(request.token_ids)
        self.gathers = not request.stream
        self.is_single = request.max_tokens == 1
        self.kept: deque[_Piece] | None = deque() if self.gathers else None
        self.is_blocked = False
        self.has_tokens = False
        self.began = self.first_at = monotonic()
        self.made = 0

    def keep(self, item: Generated) -> bool:
        """Keep an item; whether what is kept is to be sent now."""
        kept = self.kept
        assert kept is not None, "each item is sent at once"
        piece = kept[-1] if kept else None
        if piece is not None and piece.index != item.index:
            piece = next((one for one in reversed(kept) if one.index == item.index), None)
        if piece is None or not piece.join(item):
            piece = _Piece(item)
            kept.append(piece)
        if self.is_blocked:
            return False
        # The first item tells routers that the prompt is computed.
        is_first = not self.has_tokens
        return (
            is_first or piece.finish_reason is not None or len(piece.token_ids) >= MAX_JOINED_TOKENS
        )


class _Text:
    """A text that is being embedded.

    Attributes:
        number: of the request, counted with those for tokens.
        tokens: how many it has.
        embedded: its embedding, or why there is none.
    """

    __slots__ = ("embedded", "number", "tokens")

    def __init__(self, number: int, tokens: int) -> None:
        self.number = number
        self.tokens = tokens
        self.embedded: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()

    def fail(self, error: DynbusError) -> None:
        if not self.embedded.done():
            self.embedded.set_exception(error)
            # The asker may be cancelled just now.
            self.embedded.exception()


class _Hold:
    """A hold of blocks, and the request of which only the prompt is computed where it is one's.

    Attributes:
        first: the token of such a request, or why there is none; None for any other hold.
        prompt: how many tokens its prompt has.
        held: what was told of it last, until somebody has taken it.
    """

    __slots__ = ("_changed", "_error", "began", "first", "held", "number", "prompt")

    def __init__(self, number: int, prompt: int, *, is_request: bool) -> None:
        self.number = number
        self.began = monotonic()
        self.prompt = prompt
        self.held: Held | None = None
        self.first: asyncio.Future[Generated] | None = None
        if is_request:
            self.first = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._error: DynbusError | None = None

    def put(self, held: Held) -> None:
        self.held = held
        self._changed.set()

    def fail(self, error: DynbusError) -> None:
        """Nothing more is told of it; the first reason counts."""
        if self._error is None:
            self._error = error
            self._changed.set()
        if self.first is not None and not self.first.done():
            self.first.set_exception(error)
            # The asker may be cancelled just now.
            self.first.exception()

    async def next(self) -> Held:
        while True:
            held, self.held = self.held, None
            if held is not None:
                return held
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()


class EngineRunner(Openable):
    """Steps an engine and sends what it makes. Use it with `async with`, on the event loop.

    An engine that computes is stepped in a thread of its own, else in a task of the loop that
    sleeps for as long as a step is said to take. Requests and cancellations reach it between steps.

    Args:
        sink: gets what the cache stored and removed when a step has ended; None for nobody.
        trace: is told of requests and steps, where somebody wants spans and times of them.
        kept_for: seconds for which the outputs of a request that wants no stream are kept at most;
            None for as long as they are few.
        failed: called with the reason when the engine has raised. Before that the requests end
            with `HandlerError` that may have been the cause (see `StepFailed`), so that nobody
            sends them to another engine; after it the others, with `Unavailable`.

    Attributes:
        limits: of the engine, which nobody else may use.
        load: of the engine after its last step.
        output_tokens: that it has made.
        totals: of its requests; those whose outputs go elsewhere have no more than a first token.
        failed_requests: how many ended since they could not go on, or may have made it fail.
    """

    def __init__(
        self,
        engine: Engine | RunningEngine,
        sink: EventSink | None = None,
        *,
        trace: EngineTrace | None = None,
        kept_for: float | None = None,
        failed: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        self.limits = engine.limits
        self._engine = engine
        self.load = EngineLoad(0, 0, 0)
        self.output_tokens = self.failed_requests = 0
        self.totals = RequestTotals()
        self._sink = sink
        self._trace = trace
        self._kept_for = kept_for
        self._sends_kept = monotonic()
        self._failed = failed
        self._submitted = 0
        self._made = 0
        self._streams: dict[str, _Stream] = {}
        self._by_reply: dict[Reply[Generated], _Stream] = {}
        self._texts: dict[str, _Text] = {}
        self._holds: dict[str, _Hold] = {}
        self._stepper = stepper = stepper_of(engine, self)
        self._holder: HoldingStepper | None = None
        if isinstance(stepper, HoldingStepper) and stepper.holds:
            self._holder = stepper
        # One at a time: the others' tokens need the cores.
        one = ThreadPoolExecutor(1, thread_name_prefix="dynbus-preparing")
        self._preparing = TenantThreads(one, 1)
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<EngineRunner [{len(self._streams)} streams] {self._engine!r}>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, name="engine")
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                if self._failure is None:
                    self._failure = Unavailable("the engine was stopped")
                self._fail_streams()

    async def _run(self) -> None:
        try:
            await self._stepper.run()
        except Exception as error:
            logger.exception("the engine failed: its requests end")
            self._failure = error
            reason = str(error) if isinstance(error, StepFailed) else describe_exception(error)
            for request_id in self._causes(error):
                self._fail(request_id, f"the engine failed with it: {reason}")
            if self._failed is not None:
                self._failed(f"its engine failed: {reason}")
            self._fail_streams()

    # Its progress ---------------------------------------------------------------------

    @property
    def tells_progress(self) -> bool:
        """True if the engine's stepper says how far it is."""
        return isinstance(self._stepper, WatchedStepper)

    def progress(self) -> StepProgress:
        """The progress of an engine that tells it; callable from any thread."""
        assert isinstance(self._stepper, WatchedStepper), "its caller has looked"
        turn, steps = self._stepper.count_steps()
        most = self.limits.max_num_batched_tokens
        # Copies, as the event loop goes on meanwhile.
        streams, holds = list(self._streams.values()), list(self._holds.values())
        texts = [text.tokens for text in list(self._texts.values())]
        prompts = [stream.prompt for stream in streams]
        prompts += [hold.prompt for hold in holds if hold.first is not None]
        if self.load.preempted:
            # One that was preempted is computed again, with its prompt.
            tokens = most
        else:
            waiting = [stream.prompt for stream in streams if not stream.has_tokens]
            waiting += [h.prompt for h in holds if h.first is not None and not h.first.done()]
            tokens = max(1, min(most, sum(waiting) + sum(texts) + len(streams)))
        fruitless = 1 + max([*prompts, *texts], default=0) // most
        return StepProgress(turn, steps, self._made, tokens, fruitless)

    def give_up(self) -> None:
        """Wait for no step of the engine when it is closed: it hangs. Any thread may say so."""
        if isinstance(self._stepper, EngineStepper):
            self._stepper.is_given_up = True

    # Requests -------------------------------------------------------------------------

    async def prepare(self, request: GenerateRequest) -> None:
        """Have the engine do beside its steps what takes time of a request, before it is submitted.

        Raises:
            InvalidRequest: a value is not usable.
            Unavailable: the form of its output cannot be checked.
        """
        if request.structured is None or not prepares(self._engine):
            return
        try:
            # Not all requests come through a front end, which has done so.
            await check_grammar(request.structured)
            await self._preparing.run(partial(self._engine.prepare, request))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def submit(self, request_id: str, request: GenerateRequest, reply: Reply[Generated]) -> None:
        """Have a request served: its items go to `reply`, which ends with the last of them.

        One that the engine refuses ends with `InvalidRequest`.

        Raises:
            Unavailable: the engine was stopped, or it failed.
            ValueError: the id is in use.
        """
        self._check_new(request_id)
        self._open_stream(request_id, request, reply)
        self._count(request_id, request)
        self._stepper.add(request_id, request)

    def _open_stream(
        self, request_id: str, request: GenerateRequest, reply: Reply[Generated]
    ) -> None:
        stream = _Stream(self._submitted + 1, request_id, reply, request)
        stream.is_single |= len(request.token_ids) + 1 >= self.limits.context_length
        self._streams[request_id] = self._by_reply[reply] = stream

    async def embed(self, request_id: str, request: EmbedRequest) -> Embedded:
        """The embedding of a text.

        Raises:
            InvalidRequest: the engine refuses it.
            HandlerError: it cannot be embedded, or may have made the engine fail.
            Cancelled: it was cancelled.
            Unavailable: the engine was stopped, or it failed.
            ValueError: the id is in use.
        """
        self._check_new(request_id)
        text = self._texts[request_id] = _Text(self._submitted + 1, len(request.token_ids))
        self._count(request_id, request)
        self._stepper.add(request_id, request)
        try:
            return await text.embedded
        finally:
            if self._forget_text(request_id) is not None:
                # The asker is gone.
                self._stepper.cancel(request_id)

    def _check_new(self, request_id: str) -> None:
        if self._failure is not None:
            raise self._unavailable()
        if request_id in self._streams or request_id in self._texts:
            raise ValueError(f"request {request_id!r} is in the engine already: cancel it first")
        if request_id in self._holds:
            raise ValueError(f"{request_id!r} holds blocks of the engine: release it first")

    def _count(self, request_id: str, request: EngineRequest) -> None:
        self._submitted += 1
        self.totals.submitted += 1
        if self._trace is not None:
            self._trace.submitted(request_id, request)

    # Blocks that others read and write ------------------------------------------------

    @property
    def memory(self) -> KvMemory:
        """The memory of the engine's blocks.

        Raises:
            InvalidRequest: its blocks stay where they are: it is no `TransferringEngine`.
        """
        self._holding()
        assert transfers(self._engine), "others move their blocks themselves"
        return self._engine.memory

    def _holding(self) -> HoldingStepper:
        if self._holder is None:
            raise InvalidRequest(f"the blocks of {self._engine!r} cannot be transferred")
        return self._holder

    def reserve(self, request_id: str, request: GenerateRequest, reply: Reply[Generated]) -> None:
        """Have a request served whose prompt is computed elsewhere: see `TransferringEngine`.

        `next_held` gives its blocks. End its wait with `deliver` or `cancel`, and the hold with
        `release` in any case, once nothing writes into the blocks any longer.

        Raises:
            InvalidRequest: the engine's blocks stay where they are.
            Unavailable: the engine was stopped, or it failed.
            ValueError: the id is in use.
        """
        stepper = self._holding()
        self._check_new(request_id)
        self._open_stream(request_id, request, reply)
        self._holds[request_id] = _Hold(
            self._submitted + 1, len(request.token_ids), is_request=False
        )
        self._count(request_id, request)
        stepper.reserve(request_id, request)

    def show_first(self, request_id: str, first: Generated) -> bool:
        """Send the first token of a reserved request, as the `first` of another engine gave it.

        Returns:
            Whether the request goes on. If not, its stream has ended and the engine has forgotten
            it: nothing has to be delivered.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        ends = first.finish_reason == "stop" or stream.is_single
        if not ends:
            first = msgspec.structs.replace(first, finish_reason=None)
        else:
            self._stepper.cancel(request_id)
        self._send([(request_id, first)])
        return not ends

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        """Let a reserved request go on: see `TransferringEngine`.

        Args:
            first: what `show_first` has sent, and said to go on.
        """
        self._holding().deliver(request_id, computed, first)

    def note_source(self, request_id: str, source: str) -> None:
        """The blocks of a reserved request come from this instance; before they are delivered."""
        if isinstance(self._stepper, EngineStepper):
            self._stepper.note_source(request_id, source)

    def add_held(self, request_id: str, request: GenerateRequest) -> None:
        """Have the prompt and the first token of a request computed: see `TransferringEngine`.

        `next_held` gives what of the prompt is computed, `first` the token. `release` the hold in
        any case.

        Raises:
            InvalidRequest: the engine's blocks stay where they are.
            Unavailable: the engine was stopped, or it failed.
            ValueError: the id is in use.
        """
        stepper = self._holding()
        self._check_new(request_id)
        self._holds[request_id] = _Hold(
            self._submitted + 1, len(request.token_ids), is_request=True
        )
        self._count(request_id, request)
        stepper.add_held(request_id, request)

    async def first(self, request_id: str) -> Generated:
        """The first token of a request that `add_held` took in.

        Raises:
            InvalidRequest: the engine refuses the request.
            HandlerError: it cannot go on, or may have made the engine fail.
            Cancelled: it was cancelled or released.
            Unavailable: the engine was stopped, or it failed.
        """
        hold = self._known_hold(request_id)
        assert hold.first is not None, f"{request_id} is no request that add_held took in"
        return await asyncio.shield(hold.first)

    async def hold(self, hold_id: str, request: GenerateRequest) -> Held:
        """Hold what is cached of a prompt: see `TransferringEngine`.

        `release` the hold in any case that this returns; where it raises or is cancelled, there is
        none.

        Raises:
            InvalidRequest: the engine refuses it, or its blocks stay where they are.
            Unavailable: the engine was stopped, or it failed.
            ValueError: the id is in use.
        """
        stepper = self._holding()
        self._check_new(hold_id)
        hold = self._holds[hold_id] = _Hold(
            self._submitted, len(request.token_ids), is_request=False
        )
        stepper.hold(hold_id, request)
        try:
            return await hold.next()
        except BaseException:
            self.release(hold_id)
            raise

    async def announce(self, name: str, owner: str, session: str) -> Held:
        """Have the blocks of a conversation ready, and how much of it is there then: see
        `AnnouncedEngine`. Nothing is, where the engine is none.

        Args:
            name: of the announcement, which no request and no hold has.

        Raises:
            Unavailable: the engine was stopped, or it failed.
            ValueError: the name is in use.
        """
        self._check_new(name)
        stepper = self._stepper
        if not isinstance(stepper, EngineStepper) or not stepper.takes_announcements:
            return Held(name, (), 0, 0)
        hold = self._holds[name] = _Hold(self._submitted, 0, is_request=False)
        stepper.announce(name, owner, session)
        try:
            return await hold.next()
        finally:
            del self._holds[name]

    async def next_held(self, hold_id: str) -> Held:
        """The blocks of a hold, once they are more than when this returned last.

        Raises:
            InvalidRequest: the engine refuses the request.
            HandlerError: it cannot go on, or may have made the engine fail.
            Cancelled: it was cancelled, or the hold was released or is unknown.
            Unavailable: the engine was stopped, or it failed.
        """
        return await self._known_hold(hold_id).next()

    def _known_hold(self, hold_id: str) -> _Hold:
        hold = self._holds.get(hold_id)
        if hold is None:
            raise Cancelled(f"{hold_id!r} holds no blocks, or was released")
        return hold

    def release(self, hold_id: str) -> None:
        """End a hold, and forget its request where `add_held` took it in."""
        hold = self._holds.pop(hold_id, None)
        if hold is None:
            return
        hold.fail(Cancelled("its blocks were released"))
        if self._failure is not None:
            return
        stepper = self._holding()
        if hold.first is not None:
            stepper.cancel(hold_id)
            if self._trace is not None:
                self._trace.ended(hold_id)
        stepper.release(hold_id)

    # Ends -----------------------------------------------------------------------------

    def cancel(self, request_id: str) -> None:
        """Free what a request has, and end its stream as cancelled; nothing for an unknown one.

        Blocks that it holds stay held until `release`.
        """
        hold = self._holds.get(request_id)
        if hold is not None:
            if hold.first is not None:
                self._stepper.cancel(request_id)
            hold.fail(Cancelled("the request was cancelled"))
        text = self._forget_text(request_id)
        if text is not None:
            self._stepper.cancel(request_id)
            text.fail(Cancelled("the request was cancelled"))
            return
        stream = self._forget(request_id)
        if stream is None:
            return
        self._stepper.cancel(request_id)
        # Without regard to credit: it is not much, and nothing comes after it.
        items = [piece.item() for piece in stream.kept or ()]
        items += [Generated([], index, finish_reason="cancelled") for index in sorted(stream.open)]
        push_each((stream.reply, item) for item in items)
        stream.reply.end()

    def forget(self, request_id: str) -> None:
        """Free what a request has whose call has ended; nothing for an unknown one."""
        if self._forget(request_id) is not None:
            self._stepper.cancel(request_id)
            hold = self._holds.get(request_id)
            if hold is not None:
                hold.fail(Cancelled("the call of the request has ended"))

    def _forget(self, request_id: str) -> _Stream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            del self._by_reply[stream.reply]
            if stream.has_tokens:
                totals = self.totals
                totals.ended += 1
                totals.decoded_tokens += max(0, stream.made - 1)
                totals.decode_seconds += monotonic() - stream.first_at
            if self._trace is not None:
                self._trace.ended(request_id)
        return stream

    def _forget_text(self, request_id: str) -> _Text | None:
        text = self._texts.pop(request_id, None)
        if text is not None and self._trace is not None:
            self._trace.ended(request_id)
        return text

    def _causes(self, error: Exception) -> Collection[str]:
        """The requests that may have made the engine fail."""
        if not isinstance(error, StepFailed):
            # The engine is well: what it has made could not be handed over.
            return ()
        begun = [stream.request_id for stream in self._streams.values() if stream.has_tokens]
        return error.request_ids or begun

    def _fail(self, request_id: str, reason: str) -> None:
        """End a request that cannot go on, here or elsewhere."""
        error = HandlerError(f"the request failed: {reason}")
        self.failed_requests += self._end_with(request_id, error)

    def _end_with(self, request_id: str, error: DynbusError) -> bool:
        """End a request, and who waits for its blocks, with an error; False for an unknown one."""
        stream, text = self._forget(request_id), self._forget_text(request_id)
        hold = self._holds.get(request_id)
        if hold is not None:
            hold.fail(error)
        if stream is not None:
            stream.reply.fail(error)
        elif text is not None:
            text.fail(error)
        return not (stream is None and text is None and hold is None)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the engine does not run: {self._failure}")

    def _fail_streams(self) -> None:
        for request_id in list(self._streams):
            stream = self._forget(request_id)
            if stream is not None:
                stream.reply.fail(self._unavailable())
        for request_id in list(self._texts):
            text = self._forget_text(request_id)
            if text is not None:
                text.fail(self._unavailable())
        for hold in self._holds.values():
            hold.fail(self._unavailable())

    # What the engine made -------------------------------------------------------------

    def on_refused(self, request_id: str, error: Exception) -> None:
        refusal = error if isinstance(error, DynbusError) else InvalidRequest(str(error))
        self._end_with(request_id, refusal)

    def on_step(self, step: Step, load: EngineLoad, began: float) -> None:
        """Send what a step made."""
        self.load = load
        self._made += bool(
            step.outputs or step.embedded or step.held or step.failures or step.refusals
        )
        if self._trace is not None:
            self._trace.stepped(step, began)
        for held in step.held:
            hold = self._holds.get(held.hold_id)
            if hold is not None:
                hold.put(held)
        if step.outputs:
            self._send(step.outputs)
        for request_id, embedded in step.embedded:
            text = self._forget_text(request_id)
            if text is not None and not text.embedded.done():
                text.embedded.set_result(embedded)
        for request_id, reason in step.failures:
            # Its caller is not told why.
            logger.warning("request %s failed: %s", request_id, reason)
            self._fail(request_id, reason)
        for request_id, reason in step.refusals:
            self.on_refused(request_id, InvalidRequest(reason))
        if self._sink is not None and step.events:
            self._sink.publish(step.events)
        if self._kept_for is not None and monotonic() - self._sends_kept >= self._kept_for:
            self._sends_kept = monotonic()
            for stream in list(self._streams.values()):
                if stream.kept and not stream.is_blocked:
                    self._send_kept(stream)

    def on_idle(self, taken: int) -> None:
        """End what the engine has lost: it would be waited for until its caller gives up."""
        lost = [one for one in self._streams.values() if one.open and one.number <= taken]
        for stream in lost:
            reason = (
                "the engine has lost the request: it has no work left and has not ended the "
                f"continuations with index {', '.join(map(str, sorted(stream.open)))}"
            )
            logger.error("%s: %s", stream.request_id, reason)
            self._forget(stream.request_id)
            stream.reply.fail(HandlerError(reason))
        for hold_id, hold in self._holds.items():
            if hold.first is not None and not hold.first.done() and hold.number <= taken:
                reason = "the engine has lost the request: it has no work left and made no token"
                logger.error("%s: %s", hold_id, reason)
                self._fail(hold_id, reason)
        lost_texts = [name for name, one in self._texts.items() if one.number <= taken]
        for request_id in lost_texts:
            reason = "the engine has lost the request: it has no work left and has not embedded it"
            logger.error("%s: %s", request_id, reason)
            self._fail(request_id, reason)

    def _send(self, outputs: Sequence[tuple[str, Generated]]) -> None:
        pairs: list[tuple[Reply[Generated], Generated]] = []
        due: dict[_Stream, None] = {}
        ended: list[_Stream] = []
        streams = self._streams
        for request_id, item in outputs:
            made = len(item.token_ids)
            self.output_tokens += made
            stream = streams.get(request_id)
            if stream is None:
                self._note_first(request_id, item)
                continue
            stream.made += made
            if not stream.has_tokens:
                stream.first_at = self._count_first(stream.began)
            if item.finish_reason is not None:
                stream.open.discard(item.index)
                if not stream.open:
                    ended.append(stream)
            if stream.kept is None:
                pairs.append((stream.reply, item))
            elif stream.keep(item):
                due[stream] = None
            stream.has_tokens = True
        for reply in push_each(pairs):
            # It is there once for each of its continuations, and may be forgotten with the first.
            stream = self._by_reply.get(reply)
            if stream is not None:
                self._wait_for_reader(stream)
        for stream in due:
            self._send_kept(stream)
        for stream in ended:
            self._end_if_done(stream)

    def _note_first(self, request_id: str, item: Generated) -> None:
        """Take the token of a request that has no stream."""
        hold = self._holds.get(request_id)
        if hold is not None and hold.first is not None and not hold.first.done():
            self._count_first(hold.began)
            self.totals.ended += 1
            hold.first.set_result(item)

    def _count_first(self, began: float) -> float:
        """A request that came then has its first token; returns the time."""
        now = monotonic()
        self.totals.firsts += 1
        self.totals.first_seconds += now - began
        return now

    def _wait_for_reader(self, stream: _Stream) -> None:
        """Keep what is made for a stream until its reader has credit."""
        if stream.reply.has_ended:
            # What could not be sent has ended it.
            self.forget(stream.request_id)
        elif not stream.is_blocked:
            stream.is_blocked = True
            if stream.kept is None:
                stream.kept = deque()
            stream.reply.when_writable(lambda: self._go_on(stream))

    def _go_on(self, stream: _Stream) -> None:
        """Send what was kept for a reader that has credit again."""
        stream.is_blocked = False
        if stream.request_id in self._streams:
            self._send_kept(stream)

    def _send_kept(self, stream: _Stream) -> None:
        """Send what was kept, as far as there is credit."""
        kept = stream.kept
        while kept:
            if push_each([(stream.reply, kept.popleft().item())]):
                self._wait_for_reader(stream)
                break
        if not stream.is_blocked and not stream.gathers:
            stream.kept = None
        self._end_if_done(stream)

    def _end_if_done(self, stream: _Stream) -> None:
        if not stream.open and not stream.kept and self._forget(stream.request_id) is not None:
            stream.reply.end()
