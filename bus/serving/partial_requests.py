"""Split requests of which parts are still to come: in a bounded space, and not for ever.

Nothing here knows of a connection, a clock or a call. Who sends a request sends all its parts at
once, so a client has few that are incomplete, and one of which no part came for a while is the
first to give way to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dynbus.bus.protocol.wire import MAX_PARTS

LARGEST_PER_CLIENT: Final = 2
LARGEST: Final = 4
"""Requests of the largest size whose bytes may wait, of one client and of all."""
REQUESTS_PER_CLIENT: Final = 16
REQUESTS: Final = 256
"""Requests that may be incomplete, of one client and of all. Each has headers, too."""
PARTS_PER_CLIENT: Final = LARGEST_PER_CLIENT * MAX_PARTS
PARTS: Final = LARGEST * MAX_PARTS
IDLE_SWEEPS: Final = 20
"""Sweeps without a part after which a request is given up: 10 s in which the loop did run."""

Key = tuple[str, int]
"""A client's id, and the number of its request."""


class PartialRequest:
    """The parts of a split request that have arrived, in whatever order.

    Attributes:
        size: bytes that have arrived.
    """

    __slots__ = ("_count", "_parts", "size", "swept")

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: dict[int, bytes] = {}
        self.size = 0
        self.swept = 0

    def __repr__(self) -> str:
        return f"<PartialRequest [{len(self._parts)} of {self._count} parts]>"

    def __len__(self) -> int:
        """The number of parts that have arrived."""
        return len(self._parts)

    def add(self, index: int, count: int, data: bytes) -> None:
        """Take in part `index`, counted from 1; a repeat, or one of another split, is ignored."""
        if self._count == count and index not in self._parts:
            self._parts[index] = data
            self.size += len(data)

    def whole(self) -> bytes | None:
        """The request, or None while parts are still to come."""
        if len(self._parts) < self._count:
            return None
        return b"".join(self._parts[index] for index in range(1, self._count + 1))


class _Share:
    """The partial requests of one client, or of all."""

    __slots__ = ("parts", "requests", "size")

    def __init__(self) -> None:
        self.requests = self.parts = self.size = 0

    def add(self, requests: int, parts: int, size: int) -> None:
        self.requests += requests
        self.parts += parts
        self.size += size


class PartialRequests:
    """The incomplete requests of one instance, those without a part for the longest first.

    Args:
        max_request_bytes: bytes of the largest request.
    """

    __slots__ = ("_all", "_max_request_bytes", "_of_client", "_requests", "_sweeps")

    def __init__(self, max_request_bytes: int) -> None:
        self._max_request_bytes = max_request_bytes
        self._requests: dict[Key, PartialRequest] = {}
        self._of_client: dict[str, _Share] = {}
        self._all = _Share()
        self._sweeps = 0

    def __repr__(self) -> str:
        return (
            f"<PartialRequests [{self._all.requests} of {len(self._of_client)} clients, "
            f"{self._all.size} bytes]>"
        )

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: Key) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._requests))

    @property
    def size(self) -> int:
        """Bytes that have arrived of all requests."""
        return self._all.size

    def add(self, key: Key, index: int, count: int, data: bytes) -> PartialRequest:
        """Take in part `index` of `count`, counted from 1; the request as far as it is here."""
        request = self._requests.pop(key, None)
        share = self._of_client.get(key[0])
        if share is None:
            share = self._of_client[key[0]] = _Share()
        is_new = request is None
        if request is None:
            request = PartialRequest(count)
        parts, size = len(request), request.size
        request.add(index, count, data)
        request.swept = self._sweeps
        self._requests[key] = request
        for each in (share, self._all):
            each.add(is_new, len(request) - parts, request.size - size)
        return request

    def remove(self, key: Key) -> None:
        """Forget a request; one that is not here is none."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        share = self._of_client[key[0]]
        for each in (share, self._all):
            each.add(-1, -len(request), -request.size)
        if not share.requests:
            del self._of_client[key[0]]

    def is_too_much(self, client_id: str) -> bool:
        """True if a client sends more than it may have here."""
        share = self._of_client.get(client_id)
        return share is not None and (
            share.requests > REQUESTS_PER_CLIENT
            or share.parts > PARTS_PER_CLIENT
            or share.size > LARGEST_PER_CLIENT * self._max_request_bytes
        )

    def excess(self) -> Key | None:
        """The request that is to be given up next for there is too much of all; None if not."""
        if (
            self._all.requests > REQUESTS
            or self._all.parts > PARTS
            or self._all.size > LARGEST * self._max_request_bytes
        ):
            return next(iter(self._requests))
        return None

    def sweep(self) -> list[Key]:
        """Count a sweep; the requests that have been without a part for too many of them."""
        # Not a time: while the loop is blocked no part is read.
        self._sweeps += 1
        idle: list[Key] = []
        for key, request in self._requests.items():
            if self._sweeps - request.swept < IDLE_SWEEPS:
                break
            idle.append(key)
        return idle
