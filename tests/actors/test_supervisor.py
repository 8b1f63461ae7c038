"""The supervisor starts in order, restarts with bounds, and never leaves a child behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynbus.actors.actor import Actor
from dynbus.actors.child import ChildState, WorkerSettings
from dynbus.actors.configuration import Text
from dynbus.actors.loader import resolve
from dynbus.actors.restart_policy import RestartPolicy
from dynbus.actors.serving import Assignment
from dynbus.actors.supervisor import Supervisor
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats_server import RunningServer

ACTORS = """
from pathlib import Path
from dynbus import Actor, depends, handler

class Below(Actor, namespace="supervised"):
    def __init__(self, folder: Path, order: list[int] | None = None) -> None:
        self.folder = folder
        self.order = order or []

    async def on_start(self) -> None:
        self.log(f"start {sum(self.order)}")

    async def on_stop(self) -> None:
        self.log("stop")

    def log(self, what: str) -> None:
        with (self.folder / "order").open("a") as file:
            file.write(f"{what} {type(self).__name__}\\n")

    @handler
    async def call(self) -> str:
        return ""

class Above(Below, namespace="supervised"):
    below = depends(Below)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "supervised_actors.py").write_text(ACTORS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "supervised_actors", raising=False)
    return tmp_path


def supervise(
    server: RunningServer, folder: Path, *names: str, limit: int = 5, **arguments: Any
) -> Supervisor:
    given = {"folder": str(folder), **arguments}
    return Supervisor(
        [Assignment(resolve(f"supervised_actors:{name}"), given, 1) for name in names],
        WorkerSettings({"servers": server.url}, "json", "warning"),
        drain_grace=5.0,
        policy=lambda: RestartPolicy(limit),
    )


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncGenerator[asyncio.Task[int], None]:
    """Run the supervisor; at the end none of its children is left."""
    task = asyncio.create_task(supervisor.run())
    pids: set[int] = set()
    try:
        async with asyncio.timeout(40):
            yield task
            pids = {child.pid for child in supervisor.children if child.pid is not None}
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=15.0)
        assert [child for child in supervisor.children if child.pid is not None] == []
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []


async def all_ready(supervisor: Supervisor) -> None:
    for child in supervisor.children:
        await child.has_been_ready.wait()


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.02)


@pytest.mark.anyio
async def test_dependencies_start_first_and_stop_last(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", "Above")

    async with running(supervisor) as task:
        supervisor.begin()
        await all_ready(supervisor)
        supervisor.drain()
        code = await task

    assert code == exit_codes.OK
    assert (folder / "order").read_text().splitlines() == [
        "start 0 Below",
        "start 0 Above",
        "stop Above",
        "stop Below",
    ]


@pytest.mark.anyio
async def test_children_wait_for_the_word_to_begin(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below")
    (child,) = supervisor.children

    async with running(supervisor):
        await until(lambda: child.state is ChildState.LOADED)
        waiting = supervisor.problems()
        supervisor.begin()
        await all_ready(supervisor)

        assert waiting == {"supervised.Below/1": "loaded"}
        assert supervisor.problems() == {}


@pytest.mark.anyio
async def test_a_drain_while_children_still_load_leaves_none(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", "Above")

    async with running(supervisor) as task:
        supervisor.drain()
        code = await task

    assert code == exit_codes.OK


@pytest.mark.anyio
async def test_a_cancelled_run_leaves_no_child(nats_server: RunningServer, folder: Path) -> None:
    supervisor = supervise(nats_server, folder, "Below")

    async with running(supervisor) as task:
        supervisor.begin()
        await all_ready(supervisor)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert [child.state for child in supervisor.children] == [ChildState.ENDED]


@pytest.mark.anyio
async def test_text_of_the_command_line_is_read_as_its_type_in_the_child(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", order=Text("[3, 4]"))

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)

    assert (folder / "order").read_text().startswith("start 7 Below")


@pytest.mark.anyio
async def test_a_child_that_ended_too_often_ends_the_run_with_the_reason(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", limit=0)
    (child,) = supervisor.children

    async with running(supervisor) as task:
        supervisor.begin()
        await all_ready(supervisor)
        assert child.pid is not None
        psutil.Process(child.pid).kill()
        code = await task

    assert code == exit_codes.GAVE_UP
    assert supervisor.failure is not None
    assert supervisor.failure.message == (
        "supervised.Below/1 ended 1 times within 60 s, the last time: killed by SIGKILL"
    )


@pytest.mark.anyio
async def test_a_child_that_dies_before_it_is_ready_ends_the_run(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below")
    (child,) = supervisor.children

    async with running(supervisor) as task:
        await until(lambda: child.state is ChildState.LOADED)
        assert child.pid is not None
        psutil.Process(child.pid).kill()
        code = await task

    assert code == exit_codes.START_FAILED
    assert supervisor.failure is not None
    assert supervisor.failure.message == (
        "supervised.Below/1 ended before it was ready: killed by SIGKILL"
    )


def test_a_class_that_another_process_cannot_find_is_refused() -> None:
    class Local(Actor, namespace="supervised"):
        pass

    with pytest.raises(ConfigError, match="use --in-process"):
        Supervisor([Assignment(Local, {}, 1)], WorkerSettings({}), drain_grace=1.0)
