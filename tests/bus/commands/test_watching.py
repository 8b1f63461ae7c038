"""`dynbus ps --watch` tells what instances do, fits its terminal, and leaves it as it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import PATIENCE

from dynbus.bus.commands.rates import Activity, Column, activities, columns, counted, fitting
from dynbus.bus.commands.survey import Counts, InstanceReport
from dynbus.bus.commands.watching import View, show
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import Message

ENGINE = {"kv_blocks": 100, "kv_blocks_used": 25}


def row(instance_id: str = "i1", **given: Any) -> InstanceReport:
    fields: dict[str, Any] = {"state": "serving", "started": 100.0, "answers": True}
    return InstanceReport("demo", "Hello", instance_id, **(fields | given))


def counts(at: float, calls: int = 0, items: int = 0, **given: Any) -> Counts:
    fields: dict[str, Any] = {"errors": 0, "streams": 0, "seconds": 0.0, "figures": {}}
    return Counts(at, calls=calls, items=items, **(fields | given))


def activity(before: Counts | None, now: Counts) -> Activity:
    known = {} if before is None else counted([row(counts=before)])
    (found,) = activities(known, [row(counts=now)])
    return found


def test_rates_are_of_the_time_between_two_answers() -> None:
    found = activity(
        counts(10.0, 100, 1000, seconds=3.0, errors=1),
        counts(12.0, 110, 1400, seconds=4.0, errors=2, streams=3),
    )

    assert (found.calls, found.errors, found.items, found.streams) == (5.0, 0.5, 200.0, 3)
    assert found.latency == pytest.approx(0.1)
    assert (found.cache, found.hit_rate) == (None, None)


def test_the_items_of_an_engine_are_its_tokens_and_its_hits_those_of_late() -> None:
    before = {"prompt_tokens": 1000, "cached_tokens": 0, "output_tokens": 50, **ENGINE}
    after = {"prompt_tokens": 1100, "cached_tokens": 80, "output_tokens": 90, **ENGINE}

    now = activity(counts(1.0, 0, 5, figures=before), counts(2.0, 0, 6, figures=after))
    idle = activity(counts(1.0, figures=after), counts(2.0, figures=after))

    assert (now.items, now.hit_rate, now.cache) == (40.0, 0.8, 0.25)
    assert idle.items == 0.0
    assert idle.hit_rate == pytest.approx(80 / 1100)


@pytest.mark.parametrize("before", [None, counts(5.0, 1), counts(1.0, 9)])
def test_nothing_is_said_of_rates_that_are_not_known(before: Counts | None) -> None:
    found = activity(before, counts(5.0, 3, streams=2))

    assert (found.calls, found.items, found.latency, found.streams) == (None, None, None, 2)


def test_an_instance_that_does_not_answer_has_a_state_alone() -> None:
    (found,) = activities({}, [row(state="silent", answers=False)])

    cells = {column.title: column.cells for column in columns([found], now=105.0)}
    assert found.to_json(now=105.0)["running"] is None
    assert (cells["STATE"], cells["SINCE"], cells["RUN"]) == (["silent"], ["5s"], ["-"])


def test_the_busiest_come_first_where_that_is_asked_for() -> None:
    rows = [row("a", counts=counts(2.0, 1)), row("b", counts=counts(2.0, 9), running=1)]
    before = counted([row("a", counts=counts(1.0)), row("b", counts=counts(1.0))])

    orders = [
        [each.row.instance_id for each in activities(before, rows, sort)]
        for sort in ("name", "calls", "load")
    ]

    assert orders == [["a", "b"], ["b", "a"], ["b", "a"]]


@given(st.integers(1, 300), st.lists(st.integers(0, 40), max_size=5))
def test_the_columns_fit_and_the_component_always_stays(width: int, lengths: list[int]) -> None:
    rows = [row("i" * length, counts=counts(2.0, figures=ENGINE)) for length in lengths]
    table = columns(activities({}, rows), now=200.0)

    kept = fitting(table, width)

    assert kept[0].title == "COMPONENT"
    assert len(kept) == 1 or sum(column.width + 2 for column in kept) - 2 <= width
    assert kept == [column for column in table if column in kept]


def test_what_matters_least_goes_first() -> None:
    table = [Column("A", 3, []), Column("B", 1, []), Column("C", 2, [])]

    assert [[c.title for c in fitting(table, width)] for width in (7, 6, 4, 3)] == [
        ["A", "B", "C"],
        ["A", "C"],
        ["A", "C"],
        ["A"],
    ]


STATS = {
    "name": "demo_Hello",
    "id": "i1",
    "started": "2026-01-01T00:00:00Z",
    "metadata": {"dynbus.namespace": "demo"},
}


def stats(calls: int) -> bytes:
    data = {"running": 1, "waiting": 0, "items": calls * 10}
    endpoint = {"name": "a", "num_requests": calls, "processing_time": calls, "data": data}
    return json.dumps(STATS | {"endpoints": [endpoint]}).encode()


def test_what_an_instance_has_counted_is_read_from_its_answer() -> None:
    found = InstanceReport.read(stats(3), now=7.0)

    assert found is not None
    assert found.counts == Counts(7.0, 3, 0, 1, 30, 3e-9, {})


@pytest.mark.anyio
async def test_a_server_that_is_lost_is_told_and_looked_at_again_when_it_is_back(
    own_server: RunningServer,
) -> None:
    views: asyncio.Queue[View] = asyncio.Queue()
    calls = 0

    def respond(message: Message) -> None:
        nonlocal calls
        calls += 5
        connection.publish(message.reply, stats(calls))

    async def until(condition: Callable[[View], Any]) -> View:
        while not condition(view := await views.get()):
            pass
        return view

    connection = await connect([own_server.url])
    connection.subscribe("$SRV.STATS", respond)
    await connection.barrier()
    config = BusConfig(servers=(own_server.url,))
    async with asyncio.timeout(PATIENCE):
        showing = asyncio.create_task(show(config, views.put_nowait, interval=0.2, at_once=True))
        first = await views.get()
        await until(lambda view: view.shown and view.shown[0].calls)
        own_server.kill()
        lost = await until(lambda view: view.notice)
        await own_server.restart()
        back = await until(lambda view: not view.notice and view.shown)
        showing.cancel()
        await asyncio.wait({showing})
    await connection.close()

    assert [each.calls for each in first.shown] == [None]
    assert lost.notice.startswith("the server is lost: ")
    assert [each.row.instance_id for each in lost.shown] == ["i1"]
    assert [each.row.instance_id for each in back.shown] == ["i1"]


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("ps", "--watch"), signal.SIGINT),
        (("ps", "--watch"), signal.SIGTERM),
        (("top",), signal.SIGINT),
    ],
)
def test_the_terminal_is_left_as_it_was(
    own_server: RunningServer, command: tuple[str, ...], number: signal.Signals
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dynbus", *command, "--nats", own_server.url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "40"},
        start_new_session=True,
    )
    os.close(theirs)
    screen = b""
    try:
        while b"COMPONENT" not in screen:
            screen += os.read(ours, 4096)
        process.send_signal(number)
        with contextlib.suppress(OSError):  # that is its end
            while more := os.read(ours, 4096):
                screen += more
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(ours)

    assert process.returncode == 128 + number
    assert b"\x1b[?1049h" in screen
    assert screen.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")
