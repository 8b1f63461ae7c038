"""The batches of one endpoint: `Gathering` says who goes together and when; this carries it out.

Each call stays one of its own, with its task, context, deadline and span. Its task waits here for
its result. The batch runs in a task and a context of its own, which no caller's variables reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, context
from dynbus.bus.errors import Cancelled, DynbusError, HandlerError, only_cause
from dynbus.bus.protocol.endpoint import BatchRule
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.trace_context import joined_trace

from .gathering import Gathering

if TYPE_CHECKING:
    from dynbus.bus.telemetry.telemetry import CallObservation, Telemetry

logger = logging.getLogger(__name__)


class BatchOwner(Protocol):
    """The owner of batches: it runs the calls of an instance."""

    @property
    def telemetry(self) -> Telemetry | None: ...

    def begin(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """Run something of a handler's in a task of its own, from the instance's variables."""
        ...

    def is_draining(self) -> bool: ...

    def failure(self, raised: BaseException, where: str, /) -> DynbusError:
        """The error for callers of a handler that raised no error of dynbus; the exception is
        logged.
        """
        ...


class _Member:
    """A call that waits for its batch, or for the end of it.

    Attributes:
        batch: None until it has begun.
        error: raised to its caller in place of a result.
    """

    __slots__ = ("arrived", "batch", "context", "done", "error", "request", "result")

    def __init__(
        self, request: Any, context: Context, now: float, done: asyncio.Future[None]
    ) -> None:
        self.request = request
        self.context = context
        self.arrived = now
        self.done = done
        self.batch: _Batch | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Let its task go on."""
        if not self.done.done():
            self.done.set_result(None)


class _Batch:
    """Calls that run together.

    Attributes:
        left: how many of its callers are gone.
    """

    __slots__ = ("context", "left", "members", "task")

    def __init__(self, members: Sequence[_Member], context: Context) -> None:
        self.members = members
        self.context = context
        self.left = 0
        self.task: asyncio.Task[None] | None = None


