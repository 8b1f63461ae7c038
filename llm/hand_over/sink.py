"""The sink: an engine that goes on with prompts whose blocks come from elsewhere.

What `HandOver` decides for a request is carried out here.
"""

from __future__ import annotations

import contextvars
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol, assert_never

import anyio
import msgspec
from anyio.abc import TaskGroup

from dynbus import (
    Context,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    NoInstances,
    Overloaded,
    Reply,
    Unavailable,
    context,
)
from dynbus.llm.engine.interface import Held
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.spi import Background, describe_exception, monotonic, random_id
from dynbus.transfer import (
    BadDescription,
    ChecksumMismatch,
    LeaseLost,
    Moving,
    TransferFailed,
)

from .machine import (
    Abandon,
    Action,
    Call,
    Deliver,
    EndCall,
    Enqueue,
    HandOver,
    Read,
    Reason,
    Release,
    Settle,
    Show,
)
from .messages import Offer, OfferAnswer, Prefilled, PrefillRequest
from .observing import NOT_COUNTED, HandOverEvents, HandOverFigures, HandOverSpan, TransferSpans
from .part_reader import Part, PartReader

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT: Final = 1.0
"""Seconds that leaving a call may take, for which its source is told."""

LATE: Final = 0.5
"""Seconds after its deadline in which a transfer may say that it is over."""

SHARE_OF_DEADLINE: Final = 0.5
"""The part of a request's time that a hand-over may take: in the rest its prompt can still be
computed here."""


class Limits(NamedTuple):
    """The time limits of hand-overs, in seconds; half of the time left to the request's deadline
    counts where that is less.

    Attributes:
        hand_over: all of one, from when its blocks are reserved.
        queue: until the source has answered, or a prefill instance has taken it in. What waits in
            the engine there waits on, within `hand_over`.
        transfer: each transfer.
        lease: for which a prefill instance keeps what it has computed.
        settle: the answer of a source that has nothing to compute for it.
    """

    hand_over: float = 60.0
    queue: float = 10.0
    transfer: float = 10.0
    lease: float = 30.0
    settle: float = 5.0


