"""The supervisor starts in order, restarts with bounds, and never leaves a child behind."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from dynbus.actors.declaring.arguments import Text
from dynbus.actors.declaring.handlers import handler
from dynbus.actors.declaring.restart_policy import OnCrash
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running import supervisor as supervising
from dynbus.actors.running.child import Child, ChildState
from dynbus.actors.running.child_messages import (
    Command,
    DrainInstance,
    StopInstance,
    WorkerSettings,
)
from dynbus.actors.running.in_process import Assignment, Ending
from dynbus.actors.running.loader import resolve
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.running.planning import planned
from dynbus.actors.running.processes import ForkProcess, ForkServer, Process
from dynbus.actors.running.supervisor import ChangeFailed, Supervisor
from dynbus.actors.runtime import Actor
from dynbus.actors.serving.instance import CANCEL_TIMEOUT, STOP_TIMEOUT
from dynbus.bus import exit_codes
from dynbus.bus.clock import monotonic, run
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import RunningServer

ACTORS = """
import asyncio, os, sys, time
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

class Telling(Below, namespace="supervised"):
    async def on_start(self) -> None:
        await super().on_start()
        self.runtime.bus.status.put("1", "x", {"mode": "slow", "since": "noon"})

class Loading(Below, namespace="supervised"):
    async def on_start(self) -> None:
        self.runtime.bus.status.put_step("model", "loading the model", 1, 4)
        while not (self.folder / "loaded").exists():
            await asyncio.sleep(0.02)

class Blocked(Below, namespace="supervised"):
    async def on_start(self) -> None:
        self.blocking = asyncio.create_task(self.block())

    async def block(self) -> None:
        while not (self.folder / "block").exists():
            await asyncio.sleep(0.02)
        time.sleep(60)

class Once(Below, namespace="supervised"):
    async def on_start(self) -> None:
        with (self.folder / "once").open("x"):
            await super().on_start()

class Garbling(Below, namespace="supervised"):
    async def on_start(self) -> None:
        os.write(int(sys.argv[1]), b"no report\\n")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "supervised_actors.py").write_text(ACTORS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "supervised_actors", raising=False)
    return tmp_path


