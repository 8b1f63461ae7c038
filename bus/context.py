"""The context of the call that is running: id, deadline, metadata (the tenant too), cancellation.

A handler reads it with `context()`; clients made inside a handler read it by themselves, so
that every sub-call inherits deadline, cancellation, metadata and trace without a word in the
handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

from .clock import monotonic
from .errors import ConfigError
from .protocol.names import InstanceName
from .protocol.random_ids import random_id

MAX_ID_LENGTH: Final = 128

_EMPTY: Mapping[str, str] = MappingProxyType({})


class Context:
    """The facts about one call while it runs.

    Two strengths of cancellation exist: *stop* asks the handler to finish tidily, *kill*
    drops the call now. Both pass on to every sub-call, and neither can be taken back.

    Attributes:
        id: the request id, shared by all sub-calls of one request.
        deadline: when the time is over, on the library's monotonic clock in seconds; None
            when there is no limit. `time_left` is what a handler wants.
        metadata: what the caller sent along; read-only.
        attempt: 1 for the first try, one more for each retry.
        priority: as the caller gave it; larger is more urgent.
        idempotency_key: names the effect that the caller wants once; empty without one. A
            handler with effects looks it up before it repeats them.
        delivered: how many items its caller had, when it called, of a stream with which it can go
            on at another instance; None where it cannot.
        principal: the user of the server who calls, proven, where the handler has `allow`; empty
            elsewhere.
        hop: `namespace.component.endpoint@instance` where the call runs.
        TENANT_KEY: the key of `metadata` under which a front end says whose request it is.
    """

    TENANT_KEY: Final = "tenant"

    __slots__ = (
        "__weakref__",
        "_draining",
        "_killed",
        "_listeners",
        "_stopped",
        "_trace_headers",
        "_waiters",
        "attempt",
        "delivered",
        "deadline",
        "hop",
        "id",
        "idempotency_key",
        "metadata",
        "principal",
        "priority",
    )

    def __init__(
        self,
        id: str = "",
        *,
        deadline: float | None = None,
        metadata: Mapping[str, str] | None = None,
        attempt: int = 1,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        hop: str = "",
        draining: Callable[[], bool] | None = None,
    ) -> None:
        if not (id.isascii() and id.isprintable() and len(id) <= MAX_ID_LENGTH):
            raise ConfigError(
                f"request id {id[:140]!r} must be at most {MAX_ID_LENGTH} characters of "
                "printable ASCII"
            )
        self.id = id or random_id()
        self.deadline = deadline
        self.metadata = MappingProxyType(dict(metadata)) if metadata else _EMPTY
        self.attempt = attempt
        self.priority = priority
        self.delivered: int | None = None
        self.principal = ""
        self.hop = hop
        self.idempotency_key = ""
        self._trace_headers = trace_headers or _EMPTY
        self._stopped = False
        self._killed = False
        self._draining = draining
        self._listeners: dict[int, Callable[[bool], None]] | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def __repr__(self) -> str:
        state = "killed" if self._killed else "stopped" if self._stopped else "running"
        return f"<Context {self.id} [{state} | attempt: {self.attempt}]>"

    @property
    def continues(self) -> bool:
        """True if the call is a stream with which its caller can go on at another instance."""
        return self.delivered is not None

    def is_stopped(self) -> bool:
        """True if the call was asked to stop, or was killed."""
        return self._stopped

    def is_killed(self) -> bool:
        """True if the call was killed."""
        return self._killed

    def is_draining(self) -> bool:
        """True if the instance is going away and waits for this call."""
        return self._draining is not None and self._draining()

    def time_left(self) -> float | None:
        """Seconds to the deadline, negative when it has passed; None without one."""
        return None if self.deadline is None else self.deadline - monotonic()

    def stop_generating(self) -> None:
        """Ask the call, and every sub-call that it made, to finish tidily."""
        if not self._stopped:
            self._stopped = True
            self._tell(False)

    def kill(self) -> None:
        """Drop the call, and every sub-call that it made, now."""
        if not self._killed:
            self._stopped = True
            self._killed = True
            self._tell(True)

    async def stopped(self) -> None:
        """Wait until the call is asked to stop."""
        if self._stopped:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)

    @property
    def tenant(self) -> str:
        """The tenant of the request, by the key that a front end was given; empty where it has
        none."""
        return self.metadata.get(self.TENANT_KEY, "")

    @staticmethod
    def current() -> Context | None:
        """The context of the running handler, or None outside of one."""
        return _current.get()

    def enter(self) -> None:
        """Make it the context of the running task from here on, and so of what that begins."""
        _current.set(self)

    def trace_headers(self) -> dict[str, str]:
        """`traceparent`, `tracestate` and `baggage` for a call to another system."""
        return dict(self._trace_headers)

    def set_trace_headers(self, trace_headers: Mapping[str, str]) -> None:
        """Replace what `trace_headers` gives, once this hop has a span of its own."""
        self._trace_headers = trace_headers

    def link(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Call `listener(killed)` at stop and at kill; returns the function that ends this.

        A listener linked after a stop is called at once.
        """
        if self._listeners is None:
            self._listeners = {}
        listeners = self._listeners
        key = id(listener)
        listeners[key] = listener
        if self._stopped:
            listener(self._killed)

        def unlink() -> None:
            listeners.pop(key, None)

        return unlink

    def _tell(self, killed: bool) -> None:
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        if self._listeners:
            for listener in list(self._listeners.values()):
                listener(killed)


_current: ContextVar[Context | None] = ContextVar("dynbus_context", default=None)


def context() -> Context:
    """The context of the running handler.

    Raises:
        LookupError: called outside of a handler.
    """
    current = _current.get()
    if current is None:
        raise LookupError("context() is only known inside a handler")
    return current


def entered(value: Context) -> Callable[[], None]:
    """Make `value` the context of the running task; what is returned ends that, in the same
    task."""
    token = _current.set(value)
    return lambda: _current.reset(token)


_instance: ContextVar[InstanceName | None] = ContextVar("dynbus_instance", default=None)


def current_instance() -> InstanceName | None:
    """The instance whose code is running: a handler, `on_start`, a task that one of them began.

    None outside of those, also in callbacks of the bus.
    """
    return _instance.get()


@contextmanager
def inside_instance(name: InstanceName) -> Generator[None]:
    """Make what runs or begins here code of this instance."""
    token = _instance.set(name)
    try:
        yield
    finally:
        _instance.reset(token)
