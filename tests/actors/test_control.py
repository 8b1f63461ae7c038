"""Only its owner can steer a run, and it goes on where nobody can, or whoever does stands still."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from tests.conditions import PATIENCE

from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.control import (
    Done,
    Misfit,
    Progress,
    Refused,
    RestartNodes,
    RunShown,
    ask,
    check_rollout,
    controlled,
    find_run,
)
from dynbus.actors.running.in_process import Ending
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import ChangeFailed, Supervisor
from dynbus.bus.errors import ConfigError


@pytest.mark.anyio
async def test_a_run_in_a_folder_that_cannot_be_written_to_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    # For the superuser every folder can be written to; this is none.
    (tmp_path / ".dynbus").write_text("")
    supervisor = Supervisor([], WorkerSettings([], {}), ForkServer(), Ending(), drain_grace=1.0)
    entered = False

    async with controlled(supervisor, lambda at_once: None, nothing_breaks):
        entered = True

    assert entered
    (message,) = caplog.messages
    assert message.startswith("dynbus stop, restart and scale do not reach this run: its socket ")
    assert message.endswith(": File exists")


async def nothing_breaks(nodes: Sequence[PlannedNode]) -> list[Misfit]:
    return []


NODE = PlannedNode(address="demo.Splitter", actor="split:Splitter", depth=0)
STEPS = 5_000
"""More of them than a socket takes that nobody reads."""


class Telling(Supervisor):
    """Has one node, whose restart tells much."""

    restarted: anyio.Event

    async def restart(self, address: str, *args: Any, **options: Any) -> None:
        for number in range(STEPS):
            options["tell"](f"step {number}")
            await anyio.lowlevel.checkpoint()
        self.restarted.set()

    def find(self, name: str) -> str:
        return name


@pytest.mark.anyio
async def test_a_command_that_is_stopped_holds_up_no_restart_and_reads_all_steps_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    supervisor = Telling([NODE], WorkerSettings([], {}), ForkServer(), Ending(), drain_grace=1.0)
    supervisor.restarted = anyio.Event()
    going_on = threading.Event()

    def read() -> list[object]:
        answers = ask(os.getpid(), RestartNodes(["demo.Splitter"]))
        first = next(answers)
        going_on.wait(PATIENCE)
        return [first, *answers]

    async with controlled(supervisor, lambda at_once: None, nothing_breaks):
        reading = asyncio.create_task(asyncio.to_thread(read))
        with anyio.fail_after(PATIENCE):
            await supervisor.restarted.wait()
        going_on.set()
        answers = await reading

    steps = [Progress(f"step {number}") for number in range(STEPS)]
    assert answers == [*steps, Progress("demo.Splitter: restarted"), Done()]


GONE = Misfit(True, "demo.Splitter.split: is gone; keep it")
UNCLEAR = Misfit(False, "demo.Splitter.split: depends on the value")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("found", "force", "is_restarted", "told"),
    [
        ([], False, True, []),
        ([UNCLEAR], False, True, [Progress(f"may break: {UNCLEAR.text}")]),
        ([UNCLEAR, GONE], False, False, []),
        ([GONE], True, True, []),
    ],
)
async def test_a_restart_that_breaks_callers_is_refused_unless_it_is_forced(
    found: list[Misfit],
    force: bool,
    is_restarted: bool,
    told: list[Progress],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    supervisor = Supervisor([NODE], WorkerSettings([], {}), ForkServer(), Ending(), drain_grace=1.0)
    restarted: list[str] = []
    compared: list[PlannedNode] = []

    async def restart(address: str, **options: Any) -> None:
        restarted.append(address)

    async def check(nodes: Sequence[PlannedNode]) -> list[Misfit]:
        compared.extend(nodes)
        return found

    monkeypatch.setattr(supervisor, "restart", restart)
    async with controlled(supervisor, lambda at_once: None, check):
        question = RestartNodes(force=force)
        answers = await asyncio.to_thread(lambda: list(ask(os.getpid(), question, PATIENCE)))

    assert compared == ([] if force else [NODE])
    assert restarted == ([NODE.address] if is_restarted else [])
    if is_restarted:
        assert answers == [*told, Progress("demo.Splitter: restarted"), Done()]
    else:
        assert answers == [
            Refused(
                f"nothing is restarted, since callers that run could not go on: {GONE.text}. "
                "`dynbus restart --force` restarts all the same"
            )
        ]


def test_a_refusal_names_some_of_many_changes_and_counts_the_rest() -> None:
    many = [Misfit(True, f"change {number}") for number in range(7)]

    with pytest.raises(ChangeFailed, match=r"go on: change 0 \| .* \| change 4 \| and 2 more\. "):
        check_rollout(many, print)


class FakeRun:
    """The socket of a run that answers what it shows."""

    def __init__(self, pid: int, nodes: list[str]) -> None:
        self._answer = msgspec.json.encode(RunShown(pid, [], nodes)) + b"\n"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f".dynbus/run-{pid}.sock")
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                if connection.recv(65536):
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)


def test_a_node_that_one_run_alone_has_names_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dynbus").mkdir()
    first = FakeRun(11, ["demo.Splitter", "demo.Shared"])
    second = FakeRun(12, ["demo.Shouter", "demo.Shared"])
    try:
        assert find_run(nodes=["Splitter"]) == 11
        assert find_run(nodes=["demo.Shouter", "Shared"]) == 12
        assert find_run(12, nodes=["Shared"]) == 12
        for nodes in ([], ["Shared"], ["Splitter", "Shouter"], ["Missing"]):
            with pytest.raises(ConfigError, match=r"several runs .* --run 11 \(demo\.Splitter, "):
                find_run(nodes=nodes)
    finally:
        first.close()
        second.close()


def test_a_run_of_another_user_is_named_as_such_and_stands_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.socket.connect

    def connect_or_refuse(connection: socket.socket, path: str) -> None:
        if path.endswith("run-7.sock"):
            raise PermissionError(13, "Permission denied")
        connect(connection, path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", connect_or_refuse)
    (tmp_path / ".dynbus").mkdir()
    for name in ("run-7.sock", "run-mine.sock"):
        (tmp_path / ".dynbus" / name).touch()
    belongs = "^dynbus run 7 in .* belongs to another user, who alone can ask it$"

    with pytest.raises(ConfigError, match=belongs):
        find_run()
    with pytest.raises(ConfigError, match=belongs):
        find_run(7)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(".dynbus/run-8.sock")
        listener.listen()
        mine = find_run()

    assert mine == 8
