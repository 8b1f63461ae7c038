"""The embedded nats-server when processes are killed: it stays while it has users, never longer.

Every user here is a process of its own, as `dynbus run` is.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.conditions import PATIENCE, wait_until

from dynbus.bus.nats.embedded_guard import DataFolder, FileLock, is_locked
from dynbus.bus.nats.server_process import free_port, probe

GONE_WITHIN = 3.0
"""Seconds after its last user's death within which the server has ended."""

USER = """
import asyncio, os, sys, time
from pathlib import Path
from dynbus.bus.nats.embedded import embedded_server

async def use(url, data_dir, mode):
    async with embedded_server(url, data_dir=Path(data_dir)) as server:
        child = os.fork() if mode == "forks" else None
        if child == 0:
            time.sleep(600)
        print("started" if server.started else "joined", child, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(use(*sys.argv[1:]))
"""

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends a process with its parent"
)


class User:
    """A process inside `embedded_server`; it leaves when told, or is killed."""

    def __init__(self, url: str, data_dir: Path, mode: str = "plain") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, url, str(data_dir), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def entered(self) -> list[str]:
        """Wait until it uses the server; the words are `started` or `joined`, and a child."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert readable, "the user did not get a server in time"
        return self.process.stdout.readline().decode().split()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def leave(self) -> int:
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def url() -> str:
    return f"nats://127.0.0.1:{free_port()}"


@pytest.fixture
def user(url: str, tmp_path: Path) -> Iterator[Callable[..., User]]:
    """Starts users of one folder; at the end all are killed, and nothing may be left."""
    users: list[User] = []

    def start(mode: str = "plain") -> User:
        users.append(User(url, tmp_path, mode))
        return users[-1]

    yield start
    for each in users:
        each.close()
    wait_until(lambda: processes_of(tmp_path) == [], GONE_WITHIN)


def processes_of(data_dir: Path, name: str = "") -> list[psutil.Process]:
    """Living processes that name the folder on their command line, users left out."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line: list[str] = process.info["cmdline"] or []
        names_folder = any(str(data_dir) in word for word in line) and USER not in line
        if names_folder and name in " ".join(line[:4]):
            found.append(process)
    return [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]


def guard_of(data_dir: Path) -> psutil.Process:
    (guard,) = processes_of(data_dir, "embedded_guard.py")
    return guard


def server_of(data_dir: Path) -> psutil.Process:
    (server,) = [
        each
        for each in processes_of(data_dir, "nats-server")
        if "embedded_guard.py" not in " ".join(each.cmdline())
    ]
    return server


def answers(url: str) -> bool:
    return asyncio.run(probe(url)) is not None


