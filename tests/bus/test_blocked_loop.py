"""A block of the main loop is told from a busy machine, and names the user's lines."""

from __future__ import annotations

import asyncio
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from subprocess import PIPE
from traceback import FrameSummary

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import wait_until

import dynbus.bus
from dynbus.bus import blocked_loop
from dynbus.bus.blocked_loop import (
    BLOCKED_REPORT,
    SHOWN_FRAMES,
    TOLD_FRAMES,
    BlockReport,
    LoopWatch,
    Reading,
    ThreadClock,
    block_of,
    depth_here,
    frames_to_show,
    is_in_loop,
    stack_of,
)
from dynbus.bus.lane import new_event_loop

START = Reading(100.0, 3.0, 1.0)
OURS = str(Path(dynbus.bus.__file__).parent / "serving" / "execution.py")
LOOP = str(Path(asyncio.__file__).parent / "base_events.py")
SELECTORS = str(selectors.__file__)

seconds = st.floats(0.0, 1000.0)


def after(passed: float, *, used: float = 0.0, waited: float = 0.0) -> Reading:
    return Reading(START.now + passed, START.used + used, START.waited + waited)


def frame(file: str, name: str = "f") -> FrameSummary:
    return FrameSummary(file, 1, name, lookup_line=False)


@pytest.mark.parametrize(
    ("now", "away", "blocked"),
    [
        (after(5.0), 0.0, 5.0),  # it sleeps
        (after(5.0, used=5.0), 0.0, 5.0),  # it computes
        (after(5.0, used=5.0), 5.0, 5.0),  # and keeps the interpreter to itself
        (after(5.0, used=0.1, waited=4.9), 0.0, 0.1),  # it gets no processor
        (after(5.0), 5.0, 0.0),  # the process was suspended
        (after(5.0, used=1.0), 4.0, 2.0),
        (after(5.0, used=1.0, waited=4.0), 4.0, 1.0),  # both of them got none
    ],
)
def test_only_what_the_thread_did_itself_is_a_block(
    now: Reading, away: float, blocked: float
) -> None:
    assert block_of(START, now, away) == pytest.approx(blocked)


@given(passed=seconds, used=seconds, waited=seconds, away=seconds)
def test_a_block_is_never_longer_than_the_time_that_passed(
    passed: float, used: float, waited: float, away: float
) -> None:
    assert block_of(START, after(passed, used=used, waited=waited), away) <= passed + 1e-6


def test_what_is_shown_begins_with_the_users_first_line() -> None:
    stack = [frame("main.py"), frame(LOOP), frame(OURS), frame("user.py"), frame(OURS)]

    assert [each.filename for each in frames_to_show(stack, 2)] == ["user.py", OURS]


def test_a_block_by_dynbus_itself_is_shown_too() -> None:
    stack = [frame("main.py"), frame(LOOP), frame(LOOP), frame(OURS)]

    assert [each.filename for each in frames_to_show(stack, 2)] == [LOOP, OURS]


@pytest.mark.parametrize(
    "inside", [[], [frame(SELECTORS, "select")], [frame(LOOP, "_run_once"), frame(LOOP)]]
)
def test_a_loop_that_waits_in_itself_is_blocked_by_nobody(inside: list[FrameSummary]) -> None:
    stack = [frame("main.py"), frame(LOOP), frame(LOOP), *inside]

    assert frames_to_show(stack, 4) == []


def test_of_a_deep_stack_the_innermost_frames_are_shown() -> None:
    stack = [frame("user.py", str(number)) for number in range(100)]

    shown = frames_to_show(stack, 0)

    assert [each.name for each in shown] == [str(n) for n in range(100 - SHOWN_FRAMES, 100)]


