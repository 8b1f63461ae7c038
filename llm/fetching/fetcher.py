"""`PublicFetcher`: the bytes at a URL that a client names, without leading into our own network.

A name is resolved here, each of its addresses is looked at, and the connection goes to that very
address: a name that changes in between leads nowhere else. So it is again at each redirect.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Final, NamedTuple
from urllib.parse import urljoin, urlsplit

import anyio

from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.proxy.http_client import (
    Answer,
    BrokenOff,
    HttpClient,
    NotReached,
    ServerAddress,
)

from .addresses import is_public
from .settings import FetchRules

MAX_URL: Final = 8192
MOST_AT_ONCE: Final = 64
"""Fetches that run at a time; further ones wait, within their time."""
MOST_RESOLVED: Final = 16
"""Names that are resolved at a time."""
MAX_ADDRESSES: Final = 4
"""Addresses of a name that are tried."""

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_AGENT: Final = "dynbus"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Finds the addresses of a name."""


class _Refused(Exception):
    """Raised when a URL is not fetched, and why."""


class _Place(NamedTuple):
    """The place that a URL names.

    Attributes:
        target: path and query, as a request has them.
    """

    tls: bool
    host: str
    port: int
    target: str


@cache
def _resolving() -> ThreadPoolExecutor:
    """The threads that ask for names: nobody can take one back from a server that does not answer,
    so that all others of the process are to be spared."""
    return ThreadPoolExecutor(MOST_RESOLVED, thread_name_prefix="dynbus-names")


async def resolved(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, as the system knows them.

    Raises:
        OSError: it has none.
    """
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    infos = await asyncio.get_running_loop().run_in_executor(_resolving(), ask)
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


class PublicFetcher:
    """Fetches from public addresses alone; see `Fetcher`.

    Args:
        rules: from which hosts, and for how long.
        resolve: finds the addresses of names.
        may_connect: tells whether an address may be connected to.
        context: of TLS; with the system's authorities unless given.
    """

    def __init__(
        self,
        rules: FetchRules,
        *,
        resolve: Resolve = resolved,
        may_connect: Callable[[str], bool] = is_public,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._resolve = resolve
        self._may_connect = may_connect
        self._places = anyio.CapacityLimiter(MOST_AT_ONCE)
        self._context = context

    @property
    def timeout(self) -> float:
        """Seconds for all URLs of a request."""
        return self._rules.timeout

    def __repr__(self) -> str:
        return f"<PublicFetcher of {', '.join(self._rules.hosts)}>"

    async def fetch(self, url: str, where: str, most: int) -> bytes:
        """The bytes at a URL.

        Args:
            where: the part is in the request, for refusals.
            most: bytes that are taken.

        Raises:
            BadRequest: it is not fetched, or is too large, and why.
        """
        rules = self._rules
        try:
            with anyio.fail_after(rules.timeout):
                async with self._places:
                    return await self._follow(url, most)
        except TimeoutError:
            why = f"its URL was not fetched within {rules.timeout:g} s"
        except _Refused as error:
            why = str(error)
        except (NotReached, BrokenOff, OSError):
            # More would tell who asks of a network that is not theirs.
            why = "its URL cannot be fetched: the host does not answer"
        raise BadRequest(f"{where}: {why}", param=where, reason="url_not_fetched")

    async def _follow(self, url: str, most: int) -> bytes:
        before: _Place | None = None
        for _ in range(self._rules.redirects + 1):
            place = _place_of(url)
            if before is not None and before.tls and not place.tls:
                raise _Refused("its URL redirects from https to http")
            data, location = await self._get(place, most)
            if location is None:
                return data
            try:
                url, before = urljoin(url, location), place
            except ValueError:
                raise _Refused("its URL redirects to what is no URL") from None
        raise _Refused(f"its URL redirects more than {self._rules.redirects} times")

    async def _get(self, place: _Place, most: int) -> tuple[bytes, str | None]:
        """The answer of a place: its bytes, or where it redirects to."""
        host, port = place.host, place.port
        if not self._rules.allow(host, port):
            raise _Refused(f"nothing is fetched from {host[:200]}:{port} here")
        address = ServerAddress(host, port, place.tls, "", "")
        addresses = await self._addresses(host, port)
        client = HttpClient(address, await self._trust() if place.tls else None, addresses)
        headers = {"User-Agent": _AGENT, "Accept": "image/*,audio/*", "Connection": "close"}
        try:
            async with client.request("GET", place.target, headers) as answer:
                if answer.status in _REDIRECTS and "location" in answer.headers:
                    return b"", answer.headers["location"]
                return await _body(answer, most), None
        finally:
            client.close()

    async def _trust(self) -> ssl.SSLContext:
        """The system's authorities, which take a while to be read."""
        if self._context is None:
            self._context = await asyncio.to_thread(ssl.create_default_context)
        return self._context

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        """The addresses of a host, all of which may be connected to."""
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        # One that is not public makes the name suspicious, whatever the others are. What it is
        # nobody is told: it may be the map of a network.
        if not addresses or not all(map(self._may_connect, addresses)):
            raise _Refused(f"{host[:200]} has no public address")
        return addresses[:MAX_ADDRESSES]


async def _body(answer: Answer, most: int) -> bytes:
    if answer.status != 200:
        raise _Refused(f"its URL is answered with the status {answer.status}")
    if answer.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        # What was not asked for may become anything.
        raise _Refused("its URL is answered in an encoding that was not asked for")
    try:
        return await answer.body(most)
    except ValueError:
        raise _Refused(f"at its URL are more than {most} bytes, the most that is taken") from None


def _place_of(url: str) -> _Place:
    """The place that a URL names.

    Raises:
        _Refused: it is no URL that is fetched.
    """
    wrong = "its URL is none that is fetched: give https://HOST/PATH, or the image itself"
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise _Refused(wrong)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _Refused(wrong) from None
    tls, host = parts.scheme == "https", (parts.hostname or "").rstrip(".")
    if parts.scheme not in ("http", "https") or not host or "\\" in url or "%" in host:
        raise _Refused(wrong)
    if parts.username is not None or parts.password is not None:
        raise _Refused("its URL has a name or a password")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Place(tls, host, port or (443 if tls else 80), target)
