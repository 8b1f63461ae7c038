"""Requests that were named before they arrived, such as by a cancel: remembered for a while."""

from __future__ import annotations

from typing import Final

REQUESTS: Final = 16384
"""Of all clients together. One takes about half a KiB."""
REQUESTS_PER_CLIENT: Final = 4096
KEPT_SECONDS: Final = 60.0
"""Seconds for which a request may be on its way, or wait in front of a blocked loop."""


class RememberedRequests:
    """Requests by client id and number, each with its secret, for a while. The memory is bounded.

    A client with too many pushes out its own oldest; where all clients together have too many,
    the oldest goes of the client that was without news for the longest. To forget one does no
    harm: its sender does not list it in its heartbeats, and it is ended for that.
    """

    __slots__ = ("_clients", "_count")

    def __init__(self) -> None:
        # The clients are in the order of their news, and so are the requests of each.
        self._clients: dict[str, dict[int, tuple[bytes, float]]] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<RememberedRequests [{self._count} of {len(self._clients)} clients]>"

    def __len__(self) -> int:
        return self._count

    def add(self, client_id: str, number: int, secret: bytes, now: float) -> None:
        """Remember a request.

        Args:
            now: seconds of any clock that does not go back.
        """
        requests = self._clients.pop(client_id, {})
        self._clients[client_id] = requests
        if requests.pop(number, None) is not None:
            self._count -= 1
        elif len(requests) >= REQUESTS_PER_CLIENT:
            # More than one is left: the client itself stays.
            self._forget_first(client_id)
        elif self._count >= REQUESTS:
            self._forget_first(next(iter(self._clients)))
        requests[number] = secret, now
        self._count += 1

    def has(self, client_id: str, number: int, secret: bytes) -> bool:
        """True if this very request is remembered."""
        requests = self._clients.get(client_id)
        return requests is not None and requests.get(number, (b"", 0.0))[0] == secret

    def forget_old(self, now: float) -> None:
        """Forget the requests that will hardly come any more."""
        for client_id, requests in list(self._clients.items()):
            while requests and now - next(iter(requests.values()))[1] >= KEPT_SECONDS:
                self._forget_first(client_id)

    def _forget_first(self, client_id: str) -> None:
        requests = self._clients[client_id]
        del requests[next(iter(requests))]
        self._count -= 1
        if not requests:
            del self._clients[client_id]
