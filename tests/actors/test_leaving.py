"""A process that has nothing more to do ends, whatever goes on in it."""

from __future__ import annotations

import os
import threading

import pytest

from dynbus.actors.running.in_process import leave_behind, leave_within, running_threads


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


def test_a_process_that_does_not_end_is_ended_with_its_code(codes: list[int]) -> None:
    said: list[str] = []

    leave_within(5, 0.01, say=lambda: said.append("why")).join(60)

    assert (codes, said) == ([5], ["why"])


def test_a_process_that_has_ended_by_itself_is_left_alone(codes: list[int]) -> None:
    timer = leave_within(5, 60.0)

    timer.cancel()
    timer.join(60)

    assert codes == []


def test_threads_that_go_on_are_named(codes: list[int], caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    thread = threading.Thread(target=free.wait, name="loading")
    idle = threading.Thread(target=free.wait, name="idle", daemon=True)
    before = running_threads()
    thread.start()
    idle.start()
    try:
        leave_behind(0)
        found = [each for each in running_threads() if each not in before]
    finally:
        free.set()
        thread.join(60)
        idle.join(60)

    assert found == [thread]
    assert "abandoning threads that still run, since nothing can cancel them: " in caplog.text
    assert "loading" in caplog.text
    assert "idle" not in caplog.text
    assert codes == [0]
