"""A served endpoint: one handler, reduced to the part that the bus needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

DEFAULT_CONCURRENCY: Final = 256
DEFAULT_QUEUE: Final = 1024
DEFAULT_TIMEOUT: Final = 60.0
DEFAULT_IDLE_TIMEOUT: Final = 30.0
MAX_SECONDS: Final = 1e9
"""The longest time that may be asked for, about 32 years; for no limit there is None."""


class Contract(NamedTuple):
    """The messages that an endpoint reads and writes, for clients that know another version of it.

    Attributes:
        hash: the same for endpoints that read and write the same; empty where that is not known.
        schemas: makes the schemas, as JSON.
    """

    hash: str
    schemas: Callable[[], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One handler of one instance.

    Attributes:
        invoke: takes a decoded request; returns a coroutine, or for a stream an async generator.
        by_port: whether `invoke` takes the request and a `ReplyPort` instead, and returns a
            coroutine that has the results sent there, encoded. When it returns, the call ends
            well unless it has ended already; `encode` is not used.
        decode: request bytes to request; raises `InvalidRequest`.
        encode: a result or an item to bytes; raises `InvalidResponse`.
        concurrency: calls that run at a time; None for no limit.
        queue: calls that wait at most; None for no limit.
        timeout: seconds for a whole call; None for no limit.
        idle_timeout: seconds that a stream may be without an item; None for no limit.
        schemas: JSON schemas by `request` and `response`.
        contract: None where clients are not to ask for it.
    """

    name: str
    streaming: bool
    invoke: Callable[..., Any]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    by_port: bool = False
    concurrency: int | None = DEFAULT_CONCURRENCY
    queue: int | None = DEFAULT_QUEUE
    timeout: float | None = DEFAULT_TIMEOUT
    idle_timeout: float | None = DEFAULT_IDLE_TIMEOUT
    schemas: Mapping[str, Any] = field(default_factory=dict[str, Any])
    contract: Contract | None = None

    @property
    def kind(self) -> str:
        """`stream` or `unary`."""
        return "stream" if self.streaming else "unary"
