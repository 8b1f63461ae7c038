"""The start of a run on the terminal: bars of what instances do, and the lines they announce."""

from __future__ import annotations

import io
import sys

import pytest

from dynbus import Actor
from dynbus.actors.commands.starting import StartDisplay
from dynbus.actors.running.child import Child
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.planning import planned
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.telemetry.process_status import StartStep


class Model(Actor, namespace="starting"):
    pass


class Terminal(io.StringIO):
    """Takes text as a terminal does."""

    def isatty(self) -> bool:
        return True


def child(*steps: StartStep) -> Child:
    made = Child(planned(Assignment(Model, {})), 1, WorkerSettings([], {}))
    made.steps = steps
    return made


def terminal_of(monkeypatch: pytest.MonkeyPatch, name: str) -> Terminal:
    """A terminal for `stdout` or `stderr`; only in the test itself, as pytest has them before."""
    screen = Terminal()
    monkeypatch.setattr(sys, name, screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


@pytest.mark.anyio
async def test_a_bar_tells_whose_step_it_is_and_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal_of(monkeypatch, "stderr")
    display = StartDisplay(bars=True)

    display.update([child(StartStep("downloading tiny", 30, 120))])
    display.close()

    drawn = stderr.getvalue()
    assert "starting.Model/1: downloading tiny" in drawn
    assert "25%" in drawn


@pytest.mark.anyio
async def test_no_bar_is_drawn_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal_of(monkeypatch, "stderr")
    display = StartDisplay(bars=False)

    display.update([child(StartStep("downloading tiny", 30, 120))])
    display.close()

    assert stderr.getvalue() == ""


@pytest.mark.anyio
async def test_an_announcement_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    display, one = StartDisplay(bars=False), child()
    one.announced.append(("tiny answers", "In a browser: ..."))

    display.update([one])
    display.update([one])

    assert capsys.readouterr().out == "tiny answers\n"


def test_details_are_for_people_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal_of(monkeypatch, "stdout")

    terminal.announce("tiny answers", "In a browser:\n  \x1b[2J")

    assert screen.getvalue() == "tiny answers\nIn a browser:\n  \\x1b[2J\n"
