"""One logical call: sending it to a chosen instance, and to the next where that is safe.

`Selection` chooses the instance of each `Attempt`, `RetryPolicy` says what follows one that failed;
both are carried out here, and telemetry observes the call as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynbus.actors.declaring.codec import Misfit
from dynbus.actors.declaring.resume import ResumeRule
from dynbus.bus.calling.pending_call import CallHead, PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    DynbusError,
    InvalidResponse,
    Migrate,
    Unavailable,
    describe_exception,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.cancellation import OPERATOR
from dynbus.bus.protocol.endpoint import DEFAULT_TIMEOUT
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.random_ids import jitter, random_id

from .attempt import Attempt
from .client_side import ClientSide
from .continuation import Continuation, Resume
from .options import CallOptions, inherited
from .retry_policy import (
    FailedAttempt,
    GiveUp,
    Move,
    PauseThenRetry,
    RetryPolicy,
    is_away,
)
from .routing import NO_METADATA, Router
from .selection import Selection

if TYPE_CHECKING:
    from dynbus.bus.telemetry.telemetry import CallObservation


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of all calls of an endpoint by one client.

    Attributes:
        streaming: None when only the instances' records can tell (untyped calls).
        timeout: seconds used when neither options nor parent give less; None for no limit.
        idempotent: whether a call may be carried out twice.
        migration_limit: how often one may move to another instance.
        resume: how a stream goes on at another instance; None where it does not.
        schema_hash: of the client's class, to be compared with those of instances; empty for a
            client that has none.
    """

    streaming: bool | None
    timeout: float | None = DEFAULT_TIMEOUT
    idempotent: bool = False
    migration_limit: int = 0
    resume: Resume | None = None
    schema_hash: str = ""


