"""One logical call: sending it to a chosen instance, and to the next where that is safe.

A failed attempt is repeated by itself only when the request provably did not start. Beyond
that a handler must be declared idempotent, or the caller must have given an idempotency key.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from dynbus.bus import headers
from dynbus.bus.caller import CallHead, PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, current_context
from dynbus.bus.endpoint import DEFAULT_TIMEOUT
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    DynbusError,
    InvalidRequest,
    Migrate,
    NoInstances,
    Overloaded,
    Unavailable,
)
from dynbus.bus.names import EndpointName
from dynbus.bus.tokens import jitter, random_id

from .options import DEFAULT, CallOptions, current_options
from .routing import Router
from .selection import Selection

if TYPE_CHECKING:
    from dynbus.bus.telemetry import CallObservation

    from .runtime import Runtime

MAX_ATTEMPTS: Final = 8
DEFAULT_RETRIES: Final = 2
FIRST_BACKOFF: Final = 0.05
MAX_BACKOFF: Final = 2.0


class Invocation:
    """A call from its options to its end. Made when the call is written, sent when awaited.

    Args:
        streaming: None when only the instance's record can tell (untyped calls).
        timeout: seconds used when neither options nor parent give less; None for no limit.
    """

    __slots__ = (
        "_attempt",
        "_deadline",
        "_fields",
        "_observation",
        "_parent",
        "_migrations",
        "_retries",
        "_selection",
        "call",
        "data",
        "endpoint",
        "idempotent",
        "instance_id",
        "migration_limit",
        "options",
        "request_id",
        "runtime",
    )

    def __init__(
        self,
        runtime: Runtime,
        endpoint: EndpointName,
        router: Router,
        request: Any,
        data: bytes,
        *,
        streaming: bool | None,
        timeout: float | None = DEFAULT_TIMEOUT,
        idempotent: bool = False,
        migration_limit: int = 0,
        options: CallOptions | None = None,
        parent: Context | None = None,
    ) -> None:
        options = options or current_options()
        parent = parent or current_context()
        self.runtime = runtime
        self.endpoint = endpoint
        self.data = data
        self.options = options
        self.request_id = options.request_id or (parent.id if parent else random_id())
        self.migration_limit = migration_limit
        self.idempotent = idempotent or bool(options.idempotency_key)
        self.instance_id = options.instance
        self.call: PendingCall | None = None
        self._parent = parent
        self._attempt = 0
        self._retries = 0
        self._migrations = 0
        self._selection = Selection(
            runtime, endpoint, router, request, self.request_id, parent, streaming
        )
        self._fields: dict[str, str] | None = None
        self._observation: CallObservation | None = None
        limit = timeout if options.timeout is DEFAULT else options.timeout
        deadline = monotonic() + limit if isinstance(limit, int | float) else None
        if parent is not None and parent.deadline is not None:
            deadline = parent.deadline if deadline is None else min(deadline, parent.deadline)
        self._deadline = deadline

    @property
    def streaming(self) -> bool | None:
        """Whether the call is a stream; None for an untyped one before an instance tells."""
        return self._selection.streaming

    @streaming.setter
    def streaming(self, streaming: bool) -> None:
        self._selection.streaming = streaming

    async def begin(self) -> PendingCall:
        """Send the request to the instance that the router picks.

        Raises:
            NoInstances: there is none, at once or after the wait that the options give.
            ConfigError: the router failed, or picked what it was not offered.
            InvalidRequest: the instance serves the endpoint in the other kind.
            DeadlineExceeded, PayloadTooLarge, Unavailable: nothing was sent.
        """
        runtime = self.runtime
        if not runtime.is_connected:
            await runtime.wait_connected(self._time_left())
        # Until one is chosen a failure is no instance's, and no reason to try the next.
        self.instance_id = self.options.instance
        instance_id = self.instance_id or await self._choose()
        self.instance_id = instance_id
        self._attempt += 1
        self._selection.check_kind(instance_id)
        head = CallHead(
            self.endpoint,
            self.request_id,
            self._deadline,
            self._attempt,
            bool(self.streaming),
            self._fields if self._fields is not None else self._head_fields(),
        )
        call = runtime.caller.begin(head, instance_id, self.data)
        self.call = call
        if self._parent is not None:
            call.follow(self._parent)
        return call

    async def learn_kind(self) -> None:
        """Find out whether the endpoint streams, from the record of an instance.

        Raises:
            NoInstances: there is none that could tell.
        """
        instance_id, wait = self.options.instance, self.options.wait
        if not instance_id or not await self._selection.learn_kind_at(instance_id, wait):
            await self._choose()

    async def unary(self) -> bytes:
        """The result of a unary call, over as many attempts as are safe.

        Raises:
            DynbusError: how the call ended.
        """
        try:
            while True:
                try:
                    result = await (await self.begin()).result()
                    break
                except DynbusError as error:
                    await self.prepare_retry(error)
        except BaseException as error:
            self.observe_end(error)
            raise
        self.observe_end(None)
        return result

    async def items(self) -> list[bytes]:
        """The next items of a stream; empty at its end. The first call sends the request.

        Raises:
            DynbusError: how the call ended.
        """
        while True:
            call = self.call
            try:
                if call is None:
                    call = await self.begin()
                items = await call.items()
            except DynbusError as error:
                if self.call is not None and self.call.reader.has_begun:
                    self.observe_end(error)
                    raise
                try:
                    await self.prepare_retry(error)
                except DynbusError:
                    self.observe_end(error)
                    raise
                self.call = None
                continue
            if self._observation is not None:
                self._observation.items(len(items))
            if not items:
                self.observe_end(None)
            return items

    @property
    def is_direct(self) -> bool:
        """Whether items may be read from `call` without passing here: nothing counts them."""
        return self._observation is None

    def abandon(self) -> None:
        """Leave the call; the far side is cancelled."""
        if self.call is not None and self.call.is_open:
            self.call.abandon()
            if self._observation is not None:
                self._observation.cancelled()
        self.observe_end(None)

    async def prepare_retry(self, error: DynbusError) -> None:
        """Return when another attempt may follow, after a pause where one is due.

        Raises:
            DynbusError: the error itself, when none may.
        """
        call = self.call
        ended = call is not None and call.error is error
        unreachable = call is not None and ended and call.unreachable
        # The instance is there and says that the request never came.
        lost = ended and not unreachable and isinstance(error, Unavailable) and not error.started
        view = self.runtime.discovery.view
        if unreachable and not error.started and view.is_settling(monotonic()):
            # Right after an outage an instance may be a moment later on the bus than we are.
            await self._pause(error)
            self._attempt -= 1
            return
        if unreachable:
            view.suspect(
                self.endpoint.namespace, self.endpoint.component, self.instance_id, monotonic()
            )
        if self.instance_id and not error.started and not lost:
            self._selection.mark_tried(self.instance_id)
        final = isinstance(error, ConfigError | DeadlineExceeded | NoInstances)
        if self._attempt >= MAX_ATTEMPTS or final:
            raise error
        routed = self.instance_id and not self.options.instance
        if routed and not error.started and not lost and self._selection.has_untried():
            return
        if isinstance(error, Migrate | Draining) and self._may_migrate():
            return
        safe = not error.started or (
            self.idempotent and (error.retryable or error.code == "UnknownOutcome")
        )
        allowed = self.options.retries
        if allowed is None:
            allowed = DEFAULT_RETRIES if self.idempotent or lost else 0
        if not safe or self._retries >= allowed or isinstance(error, InvalidRequest):
            raise error
        self._retries += 1
        self._selection.forget_tried()
        await self._pause(error)

    def _may_migrate(self) -> bool:
        """Whether the call may begin again on an instance that it was not on yet.

        Only asked before the first item: a stream that has begun is continued where that is
        defined, never begun again.
        """
        self._selection.mark_tried(self.instance_id)
        if self._migrations >= self.migration_limit or not self._selection.has_untried():
            return False
        self._migrations += 1
        return True

    def observe_end(self, error: BaseException | None) -> None:
        """Close the span of the call, once."""
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.end(error)

    # Internals -----------------------------------------------------------------------------

    async def _choose(self) -> str:
        return await self._selection.choose(self.options.wait, self._time_left())

    async def _pause(self, error: DynbusError) -> None:
        pause = min(MAX_BACKOFF, FIRST_BACKOFF * 2**self._retries) * jitter.uniform(0.5, 1.0)
        if isinstance(error, Overloaded):
            pause = max(pause, error.retry_after)
        left = self._time_left()
        if left is not None and left <= pause:
            raise error
        await asyncio.sleep(pause)

    def _time_left(self) -> float | None:
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

    def _head_fields(self) -> dict[str, str]:
        """Headers that are the same for every attempt."""
        options, parent = self.options, self._parent
        fields: dict[str, str] = {}
        telemetry = self.runtime.bus.telemetry
        if telemetry is not None:
            self._observation = telemetry.client_call(
                self.endpoint,
                streaming=bool(self.streaming),
                request_id=self.request_id,
                parent=parent,
            )
            fields |= self._observation.trace_headers
        elif parent is not None:
            fields |= parent.trace_headers()
        metadata = dict(parent.metadata) if parent is not None else {}
        if options.metadata:
            metadata |= options.metadata
        if metadata:
            fields[headers.METADATA] = headers.encode_metadata(metadata)
        priority = options.priority
        if priority is None and parent is not None:
            priority = parent.priority
        if priority:
            fields[headers.PRIORITY] = str(priority)
        if options.idempotency_key:
            fields[headers.IDEMPOTENCY_KEY] = options.idempotency_key
        self._fields = fields
        return fields
