"""The process of an instance has its GPUs, cores, memory and variables before it imports the
actor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conditions import eventually

from dynbus.actors.declaring.resources import Resources
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.placing.allotment import Machine
from dynbus.actors.placing.machine import this_machine
from dynbus.actors.running.child import Child
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.in_process import Assignment, Ending
from dynbus.actors.running.loader import resolve
from dynbus.actors.running.planning import planned
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import ChangeFailed, Supervisor
from dynbus.actors.runtime import Runtime
from dynbus.bus import exit_codes
from dynbus.bus.errors import DynbusError, HandlerError
from dynbus.bus.nats.server_process import RunningServer

ACTORS = """
import json, os, resource, sys
from pathlib import Path

AT_IMPORT = {name: os.environ.get(name) for name in (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DYNBUS_WORKER_INDEX", "DYNBUS_WORKER_CORES", "MODE"
)}
NUMPY_AT_IMPORT = "numpy" in sys.modules

from dynbus import Actor, handler

class Seeing(Actor, namespace="placed", abstract=True):
    def __init__(self, folder: Path) -> None:
        self.in_constructor = self.worker_index
        self.folder = folder
        self.kept = []

    async def on_start(self) -> None:
        seen = AT_IMPORT | {
            "indices": [self.in_constructor, self.worker_index],
            "cores": sorted(os.sched_getaffinity(0)),
            "memory": resource.getrlimit(resource.RLIMIT_DATA)[0],
            "numpy": NUMPY_AT_IMPORT,
        }
        (self.folder / str(os.getpid())).write_text(json.dumps(seen))

    @handler
    async def keep(self, mebibytes: int) -> str:
        self.kept.append(bytearray(mebibytes << 20))
        return "kept"

class Large(
    Seeing, workers=2, resources={"gpu": 1, "cpu": 0.5, "memory": "384Mi"},
    environment={"MODE": "number {index}"},
):
    pass

class Other(Seeing, workers=0, resources={"gpu": 1}):
    pass

class Plain(Seeing):
    pass

class Greedy(Seeing, resources={"memory": "256Mi"}):
    async def on_start(self) -> None:
        bytearray(1 << 30)
