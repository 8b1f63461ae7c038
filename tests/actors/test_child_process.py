"""A worker process hears its parent, answers it, and does not outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from dynbus.actors.running.child_messages import (
    ActorLoaded,
    Announced,
    CollectMetrics,
    Command,
    DrainInstance,
    HealthChanged,
    InstanceFailed,
    InstanceReady,
    LoadActor,
    MetricsCollected,
    Report,
    StartInstance,
    StepsChanged,
    StopInstance,
    WorkerSettings,
)
from dynbus.actors.running.child_process import Channel
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.runtime import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.telemetry.process_status import StartStep

LOAD = LoadActor(
    PlannedNode(
        address="demo.Splitter",
        actor="actors:Splitter",
        depth=0,
        values={"limits": {"size": 1}},
        texts={"separator": ","},
    ),
    settings=WorkerSettings(["/a"], {"servers": "nats://h:1"}, "json"),
)
ENDED_WITHIN = 60.0

LOADING = """
import gc
from dynbus import Actor, handler

class Loading(Actor):
    async def on_start(self):
        self.weights = [{"layer": []}]

    @handler
    async def is_looked_at(self) -> bool:
        return any(found is self.weights for found in gc.get_objects())
"""


class Parent:
    """The parent's end of a channel."""

    def __init__(self, connection: socket.socket, childs: socket.socket) -> None:
        self.connection = connection
        self.orphaned = threading.Event()
        self.metrics_asked = threading.Event()
        self.end_asked = threading.Event()
        self.channel = Channel(
            childs,
            orphaned=self.orphaned.set,
            metrics_asked=self.metrics_asked.set,
            end_asked=self.end_asked.set,
        )

    def say(self, *commands: Command) -> None:
        lines = b"".join(msgspec.json.encode(command) + b"\n" for command in commands)
        self.connection.sendall(lines)


@pytest.fixture
def parent() -> Iterator[Parent]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = Parent(ours, theirs)
        made.channel.open()
        yield made
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        assert made.orphaned.wait(60)


@pytest.mark.parametrize(
    "command", [LOAD, StartInstance(), DrainInstance(2.5), StopInstance(), CollectMetrics()]
)
def test_every_command_crosses_as_it_is(command: Command) -> None:
    assert msgspec.json.decode(msgspec.json.encode(command), type=Command) == command


@pytest.mark.parametrize(
    "report",
    [
        ActorLoaded(),
        StepsChanged([StartStep("loading", 1, 2)]),
        Announced("tiny answers", "details"),
        InstanceReady("i1"),
        InstanceFailed(code=5, message="no", traceback="..."),
        HealthChanged({"bus": "disconnected"}),
        MetricsCollected("page\n"),
    ],
)
def test_every_report_crosses_as_it_is(report: Report) -> None:
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_commands_are_received_in_order(parent: Parent) -> None:
    parent.say(LOAD, StartInstance())

    assert [parent.channel.receive(), parent.channel.receive()] == [LOAD, StartInstance()]


def test_what_came_before_the_loop_and_what_comes_after_is_taken_on_it(parent: Parent) -> None:
    taken: queue.SimpleQueue[tuple[Command, str]] = queue.SimpleQueue()

    async def story() -> None:
        done = asyncio.Event()

        def take(command: Command) -> None:
            taken.put((command, threading.current_thread().name))
            if command == StopInstance():
                done.set()

        parent.say(LOAD, StartInstance())
        assert await asyncio.to_thread(parent.channel.receive) == LOAD
        parent.channel.deliver_to(asyncio.get_running_loop(), take)
        parent.say(DrainInstance(1.0), StopInstance())
        async with asyncio.timeout(60):
            await done.wait()

    asyncio.run(story())

    found = [taken.get_nowait() for _ in range(taken.qsize())]
    assert [command for command, _ in found if command != StartInstance()] == [
        DrainInstance(1.0),
        StopInstance(),
    ]
    assert {thread for _, thread in found} == {threading.current_thread().name}


