"""Time jumps when everything waits, stands still when something runs, and never just hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest

from dynbus.bus.clock import EPOCH, START, Deadlock, JumpingLoop, monotonic, run, unix_time


def real_seconds(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def test_hours_of_waiting_take_no_time() -> None:
    async def wait() -> float:
        started = monotonic()
        await asyncio.sleep(3600)
        return monotonic() - started

    results: list[float] = []

    assert real_seconds(lambda: results.append(run(wait()))) < 1.0
    assert results == [3600.0]


def test_time_stands_still_while_something_runs() -> None:
    async def turns() -> set[float]:
        seen = {monotonic()}
        waiting = asyncio.create_task(asyncio.sleep(1000))
        for _ in range(100):
            await asyncio.sleep(0)
            seen.add(monotonic())
        waiting.cancel()
        return seen

    assert run(turns()) == {START}


def test_timers_fire_in_order_and_at_their_time() -> None:
    async def main() -> list[tuple[str, float]]:
        fired: list[tuple[str, float]] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, monotonic() - START))

        await asyncio.gather(wait("c", 3), wait("a", 0.001), wait("b", 2.5), wait("d", 86400 * 3))
        return fired

    fired = run(main(), limit=1e6)

    assert [name for name, _ in fired] == ["a", "b", "c", "d"]
    assert [at for _, at in fired] == pytest.approx([0.001, 2.5, 3, 86400 * 3])


def test_a_timeout_is_met_by_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return monotonic() - START

    assert run(main()) == pytest.approx(30)


def test_a_cancelled_timer_does_not_move_time() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(50, print).cancel()
        await asyncio.sleep(1)
        return monotonic() - START

    assert run(main()) == pytest.approx(1)


def test_a_wait_that_nothing_can_end_is_told_and_named() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="every task waits and no timer is set") as told:
        run(forever())

    assert "forever" in str(told.value)
    assert "test_clock.py" in str(told.value)


def test_a_deadlock_runs_the_cleanup_of_its_tasks() -> None:
    cleaned: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5)
            cleaned.append("yes")

    with pytest.raises(Deadlock):
        run(forever())

    assert cleaned == ["yes"]


def test_a_wait_beside_a_heartbeat_is_told_after_the_limit() -> None:
    async def main() -> None:
        async def beat() -> None:
            while True:  # noqa: ASYNC110 - a heartbeat waits for time, not for an event
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(beat())
            await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="only timers ran in 600 s"):
        run(main(), limit=600)


def test_time_waits_for_a_job_in_an_executor() -> None:
    async def main() -> tuple[str, float]:
        def job() -> str:
            time.sleep(0.05)
            return "done"

        async with asyncio.timeout(10):
            result = await asyncio.to_thread(job)
        return result, monotonic() - START

    assert run(main()) == ("done", 0.0)


def test_a_thread_wakes_the_loop() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[str] = loop.create_future()

        def work() -> None:
            time.sleep(0.05)
            loop.call_soon_threadsafe(woken.set_result, "woken")

        thread = threading.Thread(target=work)
        thread.start()
        result = await woken
        thread.join()
        return result

    assert run(main()) == "woken"


def test_a_thread_that_never_wakes_the_loop_is_waited_for_with_patience_only() -> None:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()

    async def forever() -> None:
        await asyncio.Event().wait()

    def attempt() -> None:
        with pytest.raises(Deadlock):
            run(forever(), patience=0.2)

    try:
        assert 0.1 < real_seconds(attempt) < 3.0
    finally:
        ending.set()
        thread.join()


def test_sockets_of_the_loop_are_served_before_time_jumps() -> None:
    async def main() -> tuple[bytes, float]:
        one, two = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=one)
        _, far = await asyncio.open_connection(sock=two)
        far.write(b"hello")
        async with asyncio.timeout(5):
            data = await reader.readexactly(5)
        for stream in (writer, far):
            stream.close()
            await stream.wait_closed()
        return data, monotonic() - START

    assert run(main()) == (b"hello", 0.0)


def test_the_clock_is_virtual_on_a_jumping_loop_only() -> None:
    async def main() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        in_a_thread = await asyncio.to_thread(monotonic)
        return monotonic() - loop.time(), unix_time() - EPOCH - loop.time(), in_a_thread

    before = monotonic()
    difference, unix_difference, in_a_thread = run(main())
    after = monotonic()

    assert difference == 0.0
    assert abs(unix_difference) < 1e-6
    assert before <= in_a_thread <= after <= time.monotonic()
    assert abs(unix_time() - time.time()) < 5


def test_an_ordinary_loop_keeps_real_time_beside_a_jumping_one() -> None:
    async def ordinary() -> tuple[float, float]:
        return monotonic(), time.monotonic()

    async def main() -> tuple[float, float]:
        await asyncio.sleep(10_000)
        return await asyncio.to_thread(asyncio.run, ordinary())

    seen, real = run(main(), limit=20_000)

    assert abs(seen - real) < 1.0


def test_a_loop_that_failed_leaves_the_real_clock_behind() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(fail())

    assert abs(monotonic() - time.monotonic()) < 1.0


def test_two_runs_see_the_same_times() -> None:
    async def main() -> list[float]:
        seen: list[float] = []
        for number in range(50):
            await asyncio.sleep(number / 7)
            seen.append(monotonic())
        return seen

    assert run(main()) == run(main())


def test_the_loop_can_be_used_as_any_other() -> None:
    async def main() -> str:
        await asyncio.sleep(60)
        return "done"

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(main()) == "done"
        assert runner.run(main()) == "done"


def test_reading_the_clock_is_cheap() -> None:
    # 0.07 us where this was written; the bound leaves room for a busy machine.
    best = min(real_seconds(lambda: [monotonic() for _ in range(10_000)]) for _ in range(20))

    assert best / 10_000 < 2e-6
