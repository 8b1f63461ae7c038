"""The fork server makes processes, tells how each ends, and may die without harm to them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import psutil
import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.actors.running.processes import ForkProcess, ForkServer, ForkServerDied, Process

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def forked(server: ForkServer, label: str = "n.c/1") -> AsyncGenerator[Process]:
    """A worker that waits to be told what to load."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = await server.fork(ForkProcess("worker", label), theirs.fileno())
        try:
            yield process
        finally:
            process.kill()
            await process.wait()


def title(process: Process) -> str:
    """What the list of processes shows of it."""
    return " ".join(psutil.Process(process.pid).cmdline()).strip()


def fork_servers() -> list[psutil.Process]:
    """The fork servers that this process started."""
    return [child for child in psutil.Process().children() if _is_fork_server(child)]


def _is_fork_server(child: psutil.Process) -> bool:
    try:
        return "dynbus.actors.running.fork_server" in child.cmdline()
    except psutil.ZombieProcess:
        # One that another test ended, and whose code nobody has asked for yet.
        return False


async def told_of_its_death(server: ForkServer) -> bool:
    """Whether a fork found out that the server has died; one that did not has ended by now."""
    try:
        async with forked(server):
            return False
    except ForkServerDied:
        return True


async def test_a_process_shows_its_label_leads_a_group_and_its_end_is_told() -> None:
    async with ForkServer() as server, forked(server, "demo.Splitter/2") as process:
        await eventually(lambda: title(process) == "dynbus worker demo.Splitter/2")
        await eventually(lambda: os.getsid(process.pid) == process.pid)
        process.kill()
        code = await process.wait()

    assert code == -signal.SIGKILL
    assert fork_servers() == []


async def test_a_process_ends_with_its_parents_end_of_the_socket() -> None:
    ours, theirs = socket.socketpair()
    async with ForkServer() as server:
        with theirs:
            process = await server.fork(ForkProcess("worker", "n.c/1"), theirs.fileno())
        ours.close()

        async with asyncio.timeout(PATIENCE):
            assert await process.wait() != 0


async def test_the_death_of_the_fork_server_ends_no_process_and_their_ends_are_still_seen() -> None:
    async with ForkServer() as server, forked(server) as before:
        (program,) = fork_servers()
        program.kill()
        async with asyncio.timeout(PATIENCE):
            await eventually(lambda: told_of_its_death(server))
            async with forked(server) as after:
                assert before.is_alive
                assert after.is_alive
                before.kill()
                assert await before.wait() is None


async def test_processes_that_are_asked_for_at_once_are_told_apart() -> None:
    async with ForkServer() as server:
        pairs = [socket.socketpair() for _ in range(8)]
        async with asyncio.TaskGroup() as tasks:
            forks = [
                tasks.create_task(
                    server.fork(ForkProcess("worker", f"n.c/{number}"), theirs.fileno())
                )
                for number, (_, theirs) in enumerate(pairs)
            ]
        processes = [fork.result() for fork in forks]
        titles = [f"dynbus worker n.c/{number}" for number in range(8)]
        await eventually(lambda: [title(each) for each in processes] == titles)
        for process in processes:
            process.kill()
        codes = [await process.wait() for process in processes]
        for pair in pairs:
            for end in pair:
                end.close()

    assert codes == [-signal.SIGKILL] * 8
