"""Running calls: who is admitted, the handlers as tasks, and how each call ends.

`Admission` decides who runs. A call that was admitted is settled exactly once, whether its
handler was left, killed, or never entered. Everything here runs on the main loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dynbus.bus.clock import monotonic
from dynbus.bus.deadlines import Deadlines
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    DynbusError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    Migrate,
    Overloaded,
    ReaderStalled,
    StreamLost,
    describe_exception,
    only_cause,
)
from dynbus.bus.protocol.cancellation import OPERATOR, Tombstones
from dynbus.bus.protocol.unread_bytes import LEAST_PER_STREAM

from .admission import Admittance, Turn
from .batches import Batches
from .calls import Call, ServedEndpoint, no_room

if TYPE_CHECKING:
    from types import FrameType

    from dynbus.bus.bus import Bus
    from dynbus.bus.telemetry.telemetry import Telemetry

logger = logging.getLogger(__name__)

TURN_ITEMS: Final = 512
LEAST_TURN_ITEMS: Final = 16
HIGH_BACKLOG: Final = 8 * 1024 * 1024
STOP_TIMEOUT: Final = 5.0

LONG_WAIT: Final = 0.1
"""Seconds in the queue from which on it is recorded that a call has waited."""

Refusal: TypeAlias = Literal["full", "late", "no_room", "displaced"]
"""The reason for which there is no place for a call."""

_REASONS: Final[Mapping[Refusal, str]] = {
    "full": "",
    "late": ": it would probably not be done by its deadline",
    "no_room": ": there is no room for another large request of this client to wait",
    "displaced": ": the queue is full, and a client with fewer calls in it took this one's place",
}


_NOTHING: Final[Mapping[str, str | float]] = {}


class Execution:
    """The calls that run or wait at one instance.

    Args:
        cancelled: what operators have cancelled; none of that begins.
        retired: called once with each call when it is over, whatever became of it, and the time.

    Attributes:
        draining: whether new calls are refused.
        load: calls that run or wait.
        memory_refused: whether a handler was refused memory since the watcher looked last.
    """

    def __init__(
        self,
        bus: Bus,
        instance_id: str,
        cancelled: Tombstones,
        retired: Callable[[Call, float], object],
    ) -> None:
        self.bus = bus
        self._cancelled = cancelled
        self._retired = retired
        self.draining = False
        self.load = 0
        self.memory_refused = False
        self._instance_id = instance_id
        # Handlers start from the variables of the instance's starter: those of the
        # message that happens to be read would leak one caller's into another's call.
        self._variables = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: list[Batches] = []
        # Waiters for the moment when no call runs or waits.
        self._until_idle: list[asyncio.Future[None]] = []
        self._deadlines = Deadlines(bus.loop, self._expire)

    def __repr__(self) -> str:
        state = "draining" if self.draining else "serving"
        return f"<Execution {self._instance_id} [{state} | load: {self.load}]>"

    def is_draining(self) -> bool:
        """True if new calls are refused; for the contexts of those that run."""
        return self.draining

    @property
    def telemetry(self) -> Telemetry | None:
        """The telemetry that observes the calls."""
        return self.bus.telemetry

    def gather(self, served: ServedEndpoint) -> None:
        """Have the calls of an endpoint go together where its rule says so."""
        endpoint = served.endpoint
        if endpoint.batch is not None:
            made = Batches(
                endpoint.batch, endpoint.concurrency, served.address, served.hop, owner=self
            )
            served.gather_into(made)
            self._batches.append(made)

    def begin_draining(self) -> None:
        """Refuse new calls; those that wait for company begin."""
        self.draining = True
        for batches in self._batches:
            batches.hurry()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something of a handler's in a task of its own, from the instance's variables."""
        task = self.bus.loop.create_task(work, context=self._variables.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def idle(self) -> None:
        """Wait until no call runs or waits."""
        while self.load:
            idle = self.bus.loop.create_future()
            self._until_idle.append(idle)
            await idle

    async def stop(self) -> None:
        """Wait for the handlers, which must have been told to end, and forget all deadlines.

        One that ignores its cancellation is logged and left behind.
        """
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT)
            for task in stuck:
                logger.error("a handler ignores its cancellation: %r", task)
        self._deadlines.clear()

    def admit(self, call: Call, data: bytes, now: float) -> None:
        """Let a call run or wait, or end it with the reason why it may not.

        Args:
            data: the whole request.
            now: when it arrived, on the monotonic clock.
        """
        served = call.served
        telemetry = self.bus.telemetry
        if telemetry is not None:
            self._observe(telemetry, call)
        if self.draining:
            self.refuse(call, Draining("the instance is going away", started=False))
            return
        if self._cancelled.has_any and (error := self._cancel_of(call, now)) is not None:
            self.refuse(call, error)
            return
        deadline = call.context.deadline
        if deadline is not None and deadline <= now:
            self.refuse(call, DeadlineExceeded("the deadline passed on the way", started=False))
            return
        try:
            call.request = served.endpoint.decode(data)
        except DynbusError as error:
            error.started = False
            self.refuse(call, error)
            return
        except Exception as error:
            logger.exception("%s: the request could not be read", served.address)
            text = f"the request could not be read: {type(error).__name__}: {error}"
            self.refuse(call, InvalidRequest(text, started=False))
            return
        if len(data) > LEAST_PER_STREAM and not (
            served.admission.has_place or call.account.has_room
        ):
            self.refuse(call, self._overloaded(call, "no_room", now), "no_room")
            return
        admittance, displaced = served.admission.enter(
            call, call.turn_taker, now, deadline, continued=call.is_continued
        )
        if admittance in (Admittance.FULL, Admittance.LATE):
            why: Refusal = "late" if admittance is Admittance.LATE else "full"
            self.refuse(call, self._overloaded(call, why, now), why)
            return
        if displaced is not None:
            self._turn_away(displaced, "displaced", now)
        self.load += 1
        if telemetry is not None:
            telemetry.in_flight(served.address, 1)
        if deadline is not None:
            call.deadline_number = self._deadlines.arm(deadline, now, call)
        if admittance is Admittance.RUN:
            self._run(call, now)
        else:
            call.hold_request(len(data))

    def _observe(self, telemetry: Telemetry, call: Call) -> None:
        call.observation = telemetry.server_call(
            call.served.address,
            self._instance_id,
            call.context.trace_headers(),
            streaming=call.served.endpoint.streaming,
            request_id=call.context.id,
        )
        call.context.set_trace_headers(call.observation.trace_headers)

    def _cancel_of(self, call: Call, now: float) -> DynbusError | None:
        """The reason why a call that an operator has cancelled may not begin; None for any
        other.
        """
        if not self._cancelled.has_request(call.context.id, now):
            return None
        self.bus.drop(DropReason.REFUSED)
        return Cancelled(OPERATOR, started=False)

    def refuse(self, call: Call, error: DynbusError, why: Refusal | None = None) -> None:
        """End a call that was not admitted.

        Args:
            why: the reason for which there is no place; None for any other.
        """
        call.reply.fail(error)
        now = monotonic()
        self._retired(call, now)
        served = call.served
        served.finished(0.0, error)
        self._record_refusal(call, error, why, now)
        if call.observation is not None:
            call.observation.end(error)

    def _turn_away(self, call: Call, why: Refusal, now: float) -> None:
        """End a call that waited and may wait no longer."""
        call.reply.fail(self._overloaded(call, why, now))
        self._settle(call, now, why)

    def _record_refusal(
        self, call: Call, error: DynbusError, why: Refusal | None, now: float
    ) -> None:
        """Have it in the flight that a call did not begin here, unless it was cancelled."""
        if self.bus.flight is None or isinstance(error, Cancelled):
            return
        details: dict[str, str | float] = {"error": error.code}
        if why is not None:
            details["why"] = why
        if isinstance(error, Overloaded) and error.retry_after:
            details["retry_after"] = round(error.retry_after, 3)
        self._record(call, "call.refused", now, details)

    def _record(
        self, call: Call, what: str, now: float, details: Mapping[str, str | float] = _NOTHING
    ) -> None:
        """Have it in the flight what became of a call in the queue."""
        flight, served = self.bus.flight, call.served
        if flight is None:
            return
        tenant = call.context.tenant
        flight.note_request(
            served.address.namespace,
            what,
            served.hop,
            call.context.id,
            {
                "waited": round(now - call.started_at, 4),
                "running": served.admission.running,
                "waiting": served.admission.waiting,
                **({"tenant": flight.digest(tenant)} if tenant else {}),
                **details,
            },
        )

    @staticmethod
    def _overloaded(call: Call, why: Refusal, now: float) -> Overloaded:
        """The error for a call that is refused; to be asked while it is not in the queue."""
        admission = call.served.admission
        deadline = call.context.deadline
        allowed = None if deadline is None else deadline - call.started_at
        return Overloaded(
            f"{describe_calls(admission.running, admission.waiting)}{_REASONS[why]}",
            retry_after=admission.retry_after(call.turn_taker, now, allowed),
            started=False,
        )

    def _run(self, call: Call, now: float) -> None:
        call.began_at = call.reply.progressed_at = now
        if call.waiting_bytes:
            call.let_request_go()
        endpoint = call.served.endpoint
        streams = endpoint.streaming and not endpoint.by_port
        work = self._stream(call) if streams else self._answer(call)
        # Not a task group's: entering a scope costs each call more than its bookkeeping here, and a
        # kill must reach one handler before its first step.
        task = self.bus.loop.create_task(work, context=self._variables.copy())
        call.task = task
        self._tasks.add(task)

    async def _answer(self, call: Call) -> None:
        """Run a unary handler, or one that has its results sent by itself or by others."""
        token = self._enter(call)
        served, reply = call.served, call.reply
        endpoint = served.endpoint
        try:
            if endpoint.by_port:
                if call.observation is not None:
                    reply.observe(call.observation.items)
                await served.invoke(call.request, reply)
                reply.end()
            else:
                reply.end(endpoint.encode(await served.invoke(call.request)))
        except BaseException as error:
            if not self._conclude(call, error):
                raise
        finally:
            self._leave(call, token)

    async def _stream(self, call: Call) -> None:
        """Run a streaming handler and send what it yields, as fast as the reader allows."""
        token = self._enter(call)
        bus = self.bus
        reply = call.reply
        push = reply.push
        encode = call.served.endpoint.encode
        observation = call.observation
        left = 1  # the first item goes out before the second is asked for
        try:
            items = call.served.invoke(call.request)
            try:
                async for item in items:
                    may_go_on = push(encode(item))
                    if observation is not None:
                        observation.items(1)
                    left -= 1
                    if not may_go_on:
                        await reply.writable()
                        if reply.ended:
                            break
                    elif left <= 0:
                        # A turn of the loop is shared by all streams that never wait.
                        left = max(LEAST_TURN_ITEMS, TURN_ITEMS // self.load)
                        if bus.data.backlog > HIGH_BACKLOG:
                            await bus.data.drained(timeout=bus.config.reader_stall_timeout)
                        else:
                            await asyncio.sleep(0)
            finally:
                await items.aclose()
            reply.end()
        except BaseException as error:
            if not self._conclude(call, error):
                raise
        finally:
            self._leave(call, token)

    def _enter(self, call: Call) -> Any:
        call.entered = True
        call.context.enter()
        return call.observation.activate() if call.observation is not None else None

    def _leave(self, call: Call, token: Any) -> None:
        if call.observation is not None:
            call.observation.deactivate(token)
        self._left(call)

    def _conclude(self, call: Call, error: BaseException) -> bool:
        """End a call as its handler's exception says; False when that must go on upwards."""
        whole, error = error, only_cause(error)
        if isinstance(error, DynbusError):
            if isinstance(error, InvalidResponse):
                # The caller is told; it is this actor's author who can mend it.
                logger.error("%s, request %s: %s", call.served.address, call.context.id, error)
            # The handler did run, whatever a sub-call said of itself.
            error.started = True
            call.reply.fail(error)
        elif isinstance(error, GeneratorExit):
            call.reply.fail(Migrate("the handler asks for another instance"))
        elif isinstance(error, asyncio.CancelledError):
            call.reply.fail(Cancelled("the handler was cancelled"))
            return call.context.is_killed()
        elif isinstance(error, SystemExit | KeyboardInterrupt):
            if call.task is not None:
                # It ends the loop itself, and nobody is left to look at the task.
                call.task.add_done_callback(_look_at)
            text = "%s raised %r in request %s: its process ends"
            logger.error(text, call.served.address, error, call.context.id)
            # A stream that goes on elsewhere may do the same there: its caller counts what is lost.
            kind = StreamLost if call.can_move else Draining
            call.reply.fail(kind("the instance was stopped"))
            return False
        else:
            where = f"{call.served.address} raised in request {call.context.id}"
            call.reply.fail(self.failure(whole, where))
        return True

    def failure(self, raised: BaseException, where: str) -> DynbusError:
        """The error for callers of a handler that raised no error of dynbus; the exception is
        logged.
        """
        error = only_cause(raised)
        self.memory_refused = self.memory_refused or isinstance(error, MemoryError)
        logger.error("%s", where, exc_info=raised)
        failure = HandlerError(describe_exception(error))
        failure.error_type = type(error).__name__
        if self.bus.config.debug:
            import traceback

            failure.remote_traceback = "".join(traceback.format_exception(error))
        return failure

    def _left(self, call: Call) -> None:
        """A handler has been left, or will never be entered."""
        if not call.reply.ended:
            call.reply.fail(Cancelled("the handler was cancelled"))
        if call.task is not None:
            # A callback of the task would cost a turn of the loop for each call.
            self._tasks.discard(call.task)
        now = monotonic()
        self._settle(call, now)
        turn = call.served.admission.leave(call, now, whole=not _was_cut_short(call))
        if turn.begins is not None or turn.late:
            self._begin_turn(turn, now)

    def _begin_turn(self, turn: Turn[Call], now: float) -> None:
        """Run the call whose turn it is, unless there is no room for its results."""
        while True:
            for late in turn.late:
                self._turn_away(late, "late", now)
            call = turn.begins
            if call is None:
                return
            refused: DynbusError | None = no_room(call.account)
            if refused is None and self._cancelled.has_any:
                # The lane has heard of it, and the main loop not yet.
                refused = self._cancel_of(call, now)
            if refused is None:
                if now - call.started_at >= LONG_WAIT:
                    self._record(call, "call.waited", now)
                self._run(call, now)
                return
            call.reply.fail(refused)
            self._settle(call, now)
            turn = call.served.admission.skip(call, now)

    def _settle(self, call: Call, now: float, why: Refusal | None = None) -> None:
        """Account for a call that neither runs nor waits any longer.

        Args:
            why: the reason for which there is no place for one that waited; None for any other.
        """
        if call.waiting_bytes:
            call.let_request_go()
        if call.deadline_number is not None:
            self._deadlines.disarm(call.deadline_number, call)
            call.deadline_number = None
        if call.kill_timer is not None:
            call.kill_timer.cancel()
        error = call.reply.error
        call.served.finished(0.0 if call.began_at is None else now - call.began_at, error)
        if call.began_at is None and error is not None:
            self._record_refusal(call, error, why, now)
        call.settled = True
        if call.served.endpoint.streaming:
            call.served.items += call.reply.sent_items
        if call.observation is not None:
            call.observation.end(error)
        self._retired(call, now)
        if self.bus.telemetry is not None:
            self.bus.telemetry.in_flight(call.served.address, -1)
        self.load -= 1
        if self.load == 0 and self._until_idle:
            waiting, self._until_idle = self._until_idle, []
            for idle in waiting:
                if not idle.done():
                    idle.set_result(None)

    def _expire(self, call: Call) -> None:
        """The deadline of a call passed."""
        if call.reply.ended:
            return
        batches = call.served.batches
        waited = call.task is None or (batches is not None and batches.has_waiting(call.context))
        message = (
            "the deadline passed while the call waited"
            if waited
            else "the deadline passed while the handler ran"
        )
        self.abort(call, DeadlineExceeded(message, started=not waited))

    def abort(self, call: Call, error: DynbusError) -> None:
        """End a call with `error` and drop it."""
        call.reply.fail(error)
        self.kill(call)

    def hand_on(self, call: Call) -> None:
        """End a stream with which its caller goes on elsewhere, after all that was yielded."""
        self.abort(call, Draining("the instance is going away", started=call.task is not None))

    def kill(self, call: Call) -> None:
        """Drop a call now, wherever it is."""
        call.context.kill()
        if call.task is not None:
            call.task.cancel()
            if not call.entered:
                # A task that is cancelled before its first step never enters its body.
                call.entered = True
                self._left(call)
        elif call.served.admission.withdraw(call):
            self._settle(call, monotonic())
        else:
            # Parts of its request are still to come.
            self._retired(call, monotonic())

    def cancel(
        self, call: Call, kill_after: float, why: str = "the caller cancelled the call"
    ) -> None:
        """Stop a call, and kill it `kill_after` seconds later unless that is negative; at once
        where its handler has not begun.

        Args:
            why: what it is told when it is killed at once.
        """
        if call.reply.ended:
            return
        if kill_after > 0 and not call.entered:
            kill_after = 0.0
        if self.bus.telemetry is not None:
            self.bus.telemetry.cancellation(
                call.served.address, "kill" if kill_after == 0 else "stop"
            )
        if kill_after == 0:
            self.abort(call, Cancelled(why, started=call.entered))
            return
        call.context.stop_generating()
        if call.observation is not None:
            call.observation.cancelled()
        if kill_after > 0 and call.kill_timer is None:
            call.kill_timer = self.bus.loop.call_later(kill_after, self.cancel, call, 0.0)

    def reader_gone(self, call: Call) -> None:
        """The reader of this call's results does not exist any longer."""
        self.bus.drop(DropReason.READER_GONE)
        self.cancel(call, 0.0)

    def end_if_stuck(self, call: Call, now: float) -> None:
        """End a stream whose handler or reader has done nothing for too long."""
        if call.reply.ended or call.task is None or not call.served.endpoint.streaming:
            return
        idle = call.served.endpoint.idle_timeout
        reply = call.reply
        if reply.paused:
            if now - reply.paused_since > self.bus.config.reader_stall_timeout:
                self.abort(call, ReaderStalled("the reader granted no credit"))
        elif (
            not reply.has_progressed(now) and idle is not None and now - reply.progressed_at > idle
        ):
            self.abort(call, DeadlineExceeded(f"the handler yielded nothing for {idle} s"))


def describe_calls(running: int, waiting: int) -> str:
    """The numbers of calls that run and wait, in words."""
    runs = "1 call runs" if running == 1 else f"{running} calls run"
    return f"{runs} and {waiting} {'waits' if waiting == 1 else 'wait'}"


def drives(frame: FrameType) -> bool:
    """True if a frame is that of a handler's own generator: it runs alone in a task of its own."""
    caller = frame.f_back
    # It is the code that counts, whichever object it belongs to.
    stream = Execution._stream.__code__  # pyright: ignore[reportPrivateUsage]
    return caller is not None and caller.f_code is stream


def _was_cut_short(call: Call) -> bool:
    """True if its handler would have taken longer than it did, for the whole of its request."""
    # What it was given up for may also have reached it through a sub-call.
    error = call.reply.error
    given_up = error is not None and isinstance(error, DeadlineExceeded | Cancelled)
    return given_up or call.context.is_stopped() or call.is_continued


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
