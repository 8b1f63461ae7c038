"""A child process tells how it is doing, does as it is told, and is gone when it is killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from dynbus.actors.running.child import Child, ChildState
from dynbus.actors.running.child_messages import StartInstance, StopInstance, WorkerSettings
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.loader import resolve
from dynbus.actors.running.planning import planned
from dynbus.actors.running.processes import ForkServer, exit_text
from dynbus.bus.nats.server_process import RunningServer

ACTORS = """
import asyncio
from dynbus import Actor, depends, handler
from dynbus.bus.telemetry.process_status import StartStep

class Below(Actor, namespace="born"):
    @handler
    async def call(self) -> str:
        return ""

class Above(Below, namespace="born"):
    below = depends(Below)

class Slow(Below, namespace="born"):
    async def on_start(self) -> None:
        status = self.runtime.bus.status
        status.put_step("model", "loading", 1, 4)
        status.announce("born", "at last")
        await asyncio.sleep(3600)
"""

SPAWNED_WITHIN = 60.0


@pytest.fixture
def actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_actors.py").write_text(ACTORS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "child_actors", raising=False)
    return "child_actors"


def child_of(target: str, url: str) -> Child:
    settings = WorkerSettings(sys.path, {"servers": url}, "json", "warning")
    return Child(planned(Assignment(resolve(target), {})), 1, settings)


@asynccontextmanager
async def loaded(child: Child) -> AsyncGenerator[asyncio.Task[int | None], None]:
    """The child's process, once it waits for `StartInstance`; at the end it is gone."""
    waiting = asyncio.Event()

    async def loaded() -> None:
        waiting.set()

    async with ForkServer() as forks:
        running = asyncio.create_task(child.run(forks, loaded))
        try:
            async with asyncio.timeout(SPAWNED_WITHIN):
                await waiting.wait()
            yield running
        finally:
            child.kill()
            await asyncio.wait({running}, timeout=60)
            assert child.pid is None


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-999, "killed by signal 999"),
        (None, "how is not known: the fork server had died before it"),
    ],
)
def test_the_end_of_a_process_has_words(code: int | None, text: str) -> None:
    assert exit_text(code) == text


@pytest.mark.anyio
async def test_a_child_is_named_after_its_actor_and_number(actors: str) -> None:
    child = child_of(f"{actors}:Below", "nats://127.0.0.1:4222")

    assert child.label == "born.Below/1"
    assert repr(child) == "<Child born.Below/1 [loading | pid None]>"


@pytest.mark.anyio
async def test_what_depends_on_others_is_deeper(actors: str) -> None:
    below, above = (
        child_of(f"{actors}:{name}", "nats://127.0.0.1:4222") for name in ("Below", "Above")
    )

    assert below.node.depth < above.node.depth


@pytest.mark.anyio
async def test_a_child_tells_how_far_its_start_is_and_what_people_are_to_read(
    nats_server: RunningServer, actors: str
) -> None:
    child = child_of(f"{actors}:Slow", nats_server.url)

    async with loaded(child), asyncio.timeout(SPAWNED_WITHIN):
        child.send(StartInstance())
        while not (child.steps and child.announced):
            await child.news.wait()
            child.news.clear()
        steps = [str(step) for step in child.steps]

    assert steps == ["loading (25%)"]
    assert not child.steps
    assert child.announced == [("born", "at last")]


@pytest.mark.anyio
async def test_a_child_loads_then_starts_when_told_and_ends_when_told(
    nats_server: RunningServer, actors: str
) -> None:
    child = child_of(f"{actors}:Below", nats_server.url)

    async with loaded(child) as running, asyncio.timeout(SPAWNED_WITHIN):
        states = [child.state]
        assert psutil.pid_exists(child.pid or 0)
        child.send(StartInstance())
        await child.has_been_ready.wait()
        states.append(child.state)
        child.request_end(StopInstance())
        code = await running

    assert states == [ChildState.LOADED, ChildState.READY]
    assert child.instance_id
    assert code == 0


@pytest.mark.anyio
async def test_a_killed_child_has_ended_by_a_signal_and_is_told_nothing_more(
    nats_server: RunningServer, actors: str
) -> None:
    child = child_of(f"{actors}:Below", nats_server.url)

    async with loaded(child) as running:
        child.kill()
        code = await asyncio.wait_for(running, 60)

        child.send(StartInstance())
        child.kill()

    assert code == -signal.SIGKILL
    assert child.pid is None


async def nothing() -> None:
    return


@pytest.mark.anyio
async def test_a_word_that_was_said_before_the_process_is_there_reaches_it(
    nats_server: RunningServer, actors: str
) -> None:
    child = child_of(f"{actors}:Below", nats_server.url)

    async with ForkServer() as forks:
        running = asyncio.create_task(child.run(forks, nothing))
        await asyncio.sleep(0)  # now its process is being made
        child.request_end(StopInstance())
        try:
            code = await asyncio.wait_for(running, SPAWNED_WITHIN)
        finally:
            child.kill()

    assert code == 0
