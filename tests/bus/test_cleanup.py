"""A clean-up ends before a cancellation goes on, and nothing it says is lost."""

from __future__ import annotations

import asyncio

import pytest

from dynbus.bus.cleanup import end_tasks, finish
from dynbus.testing import run


class Cleanup:
    """A clean-up of one second, which then returns or raises `outcome`."""

    def __init__(self, outcome: str | BaseException = "clean") -> None:
        self.outcome = outcome
        self.ended = False

    async def __call__(self) -> str:
        await asyncio.sleep(1.0)
        self.ended = True
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def test_its_result_comes_back() -> None:
    async def story() -> str:
        return await finish(Cleanup("clean")())

    assert run(story()) == "clean"


def test_what_it_raises_is_raised() -> None:
    async def story() -> None:
        with pytest.raises(OSError, match="no space"):
            await finish(Cleanup(OSError("no space"))())

    run(story())


@pytest.mark.parametrize("times", [1, 3])
def test_it_ends_however_often_its_task_is_cancelled(times: int) -> None:
    async def story() -> None:
        cleanup = Cleanup()
        task = asyncio.create_task(finish(cleanup()))
        await asyncio.sleep(0.1)

        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.1)
        done_early = task.done()
        await asyncio.wait({task})

        assert not done_early
        assert cleanup.ended
        assert task.cancelled()

    run(story())


def test_a_time_limit_that_passes_meanwhile_is_told_as_one() -> None:
    async def story() -> None:
        cleanup = Cleanup()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await finish(cleanup())

        assert cleanup.ended

    run(story())


def test_a_failure_that_a_cancellation_hides_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        task = asyncio.create_task(finish(Cleanup(OSError("no space"))()))
        await asyncio.sleep(0.1)

        task.cancel()
        await asyncio.wait({task})

        assert task.cancelled()

    run(story())

    assert "a clean-up failed while its task was cancelled" in caplog.text
    assert "no space" in caplog.text


def test_a_clean_up_that_is_itself_cancelled_says_so() -> None:
    async def story() -> None:
        with pytest.raises(asyncio.CancelledError):
            await finish(Cleanup(asyncio.CancelledError())())

    run(story())


def test_tasks_are_cancelled_and_waited_for_however_they_end() -> None:
    async def raising() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError

    async def story() -> list[bool]:
        tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(raising())]
        await asyncio.sleep(0)
        await end_tasks(*tasks)
        assert isinstance(tasks[1].exception(), OSError)
        return [task.done() for task in tasks]

    assert asyncio.run(story()) == [True, True]