class Invocation:
    """A call from its options to its end. Made when the call is written, sent when awaited.

    Args:
        routed_as: what the router looks at in place of the requests; None for those.
        options: of this very call.
    """

    # Of streams alone: see `StreamInvocation`.
    _continuation: Continuation | None = None

    __slots__ = (
        "_attempt",
        "_attempts",
        "_deadline",
        "_fields",
        "_idempotent",
        "_left",
        "_metadata",
        "_observation",
        "_priority",
        "_retry_policy",
        "_selection",
        "_terms",
        "_wait_until",
        "data",
        "endpoint",
        "instance_id",
        "options",
        "parent",
        "request_id",
        "side",
        "streaming",
    )

    def __init__(
        self,
        side: ClientSide,
        endpoint: EndpointName,
        router: Router,
        request: Any,
        data: bytes,
        terms: Terms,
        *,
        routed_as: Any = None,
        options: CallOptions,
        parent: Context | None = None,
    ) -> None:
        parent = parent or Context.current()
        self.side = side
        self.endpoint = endpoint
        self.data = data
        self.options = options
        self.request_id = ""
        self.instance_id = ""
        self.streaming = terms.streaming
        self._terms = terms
        self._idempotent = terms.idempotent
        limit = terms.timeout
        spills = side.spills
        if options:
            self.request_id = options.get("request_id") or ""
            self.instance_id = options.get("instance") or ""
            self._idempotent = terms.idempotent or bool(options.get("idempotency_key"))
            limit = options.get("timeout", limit)
            if spill := options.get("spill"):
                spills = spill == "region"
        if not self.request_id:
            self.request_id = parent.id if parent else random_id()
        self.parent = parent
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._left = False
        self._retry_policy: RetryPolicy | None = None
        self._selection = Selection(
            side, endpoint, router, request, routed_as, self.request_id, parent, spills
        )
        self._fields: dict[str, str] | None = None
        self._metadata: Mapping[str, str] = NO_METADATA
        self._priority = 0
        self._observation: CallObservation | None = None
        self._wait_until: float | None = None
        deadline = None if limit is None else monotonic() + limit
        if parent is not None and parent.deadline is not None:
            deadline = parent.deadline if deadline is None else min(deadline, parent.deadline)
        self._deadline = deadline

    @property
    def call(self) -> PendingCall | None:
        """The open call at the instance of the present attempt; None between two of them."""
        return self._attempt.pending if self._attempt is not None else None

    @property
    def continues(self) -> bool:
        """True if the call is a stream that can go on at another instance."""
        return self._continuation is not None and bool(self.streaming)

    def time_left(self) -> float | None:
        """Seconds until the deadline; None without one.

        Raises:
            DeadlineExceeded: it has passed.
        """
        if self._deadline is None:
            return None
        left = self._deadline - monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"the deadline passed before {self.endpoint} was called",
                request_id=self.request_id,
                started=False,
            )
        return left

    async def everyone(self) -> list[str]:
        """The ids of the instances that a broadcast goes to; see `Selection.everyone`.

        Raises:
            Unavailable: the instances cannot be read.
            DeadlineExceeded: they were not read in time.
            Cancelled: an operator has cancelled the request.
        """
        with self._until_cancelled():
            instances = await self._selection.everyone(self._wait_left(), self.time_left())
        self._check_not_left()
        return instances

    async def learn_kind(self) -> None:
        """Find out whether the endpoint streams, from the records of its instances.

        Raises:
            NoInstances: there is none that could tell, at once or after the wait.
            DeadlineExceeded: none was found in time.
            Cancelled: the call was left.
        """
        try:
            with self._until_cancelled():
                self.streaming = await self._selection.is_stream(
                    self.options.get("instance") or "", self._wait_left(), self.time_left()
                )
            self._check_not_left()
        except BaseException as error:
            # Whether the call would have been a stream was not to be learned.
            self._observe()
            self._end(error)
            raise

    async def _begin(self) -> PendingCall:
        """Send the request to the instance that the router picks.

        Raises:
            NoInstances: there is none, at once or after the wait that the options give.
            ConfigError: the router failed, or picked what it was not offered.
            InvalidRequest: the instance serves the endpoint in the other kind.
            DeadlineExceeded, PayloadTooLarge, Unavailable: nothing was sent.
            Cancelled: the call was left; nor then.
        """
        side, selection = self.side, self._selection
        if self._left or side.bus.cancels.has_any:
            self._check_not_left()
        fields = self._fields
        if fields is None:
            fields = self._fields = self._head_fields()
        if not side.is_connected:
            with self._until_cancelled():
                await side.wait_connected(self.time_left())
            self._check_not_left()
        # Until one is chosen a failure is no instance's, and no reason to try the next.
        self.instance_id = (self.options.get("instance") or "") if self.options else ""
        answered: Callable[[], None] | None = None
        try:
            if self._moves:
                answered = await self._turn()
                self._check_not_left()
            self._attempt = attempt = await self._choose()
        except BaseException:
            if answered is not None:
                answered()
            raise
        if answered is not None:
            attempt.when_answered(answered)
        if self._left or side.bus.cancels.has_any:
            self._check_not_left()
        self.instance_id = attempt.instance_id
        self._attempts += 1
        streaming = bool(self.streaming)
        theirs = selection.check_instance(
            attempt.instance or selection.find(attempt.instance_id),
            streaming=streaming,
            declared=self._terms.streaming is not None,
        )
        own = self._terms.schema_hash
        if own and theirs and theirs != own and side.schema_check is not None:
            side.schema_check.differs(self.endpoint, self.instance_id, own, theirs)
        if attempt.metadata is not None:
            fields = {**fields, headers.METADATA: attempt.metadata}
        following = self._continuation
        may_move = streaming and not self.options.get("instance")
        if following is not None and may_move and following.is_handed_on:
            fields = {**fields, headers.CONTINUES: str(following.accepted)}
        head = CallHead(
            self.endpoint, self.request_id, self._deadline, self._attempts, streaming, fields
        )
        return attempt.send(side.caller, head, self.data, self.parent)

    async def _choose(self) -> Attempt:
        """An attempt at the instance that is named, or that the router picks."""
        if self.instance_id:
            return Attempt(self.instance_id)
        chosen = self._selection.pick()
        if chosen is not None:
            return Attempt(chosen.record.instance_id, instance=chosen)
        with self._until_cancelled():
            return await self._selection.choose(
                self._wait_left(),
                self.time_left(),
                attempt=self._attempts + 1,
                priority=self._priority,
                metadata=self._metadata,
            )

    async def _turn(self) -> Callable[[], None]:
        """Wait until this stream may be sent to another instance: many may have lost theirs.

        Raises:
            DeadlineExceeded: its time was over first.
            Cancelled: an operator has cancelled it.
        """
        left = self.time_left()
        try:
            async with asyncio.timeout(left):
                with self._until_cancelled():
                    return await self.side.migrations.turn(
                        self.endpoint.component_name, self._selection.count()
                    )
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed before {self.endpoint} was called again",
                request_id=self.request_id,
            ) from None

    async def unary(self, decode: Callable[[bytes], Any]) -> Any:
        """The result of a unary call, over as many attempts as are safe.

        Args:
            decode: bytes to result; whatever it raises says that they do not fit.

        Raises:
            InvalidResponse: the result does not fit.
            DynbusError: how the call ended otherwise.
        """
        try:
            while True:
                try:
                    data = await (await self._begin()).result()
                    break
                except DynbusError as error:
                    await self._prepare_retry(error)
            attempt = self._attempt
            if attempt is not None and attempt.is_watched:
                attempt.arrived((data,))
            try:
                result = decode(data)
            except Exception as error:  # noqa: BLE001 - validators of users raise what they like
                failure = self.misfit("the result", error)
                raise failure from failure.__cause__
        except BaseException as error:
            if (call := self.call) is not None:
                call.abandon()
            self._end(error)
            raise
        self._end(None)
        return result

    def misfit(self, what: str, error: Exception) -> InvalidResponse:
        """The caller's error for bytes that could not be read."""
        is_plain = isinstance(error, Misfit)
        why = str(error) if is_plain else describe_exception(error)
        failure = InvalidResponse(f"{what} of {self.endpoint}: {why}", request_id=self.request_id)
        failure.__cause__ = None if is_plain else error
        return failure

    def abandon(self, error: DynbusError | None = None) -> None:
        """Leave the call: the far side is cancelled, and what was not sent yet never is.

        Args:
            error: why, when the call failed and was not merely left.
        """
        self._left = True
        call = self.call
        if call is None:
            # Between two attempts, if any: who awaits the next one ends with `Cancelled`.
            return
        if call.is_open:
            call.abandon()
            if error is None and self._observation is not None:
                self._observation.cancelled()
        if self._attempt is not None:
            self._attempt.end(error or call.error)
        self._end(error)

    # Internals -----------------------------------------------------------------------------

    @property
    def _moves(self) -> bool:
        """True if it is a stream that has lost an instance, and goes on at another."""
        policy = self._retry_policy
        return policy is not None and policy.lost is not None and self.continues

    def _given_up(self, error: DynbusError, why: str) -> DynbusError:
        """The error that ends the call when no attempt follows one that ended with `error`.

        Args:
            why: what keeps a stream from going on; empty for the error itself.
        """
        continuation = self._continuation
        delivered = continuation is not None and continuation.accepted > 0
        end = self._policy.given_up(error, why, own=self._is_own(error), delivered=delivered)
        end.request_id = end.request_id or self.request_id
        return end

    def _is_own(self, error: DynbusError) -> bool:
        """True if the error is about the instance that was called, not about one that this called
        in its turn.
        """
        return error.hop in {"", self.endpoint.hop(self.instance_id)}

    @property
    def _policy(self) -> RetryPolicy:
        policy = self._retry_policy
        if policy is None:
            # Most calls need none.
            policy = self._retry_policy = RetryPolicy(
                idempotent=self._idempotent,
                retries=self.options.get("retries"),
                migration_limit=self._terms.migration_limit,
                continues=self.continues,
            )
        return policy

    @property
    def _has_started(self) -> bool:
        """True if an attempt has failed that may have started."""
        return self._retry_policy is not None and self._retry_policy.lost is not None

    async def _prepare_retry(self, error: DynbusError) -> None:
        """Return when another attempt may follow, after a pause where one is due.

        Raises:
            DynbusError: the error itself, when none may.
            Cancelled: the call was left during the pause.
        """
        attempt, self._attempt = self._attempt, None
        selection = self._selection
        if attempt is not None:
            # Before the next one is routed: a router that counts calls must not count both.
            attempt.end(error)
        if self._left:
            raise error
        self._policy.note(error)
        if error.started:
            # There was an instance: for the next one the caller waits anew.
            self._wait_until = None
        answered = attempt is not None and attempt.was_answered(error)
        failed = self._failed(error, attempt, answered=answered)
        decision = self._policy.decide(failed)
        if isinstance(decision, PauseThenRetry) and not decision.counted:
            await self._pause(decision, error)
            self._attempts -= 1
            return
        if answered and is_away(failed):
            self._pass_over(error, unreachable=failed.unreachable)
        if isinstance(decision, GiveUp):
            raise self._given_up(error, decision.why)
        if isinstance(decision, Move):
            if isinstance(error, Migrate | Draining):
                selection.leave(self.instance_id)
            else:
                # It may only have stood still: then it is chosen again where there is no other.
                selection.mark_tried(self.instance_id)
            self._wait_until = None
            if self._observation is not None:
                self._observation.migrated(error)
            self._record("moved", error)
        elif isinstance(decision, PauseThenRetry):
            selection.forget_tried()
            self._record("retried", error)
            await self._pause(decision, error)
        else:
            self._record("retried", error)
            if not decision.counted:
                self._attempts -= 1
            selection.mark_tried(self.instance_id)

    def _record(self, what: str, error: DynbusError) -> None:
        """Record what follows an attempt that ended with an error."""
        flight = self.side.bus.flight
        if flight is not None:
            flight.note(
                self.endpoint.namespace,
                f"call.{what}",
                str(self.endpoint),
                self.request_id,
                attempt=self._attempts,
                instance=self.instance_id,
                error=error.code,
            )

    def _failed(
        self, error: DynbusError, attempt: Attempt | None, *, answered: bool
    ) -> FailedAttempt:
        """The facts about a failed attempt that the retry policy decides by.

        Args:
            attempt: None where no instance was chosen.
            answered: whether it was sent, and ended with the error.
        """
        unreachable = attempt is not None and attempt.was_unreachable(error)
        is_refusal = isinstance(error, Unavailable) and not error.started
        # In a cluster it may be on its way to another server; the next look for one waits for it.
        may_return = unreachable and not error.started and self.side.bus.data.has_peers
        return FailedAttempt(
            error,
            self._attempts,
            sent=attempt is not None and attempt.pending is not None,
            routed=bool(self.instance_id and not self.options.get("instance")),
            unreachable=unreachable,
            lost=answered and not unreachable and is_refusal,
            own=self._is_own(error),
            settling=self.side.discovery.view.is_settling(monotonic()),
            others=may_return or self._selection.has_untried(self.instance_id),
            waits=self._wait_left() > 0,
            cut_off=self.side.bus.heartbeats.hears_nobody,
        )

    def _pass_over(self, error: DynbusError, *, unreachable: bool) -> None:
        """Have nobody choose the instance for a while: it is away, or has fallen silent."""
        instance = self.endpoint.component_name.instance(self.instance_id)
        discovery = self.side.knowing(instance)
        if not unreachable:
            discovery.suspect(instance)
        elif error.started:
            discovery.note_silent(instance)
        else:
            discovery.note_absent(instance)

    def _wait_left(self) -> float:
        """Seconds that the call still waits for an instance, from its first look for one on."""
        wait = self.options.get("wait") or 0.0
        # A process that hears nobody does not know who is there.
        if self._moves or self.side.bus.heartbeats.hears_nobody:
            wait = max(wait, ResumeRule.WAIT)
        if not wait:
            return 0.0
        now = monotonic()
        if self._wait_until is None:
            self._wait_until = now + wait
        return max(0.0, self._wait_until - now)

    async def _pause(self, decision: PauseThenRetry, error: DynbusError) -> None:
        seconds = max(decision.backoff * jitter.uniform(0.5, 1.0), decision.least)
        left = self.time_left()
        if left is not None and left <= seconds:
            raise self._given_up(error, "its deadline comes before another attempt")
        with self._until_cancelled():
            await asyncio.sleep(seconds)
        self._check_not_left()

    def _until_cancelled(self) -> AbstractContextManager[None]:
        """End what waits in the block with `Cancelled` when an operator cancels the request.

        For whatever waits while no attempt is open: one that is ends by itself.
        """
        return self.side.until_cancelled({self.endpoint.namespace}, self.request_id)

    def _check_not_left(self) -> None:
        if self._left:
            raise Cancelled(
                f"the caller left before {self.endpoint} was called",
                request_id=self.request_id,
                started=self._has_started,
            )
        if self.side.bus.cancels.has(self.endpoint.namespace, self.request_id):
            raise Cancelled(OPERATOR, request_id=self.request_id, started=self._has_started)

    def _end(self, error: BaseException | None) -> None:
        """Tell the observers how the call ended, once."""
        policy = self._retry_policy
        if policy is not None and policy.lost is not None and isinstance(error, DynbusError):
            # The last attempt may not have, and an earlier one has.
            error.started = True
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.end(error)
        attempt = self._attempt
        if attempt is not None and attempt.is_watched:
            attempt.end(error)

    def _observe(self) -> Mapping[str, str]:
        """Let telemetry begin to observe the call; the trace headers to send along."""
        telemetry, parent = self.side.bus.telemetry, self.parent
        if telemetry is None:
            return parent.trace_headers() if parent is not None else {}
        self._observation = telemetry.client_call(
            self.endpoint,
            streaming=bool(self.streaming),
            request_id=self.request_id,
            parent=parent,
        )
        return self._observation.trace_headers

    def _head_fields(self) -> dict[str, str]:
        """Headers that are the same for every attempt."""
        options, parent = self.options, self.parent
        if not options and parent is None and self.side.bus.telemetry is None:
            return {}
        fields = dict(self._observe())
        metadata, priority = inherited(options, parent)
        if metadata:
            self._metadata = metadata
            fields[headers.METADATA] = headers.encode_metadata(metadata)
        if priority:
            self._priority = priority
            fields[headers.PRIORITY] = str(priority)
        if idempotency_key := options.get("idempotency_key"):
            fields[headers.IDEMPOTENCY_KEY] = idempotency_key
        return fields
