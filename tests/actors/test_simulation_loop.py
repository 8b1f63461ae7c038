"""The loop of a simulation: a drawn order between tasks, the usual one within each lane."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from dynbus.actors.simulation import loop
from dynbus.actors.simulation.loop import SimulatedLoop, process
from dynbus.bus.clock import Deadlock
from dynbus.testing import MemoryBus

T = TypeVar("T")

SEEDS = range(40)


def run(story: Callable[[], Awaitable[T]], seed: int = 0) -> T:
    async def tell() -> T:
        return await story()

    def make_loop() -> SimulatedLoop:
        return SimulatedLoop(random.Random(seed), limit=100.0)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(tell())


async def order_of_tasks() -> tuple[int, ...]:
    """The order in which five tasks take three steps each."""
    order: list[int] = []

    async def step(number: int) -> None:
        for _ in range(3):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(step(number))
    return tuple(order)


def test_the_order_of_tasks_is_drawn_and_the_same_seed_draws_the_same() -> None:
    orders = [run(order_of_tasks, seed) for seed in SEEDS]

    assert orders == [run(order_of_tasks, seed) for seed in SEEDS]
    assert len(set(orders)) > 10


def test_some_seeds_have_the_usual_order() -> None:
    assert (0, 1, 2, 3, 4) * 3 in [run(order_of_tasks, seed) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_callbacks_run_in_the_order_in_which_they_were_registered(seed: int) -> None:
    async def story() -> list[int]:
        order: list[int] = []
        for number in range(20):
            asyncio.get_running_loop().call_soon(order.append, number)
        await asyncio.sleep(1.0)
        return order

    assert run(story, seed) == list(range(20))


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_of_one_connection_keep_their_order(seed: int) -> None:
    async def story() -> list[bytes]:
        bus = MemoryBus()
        sender, reader = await bus.connect(), await bus.connect()
        received: list[bytes] = []
        reader.subscribe("a", lambda message: received.append(message.data))
        await reader.barrier()
        for number in range(20):
            sender.publish("a", b"%d" % number)
            await asyncio.sleep(0)
        await sender.barrier()
        await reader.barrier()
        return received

    assert run(story, seed) == [b"%d" % number for number in range(20)]


def test_messages_of_two_connections_arrive_in_any_order() -> None:
    async def story() -> tuple[bytes, ...]:
        bus = MemoryBus()
        one, other, reader = await bus.connect(), await bus.connect(), await bus.connect()
        received: list[bytes] = []
        reader.subscribe("a", lambda message: received.append(message.data))
        await reader.barrier()
        one.publish("a", b"one")
        other.publish("a", b"other")
        await asyncio.sleep(1.0)
        return tuple(received)

    assert {run(story, seed) for seed in SEEDS} == {(b"one", b"other"), (b"other", b"one")}


def test_a_process_that_is_held_runs_nothing_and_catches_up_later() -> None:
    async def story() -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        held = object()
        context = contextvars.copy_context()
        context.run(process.set, held)
        began = loop.time()
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1.0)
                ticks.append(round(loop.time() - began, 3))

        ticking = loop.create_task(tick(), context=context)
        await asyncio.sleep(2.5)
        loop.hold(held)
        await asyncio.sleep(5.0)
        meanwhile = list(ticks)
        loop.release(held)
        await asyncio.sleep(1.5)
        ticking.cancel()
        return meanwhile, ticks

    assert run(story) == ([1.0, 2.0], [1.0, 2.0, 7.5, 8.5])


@pytest.mark.parametrize("seed", range(8))
def test_a_process_may_be_held_while_it_has_something_to_do(seed: int) -> None:
    async def story() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        held = object()
        context = contextvars.copy_context()
        context.run(process.set, held)
        steps = 0

        async def step() -> None:
            nonlocal steps
            steps += 1

        tasks = [loop.create_task(step(), context=context) for _ in range(10)]
        loop.hold(held)
        await asyncio.sleep(1.0)
        stood_at = steps
        loop.release(held)
        await asyncio.wait(tasks)
        assert steps == 10
        return stood_at

    assert run(story, seed) == 0


def test_the_tasks_of_a_process_are_known() -> None:
    async def story() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        owner = object()
        context = contextvars.copy_context()
        context.run(process.set, owner)
        for number in range(3):
            loop.create_task(asyncio.sleep(number), name=f"task {number}", context=context)
        await asyncio.sleep(0.5)
        return [task.get_name() for task in loop.tasks_of(owner)]

    assert run(story) == ["task 1", "task 2"]


def test_the_job_of_an_executor_is_done_on_the_spot() -> None:
    async def story() -> bool:
        return await asyncio.to_thread(threading.get_ident) == threading.get_ident()

    assert run(story)


def test_a_job_that_raises_is_raised_where_it_is_awaited() -> None:
    async def story() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run(story)


def test_a_wait_that_nothing_ends_is_a_deadlock() -> None:
    async def story() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="every task waits"):
        run(story)


def test_what_runs_on_and_on_while_time_stands_still_is_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "MOST_AT_ONCE", 1000)

    async def turn(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def story() -> None:
        for _ in range(10):
            await turn(900)
            await asyncio.sleep(0.1)
        await turn(10_000)

    with pytest.raises(Deadlock, match="1,000 callbacks ran at virtual second 1001, and time"):
        run(story)
