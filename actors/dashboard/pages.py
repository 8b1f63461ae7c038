"""`DashboardServer`: the page of a flight, and what it asks for, to one browser on this machine.

Operators alone may read a flight, and anybody on a machine can reach its loopback: all is served
under a path that was drawn, which the operator's terminal shows. A page of somebody else's, which
could have the browser ask, does not know it either.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, get_args
from urllib.parse import parse_qs

import msgspec

from dynbus.actors.commands.recording import sampled_lines
from dynbus.bus.background import Background
from dynbus.bus.errors import DynbusError
from dynbus.bus.flight import digest_of_request
from dynbus.bus.telemetry.get_server import GetServer, Response, problem

from .comparing import Comparison, compare
from .flight_view import FlightView, view_json
from .lives import Order, picture

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynbus.bus.flight import Entry

MOST_BUCKETS: Final = 480
MOST_REQUESTS: Final = 200
DEFAULT_BUCKETS: Final = 120
DEFAULT_REQUESTS: Final = 50
MOST_COMPARISONS: Final = 8
MOST_FIELDS: Final = 32

_FILES: Final[Mapping[str, tuple[str, str]]] = {
    "": ("index.html", "text/html; charset=utf-8"),
    "dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Text becomes markup nowhere: a browser refuses it to any script.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of each answer, beside its type."""


class Source(Protocol):
    """A flight that is shown.

    Attributes:
        title: the file, or the namespaces that are followed.
        is_live: whether it goes on.
    """

    @property
    def title(self) -> str: ...
    @property
    def is_live(self) -> bool: ...

    @property
    def view(self) -> FlightView: ...

    @property
    def notice(self) -> str:
        """The reason for which something is missing, and the remedy; empty for none."""
        ...

    def range(self) -> tuple[float, float]:
        """Unix seconds of its beginning, and of its end or of now."""
        ...

    def entries(self) -> Iterable[Entry] | None:
        """All records once more, from the beginning; None where they cannot be had."""
        ...


class BadQuery(ValueError):
    """Raised for a query that makes no sense."""


