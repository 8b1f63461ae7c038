"""What an actor starts, such as the processes of an engine, lives and dies with its worker."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.conditions import PATIENCE

from .project import Folder, project_folder

ENGINE = """
import asyncio, multiprocessing, os, subprocess, sys, time
from pathlib import Path
import psutil
from dynbus import Actor, handler

def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

class Engine(Actor, namespace="demo"):
    async def on_start(self) -> None:
        before = [int(line) for line in Path("pids").read_text().split()]
        Path("overlap").write_text(" ".join(str(pid) for pid in before if is_alive(pid)))
        sleeping = "import time; time.sleep(600)"
        self.core = subprocess.Popen([sys.executable, "-c", sleeping])
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.daemon = True
        forked.start()
        Path("pids").write_text(f"{self.core.pid} {forked.pid}")

    @handler
    async def generate(self, seconds: float) -> str:
        Path("working").touch()
        await asyncio.sleep(seconds)
        return "alive" if self.core.poll() is None else "dead"

class Other(Actor, namespace="demo"):
    @handler
    async def call(self) -> str:
        return ""
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with project_folder(tmp_path) as project:
        (tmp_path / "engine.py").write_text(ENGINE)
        (tmp_path / "pids").write_text("")
        yield project


def engines(folder: Folder) -> list[psutil.Process]:
    """The processes that the actor has started last, and which live."""
    found: list[psutil.Process] = []
    for pid in (folder.path / "pids").read_text().split():
        try:
            process = psutil.Process(int(pid))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def worker_of(folder: Folder) -> psutil.Process:
    """The worker: of the forked processes with its command line, the one whose parent is not."""
    pids = {process.pid for process in folder.workers()}
    (worker,) = [process for process in folder.workers() if process.ppid() not in pids]
    return worker


@pytest.mark.nightly(
    "tests/actors/test_processes.py::test_a_process_shows_its_label_leads_a_group_and_its_end_is_told"
)
def test_ctrl_c_in_the_terminal_does_not_reach_what_an_actor_has_started(folder: Folder) -> None:
    run = folder.start_ready("engine.py:Engine")
    call = folder.begin("call", "demo.Engine.generate", "1.5")
    folder.wait_for_file("working")

    os.killpg(run.pid, signal.SIGINT)

    assert call.communicate(timeout=PATIENCE)[0] == '"alive"\n'
    assert folder.exit_of(run) == 0
    assert engines(folder) == []


def test_what_a_killed_actor_had_started_is_gone_before_its_successor_starts(
    folder: Folder,
) -> None:
    folder.start_ready("engine.py:Engine")
    first = engines(folder)
    assert len(first) == 2

    worker_of(folder).kill()

    folder.wait_for(lambda: folder.output().count(" is ready") == 2)
    assert gone(first)
    assert (folder.path / "overlap").read_text() == ""
    assert len(engines(folder)) == 2


@pytest.mark.parametrize(
    "frozen",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.nightly(
                "tests/actors/test_group_guard.py::test_a_group_whose_leader_outlives_its_run_is_ended"
            ),
        ),
    ],
    ids=["", "worker frozen before"],
)
def test_nothing_is_left_when_a_worker_and_its_run_are_killed_together(
    folder: Folder, frozen: bool
) -> None:
    run = folder.start_ready("engine.py:Engine")
    started, worker = engines(folder), worker_of(folder)

    if frozen:
        worker.suspend()
        run.kill()
    else:
        worker.kill()
        run.kill()

    folder.wait_for(lambda: gone(started), 8.0)
    folder.wait_for(lambda: folder.processes() == [], 8.0)


def test_a_guard_that_was_killed_is_replaced(folder: Folder) -> None:
    folder.start_ready("engine.py:Engine")
    started, worker = engines(folder), worker_of(folder)

    def guards() -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for child in worker.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which has no command
                if "group_guard" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    (guard,) = guards()
    guard.kill()
    folder.wait_for(lambda: guards() not in ([], [guard]))
    worker.kill()

    folder.wait_for(lambda: gone(started), 8.0)
    folder.wait_for(lambda: folder.output().count(" is ready") == 2)


@pytest.mark.nightly("tests/actors/test_group_guard.py::test_a_group_of_others_is_left_alone")
def test_a_worker_that_is_killed_takes_nothing_of_the_others_with_it(folder: Folder) -> None:
    run = folder.start_ready("engine.py", instances=2)
    (other,) = [each for each in folder.workers() if "demo.Other/1" in " ".join(each.cmdline())]
    started = engines(folder)

    other.kill()

    folder.wait_for(lambda: folder.output().count(" is ready") == 3)
    assert len(engines(folder)) == 2
    assert not gone(started)
    assert run.poll() is None