def test_the_server_is_gone_soon_after_its_last_user_is_killed(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    first, second = user(), user()
    first.entered()
    second.entered()

    first.kill()
    second.kill()

    wait_until(lambda: processes_of(tmp_path) == [], GONE_WITHIN)
    assert not answers(url)


def test_the_server_stays_when_the_user_that_started_it_is_killed(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    first = user()
    first.entered()
    second = user()
    second.entered()
    before = server_of(tmp_path).pid

    first.kill()
    # A third user comes and goes: by then the guard has looked at its users many times.
    third = user()
    joined = third.entered()[0]
    third.leave()

    assert joined == "joined"
    assert server_of(tmp_path).pid == before
    assert answers(url)


@pytest.mark.nightly(
    "tests/bus/nats/test_embedded.py::test_the_second_user_joins_and_the_last_one_ends_it"
)
def test_a_user_that_leaves_last_leaves_no_process(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    only = user()
    only.entered()

    code = only.leave()

    assert code == 0
    assert processes_of(tmp_path) == []
    assert not answers(url)


@pytest.mark.nightly(
    "tests/bus/nats/test_embedded.py::test_users_that_come_at_once_share_one_server"
)
def test_users_started_at_once_share_one_server(tmp_path: Path, user: Callable[..., User]) -> None:
    users = [user() for _ in range(4)]

    words = sorted(each.entered()[0] for each in users)

    assert words == ["joined", "joined", "joined", "started"]
    wait_until(lambda: len(processes_of(tmp_path)) == 2)


def test_a_user_comes_back_at_once_after_a_kill(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    for _ in range(3):
        killed = user()
        killed.entered()
        killed.kill()

    last = user()
    last.entered()

    wait_until(lambda: len(processes_of(tmp_path)) == 2)
    assert answers(url)


@pytest.mark.nightly(
    "tests/bus/nats/test_embedded_guard.py::test_a_shared_lock_keeps_the_exclusive_one_away",
)
def test_a_forked_child_of_a_killed_user_does_not_count_as_a_user(
    tmp_path: Path, user: Callable[..., User]
) -> None:
    parent = user("forks")
    child = psutil.Process(int(parent.entered()[1]))

    parent.kill()

    try:
        wait_until(lambda: processes_of(tmp_path) == [], GONE_WITHIN)
        assert child.is_running()
    finally:
        child.kill()


@pytest.mark.nightly(
    "tests/bus/nats/test_embedded.py::test_the_user_that_started_it_may_leave_first",
)
def test_the_server_outlives_the_terminal_of_its_users(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    user().entered()
    guard, server = guard_of(tmp_path), server_of(tmp_path)

    # Ctrl-C and a closing terminal reach the processes of the session.
    sessions = {os.getsid(each.pid) for each in (guard, server)}

    assert sessions == {guard.pid}
    assert {each.terminal() for each in (guard, server)} == {None}


@linux_only
def test_a_killed_guard_takes_the_server_with_it_when_nobody_uses_it(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    only = user()
    only.entered()
    guard = guard_of(tmp_path)

    guard.suspend()
    only.kill()
    guard.kill()

    wait_until(lambda: processes_of(tmp_path) == [], GONE_WITHIN)
    assert not answers(url)


@pytest.mark.nightly(
    "tests/bus/nats/test_embedded.py::test_a_server_that_dies_is_restarted_for_its_users",
)
def test_a_killed_guard_is_replaced_for_the_users_that_remain(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    users = [user() for _ in range(3)]
    for each in users:
        each.entered()
    guard, server = guard_of(tmp_path), server_of(tmp_path)

    guard.kill()
    wait_until(lambda: is_replaced(tmp_path, guard))
    wait_until(lambda: answers(url))

    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    wait_until(lambda: len(processes_of(tmp_path)) == 2)


def is_replaced(data_dir: Path, guard: psutil.Process) -> bool:
    guards = processes_of(data_dir, "embedded_guard.py")
    return len(guards) == 1 and guards[0].pid != guard.pid and is_locked(data_dir / "server.lock")


def test_a_user_that_comes_after_guard_and_users_were_killed_gets_a_server(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    only = user()
    only.entered()

    guard_of(tmp_path).kill()
    only.kill()
    next_user = user()

    assert next_user.entered()[0] == "started"
    assert answers(url)


def test_a_terminated_guard_ends_its_server_and_is_replaced(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    user().entered()
    guard = guard_of(tmp_path)

    guard.send_signal(signal.SIGTERM)
    wait_until(lambda: is_replaced(tmp_path, guard))

    wait_until(lambda: answers(url))


@pytest.mark.nightly(
    "tests/bus/nats/test_embedded.py::test_a_server_that_dies_is_restarted_for_its_users",
    "tests/bus/nats/test_embedded_guard.py::test_restarts_slow_down_to_a_bound",
)
def test_a_killed_server_is_restarted_again_and_again_with_its_port(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    user().entered()
    guard = guard_of(tmp_path)

    for _ in range(3):
        kill_and_wait_for_the_next(tmp_path)
        wait_until(lambda: answers(url))

    assert guard_of(tmp_path).pid == guard.pid


def kill_and_wait_for_the_next(data_dir: Path) -> None:
    folder = DataFolder(data_dir)
    killed = server_of(data_dir)
    killed.kill()
    wait_until(lambda: folder.server_pid() not in (None, killed.pid))


def test_a_frozen_server_ends_with_its_last_user(tmp_path: Path, user: Callable[..., User]) -> None:
    only = user()
    only.entered()
    server_of(tmp_path).suspend()

    only.kill()

    wait_until(lambda: processes_of(tmp_path) == [], GONE_WITHIN)


def test_a_server_that_was_left_without_a_guard_is_ended_first(
    url: str, tmp_path: Path, user: Callable[..., User]
) -> None:
    lock = FileLock(tmp_path / "server.lock")
    assert lock.try_acquire()
    leftover = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=(lock.fileno(),)
    )
    (tmp_path / "server.lock").write_text(f"{leftover.pid}\n")
    lock.abandon()

    word = user().entered()[0]

    assert word == "started"
    assert leftover.wait(PATIENCE) == -signal.SIGTERM
    assert answers(url)


def test_an_idle_guard_costs_under_a_percent_of_a_core(
    tmp_path: Path, user: Callable[..., User]
) -> None:
    user().entered()
    guard = guard_of(tmp_path)

    used = guard.cpu_percent(interval=2.0)

    assert used < 1.0
