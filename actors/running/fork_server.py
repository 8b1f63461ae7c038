"""The program that makes the processes of a run: it has imported dynbus, and forks.

`python -m dynbus.actors.running.fork_server FD MODULE...` starts it, with modules to import. A
process that it makes is there within milliseconds, where a new interpreter needs the better part
of a second to import what all of them need, and shares that memory with the others. No code of a
user's ever runs in it, and it has one thread only: that is what makes a fork safe.

Over the socket FD it is asked for one process at a time, with a line of JSON that carries the
descriptor which the process is to have. It answers with lines: which process that is, and how each
one ended. When the socket ends, so does it; the processes hear of that by themselves.
`processes.py` is the other end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Final

import msgspec
import setproctitle

from . import child_process, planning
from .processes import ForkProcess, ForkReport, ProcessEnded, ProcessForked

MAX_REQUEST: Final = 4096
MAINS: Final = {"planner": planning.main, "worker": child_process.main}


def main() -> None:
    """Fork until the socket ends; in a process that was forked, be that."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    forked = _serve(connection)
    if forked is None:
        return
    asked, fd = forked
    sys.argv[1:] = [str(fd), asked.label]
    setproctitle.setproctitle(f"dynbus {asked.role} {asked.label}".rstrip())
    # Ctrl-C in a terminal then reaches neither it nor what it starts: the run hears it and drains.
    os.setsid()
    MAINS[asked.role]()


def _serve(connection: socket.socket) -> tuple[ForkProcess, int] | None:
    """Make processes until the socket ends; returns in each of them too, with what it is to be."""
    decoder = msgspec.json.Decoder(ForkProcess)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Sent to the whole group by a sender who means the run, which ends us by the socket.
        signal.signal(number, signal.SIG_IGN)
    wakes, wake = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, _wake)  # without a handler nothing is written
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # What was made until now is never freed: a collection must not copy the pages that all share.
    gc.collect()
    gc.freeze()
    while True:
        ready, _, _ = select.select([connection.fileno(), wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            for ended in _reap():
                _tell(connection, ended)
        if connection.fileno() not in ready:
            continue
        try:
            text, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 1)
        except ConnectionError:
            return None
        if not text:
            return None
        (fd,) = fds
        try:
            pid = _fork()
        except OSError as error:
            answer = ProcessForked(0, str(error))
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for inherited in (wakes, wake):
                    os.close(inherited)
                connection.close()
                for number in (signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                return decoder.decode(text), fd
            answer = ProcessForked(pid)
        os.close(fd)
        _tell(connection, answer)


def _tell(connection: socket.socket, report: ForkReport) -> None:
    with contextlib.suppress(BrokenPipeError):  # the next read finds the end
        connection.sendall(msgspec.json.encode(report) + b"\n")


def _wake(number: int, frame: FrameType | None) -> None:
    """A process has ended: `select` returns."""


def _fork() -> int:
    if threading.active_count() != 1:
        # A lock that another thread holds would stay locked in the new process for ever.
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise OSError(f"the fork server has threads: {names}")
    return os.fork()


def _reap() -> list[ProcessEnded]:
    """The processes that have ended since."""
    ended: list[ProcessEnded] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(ProcessEnded(pid, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
