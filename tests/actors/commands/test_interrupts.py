"""A run hears its signals."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from dynbus.actors.commands.interrupts import Interrupts


async def heard(*numbers: signal.Signals) -> list[str]:
    """What the signals call, each sent to this process."""
    calls: list[str] = []
    interrupts = Interrupts(
        lambda: calls.append("drain"), lambda: calls.append("stop"), within=60.0
    )
    with interrupts:
        for number in numbers:
            signal.raise_signal(number)
        await asyncio.sleep(0)
    return calls


@pytest.fixture
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times after which the process would be ended, instead of its end."""
    times: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, interval: float, function: Any, arguments: Any) -> None:
            self.interval = interval

        def start(self) -> None:
            times.append(self.interval)

    monkeypatch.setattr("threading.Timer", Timer)
    return times


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.anyio
async def test_the_first_signal_drains_and_says_so(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dynbus")

    assert await heard(number) == ["drain"]

    assert caplog.messages == ["draining: taking no more calls; press Ctrl-C again to stop at once"]


@pytest.mark.anyio
async def test_a_person_is_told_of_a_drain_where_the_log_has_warnings_alone(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("WARNING", logger="dynbus")

    await heard(signal.SIGINT)
    to_a_file = capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    await heard(signal.SIGINT)
    to_a_person = capsys.readouterr().err

    assert to_a_file == ""
    assert to_a_person == (
        "dynbus: draining: taking no more calls; press Ctrl-C again to stop at once\n"
    )


@pytest.mark.anyio
async def test_the_second_signal_stops_and_a_watchdog_ends_a_process_that_is_blocked(
    no_watchdog: list[float],
) -> None:
    calls = await heard(signal.SIGINT, signal.SIGTERM, signal.SIGINT)

    assert calls == ["drain", "stop"]
    assert no_watchdog == [60.0]


@pytest.mark.anyio
async def test_signals_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    await heard(signal.SIGTERM)

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
