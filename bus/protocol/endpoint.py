"""A served endpoint: one handler, reduced to the part that the bus needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

DEFAULT_CONCURRENCY: Final = 256
DEFAULT_QUEUE: Final = 1024
DEFAULT_TIMEOUT: Final = 60.0
DEFAULT_IDLE_TIMEOUT: Final = 30.0
ANYBODY: Final = "*"
"""Allows everybody with a user of the server."""
MAX_SECONDS: Final = 1e9
"""The longest time that may be asked for, about 32 years; for no limit there is None."""


def allows(allow: Collection[str] | None, principal: str) -> bool:
    """True if a principal may call an endpoint with this `allow`."""
    return allow is None or principal in allow or ANYBODY in allow


class Contract(NamedTuple):
    """The messages that an endpoint reads and writes, for clients that know another version of it.

    Attributes:
        hash: the same for endpoints that read and write the same; empty where that is not known.
        schemas: makes the schemas, as JSON.
    """

    hash: str
    schemas: Callable[[], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The rule by which calls of an endpoint are batched.

    Attributes:
        run: takes the decoded requests of a batch; its result has one result for each, in order,
            or an exception in the place of one.
        label: how messages name `run`.
        most: calls of one batch.
        wait: seconds that a call waits for others.
        key: of a request; only calls of the same key go together. None for all.
        size_of: how large a request is, in any unit; None where nobody tells. Metrics alone use it.
    """

    run: Callable[[Sequence[Any]], Awaitable[Any]]
    label: str
    most: int
    wait: float
    key: Callable[[Any], Hashable] | None = None
    size_of: Callable[[Any], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One handler of one instance.

    Attributes:
        invoke: takes a decoded request; returns a coroutine, or for a stream an async generator.
        by_port: whether `invoke` takes the request and a `ReplyPort` instead, and returns a
            coroutine that has the results sent there, encoded. When it returns, the call ends
            well unless it has ended already; `encode` is not used.
        batch: how calls go together; None where each runs alone. With it `invoke` takes the request
            and a function that has a request answered in a batch, and returns a coroutine.
        decode: request bytes to request; raises `InvalidRequest`.
        encode: a result or an item to bytes; raises `InvalidResponse`.
        concurrency: calls that run at a time, or batches of them; None for no limit.
        queue: calls that wait at most; None for no limit.
        timeout: seconds for a whole call; None for no limit.
        idle_timeout: seconds that a stream may be without an item; None for no limit.
        allow: the principals that may call it, `"*"` for any; None for all that the server lets
            call. With it their calls have the principal, proven, in their context.
        schemas: JSON schemas by `request` and `response`.
        contract: None where clients are not to ask for it.
    """

    name: str
    streaming: bool
    invoke: Callable[..., Any]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    by_port: bool = False
    batch: BatchRule | None = None
    concurrency: int | None = DEFAULT_CONCURRENCY
    queue: int | None = DEFAULT_QUEUE
    timeout: float | None = DEFAULT_TIMEOUT
    idle_timeout: float | None = DEFAULT_IDLE_TIMEOUT
    allow: Collection[str] | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict[str, Any])
    contract: Contract | None = None

    @property
    def kind(self) -> str:
        """`stream` or `unary`."""
        return "stream" if self.streaming else "unary"

    @property
    def places(self) -> int | None:
        """Calls that are taken in at a time; None for no limit.

        With batches, those of as many as may run, and of one that comes together meanwhile.
        """
        if self.batch is None or self.concurrency is None:
            return self.concurrency
        return (self.concurrency + 1) * self.batch.most
