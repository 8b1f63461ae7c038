"""Opening a router: what it waits for, and that nobody else has to."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynbus.kvrouter.routing import opening
from dynbus.kvrouter.routing.opening import open_router
from dynbus.testing import TestKit, run

from .routing_fixtures import until
from .worker import Worker

WAITS_FOR_ITS_KERNEL = """
import asyncio
import threading
from dynbus.kvrouter.routing import opening
from dynbus.testing import TestKit

def load_compiled():
    print("compiling", flush=True)
    threading.Event().wait()

async def main():
    async with TestKit() as kit, opening.open_router(kit.caller, "llm.Worker"):
        pass

opening.load_compiled = load_compiled
asyncio.run(main())
"""


def test_who_opens_a_router_may_leave_while_the_kernel_is_compiled_and_is_told_that_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, compiled = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def load_compiled() -> bool:
        threads.append(threading.current_thread())
        begun.set()
        return compiled.wait(30.0)

    monkeypatch.setattr(opening, "load_compiled", load_compiled)
    monkeypatch.setattr(opening, "is_compiled", lambda: False)
    monkeypatch.setattr(opening, "SLOW_KERNEL", 0.0)

    async def open_it(kit: TestKit) -> None:
        async with open_router(kit.caller, Worker):
            raise AssertionError("it did not wait")

    async def story() -> None:
        async with TestKit() as kit:
            opens = asyncio.create_task(open_it(kit))
            await until(lambda: begun.is_set() and "llm.Worker does not serve yet" in caplog.text)
            opens.cancel()
            await asyncio.wait({opens})
            assert opens.cancelled()

    run(story())

    assert not compiled.is_set()
    compiled.set()
    threads[0].join(30.0)
    assert not threads[0].is_alive()


def test_what_keeps_the_kernel_from_being_loaded_is_raised_by_the_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_compiled() -> bool:
        raise OSError("no room for the kernel")

    monkeypatch.setattr(opening, "load_compiled", load_compiled)

    async def story() -> None:
        async with TestKit() as kit, open_router(kit.caller, Worker):
            raise AssertionError("it was opened")

    with pytest.raises(OSError, match="no room for the kernel"):
        run(story())


def test_ctrl_c_ends_a_program_whose_router_waits_for_its_kernel() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_ITS_KERNEL],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=20)[1]
    finally:
        process.kill()
        process.wait()

    assert errors.rstrip().endswith("KeyboardInterrupt")