@given(st.lists(st.sampled_from([LOOP, OURS, "user.py"])), st.integers(0, 10))
def test_something_is_shown_exactly_when_the_loop_runs_more_than_itself(
    files: list[str], depth: int
) -> None:
    shown = [each.filename for each in frames_to_show(list(map(frame, files)), depth)]

    assert bool(shown) == any(file != LOOP for file in files[depth:])
    assert ("user.py" in files[depth:]) <= (shown[:1] == ["user.py"] or len(shown) == SHOWN_FRAMES)


class Watched:
    """A loop on a thread of its own, with its depth and its report."""

    def __init__(self, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.thread = 0
        self.depth = 0
        self.report: BlockReport | None = None
        self._make_loop = make_loop
        self._ready = threading.Event()

    async def _story(self, work: Callable[[], Awaitable[None]]) -> None:
        def note() -> None:
            self.depth = depth_here()

        self.thread, self.report = threading.get_ident(), BlockReport(0.1)
        self.report.begin(0.0)
        asyncio.get_running_loop().call_soon(note)
        await asyncio.sleep(0)
        self._ready.set()
        await work()

    def run(self, work: Callable[[], Awaitable[None]]) -> threading.Thread:
        def main() -> None:
            with asyncio.Runner(loop_factory=self._make_loop) as runner:
                runner.run(self._story(work))

        thread = threading.Thread(target=main)
        thread.start()
        assert self._ready.wait(60)
        return thread


@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, new_event_loop])
def test_a_handler_that_sleeps_is_found_on_every_kind_of_loop(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    release = threading.Event()

    async def handler() -> None:
        release.wait(600)

    watched = Watched(make_loop)
    thread = watched.run(handler)
    try:
        wait_until(lambda: bool(frames_to_show(stack_of(watched.thread), watched.depth)))
        shown = frames_to_show(stack_of(watched.thread), watched.depth)
        assert not is_in_loop(watched.thread)
    finally:
        release.set()
        thread.join(60)

    names = [each.name for each in shown]
    assert "handler" in names
    assert "main" not in names


def test_a_handler_that_waits_for_another_program_is_found() -> None:
    async def handler() -> None:
        # Two pipes are waited for in a selector, as an event loop waits; and for long, since the
        # test is over when that is seen.
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE) as process:  # noqa: ASYNC220 - it is to block
            programs.append(process)
            process.communicate(timeout=600)

    def is_shown() -> bool:
        stack = stack_of(watched.thread)
        names = [each.name for each in frames_to_show(stack, watched.depth)]
        in_selector = bool(stack) and stack[-1].filename == SELECTORS
        return in_selector and "handler" in names and not is_in_loop(watched.thread)

    programs: list[subprocess.Popen[bytes]] = []
    watched = Watched(new_event_loop)
    thread = watched.run(handler)
    try:
        wait_until(is_shown)
    finally:
        wait_until(lambda: bool(programs))
        programs[0].kill()
        thread.join(60)


def test_a_name_that_is_not_ascii_is_told_as_it_is() -> None:
    release = threading.Event()
    source = "def wartet_länger(release):\n    release.wait(600)\n"
    names: dict[str, Callable[[threading.Event], None]] = {}
    exec(compile(source, "/home/josé/x.py", "exec"), names)
    thread = threading.Thread(target=names["wartet_länger"], args=(release,))
    thread.start()
    try:
        told = {(each.filename, each.name) for each in stack_of(thread.ident or 0)}
    finally:
        release.set()
        thread.join(60)

    assert ("/home/josé/x.py", "wartet_länger") in told


def test_a_handler_that_blocks_deep_in_a_recursion_is_found() -> None:
    release = threading.Event()

    def descend(left: int) -> None:
        if left:
            descend(left - 1)
        else:
            release.wait(600)

    async def handler() -> None:
        descend(300)

    watched = Watched(asyncio.SelectorEventLoop)
    thread = watched.run(handler)
    try:
        wait_until(lambda: len(stack_of(watched.thread)) == TOLD_FRAMES)
        shown = frames_to_show(stack_of(watched.thread), watched.depth)
    finally:
        release.set()
        thread.join(60)

    assert "descend" in {each.name for each in shown}
    assert len(shown) == SHOWN_FRAMES


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

    assert stack_of(thread.ident or 0) == []


