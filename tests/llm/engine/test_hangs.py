"""Engines that hang in every way that leaves their process alive: each is withdrawn, and its
streams go on at another instance, token for token."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, Final

import pytest
from tests.conditions import eventually

from dynbus.bus.errors import ConfigError
from dynbus.llm.engine import Engine, EngineWorker, Step
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.mock.engine import MockConfig, MockEngine
from dynbus.llm.mock.worker import MockWorker
from dynbus.testing import TestKit, run

pytestmark = pytest.mark.anyio

TOKENS: Final = 400
released = threading.Event()
"""Set when what hangs may end."""


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    released.clear()
    yield
    released.set()


def wait_for_a_lock() -> None:
    released.wait()


def stay_in_c() -> None:
    # As a kernel that never ends does; it lets go of the interpreter.
    usleep = ctypes.CDLL(None).usleep
    while not released.is_set():
        usleep(200_000)


def compute_for_ever() -> None:
    while not released.is_set():
        time.sleep(0)


class HangingEngine(MockEngine):
    """A mock that is stepped in a thread, as an engine that computes, and hangs when told."""

    computes = True

    def __init__(self) -> None:
        super().__init__(MockConfig(blocks=512, block_size=16))
        self.hang: Callable[[], object] | None = None
        self.schedules = True
        self.taken = 0

    def step(self) -> Step:
        self.taken += 1
        if self.hang is not None:
            self.hang()
        time.sleep(0.002)
        return super().step() if self.schedules else Step(())

    def add(self, request_id: str, request: GenerateRequest) -> None:
        if self.hang is not None:
            self.hang()
        super().add(request_id, request)


class Worker(EngineWorker, namespace="test"):
    """Has such an engine."""

    hang_limit, hang_least, hang_factor = 3.0, 1.0, 4.0
    made: HangingEngine

    def make_engine(self) -> Engine:
        self.made = HangingEngine()
        return self.made


class Patient(Worker, namespace="test"):
    """Waits for a minute."""

    hang_limit, hang_least, hang_factor = 60.0, 60.0, 4.0


def request_of(number: int) -> GenerateRequest:
    return GenerateRequest(list(range(1, 40 + number)), TOKENS, sampling=Sampling(seed=number))


async def tokens_of(client: EngineWorker, number: int) -> list[int]:
    items = [item async for item in client.generate(request_of(number))]
    assert items[-1].finish_reason == "length"
    return [token for item in items for token in item.token_ids]


def expected(number: int) -> list[int]:
    engine = MockEngine(MockConfig(blocks=512, block_size=16))
    engine.add("it", request_of(number))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for _, item in engine.step().outputs for token in item.token_ids]
    return tokens


def schedule_nothing(engine: HangingEngine) -> None:
    engine.schedules = False


def hang_by(what: Callable[[], object]) -> Callable[[HangingEngine], None]:
    def begin(engine: HangingEngine) -> None:
        engine.hang = what

    return begin


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        pytest.param(hang_by(wait_for_a_lock), "ended no step for", id="lock"),
        pytest.param(hang_by(stay_in_c), "ended no step for", id="c"),
        pytest.param(hang_by(compute_for_ever), "ended no step for", id="loop"),
        pytest.param(schedule_nothing, "schedules none of its requests", id="scheduler"),
    ],
)
async def test_an_engine_that_hangs_is_withdrawn_and_its_streams_go_on_elsewhere(
    begin: Callable[[HangingEngine], None], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TestKit() as kit:
        first = await kit.start(Worker)
        client = kit.client(Worker)
        streams = [asyncio.create_task(tokens_of(client, number)) for number in range(4)]
        assert isinstance(first.actor, Worker)
        engine = first.actor.made
        await eventually(lambda: engine.taken > 20)
        second = await kit.start(Worker)
        begin(engine)
        came = await asyncio.gather(*streams)
        await first.stopped.wait()
        # It takes no new ones either.
        later = await tokens_of(client, 9)

    assert came == [expected(number) for number in range(4)]
    assert later == expected(9)
    assert told in first.broken
    assert first.hung == first.broken
    assert second.broken == ""
    assert "Thread engine:" in caplog.text
    if told.startswith("ended"):
        assert "in step\n    self.hang()" in caplog.text
        assert "hangs in a step: it is left alone" in caplog.text


async def test_an_engine_that_ends_no_step_is_shown_before_it_counts_as_hung() -> None:
    async with TestKit() as kit:
        instance = await kit.start(Patient)
        reading = asyncio.create_task(tokens_of(kit.client(Patient), 1))
        assert isinstance(instance.actor, Worker)
        engine = instance.actor.made
        await eventually(lambda: engine.taken > 20)
        engine.hang = wait_for_a_lock
        status = instance.actor.runtime.bus.status

        await eventually(lambda: "no step for 2 s of 60 s" in status.read().get("engine", ""))
        released.set()
        assert await reading == expected(1)
        await eventually(lambda: "no step" not in status.read().get("engine", ""))


async def test_a_request_that_an_engine_never_takes_in_goes_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with TestKit() as kit:
        first = await kit.start(Worker)
        assert isinstance(first.actor, Worker)
        client = kit.client(Worker)
        first.actor.made.hang = wait_for_a_lock
        stream = asyncio.create_task(tokens_of(client, 1))
        await kit.start(Worker)

        assert await stream == expected(1)

    assert "ended no step for" in first.hung


async def test_an_engine_whose_loop_is_blocked_is_not_taken_for_one_that_hangs() -> None:
    async with TestKit() as kit:
        instance = await kit.start(Worker)
        stream = asyncio.create_task(tokens_of(kit.client(Worker), 1))
        assert isinstance(instance.actor, Worker)
        engine = instance.actor.made
        await eventually(lambda: engine.taken > 5)
        for _ in range(3):
            # The engine waits for the loop, which is to hear of its last steps.
            time.sleep(1.5)  # noqa: ASYNC251 - that is what is tested
            await asyncio.sleep(0.05)

        assert await stream == expected(1)
        assert instance.broken == ""


class Slow(MockEngine):
    """A mock whose steps are to take longer than they may."""

    def step(self) -> Step:
        return super().step()._replace(delay=100.0)


class SlowWorker(MockWorker, namespace="test"):
    """Has such an engine."""

    engine: ClassVar[type[MockEngine]] = Slow

    def make_engine(self) -> MockEngine:
        return self.engine(self._config)


class Deadlocked(MockEngine):
    """A mock whose scheduler has work, and schedules nothing."""

    def step(self) -> Step:
        return Step((), delay=0.01)


class DeadlockedWorker(SlowWorker, namespace="test"):
    """Has such an engine."""

    engine = Deadlocked


def test_a_step_that_is_modelled_may_take_as_long_as_it_says() -> None:
    async def story() -> tuple[int, str]:
        async with TestKit() as kit:
            instance = await kit.start(SlowWorker, hang_limit=9.0, hang_least=9.0)
            items = [i async for i in kit.client(SlowWorker).generate(GenerateRequest([1], 3))]
            return len(items), instance.broken

    assert run(story()) == (3, "")


def test_an_engine_that_schedules_nothing_is_noticed_in_virtual_time() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            instance = await kit.start(DeadlockedWorker, hang_least=2.0)
            reading = asyncio.create_task(
                tokens_of(kit.client(DeadlockedWorker), 1), name="reading"
            )
            await instance.stopped.wait()
            reading.cancel()
            return instance.broken

    assert "it schedules none of its requests" in run(story())


def test_an_engine_may_be_left_unwatched() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            instance = await kit.start(DeadlockedWorker, hang_limit=0.0)
            reading = asyncio.create_task(
                tokens_of(kit.client(DeadlockedWorker), 1), name="reading"
            )
            await asyncio.sleep(1000.0)
            reading.cancel()
            return instance.broken

    assert run(story()) == ""


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="hang_limit=5 is less than hang_least=30: give a larger"):
        MockWorker(hang_limit=5.0)
