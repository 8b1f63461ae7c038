"""The guard ends a group when its leader is gone, and no group that it does not belong to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from dynbus.actors.running import group_guard

ENDED_WITHIN = 60.0

LEADER = f"""
import subprocess, sys, time
guard = [sys.executable, "-I", "-S", {group_guard.__file__!r}, str(__import__("os").getpid())]
subprocess.Popen([*guard, sys.argv[1]], pass_fds=(int(sys.argv[1]),))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def lead(theirs: socket.socket) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The leader of a group with a guard in it, and its child."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    with leader.stdout:
        return leader, psutil.Process(int(leader.stdout.readline()))


def test_what_a_killed_leader_started_is_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader, child = lead(theirs)

        leader.kill()
        leader.wait(60)

        child.wait(ENDED_WITHIN)


def test_a_group_whose_leader_outlives_its_run_is_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader, child = lead(theirs)
        leader.send_signal(signal.SIGSTOP)

        ours.close()
        theirs.close()

        assert leader.wait(ENDED_WITHIN) == -signal.SIGKILL
        child.wait(ENDED_WITHIN)


def test_words_to_the_whole_group_do_not_end_its_guard() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader, child = lead(theirs)
        (guard,) = [each for each in psutil.Process(leader.pid).children() if each != child]
        # Handlers come after the start of an interpreter: until then a signal would end it.
        while not is_ignored(guard, signal.SIGTERM):
            assert guard.is_running()

        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            guard.send_signal(number)

        assert guard.is_running()
        leader.kill()
        leader.wait(60)
        child.wait(ENDED_WITHIN)


def is_ignored(process: psutil.Process, number: int) -> bool:
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return True
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(line.split()[1], 16) & 1 << (number - 1))


def test_a_group_of_others_is_left_alone() -> None:
    guard = subprocess.run(
        [sys.executable, "-I", "-S", group_guard.__file__, str(os.getpid()), "0"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=ENDED_WITHIN,
        check=False,
    )

    assert guard.returncode == 1