def supervise(
    server: RunningServer,
    folder: Path,
    *names: str,
    on_crash: OnCrash = "restart",
    bus: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> Supervisor:
    given = {"folder": str(folder), **arguments}
    assignments = [
        Assignment(resolve(f"supervised_actors:{name}"), given, ServiceArgs(on_crash=on_crash))
        for name in names
    ]
    return Supervisor(
        [planned(assignment) for assignment in assignments],
        WorkerSettings(sys.path, {"servers": server.url, **bus}, "json", "warning"),
        *(ForkServer(), Ending()),
        drain_grace=5.0,
    )


def of_one(*, drain_grace: float) -> Supervisor:
    """A supervisor whose only child is a class that the test has put in its place."""
    nodes = [planned(Assignment(Alone, {}))]
    settings = WorkerSettings([], {})
    return Supervisor(nodes, settings, ForkServer(), Ending(), drain_grace=drain_grace)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncGenerator[asyncio.Task[int], None]:
    """Run the supervisor; at the end none of its children is left."""
    pids: set[int] = set()
    async with supervisor.forks:
        task = asyncio.create_task(supervisor.run())
        try:
            async with asyncio.timeout(60):
                yield task
                pids = {child.pid for child in supervisor.children if child.pid is not None}
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=60)
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
        supervisor.ending.drain()
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
async def test_what_the_process_of_a_child_says_of_how_it_is_is_known_here(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Telling", "Below")

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        await until(supervisor.details)

        assert supervisor.details() == {"supervised.Telling/1": "mode: slow; since: noon"}
        assert supervisor.problems() == {}


@pytest.mark.anyio
async def test_what_a_child_does_before_it_is_ready_is_what_keeps_the_run_from_being_ready(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Loading")
    supervisor.begin()

    async with running(supervisor):
        await until(lambda: supervisor.children[0].steps)
        loading = supervisor.problems()
        (folder / "loaded").touch()
        await all_ready(supervisor)

        assert supervisor.problems() == {}

    assert loading == {"supervised.Loading/1": "loading the model (25%)"}


def running_now(supervisor: Supervisor) -> list[str]:
    return [child.label for child in supervisor.children if child.state is ChildState.READY]


@pytest.mark.anyio
async def test_instances_are_added_to_a_running_node_and_its_last_ones_drained(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", "Above")

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        await supervisor.scale("supervised.Below", 3)
        grown, ready = running_now(supervisor), supervisor.problems()
        await supervisor.scale("supervised.Below", 1)
        shrunk = running_now(supervisor)
        await supervisor.scale("supervised.Below", 0)
        gone = running_now(supervisor)
        await supervisor.scale("supervised.Below", 1)
        back = running_now(supervisor)

    above, below = "supervised.Above/1", "supervised.Below/1"
    assert grown == [below, above, "supervised.Below/2", "supervised.Below/3"]
    assert ready == {}
    assert shrunk == [below, above]
    assert gone == [above]
    assert back == [above, below]


@pytest.mark.anyio
async def test_a_restart_replaces_one_instance_after_the_other_when_the_next_is_ready(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below")
    fewest = 2

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        await supervisor.scale("supervised.Below", 2)
        before = {child.pid for child in supervisor.children}
        restart = asyncio.create_task(supervisor.restart("supervised.Below"))
        while not restart.done():
            fewest = min(fewest, len(running_now(supervisor)))
            await asyncio.sleep(0.01)
        await restart
        after = {child.pid for child in supervisor.children}
        order = (folder / "order").read_text().split("\n")

    assert fewest == 2
    assert len(after) == 2
    assert not before & after
    assert (order.count("start 0 Below"), order.count("stop Below")) == (4, 2)


@pytest.mark.anyio
async def test_an_instance_that_does_not_start_leaves_the_run_with_those_it_has(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Once")

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        before = [child.pid for child in supervisor.children]
        for change in (
            supervisor.restart("supervised.Once"),
            supervisor.scale("supervised.Once", 3),
        ):
            with pytest.raises(
                ChangeFailed, match="supervised.Once did not start: FileExistsError"
            ):
                await change
        after = [child.pid for child in supervisor.children]
        problems = supervisor.problems()

    assert before == after
    assert problems == {}
    assert supervisor.failure is None


def test_a_node_is_found_by_its_address_and_by_a_component_that_it_alone_has() -> None:
    async def story() -> None:
        supervisor = Supervisor(
            [
                PlannedNode(address=address, actor="a:B", depth=0, service=ServiceArgs(workers=0))
                for address in ("a.Splitter", "b.Splitter", "a.Shouter")
            ],
            WorkerSettings([], {}),
            *(ForkServer(), Ending()),
            drain_grace=1.0,
        )

        assert supervisor.find("a.Splitter") == "a.Splitter"
        assert supervisor.find("Shouter") == "a.Shouter"
        with pytest.raises(ChangeFailed, match=r"^Splitter may be a.Splitter or b.Splitter: write"):
            supervisor.find("Splitter")
        with pytest.raises(ChangeFailed, match=r"^this run has no a.Shoute \(did you mean"):
            supervisor.find("a.Shoute")

    run(story())


@pytest.mark.anyio
async def test_a_drain_while_children_still_load_leaves_none(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", "Above")

    async with running(supervisor) as task:
        supervisor.ending.drain()
        code = await task

    assert code == exit_codes.OK


@pytest.mark.anyio
@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancelled_run_leaves_no_child(
    nats_server: RunningServer, folder: Path, cancellations: int
) -> None:
    supervisor = supervise(nats_server, folder, "Below")

    async with running(supervisor) as task:
        supervisor.begin()
        await all_ready(supervisor)
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    assert [child.state for child in supervisor.children] == [ChildState.ENDED]


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_while_a_process_is_made_leaves_none(
    folder: Path, nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = ForkServer.fork
    begun, made = asyncio.Event(), list[Process]()

    async def fork_and_tell(server: ForkServer, asked: ForkProcess, fd: int) -> Process:
        begun.set()
        made.append(await fork(server, asked, fd))
        return made[-1]

    monkeypatch.setattr(ForkServer, "fork", fork_and_tell)
    supervisor = supervise(nats_server, folder, "Below")

    async with running(supervisor) as task:
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})

    (process,) = made
    assert process.returncode is not None


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
async def test_an_instance_that_is_to_stop_stays_away_until_it_is_asked_for_again(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", "Once", on_crash="stop")
    below, _ = supervisor.children

    async with running(supervisor) as task:
        supervisor.begin()
        await all_ready(supervisor)
        below.kill()
        await until(below.ended.is_set)
        alone = supervisor.problems()
        await supervisor.scale("supervised.Below", 1)
        again = (running_now(supervisor), supervisor.problems())
        for child in supervisor.children:
            child.kill()
        code = await task

    assert alone == {"supervised.Below/1": "ended: killed by SIGKILL"}
    assert again == (["supervised.Once/1", "supervised.Below/1"], {})
    assert code == exit_codes.FAILURE
    assert supervisor.failure is not None
    assert supervisor.failure.message.endswith(
        "/1 ended, and no other instance is left: killed by SIGKILL"
    )


@pytest.mark.anyio
async def test_a_child_whose_end_escalates_ends_the_run_with_the_reason(
    nats_server: RunningServer, folder: Path
) -> None:
    supervisor = supervise(nats_server, folder, "Below", on_crash="escalate")
    (child,) = supervisor.children

    async with running(supervisor) as task:
        supervisor.begin()
        await all_ready(supervisor)
        assert child.pid is not None
        psutil.Process(child.pid).kill()
        code = await task

    assert code == exit_codes.ESCALATED
    assert supervisor.failure is not None
    assert supervisor.failure.message == (
        "supervised.Below/1 ended: killed by SIGKILL; its on_crash is escalate"
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


def fail_to_fork(monkeypatch: pytest.MonkeyPatch, *attempts: int) -> None:
    """Have the given attempts to make a process fail, counted from 1; none of them: every one."""
    fork = ForkServer.fork
    made = 0

    async def fork_or_fail(server: ForkServer, asked: ForkProcess, fd: int) -> Process:
        nonlocal made
        made += 1
        if not attempts or made in attempts:
            raise OSError(errno.EMFILE, "Too many open files")
        return await fork(server, asked, fd)

    monkeypatch.setattr(ForkServer, "fork", fork_or_fail)


@pytest.mark.anyio
async def test_a_child_that_cannot_be_made_ends_the_run_with_the_reason(
    folder: Path, nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_fork(monkeypatch)
    supervisor = supervise(nats_server, folder, "Below")

    async with running(supervisor) as task, asyncio.timeout(60):
        code = await task

    assert code == exit_codes.START_FAILED
    assert supervisor.failure is not None
    assert supervisor.failure.message == (
        "supervised.Below/1 ended before it was ready: its process could not be started: "
        "[Errno 24] Too many open files"
    )


@pytest.mark.anyio
async def test_a_restart_that_fails_is_tried_again(
    folder: Path,
    nats_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_to_fork(monkeypatch, 2)
    supervisor = supervise(nats_server, folder, "Below")
    (child,) = supervisor.children

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        first = child.pid
        child.kill()
        async with asyncio.timeout(60):
            await until(lambda: child.pid != first and child.state is ChildState.READY)

    assert "its process could not be started: [Errno 24] Too many open files" in caplog.text


@pytest.mark.anyio
async def test_what_goes_wrong_in_supervising_a_child_ends_the_run_with_its_traceback(
    folder: Path, nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: Child, spawning: asyncio.Lock, loaded: Any) -> int:
        raise LookupError("odd")

    monkeypatch.setattr(Child, "run", run)
    supervisor = supervise(nats_server, folder, "Below")

    async with running(supervisor) as task, asyncio.timeout(60):
        code = await task

    assert code == exit_codes.FAILURE
    assert supervisor.failure is not None
    assert supervisor.failure.message == "supervised.Below/1 cannot be supervised: LookupError: odd"
    assert supervisor.failure.traceback.endswith("\nLookupError: odd\n")


@pytest.mark.anyio
async def test_a_child_that_cannot_be_understood_is_killed_and_named(
    folder: Path, nats_server: RunningServer
) -> None:
    supervisor = supervise(nats_server, folder, "Garbling")

    async with running(supervisor) as task, asyncio.timeout(60):
        supervisor.begin()
        code = await task

    assert code == exit_codes.START_FAILED
    assert supervisor.failure is not None
    assert supervisor.failure.message.startswith(
        "supervised.Garbling/1 sent an invalid report: JSON is malformed"
    )


@pytest.mark.anyio
async def test_a_successor_has_metrics_although_its_predecessor_died_before_it_answered(
    folder: Path, nats_server: RunningServer
) -> None:
    pytest.importorskip("prometheus_client")
    supervisor = supervise(nats_server, folder, "Below")
    (child,) = supervisor.children

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        first = psutil.Process(child.pid)
        first.suspend()
        asked = asyncio.create_task(supervisor.metrics(timeout=60.0))
        await asyncio.sleep(0)  # now it has been asked
        first.kill()
        before = await asked
        async with asyncio.timeout(60):
            await until(lambda: child.pid != first.pid and child.state is ChildState.READY)
        after = await supervisor.metrics(timeout=60.0)

    assert before == []
    assert [page for _, page in after if "python_info" in page] != []


@pytest.mark.anyio
async def test_a_child_whose_loop_is_blocked_has_metrics(
    folder: Path, nats_server: RunningServer
) -> None:
    pytest.importorskip("prometheus_client")
    supervisor = supervise(nats_server, folder, "Blocked", bus={"stall_limit": 0.5})
    (child,) = supervisor.children

    async with running(supervisor):
        supervisor.begin()
        await all_ready(supervisor)
        (folder / "block").touch()
        await until(lambda: "main_loop" in child.problems)
        pages = await supervisor.metrics(timeout=60.0)
        child.kill()

    assert [page for _, page in pages if "python_info" in page] != []


def test_a_class_that_another_process_cannot_find_is_refused() -> None:
    class Local(Actor, namespace="supervised"):
        pass

    with pytest.raises(ConfigError, match="use --in-process"):
        planned(Assignment(Local, {}))


class CrashingChild(Child):
    """A child without a process that crashes as soon as it is ready, `times` times."""

    times = 12
    started: list[float]

    async def run(self, forks: ForkServer, loaded: Any) -> int | None:
        self.started = [*getattr(self, "started", []), monotonic()]
        self.state, self.ready_at = ChildState.READY, monotonic()
        self.has_been_ready.set()
        if len(self.started) <= self.times:
            return -11
        await asyncio.Event().wait()
        return 0


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (ChildState.LOADING, "restarting: killed by SIGSEGV"),
        (ChildState.LOADED, "restarting: killed by SIGSEGV"),
        (ChildState.ENDED, "ended: killed by SIGSEGV"),
    ],
)
def test_a_child_that_crashed_is_restarting_until_it_is_ready_again(
    state: ChildState, told: str
) -> None:
    async def story() -> dict[str, str]:
        supervisor = of_one(drain_grace=0.0)
        (child,) = supervisor.children
        child.state, child.crash = state, "killed by SIGSEGV"
        return supervisor.problems()

    assert run(story()) == {"supervised.Alone/1": told}


def test_a_child_that_keeps_crashing_is_started_for_ever_and_named_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervising, "Child", CrashingChild)

    async def story() -> tuple[CrashingChild, dict[str, str], int]:
        supervisor = of_one(drain_grace=0.0)
        (child,) = supervisor.children
        assert isinstance(child, CrashingChild)
        task = asyncio.create_task(supervisor.run())
        await until(lambda: child.state is ChildState.RESTARTING and len(child.started) == 12)
        problems = supervisor.problems()
        await until(lambda: len(child.started) == 13)
        supervisor.ending.stop()
        return child, problems, await task

    child, problems, code = run(story())

    pauses = [later - former for former, later in pairwise(child.started)]
    assert pauses[0] <= 0.25
    assert all(15.0 <= pause <= 30.1 for pause in pauses[8:])
    assert problems == {"supervised.Alone/1": "restarting: killed by SIGSEGV (12 times in a row)"}
    assert (
        "supervised.Alone/1 ended (12 times in a row): killed by SIGSEGV; restarting" in caplog.text
    )
    assert code == exit_codes.INTERRUPTED


class LastingChild(Child):
    """A child without a process that is ready at once, and ends some time after it was told to.

    Attributes:
        seconds: how long it goes on after a drain, or after a stop, each beyond the grace.
        killed: how long after the first word it was killed; None when it was not.
    """

    seconds: tuple[float, float] = (0.0, 0.0)
    killed: float | None = None

    async def run(self, forks: ForkServer, loaded: Any) -> int | None:
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._told = 0.0
        self.state = ChildState.READY
        self.has_been_ready.set()
        return await self._wait_or_end(self._ended)

    async def _ended(self) -> int:
        await asyncio.wait({self._end})
        return self._end.result()

    @property
    def pid(self) -> int | None:
        return None if self._end.done() else 1

    def send(self, command: Command) -> None:
        if isinstance(command, DrainInstance):
            self._told = monotonic()
            self._end_after(command.grace + self.seconds[0])
        elif isinstance(command, StopInstance):
            self._end_after(self.seconds[1])

    def kill(self) -> None:
        self.killed = monotonic() - self._told
        self._end.set_result(-9)

    def _end_after(self, seconds: float) -> None:
        def end() -> None:
            if not self._end.done():
                self._end.set_result(0)

        asyncio.get_running_loop().call_later(seconds, end)


def drained(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float]
) -> tuple[LastingChild, int]:
    """A child that was told to drain within 10 s, and the exit code of its supervisor."""
    monkeypatch.setattr(LastingChild, "seconds", seconds)
    monkeypatch.setattr(supervising, "Child", LastingChild)

    async def story() -> tuple[LastingChild, int]:
        supervisor = of_one(drain_grace=10.0)
        (child,) = supervisor.children
        assert isinstance(child, LastingChild)
        task = asyncio.create_task(supervisor.run())
        await child.has_been_ready.wait()
        supervisor.ending.drain()
        return child, await task

    return run(story())


class Alone(Actor, namespace="supervised"):
    @handler
    async def call(self) -> str:
        return ""


def test_a_child_is_left_alone_for_as_long_as_its_on_stop_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child, code = drained(monkeypatch, (STOP_TIMEOUT + CANCEL_TIMEOUT + 1.0, 60.0))

    assert (child.killed, code) == (None, exit_codes.OK)


def test_a_child_that_goes_on_for_longer_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child, code = drained(monkeypatch, (600.0, 600.0))

    assert child.killed == pytest.approx(10.0 + STOP_TIMEOUT + CANCEL_TIMEOUT + 7.0)
    assert code == exit_codes.OK
    assert caplog.messages == ["supervised.Alone/1 (process 1) did not end and was killed"]