class Origin(Protocol):
    """A source of prompts' blocks, as the sink asks it.

    Attributes:
        reader: brings the blocks.
        limits: for each of its hand-overs.
        figures: of its hand-overs.
        computes, has_tickets: see `HandOver`.
    """

    reader: PartReader
    limits: Limits
    figures: HandOverFigures
    computes: ClassVar[bool] = True
    has_tickets: ClassVar[bool] = True

    @abstractmethod
    def ask(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        """Have a source compute a prompt, or lend what it has of it.

        Args:
            instance: that is asked; the one that the router chooses where it is empty.
        """
        ...


Enqueuing = Callable[[str, int, float], Awaitable[None]]
"""Puts a job into the work queue: its id, the tokens that are to be computed, and its deadline."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The way of a prompt's blocks from elsewhere.

    Attributes:
        origin: where they come from.
        tokens: of the prompt that are wanted; see `HandOver`.
        is_worth: whether the rest is asked for of a prompt of which so many tokens are here.
        enqueue: for a request that is taken out of the work queue; None for one that is sent.
        ended: called when the engine goes on, or the request has ended.
    """

    origin: Origin
    tokens: int
    is_worth: Callable[[int], bool]
    enqueue: Enqueuing | None = None
    ended: Callable[[Receiving], object] = lambda _: None


class Planner(Protocol):
    """The decision if prompts come from elsewhere."""

    async def plan(self, request: GenerateRequest) -> Plan | None:
        """The way of the prompt of a request of the running call; None where it is computed
        here."""
        ...


class Sink:
    """The hand-overs to one engine.

    Args:
        background: owns what goes on after a request has ended: transfers that are given up.
        planner: decides for each request.
        events: of its hand-overs, in the flight.
        avoids: whether nothing is to be taken from an instance.
    """

    def __init__(
        self,
        runner: EngineRunner,
        background: Background,
        spans: TransferSpans,
        planner: Planner,
        *,
        events: HandOverEvents,
        avoids: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.avoids = avoids
        self.runner = runner
        self.background = background
        self.spans = spans
        self.planner = planner
        self.events = events
        self.open: dict[str, Receiving] = {}

    def __repr__(self) -> str:
        return f"<Sink [{len(self.open)} hand-overs]>"

    async def serve(
        self,
        name: str,
        request: GenerateRequest,
        reply: Reply[Generated],
        here: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve a request of the running call until its reply has ended, with what comes of its
        prompt from elsewhere, where some is to.

        Args:
            name: of the request in the engine.
            here: serves it without that.

        Raises:
            InvalidRequest, Unavailable: the engine does not take it.
        """
        plan = await self.planner.plan(request)
        if plan is None:
            await here()
            return
        running = context()
        await self.runner.prepare(request)
        receiving = Receiving(self, name, request, reply, plan, running)
        unlink = running.link(lambda _: self.runner.cancel(name))
        try:
            if not running.is_stopped():
                await receiving.run()
        finally:
            unlink()

    async def offer(self, offer: Offer, *, is_own: bool = False) -> OfferAnswer:
        """A prefill instance has taken a job: it computes it now, or is told that nobody waits.

        Args:
            is_own: whether it is this instance, which moves no blocks to itself.
        """
        receiving = self.open.get(offer.hand_over)
        if receiving is None:
            return OfferAnswer(done=False, reason="nobody waits for it any more")
        if is_own:
            receiving.compute_here()
            return OfferAnswer(done=False, reason="it computes its own prompt where it decodes")
        return await receiving.offered(offer)


class Receiving:
    """One request whose prompt's blocks come from elsewhere; see `Sink.serve`.

    Attributes:
        machine: where it is.
        error: what ended it before its blocks were here; None where nothing did.
        bytes: that were read so far.
        asked_at, answered_at, read_at: the times when the source was asked first, when it answered
            first, and when the last blocks were read, on the monotonic clock; 0 before.
    """

    def __init__(
        self,
        sink: Sink,
        name: str,
        request: GenerateRequest,
        reply: Reply[Generated],
        plan: Plan,
        running: Context,
    ) -> None:
        self.machine = HandOver(
            plan.tokens,
            is_computed=plan.origin.computes,
            has_tickets=plan.origin.has_tickets,
            queued=plan.enqueue is not None,
            vocabulary=sink.runner.limits.vocabulary,
        )
        self.error: DynbusError | None = None
        self.bytes = 0
        self.asked_at = self.answered_at = self.read_at = 0.0
        self._sink = sink
        self._runner = sink.runner
        self._name = name
        self._id = random_id()
        self._request = request
        self._reply = reply
        self._origin = plan.origin
        self._plan = plan
        self._running = running
        self._time_left: float | None = None
        self._tasks: TaskGroup | None = None
        self._held: Held | None = None
        self._calling = anyio.CancelScope()
        self._parts: dict[int, Part] = {}
        self._transfers: dict[int, Moving] = {}
        self._has_shown = False
        self._source = ""
        # The instance that has answered first.
        self._answered_by = ""
        self._went_on = anyio.Event()
        self._taken_in = anyio.Event()
        self._waiting: HandOverSpan | None = None
        # An offer comes by another call: what follows from it belongs to this one all the same,
        # with its deadline and its trace.
        self._context = contextvars.copy_context()

    def __repr__(self) -> str:
        return f"<Receiving {self._name} {self.machine!r}>"

    async def run(self) -> None:
        """Serve the request until its reply has ended.

        Raises:
            InvalidRequest, Unavailable: the engine does not take it.
        """
        self._runner.reserve(self._name, self._request, self._reply)
        self._sink.open[self._id] = self
        self._origin.figures.open += 1
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._wait_for_blocks)
                await self._reply.ended()
                tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            # Before its blocks are released: the engine writes into none that it has forgotten.
            self._runner.forget(self._name)
            self._do(self.machine.ended())
            self._do(self.machine.call_ended())
            self._leave()

    def _leave(self) -> None:
        """It waits for nothing any more."""
        if self._went_on.is_set():
            return
        self._went_on.set()
        self._taken_in.set()
        if self._waiting is not None:
            self._waiting.end()
        self._sink.open.pop(self._id, None)
        machine = self.machine
        self._origin.figures.ended(machine.outcome)
        self._record()
        self._plan.ended(self)
        if machine.reason and machine.reason not in NOT_COUNTED:
            logger.warning(
                "%s: its prompt is computed here from token %d on: %s (%s)",
                *(self._name, machine.settled, machine.reason, machine.detail),
            )

    def _record(self) -> None:
        """Have in the flight what became of it."""
        machine, error = self.machine, self.error
        if machine.outcome == "cancelled":
            return
        self._sink.events.ended(
            self._running.id,
            self._answered_by or ("" if error is None else error.hop.rpartition("@")[2]),
            "prefill" if self._origin.computes else "cache",
            why=machine.reason,
            error="" if error is None else error.code,
            began=self.asked_at,
            answered=self.answered_at,
            read=self.read_at,
            # The last one need not be full.
            blocks=-(-(machine.settled - machine.cached) // self._runner.limits.block_size),
            size=self.bytes,
            lacking=max(0, self._plan.tokens - machine.settled),
        )

    async def offered(self, offer: Offer) -> OfferAnswer:
        """A prefill instance has taken the job: have it compute, and wait until that is over."""
        actions = self.machine.offered(offer.instance)
        if not actions:
            return OfferAnswer(done=False, reason="it is computed already")
        if self._waiting is not None:
            self._waiting.end({"dynbus.work_queue.taken_by": offer.instance})
        self._do(actions)
        await self._went_on.wait()
        return OfferAnswer(done=not self.machine.reason, reason=self.machine.detail)

    def compute_here(self) -> None:
        """This instance has taken its own job: it has room for the prompt."""
        self._do(self.machine.fall_back("own_job", "this instance took the job itself"))

    # What the machine asks for --------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Enqueue(cached):
                self._start(self._enqueue, cached)
            case Call(instance, cached):
                self._start(self._call, instance, cached)
            case Read(part, item):
                if self._sink.avoids(item.instance):
                    lied = Unavailable(f"blocks of {item.instance} were damaged before")
                    self._fall_back("quarantined", lied)
                    self._do(self.machine.quiet(part))
                    return
                self._source = item.instance
                self._parts[part] = self._part_of(item)
                if not self._start(self._read, part):
                    self._do(self.machine.quiet(part))
            case Settle(part):
                self._start(self._settle, part)
            case Show(first):
                self._show(first)
            case Deliver(computed, first):
                if self._source:
                    self._runner.note_source(self._name, self._source)
                self._runner.deliver(self._name, computed, first if self._has_shown else None)
                self._leave()
            case EndCall():
                self._calling.cancel()
            case Abandon(part):
                self._abandon(part)
            case Release():
                self._runner.release(self._name)
            case _:
                assert_never(action)

    def _start(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        """Do something beside what runs, unless the request has ended."""
        if self._tasks is None or self._reply.has_ended:
            return False
        self._context.run(self._tasks.start_soon, function, *args)
        return True

    def _part_of(self, item: Prefilled) -> Part:
        assert self._held is not None, "its blocks were there before it was asked for"
        size = self._runner.limits.block_size
        blocks = self._held.blocks[item.start // size : -(-item.computed // size)]
        shown = item.first if self._has_shown else None
        return Part(self._name, self._id, item, blocks, shown)

    def _show(self, first: Generated) -> None:
        assert self._held is not None, "its blocks were there before it was asked for"
        if self._request.structured is not None and first.finish_reason != "stop":
            # The engine has to make what has a form from its beginning.
            return
        # What the routers of decode instances are to know is what was reused here; an engine that
        # finds its blocks by itself says so itself.
        cached = self._held.cached if self._held.blocks else None
        self._has_shown = True
        self._runner.show_first(self._name, msgspec.structs.replace(first, cached_tokens=cached))

    def _abandon(self, part: int) -> None:
        transfer = self._transfers.get(part)
        if transfer is None:
            # It has not begun, and will not.
            self._do(self.machine.quiet(part))
            return
        transfer.cancel()
        self._origin.figures.quarantined += transfer.blocks
        self._sink.events.given_up(self._running.id, self._source, transfer.blocks)
        name = f"the end of a transfer for {self._name}"
        # At the end of the process there is none; the memory goes with it.
        with suppress(RuntimeError, Unavailable):
            self._sink.background.start(self._wait_until_quiet, part, transfer, name=name)

    async def _wait_until_quiet(self, part: int, transfer: Moving) -> None:
        try:
            await transfer.quiet()
        finally:
            self._origin.figures.quarantined -= transfer.blocks
            self._do(self.machine.quiet(part))

    # What happens ---------------------------------------------------------------------------

    def _fall_back(self, reason: Reason, error: DynbusError) -> None:
        """Have the rest computed here, unless the request has ended: then nobody is to blame."""
        if self.machine.waits and not self._reply.has_ended:
            self.error = error
            self._do(self.machine.fall_back(reason, describe_exception(error)))

    async def _wait_for_blocks(self) -> None:
        try:
            self._held = held = await self._runner.next_held(self._name)
        except DynbusError:
            # The caller is told why by the engine.
            return
        self.asked_at = monotonic()
        self._time_left = self._running.time_left()
        is_worth = self._plan.is_worth(held.cached)
        self._do(self.machine.reserved(held.cached, is_worth=is_worth))
        if not self.machine.waits:
            return
        limits = self._origin.limits
        with anyio.move_on_after(self._limit(limits.queue)):
            await self._taken_in.wait()
        if not self._taken_in.is_set():
            self._fall_back("too_slow", DeadlineExceeded("no instance took it in"))
            return
        with anyio.move_on_after(self.asked_at + self._limit(limits.hand_over) - monotonic()):
            await self._went_on.wait()
        self._fall_back("too_slow", DeadlineExceeded("the hand-over took too long"))

    def _limit(self, seconds: float) -> float:
        """Seconds, and no more than the request's time allows."""
        if self._time_left is None:
            return seconds
        return min(seconds, max(0.0, self._time_left * SHARE_OF_DEADLINE))

    async def _enqueue(self, cached: int) -> None:
        put = self._plan.enqueue
        assert put is not None, "only a machine with a queue asks for it"
        self._waiting = self._sink.spans.begin("work_queue")
        tokens = len(self._request.token_ids) - cached
        deadline = monotonic() + self._limit(self._origin.limits.queue)
        try:
            await put(self._id, tokens, deadline)
        except DynbusError as error:
            self._fall_back("queue_failed", error)

    async def _call(self, instance: str, cached: int) -> None:
        reason: Reason = ""
        error: DynbusError | None = None
        with self._calling:
            items = self._origin.ask(PrefillRequest(self._id, self._request, cached), instance)
            try:
                async for item in items:
                    self.answered_at = self.answered_at or monotonic()
                    self._answered_by = self._answered_by or item.instance
                    self._taken_in.set()
                    self._do(self.machine.came(item))
            except DynbusError as problem:
                reason, error = _reason_of(problem), problem
            finally:
                with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                    await items.aclose()
        if self._reply.has_ended:
            return
        if error is not None and self.machine.waits:
            self.error = error
        self._do(self.machine.call_ended(reason, describe_exception(error) if error else ""))

    async def _read(self, number: int) -> None:
        if not self.machine.waits:
            self._do(self.machine.quiet(number))
            return
        origin = self._origin
        span = self._sink.spans.begin("transfer")
        try:
            deadline = monotonic() + self._limit(origin.limits.transfer)
            transfer = origin.reader.start(self._parts[number], deadline)
        except Exception as error:  # noqa: BLE001 - of a mover of somebody's own
            span.transferred(failed=describe_exception(error))
            self._fall_back("transfer_failed", self._of_mover(error))
            self._do(self.machine.quiet(number))
            return
        self._transfers[number] = transfer
        try:
            # It keeps its deadline by itself, and says better why it did not come.
            with anyio.fail_after(deadline - monotonic() + LATE):
                await transfer.result()
        except Exception as error:  # noqa: BLE001 - of a mover of somebody's own
            span.transferred(failed=describe_exception(error))
            origin.figures.transferred(transfer.seconds, 0, 0, failed=True)
            self._fall_back(
                "lease_lost" if isinstance(error, LeaseLost) else "transfer_failed",
                self._of_mover(error),
            )
        except BaseException:
            span.transferred(failed="it was given up")
            raise
        else:
            self.read_at = monotonic()
            self.bytes += transfer.bytes
            span.transferred(transfer.bytes, transfer.blocks, transfer.seconds)
            origin.figures.transferred(transfer.seconds, transfer.bytes, transfer.blocks)
            self._do(self.machine.read(number))

    def _of_mover(self, error: Exception) -> DynbusError:
        """The error for a part that did not come; an error that a mover must not raise is logged
        with its place.
        """
        if isinstance(error, DynbusError):
            return error
        if isinstance(error, TimeoutError):
            return DeadlineExceeded("the transfer did not end at its deadline")
        logger.error("%s: its mover failed", self._name, exc_info=error)
        return TransferFailed(f"the mover raised {describe_exception(error)}")

    async def _settle(self, number: int) -> None:
        try:
            held = await self._origin.reader.settled(self._parts[number])
        except ChecksumMismatch as error:
            self._fall_back("damaged", error)
        except BadDescription as error:
            self._fall_back("bad_answer", error)
        except DynbusError as error:
            self._fall_back("prefill_lost", error)
        else:
            if not held:
                self.error = LeaseLost("the source does not vouch for what was read")
            self._do(self.machine.answered(number, held=held))


def _reason_of(error: DynbusError) -> Reason:
    """The reason why a prompt does not come, from its source's answer."""
    match error:
        case NoInstances():
            return "no_instances"
        case InvalidRequest() | Overloaded():
            return "refused"
        case LeaseLost():
            return "lease_lost"
        case BadDescription():
            return "bad_answer"
        case _:
            return "prefill_lost"