class Batches:
    """Has the calls of one endpoint answered together. Everything here runs on the main loop.

    Args:
        hop: where its calls run.
    """

    def __init__(
        self,
        rule: BatchRule,
        concurrency: int | None,
        address: EndpointName,
        hop: str,
        owner: BatchOwner,
    ) -> None:
        self._rule = rule
        self._address = address
        self._hop = hop
        self._owner = owner
        self._gathering: Gathering[_Member] = Gathering(rule.most, rule.wait, concurrency)
        self._timer: asyncio.TimerHandle | None = None
        self._looks_soon = False

    def __repr__(self) -> str:
        return f"<Batches of {self._address} {self._gathering!r}>"

    def has_waiting(self, call: Context) -> bool:
        """True if a call waits for a batch that has not begun."""
        return any(each.context is call for each in self._gathering)

    def hurry(self) -> None:
        """Begin what has come together: the instance takes no more calls."""
        self._gathering.hurry()
        self._look()

    async def answer(self, request: Any) -> Any:
        """The result of the running call, which is made in a batch.

        Raises:
            Cancelled: it was cancelled before its batch began.
            HandlerError: the batch failed, or the key of the request is not usable.
            BaseException: what the handler raised or gave for this call.
        """
        loop, now = asyncio.get_running_loop(), monotonic()
        member = _Member(request, context(), now, loop.create_future())
        self._gathering.add(member, self._key_of(request), now, member.context.deadline)
        on_stop = partial(self._stopped, member)
        unlink = member.context.link(on_stop)
        self._look_soon(loop)
        try:
            await member.done
        except asyncio.CancelledError:
            await self._leave(member)
            raise
        finally:
            unlink()
        if member.error is not None:
            raise member.error
        return member.result

    def _key_of(self, request: Any) -> Hashable:
        if self._rule.key is None:
            return None
        key = self._rule.key(request)
        try:
            hash(key)
        except TypeError:
            raise HandlerError(
                f"{self._rule.label}: its batch_key gave a {type(key).__name__}, which cannot be "
                "compared by its hash: give a text, a number or a tuple of them"
            ) from None
        return key

    # Who leaves ----------------------------------------------------------------------------

    def _stopped(self, member: _Member, killed: bool) -> None:
        """A caller wants no result; the task of one that is killed is cancelled as well."""
        if not killed and self._withdraw(member):
            member.error = Cancelled("the caller cancelled the call", started=False)
            member.finish()
        elif member.batch is not None and all(
            each.context.is_stopped() for each in member.batch.members
        ):
            member.batch.context.stop_generating()

    def _withdraw(self, member: _Member) -> bool:
        withdrawn = self._gathering.withdraw(member)
        if withdrawn:
            self._arm()
        return withdrawn

    async def _leave(self, member: _Member) -> None:
        """The task of a call is cancelled: the last one of a batch waits for its end."""
        batch = member.batch
        if self._withdraw(member) or batch is None or batch.task is None:
            return
        if not member.done.cancelled():
            # The batch was over before.
            return
        batch.left += 1
        if batch.left == len(batch.members):
            batch.context.kill()
            batch.task.cancel()
            await asyncio.wait({batch.task})

    # When they begin -----------------------------------------------------------------------

    def _look_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        # After those that came with the same read have entered.
        if not self._looks_soon:
            self._looks_soon = True
            loop.call_soon(self._look)

    def _look(self) -> None:
        self._looks_soon = False
        now = monotonic()
        for members in self._gathering.take(now):
            self._begin(members, now)
        self._arm()

    def _arm(self) -> None:
        """Look again when the next batch is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._gathering.next_due()
        if due is not None:
            delay = max(0.0, due - monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _begin(self, members: list[_Member], now: float) -> None:
        batch = _Batch(members, self._context_of(members))
        telemetry, observation = self._owner.telemetry, None
        if telemetry is not None:
            observation = telemetry.batch(
                self._address, [each.context.trace_headers() for each in members]
            )
            telemetry.batch_begins(
                self._address, [now - each.arrived for each in members], self._sizes_of(members)
            )
            batch.context.set_trace_headers(observation.trace_headers)
        for member in members:
            member.batch = batch
        batch.task = self._owner.begin(self._run(batch, observation))
        # Also of a batch that is cancelled before its first step, and so never enters.
        batch.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._gathering.ended()
        self._look_soon(task.get_loop())

    def _context_of(self, members: Sequence[_Member]) -> Context:
        """That of a batch: what all of its calls have in common, and their longest deadline."""
        contexts = [each.context for each in members]
        first = contexts[0]
        deadlines = [each.deadline for each in contexts]
        shared = set(first.metadata.items()).intersection(
            *(each.metadata.items() for each in contexts)
        )
        whole = Context(
            first.id if len({each.id for each in contexts}) == 1 else "",
            deadline=None if None in deadlines else max(cast("list[float]", deadlines)),
            metadata=dict(shared),
            priority=max(each.priority for each in contexts),
            trace_headers=joined_trace([each.trace_headers() for each in contexts]),
            hop=self._hop,
            draining=self._owner.is_draining,
        )
        if len({each.principal for each in contexts}) == 1:
            whole.principal = first.principal
        return whole

    def _sizes_of(self, members: Sequence[_Member]) -> list[float]:
        """The sizes of the requests of a batch; empty where they are not known."""
        size_of = self._rule.size_of
        if size_of is None:
            return []
        try:
            return [float(size_of(each.request)) for each in members]
        except Exception:
            # It is the user's code, and no call fails for the sake of a figure.
            logger.exception("%s: batch_size_of failed", self._rule.label)
            return []

    # How they end --------------------------------------------------------------------------

    async def _run(self, batch: _Batch, observation: CallObservation | None) -> None:
        batch.context.enter()
        token = observation.activate() if observation is not None else None
        error: BaseException | None = None
        try:
            given = await self._rule.run([each.request for each in batch.members])
            for member, one in zip(batch.members, self._checked(batch, given), strict=True):
                if isinstance(one, BaseException):
                    member.error = self._own(one)
                else:
                    member.result = one
        except BaseException as raised:  # noqa: BLE001 - each of its calls ends with it
            error = raised
            self._fail(batch, raised)
        finally:
            if observation is not None:
                observation.deactivate(token)
                observation.end(error)
            for member in batch.members:
                member.finish()

    def _checked(self, batch: _Batch, given: Any) -> Sequence[Any]:
        """Return the handler's results if there is one for each request.

        Raises:
            HandlerError: it does not.
        """
        label, asked = self._rule.label, len(batch.members)
        requests = "1 request" if asked == 1 else f"{asked} requests"
        if not isinstance(given, list | tuple):
            raise self._refused(
                f"{label} returned {type(given).__name__} for {requests}: return a "
                "list with one result for each, in order"
            )
        results = cast("Sequence[Any]", given)
        if len(results) != asked:
            raise self._refused(
                f"{label} returned a list of {len(results)} for {requests}: return one result for "
                "each, in order, or an exception in the place of one that failed"
            )
        return results

    @staticmethod
    def _refused(text: str) -> HandlerError:
        # It is the actor's author who can mend it.
        logger.error("%s", text)
        return HandlerError(text)

    def _fail(self, batch: _Batch, raised: BaseException) -> None:
        """End each call of a batch with what its handler raised."""
        error = only_cause(raised)
        if isinstance(error, asyncio.CancelledError):
            error = Cancelled("the handler was cancelled")
        elif isinstance(error, Exception) and not isinstance(error, DynbusError):
            ids = ", ".join(dict.fromkeys(each.context.id for each in batch.members))
            # Told once, not by each of its calls.
            error = self._owner.failure(raised, f"{self._address} raised in a batch of {ids}")
        for member in batch.members:
            member.error = self._own(error)

    @staticmethod
    def _own(error: BaseException) -> BaseException:
        """An error for one call: it will say of which call it is."""
        if not isinstance(error, DynbusError):
            return error
        own: DynbusError = type(error).__new__(type(error), *error.args)
        own.args = error.args
        own.__dict__.update(error.__dict__)
        return own
