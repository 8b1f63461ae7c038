"""Runs are steered over the bus by who may, and say what becomes of it until it is done."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import msgspec
import pytest

from dynbus.actors.commands.remote_control import (
    SILENCE_SECONDS,
    Owner,
    RemoteControl,
    advice,
    ask_over_bus,
    find_runs,
    fitting,
    heard_as,
    owner_of,
)
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.control import (
    Answer,
    Control,
    Done,
    Misfit,
    Progress,
    Question,
    Refused,
    RestartNodes,
    RunShown,
    ScaleNode,
    ShowRun,
    StopRun,
)
from dynbus.actors.running.in_process import Ending
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import Supervisor
from dynbus.bus.commands.server import Server
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError, NoInstances, PermissionDenied, Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.names import ReplySubjects, run_subject
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import Message
from dynbus.testing import run

SPLITTER, SHOUTER = "demo.Splitter", "demo.Shouter"
SLOW = 2 * SILENCE_SECONDS


class Fake(Supervisor):
    """Its changes take time, and start nothing."""

    def __init__(self, *addresses: str) -> None:
        nodes = [PlannedNode(address=one, actor="split:Splitter", depth=0) for one in addresses]
        super().__init__(nodes, WorkerSettings([], {}), ForkServer(), Ending(), drain_grace=1.0)
        self.children = []
        self.done: list[object] = []

    async def scale(self, address: str, count: int, **options: Any) -> None:
        options["tell"]("it begins")
        await anyio.sleep(SLOW)
        self.done.append((address, count))

    def stop(self, at_once: bool) -> None:
        self.done.append(at_once)
        self.ended.set()


async def nothing_breaks(nodes: Sequence[PlannedNode]) -> list[Misfit]:
    return []


class Bus:
    """An in-memory bus with runs on it, and an operator."""

    def __init__(self) -> None:
        self.memory = MemoryBus()

    @asynccontextmanager
    async def server(self) -> AsyncGenerator[Server]:
        connection = await self.memory.connect()
        try:
            yield Server(BusConfig(), cast("Any", connection), ReplySubjects("-", random_id()))
        finally:
            await connection.close()

    @asynccontextmanager
    async def serving(self, supervisor: Fake, host: str, owner: Owner = "") -> AsyncGenerator[None]:
        control = Control(supervisor, supervisor.stop, nothing_breaks)
        remote = RemoteControl(control, self.server, host=host, owner=owner)
        async with remote.open():
            await anyio.sleep(0.1)
            yield


def told(story: Callable[[Bus, Server], Awaitable[Any]]) -> Any:
    """What a story of an operator comes to, in virtual time."""

    async def tell() -> Any:
        bus = Bus()
        async with bus.server() as server:
            return await story(bus, server)

    return run(tell())


async def answers(server: Server, shown: RunShown, question: Question) -> list[Answer]:
    return [answer async for answer in ask_over_bus(server, shown, question)]


def test_each_run_of_a_namespace_shows_itself_once_with_its_host() -> None:
    async def story(bus: Bus, server: Server) -> list[RunShown]:
        async with (
            bus.serving(Fake(SPLITTER, "other.Shouter"), "b"),
            bus.serving(Fake(SHOUTER), "a", "systemd"),
        ):
            return await find_runs(server, ["demo", "other", "empty"])

    found: list[RunShown] = told(story)

    assert [(one.host, one.owner, one.nodes) for one in found] == [
        ("a", "systemd", [SHOUTER]),
        ("b", "", [SPLITTER, "other.Shouter"]),
    ]


@pytest.mark.parametrize(
    "nodes",
    [[], [""], ["demo"], ["other.Splitter"], ["demo. 0\r\n\r\nPUB x"], ["demo 0\r\nPUB x.y"]],
)
def test_an_answer_that_names_no_node_where_was_asked_is_no_run(nodes: list[str]) -> None:
    """All components of a namespace hear operators, and may answer at any inbox."""

    async def story(bus: Bus, server: Server) -> list[RunShown]:
        forger = await bus.memory.connect()
        answer = msgspec.json.encode(RunShown(1, [], nodes, run="forged", host="a"))
        forger.subscribe(run_subject("demo"), lambda message: forger.publish(message.reply, answer))
        async with bus.serving(Fake(SHOUTER), "b"):
            return await find_runs(server, ["demo"])

    found: list[RunShown] = told(story)

    assert [one.host for one in found] == ["b"]


def test_runs_are_steered_where_some_of_the_namespaces_are_not_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Front ends have a namespace of their own, which an operator of another one may not ask."""
    refused: list[str] = []

    async def story(bus: Bus, server: Server) -> list[RunShown]:
        listeners: list[Callable[[DynbusError, str], object]] = []
        monkeypatch.setattr(server.connection, "on_error", listeners.append)
        # As a server does that does not let it publish there.
        other, subject = await bus.memory.connect(), run_subject("dynbus")

        def refuse(_: Message) -> None:
            listeners[-1](PermissionDenied("no"), subject)

        other.subscribe(subject, refuse)
        async with bus.serving(Fake(SHOUTER), "b"):
            found = await find_runs(server, ["demo", "dynbus"], refused.append)
            with pytest.raises(PermissionDenied):
                await find_runs(server, ["dynbus"])
            return found

    found: list[RunShown] = told(story)

    assert [one.host for one in found] == ["b"]
    assert len(refused) == 1