class DashboardServer(GetServer):
    """Serves the page of a flight on loopback.

    Args:
        port: 0 for any that is free.
        settings: of the comparison that the page begins with, as of `dynbus replay --set`.
    """

    title = "the dashboard"

    def __init__(self, source: Source, port: int, settings: Mapping[str, str]) -> None:
        super().__init__("127.0.0.1", port)
        self._source = source
        self._settings = dict(settings)
        self._key = secrets.token_urlsafe(16)
        self._comparisons: dict[str, dict[str, Any]] = {}
        self._comparing = asyncio.Lock()
        self._is_over = threading.Event()
        self._work = Background("comparisons of a dashboard", self._comparison_failed)
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()

    @property
    def page_url(self) -> str:
        """The URL of the page, which is to be known to its operator alone."""
        return f"{self.url}/{self._key}/"

    async def serve(self) -> NoReturn:
        """Wait while the page is served.

        Raises:
            BaseException: a comparison failed with it, and nothing is served any more.
        """
        await self._has_failed.wait()
        assert self._failure is not None, "set before the event"
        raise self._failure

    async def start(self) -> None:
        await self._work.open()
        try:
            await super().start()
        except BaseException:
            await self._work.close()
            raise

    async def aclose(self) -> None:
        self._is_over.set()
        await super().aclose()
        await self._work.close()

    async def answer(self, path: str, query: str) -> Response:
        # A path without a slash, which no browser asks for, is no key either.
        key, _, name = path.removeprefix("/").partition("/")
        is_below = path.startswith(f"/{key}/")
        if not secrets.compare_digest(key.encode(), self._key.encode()) or not is_below:
            return problem(HTTPStatus.NOT_FOUND)
        if name in _FILES:
            return Response(HTTPStatus.OK, _file(name), _FILES[name][1], HEADERS)
        answer = {
            "state": self._state,
            "requests": self._requests,
            "request": self._request,
            "compare": self._compare,
        }.get(name)
        if answer is None:
            return problem(HTTPStatus.NOT_FOUND)
        status = HTTPStatus.OK
        try:
            value = answer(_fields(query))
        except (BadQuery, DynbusError) as error:
            status, value = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        if value is None:
            status, value = HTTPStatus.NOT_FOUND, {"error": "no such request is kept"}
        return Response(status, msgspec.json.encode(value), headers=HEADERS)

    def _state(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        """The time line between `since` and `until`, or of the `last` seconds; of all otherwise."""
        source = self._source
        begin, end = source.range()
        last = _number(query, "last", 0.0)
        until = _number(query, "until", end)
        since = _number(query, "since", until - last if last > 0 else begin)
        if not since < until <= since + 1e10:
            raise BadQuery(f"from {since:g} to {until:g} is no time")
        most = _number(query, "most", DEFAULT_BUCKETS)
        return {
            "title": source.title,
            "is_live": source.is_live,
            "notice": "; ".join(filter(None, (source.notice, *sampled_lines(source.view.sampled)))),
            "begin": begin,
            "end": end,
            "settings": self._settings,
            **view_json(source.view, since, until, end, round(min(MOST_BUCKETS, max(1, most)))),
        }

    def _requests(self, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        """Requests in an `order`, or those between `since` and `until` that are in it."""
        order = query.get("order", ["latest"])[0]
        most = round(min(MOST_REQUESTS, max(1, _number(query, "most", DEFAULT_REQUESTS))))
        _, now = self._source.range()
        for known in get_args(Order):
            if order == known:
                return [
                    life.to_json(now) for life in self._source.view.lives.listed(known, now, most)
                ]
        raise BadQuery(f"there is no order {order[:80]!r}: {', '.join(get_args(Order))}")

    def _request(self, query: Mapping[str, list[str]]) -> dict[str, Any] | None:
        """The picture of the request with this `id`, or digest of one."""
        asked = query.get("id", [""])[0].strip()
        lives = self._source.view.lives
        life = lives.get(asked.lower()) or lives.get(digest_of_request(asked))
        _, now = self._source.range()
        return None if life is None else picture(life, now)

    # Other settings ------------------------------------------------------------------------

    def _compare(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        """The progress of a comparison with settings (`set`, each NAME=VALUE), and its outcome."""
        settings: dict[str, str] = {}
        for text in query.get("set", []):
            name, equals, value = text.partition("=")
            if not (name and equals):
                raise BadQuery(f"{text[:80]!r}: write NAME=VALUE, such as policy=dynamo")
            settings[name] = value
        if not settings:
            raise BadQuery("write NAME=VALUE, such as policy=dynamo")
        key = "&".join(f"{name}={settings[name]}" for name in sorted(settings))
        known = self._comparisons.get(key)
        if known is None:
            entries = self._source.entries()
            if entries is None:
                raise BadQuery(
                    "what goes on cannot be run again: save a part of it, dynbus record save FILE, "
                    "and open that, dynbus dashboard FILE"
                )
            # Settings that are none are refused here, before anything is begun.
            comparison = Comparison(settings, *self._source.range())
            while len(self._comparisons) >= MOST_COMPARISONS:
                del self._comparisons[next(iter(self._comparisons))]
            known = self._comparisons[key] = {"comparison": comparison}
            self._work.start(self._run, known, entries, name=f"a comparison with {key}")
        comparison = known["comparison"]
        return {
            "progress": comparison.progress,
            "result": known.get("result"),
            "error": known.get("error", ""),
        }

    async def _run(self, known: dict[str, Any], entries: Iterable[Entry]) -> None:
        async with self._comparing:
            try:
                known["result"] = await asyncio.to_thread(
                    compare, known["comparison"], entries, self._is_over.is_set
                )
            except DynbusError as error:
                known["error"] = str(error)

    def _comparison_failed(self, error: BaseException) -> None:
        """Answer nobody any more: what is shown is not to be relied on."""
        self._failed(error)
        self._failure = error
        self._has_failed.set()


@cache
def _file(name: str) -> bytes:
    package = __name__.rpartition(".")[0]
    return (resources.files(package) / "static" / _FILES[name][0]).read_bytes()


def _fields(query: str) -> dict[str, list[str]]:
    try:
        return parse_qs(query, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise BadQuery(f"there are more than {MOST_FIELDS} fields") from None


def _number(query: Mapping[str, list[str]], name: str, default: float) -> float:
    text = query.get(name, [""])[0]
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -1e12 < value < 1e12:
        raise BadQuery(f"{name}={text[:80]!r} is no number of seconds")
    return value
