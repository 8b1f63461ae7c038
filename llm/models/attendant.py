"""The attendant of a download: it runs the program for a process, and ends it with that one,
however that one ends.

It runs as a file of its own (`python -I -S attendant.py COMMAND...`), leads a process group, and
needs the standard library only. Its standard input is a pipe from the process that wants the
program: when the pipe ends, it ends the group, in which are the program and all that the program
has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _end_with_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run the program; its exit status."""
    if os.getpgrp() != os.getpid():
        return 1  # it leads no group: this one is somebody else's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return subprocess.call(command, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