def test_metrics_are_asked_for_without_the_loop(parent: Parent) -> None:
    parent.say(CollectMetrics(), StartInstance())

    assert parent.metrics_asked.wait(60)
    assert parent.channel.receive() == StartInstance()


def test_reports_are_lines_of_json(parent: Parent) -> None:
    parent.channel.send(InstanceReady("i1"))
    parent.channel.send(HealthChanged({}))

    with parent.connection.makefile("rb") as lines:
        found = [lines.readline(), lines.readline()]

    assert found == [
        b'{"type":"instance_ready","instance_id":"i1"}\n',
        b'{"type":"health_changed","problems":{}}\n',
    ]


def test_a_parent_that_is_gone_is_noticed_and_told_nothing(parent: Parent) -> None:
    parent.connection.close()

    assert parent.orphaned.wait(60)
    for _ in range(3):
        parent.channel.send(ActorLoaded())


def start_worker(path: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                "from dynbus.actors.running.child_process import main; main()",
                str(theirs.fileno()),
                "test/1",
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=path,
        )
    return process, ours


def test_a_worker_whose_parent_dies_before_it_says_anything_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", sys_path())
    process, parent_end = start_worker(tmp_path)

    parent_end.close()

    try:
        assert process.wait(ENDED_WITHIN) == 1
    finally:
        process.kill()
        process.wait(60)


def test_a_worker_that_cannot_load_its_actor_says_so_and_ends_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", sys_path())
    settings = msgspec.structs.replace(LOAD.settings, path=sys.path)
    node = msgspec.structs.replace(LOAD.node, actor="not_there:Actor")
    load = msgspec.structs.replace(LOAD, settings=settings, node=node)
    process, parent_end = start_worker(tmp_path)

    try:
        with parent_end, parent_end.makefile("rb") as lines:
            parent_end.settimeout(ENDED_WITHIN)
            parent_end.sendall(msgspec.json.encode(load) + b"\n")
            report = msgspec.json.decode(lines.readline(), type=Report)
            code = process.wait(ENDED_WITHIN)
    finally:
        process.kill()
        process.wait(60)

    assert isinstance(report, InstanceFailed)
    assert report.message == "ModuleNotFoundError: No module named 'not_there'"
    assert (report.code, code) == (5, 5)


def test_what_an_actor_has_loaded_is_never_looked_at_for_garbage(
    nats_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", sys_path())
    (tmp_path / "loading.py").write_text(LOADING)
    settings = WorkerSettings([str(tmp_path), *sys.path], {"servers": nats_server.url}, "json")
    namespace = f"test{uuid4().hex}"
    node = PlannedNode(address=f"{namespace}.Loading", actor="loading:Loading", depth=0)
    process, parent_end = start_worker(tmp_path)

    async def story() -> bool:
        async with Runtime.connect(nats_server.url) as runtime:
            endpoint = await runtime.endpoint(f"{namespace}.Loading.is_looked_at").client()
            await endpoint.wait_for_instances(timeout=ENDED_WITHIN)
            return bool(await endpoint.random())

    try:
        with parent_end, parent_end.makefile("rb") as lines:
            parent_end.settimeout(ENDED_WITHIN)
            parent_end.sendall(msgspec.json.encode(LoadActor(node, settings)) + b"\n")
            assert msgspec.json.decode(lines.readline(), type=Report) == ActorLoaded()
            parent_end.sendall(msgspec.json.encode(StartInstance()) + b"\n")
            report = msgspec.json.decode(lines.readline(), type=Report)
            assert isinstance(report, InstanceReady), report
            is_looked_at = asyncio.run(story())
    finally:
        process.kill()
        process.wait(60)

    assert not is_looked_at


def sys_path() -> str:
    """Where this process finds dynbus, for one that is started with -P."""
    import dynbus

    return str(Path(dynbus.__path__[0]).parent)
