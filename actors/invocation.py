"""One logical call: choosing an instance, sending, and trying the next where that is safe.

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
from dynbus.bus.discovery import Instance
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
from dynbus.bus.names import EndpointName, check_token
from dynbus.bus.tokens import jitter, random_id

from .options import DEFAULT, CallOptions, current_options
from .routing import Load, Router, RouteRequest

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
        "_declared",
        "_fields",
        "_observation",
        "_parent",
        "_migrations",
        "_retries",
        "_tried",
        "call",
        "data",
        "endpoint",
        "idempotent",
        "instance_id",
        "migration_limit",
        "options",
        "request",
        "request_id",
        "router",
        "runtime",
        "streaming",
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
        self.router = router
        self.request = request
        self.data = data
        self.streaming = streaming
        self.options = options
        self.request_id = options.request_id or (parent.id if parent else random_id())
        self.migration_limit = migration_limit
        self.idempotent = idempotent or bool(options.idempotency_key)
        self.instance_id = options.instance
        self.call: PendingCall | None = None
        self._parent = parent
        self._declared = streaming is not None
        self._attempt = 0
        self._retries = 0
        self._migrations = 0
        self._tried: set[str] = set()
        self._fields: dict[str, str] | None = None
        self._observation: CallObservation | None = None
        limit = timeout if options.timeout is DEFAULT else options.timeout
        deadline = monotonic() + limit if isinstance(limit, int | float) else None
        if parent is not None and parent.deadline is not None:
            deadline = parent.deadline if deadline is None else min(deadline, parent.deadline)
        self._deadline = deadline

    async def begin(self) -> PendingCall:
        """Send the request to the instance that the router picks.

        Raises:
            NoInstances: there is none, at once or after the wait that the options give.
            ConfigError: the router picked what is no instance id.
            InvalidRequest: the instance serves the endpoint in the other kind.
            DeadlineExceeded, PayloadTooLarge, Unavailable: nothing was sent.
        """
        runtime = self.runtime
        if not runtime.is_connected:
            await runtime.wait_connected(self._time_left())
        instance_id = self.options.instance or await self._choose()
        self.instance_id = instance_id
        self._attempt += 1
        self._check_kind(instance_id)
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
        instance_id = self.options.instance
        if instance_id:
            await self.runtime.discovery.wait(self.endpoint, 1, self.options.wait)
            kind = self._kind_at(instance_id)
            if kind is not None:
                self.streaming = kind == "stream"
                return
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
            self._tried.add(self.instance_id)
        final = isinstance(error, ConfigError | DeadlineExceeded | NoInstances)
        if self._attempt >= MAX_ATTEMPTS or final:
            raise error
        if not error.started and not lost and not self.options.instance and self._has_untried():
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
        self._tried.clear()
        await self._pause(error)

    def _may_migrate(self) -> bool:
        """Whether the call may begin again on an instance that it was not on yet.

        Only asked before the first item: a stream that has begun is continued where that is
        defined, never begun again.
        """
        self._tried.add(self.instance_id)
        if self._migrations >= self.migration_limit or not self._has_untried():
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
        runtime = self.runtime
        endpoint = self.endpoint
        discovery = runtime.discovery
        view = discovery.view
        instances = view.instances(endpoint.namespace, endpoint.component, monotonic())
        if not instances:
            wait = self.options.wait
            left = self._time_left()
            instances = await self._wait_for_instances(wait, left)
        if self._tried:
            untried = [one for one in instances if one.id not in self._tried]
            instances = untried or instances
        request = RouteRequest(endpoint, self.request, self._parent, self._load)
        # A router is the user's code, and what it says becomes part of a subject.
        chosen = check_token("the router's instance", await self.router.route(request, instances))
        if self.streaming is None:
            self.streaming = self._kind_at(chosen) == "stream"
        return chosen

    def _kind_at(self, instance_id: str) -> str | None:
        """`unary` or `stream`, as the instance's record says; None when it does not."""
        endpoint = self.endpoint
        view = self.runtime.discovery.view
        one = view.find(endpoint.namespace, endpoint.component, instance_id)
        return one.record.endpoints.get(endpoint.endpoint) if one is not None else None

    def _check_endpoint(self, instance_id: str) -> None:
        """Refuse a call of an endpoint that the chosen instance does not have.

        Raises:
            InvalidRequest: its record lists others; the next instance may have it.
        """
        endpoint = self.endpoint
        view = self.runtime.discovery.view
        one = view.find(endpoint.namespace, endpoint.component, instance_id)
        if one is not None and one.record.endpoints:
            raise InvalidRequest(
                f"{endpoint.namespace}.{endpoint.component} has no endpoint "
                f"{endpoint.endpoint!r}; it has {', '.join(sorted(one.record.endpoints))}",
                request_id=self.request_id,
                started=False,
            )

    def _check_kind(self, instance_id: str) -> None:
        """Refuse a call whose result would be lost, or never come.

        Raises:
            InvalidRequest: the instance's record says that it serves the other kind.
        """
        kind = self._kind_at(instance_id)
        if kind is None:
            self._check_endpoint(instance_id)
            return
        wanted = "stream" if self.streaming else "unary"
        if kind == wanted:
            return
        if self._declared:
            message = (
                f"{self.endpoint} is declared {wanted} by the client's actor class, "
                f"but instance {instance_id} serves it as {kind}"
            )
        elif self.streaming:
            message = f"{self.endpoint} answers once: await the call"
        else:
            message = f"{self.endpoint} answers with a stream: iterate over the call"
        raise InvalidRequest(message, request_id=self.request_id, started=False)

    async def _wait_for_instances(self, wait: float, left: float | None) -> list[Instance]:
        discovery = self.runtime.discovery
        try:
            async with asyncio.timeout(left):
                return await discovery.wait(
                    self.endpoint, 1, wait if left is None else min(wait, left)
                )
        except TimeoutError:
            # The first reading of the records does not end, and no wait was asked for.
            raise DeadlineExceeded(
                f"the deadline passed before {self.endpoint} was found",
                request_id=self.request_id,
                started=False,
            ) from None

    def _load(self, instance_id: str) -> Load:
        caller = self.runtime.caller
        return Load(caller.in_flight(instance_id), caller.load(instance_id))

    def _has_untried(self) -> bool:
        view = self.runtime.discovery.view
        instances = view.instances(self.endpoint.namespace, self.endpoint.component, monotonic())
        return any(one.id not in self._tried for one in instances)

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
