"""The choice of a server: one for all connections of a process, near before far, silent ones last.

A process whose two connections are at different servers can be alive on one and unreachable on the
other, when the servers lose each other. So whichever connection finds a server first has chosen it,
and the others follow. A plain object without I/O; the connections live on loops of their own
threads, and each asks and tells under a lock.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from dynbus.bus.protocol.random_ids import jitter

SHUN_SECONDS: Final = 15.0
"""For which a server is tried last that fell silent, or said that it goes away."""
FOLLOW_PAUSE: Final = 10.0
"""Seconds between two times, at least, that a connection has others follow it unasked."""


class Plan(NamedTuple):
    """The servers that a connection is to try now.

    Attributes:
        urls: the best first.
        turn: which choice of the process it goes by.
    """

    urls: list[str]
    turn: int


class ServerAddress(NamedTuple):
    """A server that a connection has a session with.

    Attributes:
        server_id: the server's own; one address may lead to several servers.
    """

    url: str
    server_id: str


class _Server(NamedTuple):
    url: str
    distance: int


class ServerChoice:
    """The server of all connections of one process, and the order of those that are next.

    Args:
        servers: URLs as configured; `?zone=NAME` behind one says where it stands.
        zone: where this process is; empty for unknown.
        is_own: whether a host, by name or address, is this machine.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        zone: str = "",
        is_own: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._lock = threading.Lock()
        self._is_own = is_own
        self._configured = [self._placed(server, zone) for server in servers]
        self._advertised: list[_Server] = []
        self._places: dict[object, ServerAddress] = {}
        self._followers: dict[object, Callable[[], None]] = {}
        self._shunned: dict[str, float] = {}
        self._chosen: ServerAddress | None = None
        self._turn = 0
        self._follow_at = 0.0

    def __repr__(self) -> str:
        at = self._chosen.url.rpartition("@")[2] if self._chosen is not None else "nowhere"
        return f"<ServerChoice [{at} | {len(self._places)} connections]>"

    def register(self, connection: object, follow: Callable[[], None]) -> None:
        """Count a connection in; `follow` has it leave its server for that of the others, and is
        called from any thread."""
        with self._lock:
            self._followers[connection] = follow

    def unregister(self, connection: object) -> None:
        """The inverse of `register`."""
        with self._lock:
            self._followers.pop(connection, None)
            self._places.pop(connection, None)

    def advertise(self, addresses: Sequence[str]) -> None:
        """Take in the addresses (`host:port`) of all servers, as one of them tells them.

        They are tried with the scheme and the credentials of the first server that is configured.
        """
        scheme, _, rest = self._configured[0].url.partition("://")
        user = rest.rpartition("@")[0]
        known = {_address(server.url) for server in self._configured}
        urls = [
            f"{scheme}://{user}@{address}" if user else f"{scheme}://{address}"
            for address in addresses
            if address not in known
        ]
        with self._lock:
            self._advertised = [self._placed(url, "") for url in urls]

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers: those that are configured, then those that these tell of."""
        with self._lock:
            return tuple(server.url for server in (*self._configured, *self._advertised))

    def tls_name(self, url: str) -> str | None:
        """The name that the certificate of a server is to have; None for the host in its URL.

        Servers tell of each other by address, and certificates have names.
        """
        first = urlsplit(self._configured[0].url).hostname or ""
        known = any(server.url == url for server in self._configured)
        host = urlsplit(url).hostname or ""
        return first if not known and _is_address(host) and not _is_address(first) else None

    def plan(self, now: float, avoid: Collection[str] = ()) -> Plan:
        """The servers to try: that of the process's other connections, then the nearest ones in
        random order, and at last those that are shunned.

        Args:
            avoid: URLs that led to another server than that of the others; they come last.
        """
        with self._lock:
            servers = [*self._configured, *self._advertised]
            jitter.shuffle(servers)
            servers.sort(key=lambda server: (server.url in avoid, *self._rank(server, now)))
            return Plan([server.url for server in servers], self._turn)

    def has_other(self, connection: object, now: float) -> bool:
        """True if there is a server, other than that of a connection, that is not shunned."""
        with self._lock:
            return self._has_other(self._places.get(connection), now)

    def shun(self, connection: object, now: float) -> None:
        """Try the server of a connection last from now on: it says that it goes away."""
        with self._lock:
            if (at := self._places.get(connection)) is not None:
                self._shunned[at.url] = now + SHUN_SECONDS

    def arrive(
        self,
        connection: object,
        place: ServerAddress,
        plan: Plan,
        now: float,
        *,
        is_last: bool = False,
    ) -> bool:
        """A connection has a session with a server; False when it is to go to that of the others.

        Args:
            plan: by which it went.
            is_last: whether every address was tried, and none leads to that of the others.
        """
        with self._lock:
            others = [at for other, at in self._places.items() if other is not connection]
            strayed = [at for at in others if at.server_id != place.server_id]
            elsewhere = [at for at in strayed if not self._is_shunned(at.url, now)]
            if elsewhere and not is_last:
                # Others have chosen meanwhile, or one address leads to more than one server.
                is_late = plan.turn != self._turn
                if is_late or elsewhere[0].url == place.url:
                    return False
            self._shunned.pop(place.url, None)
            self._places[connection] = place
            if self._chosen is None or self._chosen.server_id != place.server_id:
                self._chosen = place
                self._turn += 1
            if strayed and not elsewhere:
                self._call_followers(connection)
            elif elsewhere and elsewhere[0].url != place.url and now >= self._follow_at:
                # It cannot reach theirs, and together they are at one.
                self._follow_at = now + FOLLOW_PAUSE
                self._call_followers(connection)
            return True

    def leave(self, connection: object, now: float, *, shun: bool) -> None:
        """A connection has lost its server, or gives it up.

        Args:
            shun: whether the server is silent or goes away, so that nobody is to stay there.
        """
        with self._lock:
            place = self._places.pop(connection, None)
            if place is None:
                return
            if shun:
                self._shunned[place.url] = now + SHUN_SECONDS
            is_left = not any(at.server_id == place.server_id for at in self._places.values())
            # Who leaves late does not undo the choice of those that went before it.
            was_chosen = self._chosen is not None and self._chosen.server_id == place.server_id
            if was_chosen and (is_left or shun):
                self._chosen = None
                self._turn += 1
            if shun:
                self._call_followers(connection)

    def abandon(self, connection: object, now: float) -> bool:
        """Have all connections leave the server of one of them, which answers and is of no use;
        False where there is no other."""
        with self._lock:
            at = self._places.get(connection)
            if at is None or not self._has_other(at, now):
                return False
            self._shunned[at.url] = now + SHUN_SECONDS
            self._chosen = None
            self._turn += 1
            self._call_followers(None)
            return True

    def is_astray(self, connection: object, now: float) -> bool:
        """True if a connection should leave its server: others chose another, or it is shunned."""
        with self._lock:
            at = self._places.get(connection)
            if at is None:
                return False
            if self._chosen is None:
                return self._is_shunned(at.url, now)
            return at.server_id != self._chosen.server_id

    def _has_other(self, at: ServerAddress | None, now: float) -> bool:
        return any(
            (at is None or server.url != at.url) and not self._is_shunned(server.url, now)
            for server in (*self._configured, *self._advertised)
        )

    def _call_followers(self, besides: object) -> None:
        for connection, follow in self._followers.items():
            if connection is not besides:
                follow()

    def _rank(self, server: _Server, now: float) -> tuple[bool, bool, int]:
        chosen = self._chosen
        is_chosen = chosen is not None and server.url == chosen.url
        return (self._is_shunned(server.url, now), not is_chosen, server.distance)

    def _is_shunned(self, url: str, now: float) -> bool:
        return self._shunned.get(url, 0.0) > now

    def _placed(self, server: str, zone: str) -> _Server:
        url, server_zone = split_zone(server)
        if self._is_own(urlsplit(url).hostname or ""):
            return _Server(url, 0)
        return _Server(url, 1 if zone and server_zone == zone else 2)


def split_zone(server: str) -> tuple[str, str]:
    """The URL of a server, and the zone that it names behind `?zone=`; empty for none."""
    url, _, query = server.partition("?")
    return url, parse_qs(query).get("zone", [""])[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _address(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
