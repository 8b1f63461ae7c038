"""A screen of `dynbus top`: what fits into a terminal, whatever names and numbers are."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from dynbus.actors.dashboard.flight_view import FlightView
from dynbus.actors.dashboard.happenings import FlightReader
from dynbus.actors.dashboard.numbers import brief, brief_seconds
from dynbus.actors.dashboard.top import ASCII_BLOCKS, TopView, page, sparkline
from dynbus.bus.commands.rates import Activity
from dynbus.bus.commands.survey import InstanceReport

from .happened import at, moved_request, view_of

HOSTILE = "[red]x\x1b[2J\x9b31m\u202e" + "y" * 300


def drawn(view: TopView, width: int = 80, height: int = 24, *, is_ascii: bool = False) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, color_system=None)
    console.print(page(view, "nats://127.0.0.1:4222", width, height, is_ascii=is_ascii))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue().splitlines()


def view(flight: FlightView | None, *, instances: int = 2, requests: int = 2) -> TopView:
    shown = [
        Activity(InstanceReport("llm", "Engine", f"i{number}", "serving", running=number))
        for number in range(instances)
    ]
    waiting: list[dict[str, Any]] = [
        {
            "request_id": HOSTILE,
            "namespace": "llm",
            "component": "Engine",
            "endpoint": "generate",
            "instance_id": "i1",
            "state": "runs",
            "age": 71.0,
        }
        for _ in range(requests)
    ]
    looks = [
        {"calls": 2.0 * n, "errors": 0.0, "items": 9.0, "running": 1, "waiting": 0}
        for n in range(5)
    ]
    return TopView(102.0, "", shown, waiting, flight, looks, 60.0)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 24)])
def test_it_fits_the_terminal_whatever_is_in_it(width: int, height: int) -> None:
    faults = [at(101.0, "instance.lost", who=f"{number}{HOSTILE}") for number in range(50)]

    lines = drawn(view(view_of(faults), instances=100, requests=100), width, height)

    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)


def test_it_says_what_a_flight_says() -> None:
    flight = view_of([*moved_request(), at(101.5, "process.ended", who="llm.Engine/1", code=-9)])

    text = "\n".join(drawn(view(flight)))

    assert "hit rate" in text
    assert "40 %" in text
    assert "0, moved 1" in text
    assert "▲" in text
    assert "process.ended llm.Engine/1 code=-9" in text
    assert "1m 11s" in text
    assert "llm.Engine@i1" in text


def test_without_a_flight_it_says_what_instances_have_said() -> None:
    text = "\n".join(drawn(view(None)))

    assert "calls/s" in text
    assert "▂▄▆█" in text.replace("▃", "▂").replace("▅", "▄")
    assert "hit rate" not in text
    assert view(None).to_json()["flight"] is None


def test_a_terminal_without_these_letters_gets_others() -> None:
    lines = drawn(view(view_of(moved_request())), is_ascii=True)

    assert all(line.isascii() for line in lines if "…" not in line)


def test_an_empty_flight_is_drawn() -> None:
    assert drawn(view(FlightView(reader=FlightReader([])), instances=0, requests=0))


def test_a_line_is_the_fuller_the_higher_and_blank_where_nothing_is_known() -> None:
    assert sparkline([None, 0.0, 1.0, 8.0], ASCII_BLOCKS) == "  :@"
    assert sparkline([0.5, 1.0], ASCII_BLOCKS, 1.0) == "+@"
    assert sparkline([None, 0.0], ASCII_BLOCKS) == "  "


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.25, "0.25"),
        (3.0, "3"),
        (12.4, "12"),
        (54_321.0, "54.3k"),
        (999_499.0, "999k"),
        (999_500.0, "1M"),
        (2e6, "2M"),
        (999_999_999.0, "1G"),
    ],
)
def test_a_number_is_short(value: float | None, text: str) -> None:
    assert brief(value) == text


def test_a_duration_has_its_unit() -> None:
    assert [brief_seconds(value) for value in (None, 0.0211, 1.25)] == ["-", "21.1 ms", "1.25 s"]
    assert [brief_seconds(value) for value in (999.4, 1200.0, 9000.0)] == [
        *("999 s", "20 min", "2.5 h")
    ]
