"""Processes that are asked from threads and from the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import uvloop
from tests.conditions import PATIENCE, eventually, wait_until

from dynbus.llm.sandbox import MOST_AT_ONCE, Sandbox, SandboxEnded

PROGRAM = """
import sys
for line in sys.stdin.buffer:
    if line == b"wait\\n":
        open(sys.argv[0] + ".go").read()
    sys.stdout.buffer.write(line[:-1] * 3 + b"\\n" if line.startswith(b"long") else line)
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    program = tmp_path / "echo.py"
    program.write_text(PROGRAM)
    return program


@pytest.fixture
def sandbox(program: Path) -> Sandbox:
    return Sandbox(program, 1)


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    own = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    return asyncio.Runner(loop_factory=own)


def test_it_is_asked_from_the_loop_and_from_threads_in_turn(
    sandbox: Sandbox, runner: asyncio.Runner
) -> None:
    long = b"long" + b"x" * (MOST_AT_ONCE - 8)

    async def story() -> None:
        assert await sandbox.ask_idle(b"nobody is there yet") is None
        for _ in range(3):
            assert await asyncio.to_thread(sandbox.ask, b"a") == b"a"
            assert await sandbox.ask_idle(b"b") == b"b"
            assert await sandbox.ask_idle(long) == long * 3
        assert await sandbox.ask_idle(long * 2) is None

    with runner:
        runner.run(story())
    assert len(sandbox.idle) == 1


def test_a_process_whose_asker_has_left_is_asked_again_when_it_has_answered(
    sandbox: Sandbox, runner: asyncio.Runner, tmp_path: Path
) -> None:
    gate = tmp_path / "echo.py.go"
    os.mkfifo(gate)

    async def story() -> None:
        assert await asyncio.to_thread(sandbox.ask, b"a") == b"a"
        process = sandbox.idle
        asking = asyncio.ensure_future(sandbox.ask_idle(b"wait"))
        await eventually(lambda: not sandbox.idle)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await sandbox.ask_idle(b"it still works") is None

        await asyncio.to_thread(gate.write_text, "")

        assert await asyncio.to_thread(sandbox.ask, b"b") == b"b"
        assert sandbox.idle == process

    with runner:
        runner.run(story())


def test_a_process_that_ends_while_it_works_is_followed_by_another(
    sandbox: Sandbox, runner: asyncio.Runner, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "echo.py.go")

    async def story() -> None:
        assert await asyncio.to_thread(sandbox.ask, b"a") == b"a"
        (process,) = sandbox.idle
        asking = asyncio.ensure_future(sandbox.ask_idle(b"wait"))
        await eventually(lambda: not sandbox.idle)
        os.kill(process, signal.SIGKILL)

        with pytest.raises(SandboxEnded) as ended:
            await asking

        assert (ended.value.by, ended.value.time_is_over) == (signal.SIGKILL, False)
        assert await sandbox.ask_idle(b"c") is None
        assert await asyncio.to_thread(sandbox.ask, b"d") == b"d"

    with runner:
        runner.run(story())


def test_a_process_that_is_stopped_is_ended_whoever_waits_for_it(
    program: Path, runner: asyncio.Runner
) -> None:
    sandbox = Sandbox(program, 1, seconds=0.5)
    # More than a pipe takes: it is not written whole.
    large = b"x" * (1 << 20)

    async def stopped_process() -> int:
        """The process id of one that has answered, and answers no more."""
        assert await asyncio.to_thread(sandbox.ask, b"a") == b"a"
        (process,) = sandbox.idle
        os.kill(process, signal.SIGSTOP)
        return process

    async def story() -> None:
        await stopped_process()
        with pytest.raises(SandboxEnded):
            await sandbox.ask_idle(b"b")

        process = await stopped_process()
        asking = asyncio.ensure_future(sandbox.ask_idle(b"c"))
        await eventually(lambda: not sandbox.idle)
        asking.cancel()
        await eventually(lambda: not psutil.pid_exists(process))

        await stopped_process()
        assert await asyncio.to_thread(sandbox.ask, large) == large

    with runner:
        runner.run(story())


def test_ctrl_c_in_the_terminal_does_not_reach_a_process_that_has_just_begun(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    gate = tmp_path / "echo.py.go"
    os.mkfifo(gate)
    asking = ThreadPoolExecutor(1)
    answer = asking.submit(sandbox.ask, b"wait")
    # The program itself does nothing about it.
    wait_until(lambda: programs(tmp_path), what="the process begins")
    (process,) = programs(tmp_path)

    process.send_signal(signal.SIGINT)
    # Nobody reads it where the process has ended.
    threading.Thread(target=gate.write_text, args=("",), daemon=True).start()

    assert answer.result(PATIENCE) == b"wait"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    asking.shutdown()


def programs(folder: Path) -> list[psutil.Process]:
    """The living processes of this one that run a program of a folder."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and str(folder) in " ".join(child.cmdline())
    ]
