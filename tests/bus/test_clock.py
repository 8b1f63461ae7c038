"""Time jumps when everything waits, stands still when something runs, and never just hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import anyio.from_thread
import anyio.to_thread
import pytest

from dynbus.bus.clock import EPOCH, START, Deadlock, JumpingLoop, monotonic, run, unix_time

T = TypeVar("T")


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """What `act` returns, and the real seconds that it took."""
    started = time.monotonic()
    result = act()
    return result, time.monotonic() - started


def real_seconds(act: Callable[[], object]) -> float:
    return timed(act)[1]


def test_hours_of_waiting_take_no_time() -> None:
    async def wait() -> float:
        started = monotonic()
        await asyncio.sleep(3600)
        return monotonic() - started

    results: list[float] = []

    assert real_seconds(lambda: results.append(run(wait()))) < 36.0
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


def test_everything_waits_when_what_was_due_at_the_same_moment_has_run() -> None:
    async def main() -> tuple[list[str], float]:
        done: list[str] = []

        async def work() -> None:
            await asyncio.sleep(1.0)
            for _ in range(20):
                await asyncio.sleep(0)
            done.append("this")
            await asyncio.sleep(1.0)
            done.append("that")

        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        await loop.everything_waits()
        meanwhile, at = list(done), monotonic() - START
        await asyncio.gather(*tasks)
        return meanwhile, at

    assert run(main()) == (["this"] * 3, 1.0)


WORK = 0.3
"""Real seconds of work in a thread, beside timers that are due much earlier."""

Work = Callable[[Callable[[], str]], Coroutine[None, None, str]]


async def in_a_thread_of_asyncio(work: Callable[[], str]) -> str:
    return await asyncio.to_thread(work)


async def in_a_thread_of_anyio(work: Callable[[], str]) -> str:
    return await anyio.to_thread.run_sync(work)


async def in_an_executor(work: Callable[[], str]) -> str:
    with ThreadPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, work)


async def in_a_pool_of_its_own(work: Callable[[], str]) -> str:
    with ThreadPoolExecutor(1) as executor:
        return await asyncio.wrap_future(executor.submit(work))


async def in_a_process(work: Callable[[], str]) -> str:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, work)


async def in_a_thread_that_wakes_the_loop(work: Callable[[], str]) -> str:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()
    thread = threading.Thread(
        target=lambda: loop.call_soon_threadsafe(done.set_result, work()), daemon=True
    )
    thread.start()
    result = await done
    await asyncio.to_thread(thread.join)
    return result


async def in_a_thread_that_hands_work_back(work: Callable[[], str]) -> str:
    loop = asyncio.get_running_loop()

    async def back() -> str:
        await asyncio.sleep(0)
        return "back"

    def both() -> str:
        asyncio.run_coroutine_threadsafe(back(), loop).result()
        return work()

    return await asyncio.to_thread(both)


def work() -> str:
    time.sleep(WORK)
    return "done"


@pytest.mark.parametrize(
    "do",
    [
        in_a_thread_of_asyncio,
        in_a_thread_of_anyio,
        in_an_executor,
        in_a_pool_of_its_own,
        in_a_process,
        in_a_thread_that_wakes_the_loop,
        in_a_thread_that_hands_work_back,
    ],
    ids=lambda one: one.__name__,
)
def test_time_stands_still_while_a_thread_works_for_the_loop(do: Work) -> None:
    async def beat() -> None:
        while True:  # noqa: ASYNC110 - it waits for time, as heartbeats do
            await asyncio.sleep(0.4)

    async def main() -> tuple[str, str, float]:
        beating = asyncio.create_task(beat())
        async with asyncio.timeout(0.1):
            first = await do(work)
            second = await do(work)
        beating.cancel()
        return first, second, monotonic() - START

    assert run(main()) == ("done", "done", 0.0)


@pytest.mark.parametrize("limit", [None, 600.0], ids=["without a limit", "with a limit"])
def test_time_goes_on_while_a_thread_waits_for_what_it_handed_back(limit: float | None) -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()

        async def back() -> float:
            await asyncio.sleep(50)
            return monotonic() - START

        def hand_back() -> float:
            return asyncio.run_coroutine_threadsafe(back(), loop).result(limit)

        def from_anyio() -> float:
            return anyio.from_thread.run(back)

        return await asyncio.to_thread(hand_back), await anyio.to_thread.run_sync(from_anyio)

    at, taken = timed(lambda: run(main()))

    assert at == (50.0, 100.0)
    assert taken < 5.0


def test_time_goes_on_while_a_thread_waits_for_an_event_of_the_loop() -> None:
    async def main() -> float:
        event = threading.Event()
        asyncio.get_running_loop().call_later(50, event.set)
        await asyncio.to_thread(event.wait)
        return monotonic() - START

    assert run(main()) == 50.0


def test_idle_threads_and_services_in_the_background_do_not_hold_time_up() -> None:
    ending = threading.Event()

    def serve() -> None:
        while not ending.wait(0.05):
            pass

    async def main() -> float:
        service = threading.Thread(target=serve, daemon=True)
        service.start()
        await asyncio.gather(*(asyncio.to_thread(time.monotonic) for _ in range(3)))
        await anyio.to_thread.run_sync(time.monotonic)
        await asyncio.sleep(3600)
        ending.set()
        service.join()
        return monotonic() - START

    passed, taken = timed(lambda: run(main()))

    assert passed == 3600.0
    assert taken < 5.0


def test_a_job_that_works_for_too_long_is_named_and_time_never_jumps() -> None:
    ending = threading.Event()

    def stubborn() -> None:
        while not ending.wait(0.05):
            pass

    seen: list[float] = []

    async def main() -> None:
        try:
            async with asyncio.timeout(10):
                await asyncio.to_thread(stubborn)
        finally:
            seen.append(monotonic() - START)
            ending.set()

    with pytest.raises(Deadlock, match=r"time has stood still for 0\.3 s.*thread 'asyncio_0'"):
        run(main(), patience=0.3)

    assert seen == [0.0]


def test_a_thread_that_nobody_waits_for_holds_time_up_for_the_patience_only() -> None:
    ending = threading.Event()

    def stubborn() -> None:
        while not ending.is_set():
            time.sleep(0.01)

    async def main() -> float:
        thread = threading.Thread(target=stubborn)
        thread.start()
        for _ in range(100):
            await asyncio.sleep(36)
        ending.set()
        thread.join()
        return monotonic() - START

    passed, taken = timed(lambda: run(main(), patience=0.3))

    assert passed == 3600.0
    assert 0.2 < taken < 5.0


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
        assert real_seconds(attempt) > 0.1
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
    begun = time.thread_time()
    for _ in range(200_000):
        monotonic()

    # 0.07 us where this was written.
    assert (time.thread_time() - begun) / 200_000 < 2e-6
