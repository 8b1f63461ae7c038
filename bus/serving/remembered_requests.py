"""Requests of which something was said before they arrived, or after they were over."""

from __future__ import annotations

from typing import Final

REQUESTS_PER_CLIENT: Final = 1024
CLIENTS: Final = 1024
KEPT_SECONDS: Final = 600.0
"""How long a client without news is remembered, where room is needed for another."""


class _OfClient:
    """What is remembered of one client: secrets by request number, and a low-water mark."""

    __slots__ = ("added_at", "low_water", "secrets")

    def __init__(self) -> None:
        self.secrets: dict[int, bytes] = {}
        self.low_water = -1
        self.added_at = 0.0


class RememberedRequests:
    """Requests by client id and number, each with its secret. The memory is bounded.

    A client with too many does not push out those of others. Its oldest are forgotten; with
    `fails_closed` every request up to the highest number forgotten counts as remembered from
    then on. Clients number their requests upwards, so these are old ones.
    """

    __slots__ = ("_clients", "_fails_closed")

    def __init__(self, *, fails_closed: bool = False) -> None:
        self._clients: dict[str, _OfClient] = {}
        self._fails_closed = fails_closed

    def __repr__(self) -> str:
        requests = sum(len(client.secrets) for client in self._clients.values())
        return f"<RememberedRequests [{requests} of {len(self._clients)} clients]>"

    def add(self, client_id: str, number: int, secret: bytes, now: float) -> bool:
        """Remember a request; False when there is no room for another client.

        Args:
            now: seconds of any clock that does not go back.
        """
        client = self._clients.pop(client_id, None)
        if client is None:
            if len(self._clients) >= CLIENTS and not self._forget_oldest(now):
                return False
            client = _OfClient()
        # The clients stay in the order of their news.
        self._clients[client_id] = client
        client.added_at = now
        client.secrets[number] = secret
        if len(client.secrets) > REQUESTS_PER_CLIENT:
            oldest = next(iter(client.secrets))
            del client.secrets[oldest]
            if self._fails_closed:
                client.low_water = max(client.low_water, oldest)
        return True

    def has(self, client_id: str, number: int, secret: bytes) -> bool:
        """Whether this very request is remembered."""
        # Every request asks, and almost always there are none.
        if not self._clients:
            return False
        client = self._clients.get(client_id)
        if client is None:
            return False
        return number <= client.low_water or client.secrets.get(number) == secret

    def _forget_oldest(self, now: float) -> bool:
        client_id = next(iter(self._clients))
        if self._fails_closed and now - self._clients[client_id].added_at < KEPT_SECONDS:
            return False
        del self._clients[client_id]
        return True
