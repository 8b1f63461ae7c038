"""A download that can be ended: who is told of it, its lock, and the program that does it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from . import attendant
from .origins import ModelUnavailable, OnProgress, Progress

logger = logging.getLogger(__name__)

STALL_TIMEOUT: Final = 180.0
"""Seconds for which a download may stand still. pip and the hub's client give up on a server that
is silent before that."""

LOOK_INTERVAL: Final = 0.1
"""Seconds between two looks at how much is here, and whether it is still wanted."""

_NOTE_INTERVAL: Final = 0.5
"""Seconds between two notes for those who wait for a lock."""

_LOG_INTERVAL: Final = 10.0
"""Seconds between two lines in the log about the same thing."""

_NO_ROOM: Final = ("No space left", "File too large", "Disk quota exceeded")


def lacks_room(said: str) -> bool:
    """True if a program says that it cannot write for want of room."""
    return any(text in said for text in _NO_ROOM)


class DownloadStopped(Exception):
    """Raised in the thread of a download that nobody wants any longer."""


class Download:
    """One download, in a thread of its own.

    Args:
        tell: called in that thread.
    """

    def __init__(self, tell: OnProgress) -> None:
        self._tell = tell
        self._reported: Progress | None = None
        self._logged = ("", 0.0)
        self._stopped = threading.Event()
        self._note: IO[str] | None = None
        self._noted = 0.0

    def stop(self) -> None:
        """End it within a moment; to be called from any thread."""
        self._stopped.set()

    def wait(self, seconds: float) -> None:
        """Wait.

        Raises:
            DownloadStopped: it shall end.
        """
        if self._stopped.wait(seconds):
            raise DownloadStopped

    def tell(self, progress: Progress) -> None:
        """Tell how far it is, if that has changed.

        Raises:
            DownloadStopped: it shall end.
        """
        self.wait(0)
        if progress != self._reported:
            self._reported = progress
            self._tell(progress)
        now = time.monotonic()
        what, logged = self._logged
        if progress.what != what or now >= logged + _LOG_INTERVAL:
            self._logged = (progress.what, now)
            logger.info("%s%s", progress.what, _amount(progress))
        if self._note is not None and now >= self._noted + _NOTE_INTERVAL:
            self._noted = now
            _write_holder(self._note, progress)

    @contextmanager
    def locked(self, path: Path, name: str) -> Generator[None]:
        """Hold the lock of what is called `name`; those who wait for it see how far this one is.

        The lock goes with its holder, however that one ends. One whose holder stands still is
        waited for no longer than `STALL_TIMEOUT`.

        Raises:
            DownloadStopped: it shall end.
            ModelUnavailable: another process holds it and stands still.
            OSError: the file cannot be locked.
        """
        with path.open("a+") as file:
            self._acquire(file, path, name)
            _write_holder(file, Progress("", 0, 0))
            self._note = file
            try:
                yield
            finally:
                self._note = None

    def _acquire(self, file: IO[str], path: Path, name: str) -> None:
        still = _Stillness()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            holder, progress = _read_holder(file)
            if still.since(progress) > STALL_TIMEOUT:
                raise ModelUnavailable(
                    f"{name} is being downloaded by {holder}, which has made no progress for "
                    f"{STALL_TIMEOUT:g} s: end that process, or look what it waits for; it holds "
                    f"{path}"
                )
            self.tell(progress._replace(what=f"waiting for {holder}, which downloads {name}"))
            self.wait(LOOK_INTERVAL)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        look: Callable[[str], Progress],
    ) -> int:
        """Run a program that downloads; nothing of it is left when this returns or raises.

        Args:
            output: the file for what it says.
            look: how far it is, by what it has said.

        Returns:
            Its exit status.

        Raises:
            DownloadStopped: it shall end.
            TimeoutError: it stands still.
        """
        with output.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", attendant.__file__, *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for this process, which ends the program then.
                start_new_session=True,
            )
        still = _Stillness()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(LOOK_INTERVAL)
                text = output.read_text(errors="replace")
                progress = look(text)
                self.tell(progress)
                if still.since((progress, len(text))) > STALL_TIMEOUT:
                    raise TimeoutError(f"it has made no progress for {STALL_TIMEOUT:g} s")
        finally:
            if process.poll() is None:
                # It leads a group, and it is not waited for yet: the number is still its own.
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class _Stillness:
    """The time for which something has not changed."""

    def __init__(self) -> None:
        self._state: object = None
        self._since = time.monotonic()

    def since(self, state: object) -> float:
        """For how many seconds it has been like this."""
        now = time.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        return now - self._since


def _amount(progress: Progress) -> str:
    """The amount that is here, for people; empty where it is nothing yet."""
    if not progress.done:
        return ""
    of = f" of {progress.total / 1e6:.1f}" if progress.total else ""
    return f": {progress.done / 1e6:.1f}{of} MB"


def _write_holder(file: IO[str], progress: Progress) -> None:
    """Say in a lock's file who holds it, and how far they are."""
    note = {"pid": os.getpid(), "host": socket.gethostname(), "progress": list(progress)}
    # It is open for appending.
    file.truncate(0)
    file.write(json.dumps(note))
    file.flush()


def _read_holder(file: IO[str]) -> tuple[str, Progress]:
    """The holder of a lock, for people, and its progress."""
    file.seek(0)
    try:
        note: Any = json.loads(file.read())
        what, done, total = note["progress"]
        return f"process {int(note['pid'])} on {note['host']}", Progress(what, done, total)
    except (ValueError, KeyError, TypeError):
        # It has it since a moment ago.
        return "another process", Progress("", 0, 0)