def test_the_run_that_is_meant_alone_does_what_is_asked_however_long_it_takes() -> None:
    done: list[list[object]] = []

    async def story(bus: Bus, server: Server) -> list[Answer]:
        mine, other = Fake(SPLITTER), Fake(SPLITTER)
        done.extend([mine.done, other.done])
        async with bus.serving(mine, "a"), bus.serving(other, "b"):
            [shown] = fitting(await find_runs(server, ["demo"]), host="a", pid=None, nodes=())
            return await answers(server, shown, ScaleNode("Splitter", 3))

    said = told(story)

    assert said == [Progress("it begins"), Progress(f"{SPLITTER}: 3 instances"), Done()]
    assert done == [[(SPLITTER, 3)], []]


def test_a_run_that_another_shows_as_one_of_its_own_host_does_nothing() -> None:
    async def story(bus: Bus, server: Server) -> list[object]:
        supervisor = Fake(SPLITTER)
        async with bus.serving(supervisor, "b"):
            (shown,) = await find_runs(server, ["demo"])
            forged = msgspec.structs.replace(shown, host="a")
            with pytest.raises(Unavailable, match="on a says nothing any more"):
                await answers(server, forged, StopRun())
        return supervisor.done

    assert told(story) == []


def test_a_run_that_is_stopped_says_that_it_has_ended() -> None:
    async def story(bus: Bus, server: Server) -> tuple[list[Answer], list[object]]:
        supervisor, said = Fake(SPLITTER), list[Answer]()
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                async with bus.serving(supervisor, "a"):
                    await supervisor.ended.wait()

            tasks.start_soon(serve)
            await anyio.sleep(0.2)
            [shown] = await find_runs(server, ["demo"])
            said += await answers(server, shown, StopRun())
        return said, supervisor.done

    assert told(story) == ([Done()], [False])


def test_a_run_that_dies_meanwhile_is_told_as_such() -> None:
    async def story(bus: Bus, server: Server) -> None:
        async with bus.serving(Fake(SPLITTER), "a"):
            [shown] = await find_runs(server, ["demo"])
        with pytest.raises(Unavailable, match=r"^dynbus run \d+ on a says nothing any more$"):
            await answers(server, shown, StopRun())

    told(story)


