"""The guard of a worker's process group: when the worker is gone, it ends what the worker started.

An engine has processes of its own, which hold memory of a GPU and do not notice that the process
which asked for them was killed. The worker leads a group (a session, which Ctrl-C in a terminal
does not reach), and this process is in it: so the group is there for as long as the guard is, its
number cannot have gone to others, and to kill it nobody's id has to be known. That holds however
the worker died, and whether or not `dynbus run` died with it.

It runs as a file of its own (`python -I -S group_guard.py WORKER_PID FD`) and needs the standard
library only, so that it starts in milliseconds and stays small. FD is the worker's socket to
`dynbus run`, of which it hears the end only.

The guard of the embedded server is another: it outlives runs, and belongs to all that use a server.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Final

POLL: Final = 0.1
"""Seconds between two looks at whether the worker lives."""
GUARD_PATIENCE: Final = 3.0
"""Seconds that a worker has to end by itself when `dynbus run` is gone; it takes two of them."""


def wait_for_end(worker: int, connection: int) -> None:
    """Return when this process's parent, the worker, is gone or has outlived its own too long."""
    poller = select.poll()
    poller.register(connection, 0)  # nothing but the end
    last = float("inf")
    # A process that loses its parent gets another at once: no id can be mistaken for a later one's.
    while os.getppid() == worker and time.monotonic() < last:
        if poller.poll(POLL * 1000):
            last = time.monotonic() + GUARD_PATIENCE
            poller.unregister(connection)


def main(arguments: list[str]) -> int:
    """Guard the group of the worker; does not return where it leads one."""
    worker, connection = int(arguments[0]), int(arguments[1])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # Sent to the whole group by a sender who means the worker.
        signal.signal(number, signal.SIG_IGN)
    if os.getpgrp() != worker:
        return 1  # it leads none: this group is somebody else's
    wait_for_end(worker, connection)
    os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
