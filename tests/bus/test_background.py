"""Background work belongs to its owner: any task may start and end it, and no failure is lost."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from dynbus.bus.background import Background, Openable, Work, run_apart
from dynbus.bus.errors import Unavailable

pytestmark = pytest.mark.anyio


class Owner:
    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.background = Background("owner", self.failures.append)


async def test_work_is_started_by_one_task_and_ended_by_another() -> None:
    events: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                events.append("cleaned up")

    async with Owner().background as background:
        started = await asyncio.create_task(_start(background, work))
        await asyncio.create_task(started.end())

    assert events == ["cleaned up"]
    assert started.ended


async def test_a_callback_of_the_loop_may_start_work_also_with_sniffio() -> None:
    pytest.importorskip("sniffio", reason="needs sniffio, by which anyio finds no loop there")
    loop = asyncio.get_running_loop()
    started: asyncio.Future[Work] = loop.create_future()
    # What a program of asyncio has in its context: nothing that a test runner has set.
    background = contextvars.Context().run(Background, "owner")

    async with background:
        start = partial(background.start, anyio.lowlevel.checkpoint, name="work")
        loop.call_soon(lambda: started.set_result(start()), context=contextvars.Context())
        async with asyncio.timeout(60):
            work = await started
            await work.wait()

    assert background.failure is None


async def _wait_for_what_is_cancelled() -> None:
    other = asyncio.ensure_future(asyncio.sleep(60))
    other.cancel()
    await other


async def _start(background: Background, work: object) -> Work:
    return background.start(work, name="work")  # type: ignore[arg-type]


async def test_closing_ends_what_is_left() -> None:
    owner = Owner()

    async with owner.background as background:
        left = background.start(anyio.sleep_forever, name="left")

    assert left.ended
    assert owner.failures == []


async def test_a_failure_ends_the_rest_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()

    async def fail() -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR, "dynbus.bus.background"):
        async with owner.background as background:
            rest = background.start(anyio.sleep_forever, name="rest")
            background.start(fail, name="fails")
            await rest.wait()

    (error,) = owner.failures
    assert str(error) == "broken"
    assert "owner: background work failed" in caplog.text


async def test_a_cancellation_that_comes_from_elsewhere_does_not_end_the_rest_without_a_word() -> (
    None
):
    owner = Owner()

    async with owner.background as background:
        rest = background.start(anyio.sleep_forever, name="rest")
        background.start(_wait_for_what_is_cancelled, name="the wait")
        await rest.wait()

    (error,) = owner.failures
    assert str(error) == "what the wait waited for was cancelled"


async def test_nothing_starts_before_it_is_open_or_after_it_is_closed() -> None:
    background = Owner().background

    with pytest.raises(RuntimeError, match="owner is not open: early cannot be started"):
        background.start(anyio.sleep_forever, name="early")
    async with background:
        pass
    with pytest.raises(RuntimeError, match="late cannot be started"):
        background.start(anyio.sleep_forever, name="late")


async def test_work_ends_although_whoever_waits_for_it_is_cancelled() -> None:
    release = asyncio.Event()
    cleaning = asyncio.Event()

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                cleaning.set()
                await release.wait()

    async with Owner().background as background:
        started = background.start(work, name="work")
        await anyio.lowlevel.checkpoint()
        ending = asyncio.create_task(started.end())
        await cleaning.wait()
        ending.cancel()
        await asyncio.wait({ending})
        assert not started.ended
        release.set()
        await started.wait()


async def test_work_does_not_see_the_variables_of_whoever_starts_it() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []

    async def look() -> None:
        seen.append(variable.get())

    async with Owner().background as background:
        variable.set("a call's")
        await background.start(look, name="look").wait()

    assert seen == ["none"]


async def test_after_a_failure_nothing_starts_and_the_cause_is_named() -> None:
    owner = Owner()

    async def fail() -> None:
        raise ValueError("broken")

    async with owner.background as background:
        await background.start(fail, name="fails").wait()
        await background.close()

        with pytest.raises(Unavailable, match="owner has failed: ValueError: broken"):
            background.start(anyio.sleep_forever, name="late")


class Door(Openable):
    """Notes what becomes of it."""

    def __init__(self, *, fails: bool = False, background: Background | None = None) -> None:
        super().__init__(background)
        self.events: list[str] = []
        self.reached = asyncio.Event()
        self.may_open = asyncio.Event()
        self._fails = fails

    def __repr__(self) -> str:
        return "<Door>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        self.reached.set()
        try:
            await self.may_open.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                self.events.append("opened")
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                self.events.append("cleaned up")

    async def _run(self) -> None:
        if self._fails:
            raise ValueError("broken")
        await anyio.sleep_forever()


async def test_what_one_task_opens_another_one_closes() -> None:
    door = Door()
    door.may_open.set()

    await asyncio.create_task(door.__aenter__())
    await asyncio.create_task(door.close())
    await door.close()

    assert door.events == ["opened", "cleaned up"]


async def test_who_is_cancelled_while_they_open_leaves_nothing_open() -> None:
    door = Door()
    opening = asyncio.create_task(door.__aenter__())
    await door.reached.wait()

    opening.cancel()
    await asyncio.wait({opening})

    assert opening.cancelled()
    assert door.events == ["cleaned up"]


async def test_who_is_cancelled_while_they_close_leaves_nothing_open() -> None:
    door = Door()
    door.may_open.set()
    await door.__aenter__()

    closing = asyncio.create_task(door.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    await door.close()

    assert door.events == ["opened", "cleaned up"]


async def test_what_is_open_and_fails_is_cleaned_up_and_raises_when_it_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door(fails=True)
    door.may_open.set()

    await door.__aenter__()
    while "cleaned up" not in door.events:
        await anyio.lowlevel.checkpoint()

    with pytest.raises(ValueError, match="broken"):
        await door.close()

    assert "<Door> failed" in caplog.text


async def test_what_is_open_and_fails_fails_the_background_that_it_was_given() -> None:
    owner = Owner()
    async with owner.background as background:
        door = Door(fails=True, background=background)
        door.may_open.set()
        await door.__aenter__()
        while not owner.failures:
            await anyio.lowlevel.checkpoint()

    assert [str(failure) for failure in owner.failures] == ["broken"]
    with pytest.raises(ValueError, match="broken"):
        await door.close()


async def test_what_cannot_be_opened_is_no_failure_of_the_background() -> None:
    owner = Owner()

    class Locked(Openable):
        @asynccontextmanager
        async def _open(self) -> AsyncGenerator[None]:
            raise ValueError("locked")
            yield

    async with owner.background as background:
        with pytest.raises(ValueError, match="locked"):
            await Locked(background).__aenter__()

    assert owner.failures == []


async def test_what_ends_by_itself_is_told_too() -> None:
    owner = Owner()

    class Cut(Openable):
        def __repr__(self) -> str:
            return "<Cut>"

        @asynccontextmanager
        async def _open(self) -> AsyncGenerator[None]:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait_for_what_is_cancelled)
                yield

    async with owner.background as background:
        cut = await Cut(background).__aenter__()
        rest = background.start(anyio.sleep_forever, name="rest")
        await rest.wait()
        await cut.close()

    assert [str(error) for error in owner.failures] == ["<Cut> has ended by itself"]


async def test_what_runs_apart_gives_its_result_or_its_error() -> None:
    async def divide(one: int, other: int) -> float:
        return one / other

    assert await run_apart(divide, 4, 2, name="divide") == 2.0
    with pytest.raises(ZeroDivisionError):
        await run_apart(divide, 4, 0, name="divide")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_what_runs_apart_cleans_up_however_often_it_is_cancelled(times: int) -> None:
    started, release, cleaned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()
                cleaned.set()

    waiting = asyncio.create_task(run_apart(work, name="work"))
    await started.wait()
    for _ in range(times):
        waiting.cancel()
        await anyio.sleep(0.01)
    release.set()

    async with asyncio.timeout(60):
        await cleaned.wait()
        await asyncio.wait({waiting})
    assert waiting.cancelled()


async def test_whoever_waits_in_a_scope_that_is_cancelled_waits_for_the_clean_up_too() -> None:
    events: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                events.append("cleaned up")

    with anyio.move_on_after(0.05):
        await run_apart(work, name="work")

    assert events == ["cleaned up"]