"""
TWO_GPUS = Machine(
    gpus=["4", "5"], gpu_source="a test", cores=this_machine({}, with_gpus=False).cores[:1]
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "placed_actors.py").write_text(ACTORS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "placed_actors", raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def settings(server: RunningServer) -> WorkerSettings:
    return WorkerSettings(sys.path, {"servers": server.url}, "json", "warning")


@asynccontextmanager
async def supervised(
    server: RunningServer, folder: Path, *names: str
) -> AsyncGenerator[tuple[Supervisor, asyncio.Task[int]], None]:
    nodes = [
        planned(Assignment(actor, {"folder": str(folder)}, actor.__dynbus_service__))
        for actor in (resolve(f"placed_actors:{name}") for name in names)
    ]
    supervisor = Supervisor(
        nodes,
        settings(server),
        *(ForkServer(), Ending()),
        drain_grace=5.0,
        machine=TWO_GPUS,
    )
    async with supervisor.forks:
        task = asyncio.create_task(supervisor.run())
        supervisor.begin()
        try:
            async with asyncio.timeout(150):
                yield supervisor, task
        finally:
            task.cancel()
            await asyncio.wait({task})


def seen_by(folder: Path, child: Child) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / str(child.pid)).read_text())
    return seen


def gpus(folder: Path, supervisor: Supervisor) -> dict[str, str]:
    return {
        child.label.partition(".")[2]: seen_by(folder, child)["CUDA_VISIBLE_DEVICES"]
        for child in supervisor.children
    }


@pytest.mark.anyio
async def test_instances_keep_gpus_of_their_own_through_every_change(
    nats_server: RunningServer, folder: Path
) -> None:
    async with supervised(nats_server, folder, "Large", "Other", "Plain") as (supervisor, _):
        for child in supervisor.children:
            await child.has_been_ready.wait()
        one, two, plain = [seen_by(folder, child) for child in supervisor.children]
        with pytest.raises(
            ChangeFailed, match=r"^placed\.Other/1 needs 1 GPU: there are 2 \(4, 5\)"
        ):
            await supervisor.scale("placed.Other", 1)

        # A crash.
        crashed = supervisor.children[1]
        former = crashed.pid
        assert former is not None
        os.kill(former, signal.SIGABRT)
        await eventually(lambda: crashed.pid not in (None, former) and crashed.ready_at)
        after_crash = gpus(folder, supervisor)
        # No GPU is left for those that replace them.
        steps: list[str] = []
        await supervisor.restart("placed.Large", tell=steps.append)
        after_restart = gpus(folder, supervisor)
        indices = [seen_by(folder, c)["indices"] for c in supervisor.instances("placed.Large")]
        await supervisor.scale("placed.Large", 1)
        await supervisor.scale("placed.Other", 1)
        after_scale = gpus(folder, supervisor)
        # The new one starts beside the old one, and has the index of it.
        await supervisor.restart("placed.Plain")
        (beside,) = supervisor.instances("placed.Plain")
        beside_index = seen_by(folder, beside)["indices"]
        # Those that leave are waited for.
        await supervisor.scale("placed.Large", 0, overlap=True)
        await supervisor.scale("placed.Other", 2)
        at_last = gpus(folder, supervisor)
        # By another plan: one with two GPUs in place of two with one each.
        nodes = [
            msgspec.structs.replace(node, service=ServiceArgs(resources=Resources(gpu=2)))
            if node.address == "placed.Other"
            else node
            for node in supervisor.nodes.values()
        ]
        supervisor.use(nodes, settings(nats_server), drain_grace=5.0, machine=TWO_GPUS)
        await supervisor.restart("placed.Other", 1, overlap=True)
        by_another_plan = gpus(folder, supervisor)

    assert (one["CUDA_VISIBLE_DEVICES"], two["CUDA_VISIBLE_DEVICES"]) == ("4", "5")
    assert (one["indices"], two["indices"]) == ([0, 0], [1, 1])
    assert (one["MODE"], two["MODE"]) == ("number 0", "number 1")
    assert (two["DYNBUS_WORKER_INDEX"], two["OMP_NUM_THREADS"]) == ("1", "1")
    assert two["memory"] == 384 * 1024**2
    assert not two["numpy"]
    assert plain["cores"] == sorted(os.sched_getaffinity(0))
    assert plain["memory"] == -1
    nothing = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DYNBUS_WORKER_CORES", "MODE")
    assert [plain[name] for name in nothing] == [None] * 4
    assert after_crash == after_restart == {"Large/1": "4", "Large/2": "5", "Plain/1": None}
    assert steps == [
        "placed.Large/1 drains first: its GPUs are needed (1 of 2)",
        "placed.Large/1 starts in its place",
        "placed.Large/2 drains first: its GPUs are needed (2 of 2)",
        "placed.Large/2 starts in its place",
    ]
    assert indices == [[0, 0], [1, 1]]
    assert after_scale == {"Large/1": "4", "Other/1": "5", "Plain/1": None}
    assert (beside.label, beside_index) == ("placed.Plain/2", [0, 0])
    assert at_last == {"Other/1": "5", "Other/2": "4", "Plain/2": None}
    assert by_another_plan == {"Other/1": "4,5", "Plain/2": None}


@pytest.mark.anyio
async def test_a_crash_near_the_memory_limit_and_a_leak_are_told_as_such(
    nats_server: RunningServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(nats_server, folder, "Large") as (supervisor, _):
        for child in supervisor.children:
            await child.has_been_ready.wait()
        aborting, leaking = supervisor.children
        assert aborting.pid is not None
        os.kill(aborting.pid, signal.SIGABRT)

        former = leaking.pid
        async with Runtime.connect(nats_server.url) as runtime:
            client = await runtime.endpoint("placed.Large.keep").client()
            await client.direct(10, leaking.instance_id)
            # One that wants too much is refused, and the instance goes on.
            with pytest.raises(HandlerError, match="MemoryError"):
                await client.direct(2000, leaking.instance_id)
            assert await client.direct(10, leaking.instance_id) == "kept"

            async def leak() -> None:
                for _ in range(40):
                    await client.direct(10, leaking.instance_id)

            # Refused, or the instance is gone for the first refusal, if nobody had looked since.
            with pytest.raises(DynbusError):
                await leak()
        await eventually(lambda: leaking.pid not in (None, former) and leaking.ready_at)

    assert "placed.Large/1 ended: killed by SIGABRT; its memory limit is 384Mi; restarting" in (
        caplog.text
    )
    told = next(r.getMessage() for r in caplog.records if "placed.Large/2 ended" in r.getMessage())
    assert "% of the memory limit of 384Mi is in use: raise ServiceArgs.resources.memory" in told


@pytest.mark.anyio
async def test_an_actor_that_needs_more_memory_than_its_limit_fails_to_start_with_that_reason(
    nats_server: RunningServer, folder: Path
) -> None:
    async with supervised(nats_server, folder, "Greedy") as (supervisor, task):
        code = await task

    assert code == exit_codes.START_FAILED
    assert supervisor.failure is not None
    assert supervisor.failure.message == (
        "placed.Greedy did not start: MemoryError; its process has the memory limit of 256Mi: "
        "raise ServiceArgs.resources.memory if it needs more"
    )
