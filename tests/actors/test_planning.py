"""A run is planned in a process of its own, which tells what it found and is gone afterwards."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast
from unittest.mock import AsyncMock, Mock

import msgspec
import psutil
import pytest
from tests.conditions import eventually

from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.configuration import NodeOption
from dynbus.actors.running.plan import Plan, PlannedNode, PlanRequest
from dynbus.actors.running.planning import (
    MakePlan,
    PlanFailed,
    TellContracts,
    contracts_elsewhere,
    plan_elsewhere,
)
from dynbus.actors.running.processes import ForkServer
from dynbus.bus import exit_codes

pytestmark = pytest.mark.anyio

ACTORS = """
from dynbus import Actor, depends, handler

class Splitter(Actor, namespace="planned"):
    def __init__(self, separator: str, count: int = 1) -> None: ...

    @handler
    async def split(self, text: str) -> str:
        return text

class Shouter(Actor, namespace="planned", on_crash="escalate"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: str) -> str:
        return text
"""


def asked(*targets: str, options: list[NodeOption] | None = None) -> MakePlan:
    request = PlanRequest(targets=list(targets), options=options or [], nats="nats://h:1")
    return MakePlan(request, "console", "info")


async def plan(asked: MakePlan) -> Plan:
    async with ForkServer() as forks, asyncio.timeout(60):
        return await plan_elsewhere(forks, asked)


async def test_a_plan_names_classes_and_arguments_without_importing_them_here(
    tmp_path: Path,
) -> None:
    (tmp_path / "planned_elsewhere.py").write_text(ACTORS)

    made = await plan(
        asked(
            str(tmp_path / "planned_elsewhere.py"),
            options=[
                NodeOption("Splitter", "separator", ","),
                NodeOption("Shouter", "workers", "2"),
            ],
        )
    )

    assert made.nodes == [
        PlannedNode(
            address="planned.Splitter",
            actor="planned_elsewhere:Splitter",
            depth=0,
            service=ServiceArgs(namespace="planned"),
            endpoints={"split": "unary"},
            texts={"separator": ","},
        ),
        PlannedNode(
            address="planned.Shouter",
            actor="planned_elsewhere:Shouter",
            depth=1,
            service=ServiceArgs(namespace="planned", workers=2, on_crash="escalate"),
            dependencies={"splitter": "planned.Splitter"},
            endpoints={"shout": "unary"},
        ),
    ]
    assert made.path[0] == str(tmp_path)
    assert made.bus == {"servers": "nats://h:1"}
    assert made.sources == {"servers": "--nats"}
    assert "planned_elsewhere" not in sys.modules


@pytest.mark.parametrize(
    ("text", "code", "message", "traceback"),
    [
        ("import no_such_module", exit_codes.CONFIG_ERROR, "No module named", "no_such_module"),
        ("raise SystemExit(7)", exit_codes.CONFIG_ERROR, "SystemExit: 7", "SystemExit"),
        ("import os; os._exit(7)", exit_codes.START_FAILED, "ended: exit code 7", ""),
        ("import os; os.kill(os.getpid(), 9)", exit_codes.START_FAILED, "killed by SIGKILL", ""),
    ],
)
async def test_a_module_that_cannot_be_loaded_is_told_with_its_lines(
    tmp_path: Path, text: str, code: int, message: str, traceback: str
) -> None:
    (tmp_path / "broken_elsewhere.py").write_text(text)

    with pytest.raises(PlanFailed, match=message) as refused:
        await plan(asked(str(tmp_path / "broken_elsewhere.py")))

    assert refused.value.failure.code == code
    assert traceback in refused.value.failure.traceback


async def test_nodes_tell_what_their_classes_read_and_write_now(tmp_path: Path) -> None:
    path = tmp_path / "told_elsewhere.py"
    path.write_text(ACTORS)
    made = await plan(
        asked(str(path), options=[NodeOption("Splitter", "separator", ",")]),
    )
    # Of another length: by that, and the second, Python tells a new file from the one it compiled.
    path.write_text(ACTORS.replace("text: str", "text: bool"))

    async with ForkServer() as forks, asyncio.timeout(60):
        task = TellContracts(made.nodes, WorkerSettings(made.path, {}))
        told = await contracts_elsewhere(forks, task)

    splitter, shouter = told["planned.Splitter"], told["planned.Shouter"]
    split = msgspec.json.decode(splitter.serves["split"].schemas)
    assert "told_elsewhere" not in sys.modules
    assert (splitter.serves["split"].kind, split["request"]) == ("unary", {"type": "boolean"})
    assert splitter.calls == {}
    assert shouter.calls.keys() == {"planned.Splitter"}
    assert msgspec.json.decode(shouter.calls["planned.Splitter"]["split"].schemas) == split


class KilledPlanner:
    """A fork server whose process was killed, and what is left to read of its answer."""

    def __init__(self, left: bytes | ConnectionError) -> None:
        self._left = left

    async def open(self, asked: object) -> tuple[Mock, asyncio.StreamReader, Mock]:
        reader = asyncio.StreamReader()
        if isinstance(self._left, bytes):
            reader.feed_data(self._left)
            reader.feed_eof()
        else:
            reader.set_exception(self._left)
        return Mock(wait=AsyncMock(return_value=-9)), reader, Mock()


@pytest.mark.parametrize("left", [b"", b'{"type": "ma', ConnectionResetError()])
async def test_a_process_that_is_killed_at_any_moment_of_its_planning_is_named(
    left: bytes | ConnectionError,
) -> None:
    with pytest.raises(PlanFailed, match="that loads here.py ended: killed by SIGKILL") as refused:
        await plan_elsewhere(cast("ForkServer", KilledPlanner(left)), asked("here.py"))

    assert refused.value.failure.code == exit_codes.START_FAILED


async def test_a_plan_that_nobody_waits_for_any_more_is_given_up(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "endless_elsewhere.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )

    async with ForkServer() as forks:
        task = asyncio.create_task(
            plan_elsewhere(forks, asked(str(tmp_path / "endless_elsewhere.py")))
        )
        await eventually(lambda: begun.exists() and begun.read_text(), 60.0)
        task.cancel()
        await asyncio.wait({task})
        await eventually(lambda: not psutil.pid_exists(int(begun.read_text())), 60.0)

    assert task.cancelled()