@pytest.mark.parametrize("data", [b"", b"{", b'{"question":{"type":"fly"}}', b"\xff"])
def test_what_is_no_question_is_passed_over(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def story(bus: Bus, server: Server) -> list[RunShown]:
        async with bus.serving(Fake(SPLITTER), "a"):
            inbox = f"{server.replies.base}.x"
            server.connection.publish(run_subject("demo"), data, reply=inbox)
            # A reply that is no inbox is not answered either.
            server.connection.publish(run_subject("demo"), data, reply="$JS.API.INFO")
            return await find_runs(server, ["demo"])

    assert len(told(story)) == 1
    assert "a message to demo._run is no question to a run" in caplog.text


@pytest.mark.parametrize(
    ("owner", "question", "advised"),
    [
        ("kubernetes", StopRun(), "kubectl drain NODE"),
        ("kubernetes", ScaleNode("a", 1), "kubectl scale deployment"),
        ("kubernetes", RestartNodes(), "kubectl rollout restart"),
        ("kubernetes", ShowRun(), ""),
        ("systemd", StopRun(), "systemctl stop"),
        ("systemd", ScaleNode("a", 1), ""),
        ("systemd", RestartNodes(), ""),
        ("", StopRun(), ""),
    ],
)
def test_it_is_said_what_to_do_where_an_orchestrator_owns_a_run(
    owner: Owner, question: Question, advised: str
) -> None:
    text = advice(owner, question, "pod-1")

    assert advised in text
    assert bool(text) == bool(advised)


def test_a_run_that_an_orchestrator_owns_refuses_with_that_advice() -> None:
    async def story(bus: Bus, server: Server) -> tuple[list[Answer], list[object]]:
        supervisor = Fake(SPLITTER)
        async with bus.serving(supervisor, "a", "kubernetes"):
            [shown] = await find_runs(server, ["demo"])
            return await answers(server, shown, StopRun()), supervisor.done

    [refused], done = told(story)

    assert isinstance(refused, Refused)
    assert refused.reason.startswith("Kubernetes owns this run, in the Pod ")
    assert done == []


@pytest.mark.parametrize(
    ("environment", "owner"),
    [
        ({}, ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"SYSTEMD_EXEC_PID": "7"}, "systemd"),
        # That of the shell which it was started from.
        ({"SYSTEMD_EXEC_PID": "6"}, ""),
    ],
)
def test_the_owner_of_a_process_is_read_from_its_environment(
    environment: dict[str, str], owner: str
) -> None:
    assert owner_of(environment, 7) == owner


def shown(host: str, pid: int, *nodes: str) -> RunShown:
    return RunShown(pid, [], list(nodes), host=host)


RUNS = [shown("a", 1, SPLITTER), shown("a", 2, SHOUTER), shown("b", 3, SPLITTER, SHOUTER)]


@pytest.mark.parametrize(
    ("host", "pid", "nodes", "pids"),
    [
        ("a", None, (), [1, 2]),
        ("*", None, ("Splitter",), [1, 3]),
        ("*", None, (SPLITTER, "Shouter"), [3]),
        ("a", 2, (), [2]),
    ],
)
def test_runs_are_chosen_by_host_process_and_nodes(
    host: str, pid: int | None, nodes: tuple[str, ...], pids: list[int]
) -> None:
    assert [one.pid for one in fitting(RUNS, host=host, pid=pid, nodes=nodes)] == pids


def test_that_no_run_fits_is_said_with_those_that_there_are() -> None:
    with pytest.raises(NoInstances) as caught:
        fitting(RUNS[:1], host="c", pid=4, nodes=("Splitter",))

    assert str(caught.value) == (
        "no dynbus run on host c with process 4 has Splitter; there are: a 1: demo.Splitter"
    )


def test_a_run_hears_operators_as_a_component_that_it_has_instances_of() -> None:
    elsewhere, here = (
        PlannedNode(
            address=address, actor="split:Splitter", depth=0, service=ServiceArgs(workers=workers)
        )
        for address, workers in ((SPLITTER, 0), (SHOUTER, 2))
    )
    supervisor = Fake()
    assert heard_as(supervisor) == []

    supervisor.nodes = {node.address: node for node in (elsewhere, here)}

    assert heard_as(supervisor) == [SHOUTER]
    assert supervisor.served() == [SHOUTER]