@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, new_event_loop])
def test_a_loop_with_nothing_to_do_shows_nothing_on_every_kind_of_loop(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    release: list[Callable[[], object]] = []

    async def idle() -> None:
        over = asyncio.Event()
        release.append(partial(asyncio.get_running_loop().call_soon_threadsafe, over.set))
        await over.wait()

    watched = Watched(make_loop)
    thread = watched.run(idle)
    try:
        wait_until(lambda: not frames_to_show(stack_of(watched.thread), watched.depth))
    finally:
        wait_until(lambda: bool(release))
        release[0]()
        thread.join(60)


def test_a_block_is_reported_once_with_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    report = BlockReport(0.1)
    report.begin(0.0)

    for tenth in range(1, 10):
        report.look(tenth / 10, 0)

    (record,) = caplog.records
    text = record.getMessage()
    # What this thread has waited for a processor meanwhile is taken off.
    assert re.match("the main loop has been blocked for (1[0-9]{2}|200) ms", text)
    assert "report.look(tenth / 10, 0)" in text


def test_after_an_answer_the_next_block_is_reported_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = BlockReport(0.1)

    for begun in (0.0, 10.0):
        report.begin(begun)
        report.look(begun + 0.1, 0)
        report.look(begun + 0.2, 0)

    assert len(caplog.records) == 2


def test_a_process_that_did_not_run_at_all_blames_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = BlockReport(0.1)
    report.begin(0.0)

    report.look(60.0, 0)

    assert caplog.records == []


def test_a_thread_that_waits_for_a_processor_blames_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = BlockReport(0.1)
    report.begin(0.0)

    def read(clock: ThreadClock, now: float) -> Reading:
        return Reading(now, 0.0, 1e9 + now)

    monkeypatch.setattr(ThreadClock, "read", read)

    for tenth in range(1, 10):
        report.look(tenth / 10, 0)

    assert caplog.records == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited")
def test_the_clocks_of_a_thread_that_computes_go_on() -> None:
    clock = ThreadClock()
    before = clock.read(0.0)

    while (after_it := clock.read(0.0)).used <= before.used + 0.01:
        pass

    assert after_it.waited >= before.waited > 0.0


def test_the_report_comes_after_the_time_that_the_pages_name() -> None:
    assert BLOCKED_REPORT == 0.1


@pytest.mark.anyio
async def test_a_loop_is_asked_once_for_all_that_look_at_it() -> None:
    watch = LoopWatch(0.1)
    asked: list[Callable[[], None]] = []

    assert [watch.look(now, asked.append) for now in (1.0, 1.02, 1.05)] == [True, False, False]
    assert len(asked) == 1
    assert watch.look(1.1, asked.append)
    assert len(asked) == 1
    assert watch.blocked == pytest.approx(0.1)
    asked.pop()()
    for now in (1.15, 1.2):
        watch.look(now, asked.append)
    assert (len(asked), watch.blocked) == (1, 0.0)
    assert LoopWatch.of_running_loop(0.1) is LoopWatch.of_running_loop(0.1)


def test_stacks_that_take_long_to_read_are_read_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []

    def read_slowly(_: int) -> list[FrameSummary]:
        reads.append(now)
        # A fiftieth of a second, or longer: it rests from one second to five.
        time.sleep(0.02)
        return []

    def blocked_for_long(began: Reading, now: Reading, away: float) -> float:
        return 9.0

    monkeypatch.setattr(blocked_loop, "stack_of", read_slowly)
    monkeypatch.setattr(blocked_loop, "block_of", blocked_for_long)
    report = BlockReport(0.1)
    report.begin(0.0)
    for tenth in range(2, 10):
        now = tenth / 10
        report.look(now, 0)
    now = 60.0
    report.look(now, 0)

    assert reads == [0.2, 60.0]
