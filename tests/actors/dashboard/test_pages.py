"""The dashboard's server: what it answers, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from dynbus.actors.dashboard.flight_view import FlightView
from dynbus.actors.dashboard.pages import HEADERS, DashboardServer
from dynbus.bus.flight import Entry

from .happened import moved_request, view_of

pytestmark = pytest.mark.anyio


class Shown:
    """A source: a flight of two seconds, of a file or live."""

    title = "a.flight"
    notice = ""

    def __init__(self, view: FlightView, *, is_live: bool = False) -> None:
        self.view = view
        self.is_live = is_live

    def range(self) -> tuple[float, float]:
        return 100.0, 102.0

    def entries(self) -> Iterable[Entry] | None:
        return None if self.is_live else []


def server(*, is_live: bool = False) -> DashboardServer:
    return DashboardServer(Shown(view_of(moved_request()), is_live=is_live), 0, {})


async def ask(asked: DashboardServer, what: str) -> tuple[int, Any]:
    path, _, query = what.partition("?")
    key = asked.page_url.rstrip("/").rpartition("/")[2]
    answer = await asked.answer(f"/{key}/{path}", query)
    return answer.status, msgspec.json.decode(answer.body)


async def test_without_the_path_that_was_drawn_there_is_nothing() -> None:
    one, other = server(), server()
    key = other.page_url.rstrip("/").rpartition("/")[2]

    own = one.page_url.rstrip("/").rpartition("/")[2]

    for path in (
        *("/", "/state", f"/{key}/", f"/{key}/state", "//state", "", "*", "/é/"),
        *(own, f"/{own}", f"{own}/", f"//{own}/"),
    ):
        answer = await one.answer(path, "")
        assert (answer.status, answer.headers) == (404, {})


async def test_all_of_the_page_is_served_under_its_policy() -> None:
    shown = server()
    key = shown.page_url.rstrip("/").rpartition("/")[2]

    for name in ("", "dashboard.css", "dashboard.js", "charts.js", "icon.svg"):
        answer = await shown.answer(f"/{key}/{name}", "")
        assert (answer.status, answer.headers) == (200, HEADERS)
        assert answer.body
    assert (await shown.answer(f"/{key}/../pages.py", "")).status == 404
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


async def test_it_is_on_loopback_alone_and_says_so_over_a_socket() -> None:
    async with server() as opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
        writer.write(
            f"GET {opened.page_url.partition(str(opened.port))[2]} HTTP/1.1\r\n\r\n".encode()
        )
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()

    assert opened.host == "127.0.0.1"
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Security-Policy: default-src 'none'" in answer


async def test_requests_are_looked_for_by_id_and_by_digest() -> None:
    shown = server()

    status, state = await ask(shown, "state?most=10")
    _, listed = await ask(shown, "requests?order=failed")
    by_digest = await ask(shown, "request?id=r")
    nobody = await ask(shown, "request?id=nobody")

    assert (status, state["lanes"]["begun"], state["title"]) == (200, [1.0, 0.0], "a.flight")
    assert [one["request"] for one in listed] == ["r"]
    assert (by_digest[0], len(by_digest[1]["rows"])) == (200, 3)
    assert nobody == (404, {"error": "no such request is kept"})


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("state?since=2&until=1", "is no time"),
        ("state?last=x", "is no number of seconds"),
        (f"state?{'a=1&' * 40}", "there are more than 32 fields"),
        ("state?since=nan", "is no number of seconds"),
        ("requests?order=odd", "there is no order 'odd'"),
        ("compare", "write NAME=VALUE"),
        ("compare?set=policy", "write NAME=VALUE"),
        ("compare?set=polcy%3Ddynamo", "did you mean policy?"),
    ],
)
async def test_a_question_without_sense_is_refused_with_the_reason(what: str, why: str) -> None:
    status, answer = await ask(server(), what)

    assert status == 400
    assert why in answer["error"]


async def test_what_goes_on_is_not_run_again() -> None:
    status, answer = await ask(server(is_live=True), "compare?set=policy%3Ddynamo")

    assert status == 400
    assert "dynbus record save" in answer["error"]


class Broken(Shown):
    """A source whose records break what takes them."""

    def entries(self) -> Iterable[Entry] | None:
        return map(self._broken, [1])

    def _broken(self, number: int) -> Entry:
        raise KeyError(number)


async def test_a_comparison_that_breaks_ends_whoever_serves_the_page() -> None:
    async with DashboardServer(Broken(view_of(moved_request())), 0, {}) as shown:
        await ask(shown, "compare?set=policy%3Ddynamo")

        with pytest.raises(KeyError):
            await asyncio.wait_for(shown.serve(), 60)
