"""The guard of an embedded nats-server: a detached process that owns it and ends it.

It runs as a file of its own (`python embedded_guard.py DATA_FOLDER NATS_SERVER`, or with
`-m dynbus.bus.nats.embedded_guard`) and needs the standard library only, so that it starts in
milliseconds and stays small. Who is alive is told by file locks alone: the kernel releases
them whatever way a process dies, and no pid is ever mistaken for a later process.

| file          | held by                                  | meaning while it is held          |
|---------------|------------------------------------------|-----------------------------------|
| `start.lock`  | one `dynbus run` while it starts or joins | nobody else starts or joins       |
| `users.lock`  | every user, shared                       | the server is wanted              |
|               | the guard, exclusive                     | the last user is gone; it ends    |
| `guard.lock`  | the guard, for life                      | a guard is alive                  |
| `server.lock` | nats-server, for life; holds its pid     | this very process is alive        |

If the guard itself is killed, Linux ends nats-server with it. Elsewhere nats-server stays
until the next `dynbus run` of the folder, or one that still uses it, finds `server.lock`
held without a guard and ends it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

POLL: Final = 0.1
"""Seconds between two looks at `users.lock`."""
STOP_TIMEOUT: Final = 2.0
"""Seconds that nats-server has to end by itself after SIGTERM."""
FIRST_BACKOFF: Final = 0.1
LAST_BACKOFF: Final = 5.0
SETTLED_AFTER: Final = 5.0
"""Seconds after which a server counts as one that had started well."""
GUARD_IS_ALIVE: Final = 3

_PR_SET_PDEATHSIG: Final = 1


class DataFolder:
    """The folder with the files of one embedded server.

    Attributes:
        url: a file with the URL of the server, and the credential that it takes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = path / "store"
        self.config = path / "nats-server.conf"
        self.url = path / "nats.url"
        self.record = path / "server.json"
        self.log = path / "nats-server.log"
        self.guard_log = path / "guard.log"
        self.start_lock = path / "start.lock"
        self.users_lock = path / "users.lock"
        self.guard_lock = path / "guard.lock"
        self.server_lock = path / "server.lock"

    def make(self) -> None:
        """Make the folder, which only its owner may enter: what is in it lets in to the server.

        Raises:
            OSError: it cannot be made, or belongs to somebody else.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One that an earlier version made, as the umask was.
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(0o700)
        ignore = self.path / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def server_pid(self) -> int | None:
        """The pid of the nats-server that holds `server.lock`; None when nothing does."""
        if not is_locked(self.server_lock):
            return None
        text = self.server_lock.read_text().strip()
        return int(text) if text.isdigit() else None


class FileLock:
    """An advisory lock on a file, released by the kernel however its holder ends.

    Processes that are forked while it is held share it; see `abandon`.
    """

    alive: ClassVar[weakref.WeakSet[FileLock]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        FileLock.alive.add(self)

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._fd is not None

    def is_on_path(self) -> bool:
        """True if the path still names the file whose lock is held."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Take the lock if that is possible without waiting; True when it is held now."""
        if self._fd is not None:
            raise RuntimeError(f"{self.path.name} is held already")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.abandon()
            return False
        except BaseException:
            self.abandon()
            raise
        return True

    def release(self) -> None:
        """Give the lock back, forked processes included; more calls change nothing."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close this process's part of the lock.

        The lock stays with the processes that share it, where `release` takes it from them.
        """
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def fileno(self) -> int:
        """The descriptor of the held lock."""
        if self._fd is None:
            raise RuntimeError(f"{self.path.name} is not held")
        return self._fd


def is_locked(path: Path) -> bool:
    """True if some process holds the lock exclusively."""
    lock = FileLock(path)
    if lock.try_acquire(shared=True):
        lock.release()
        return False
    return True


class RestartPolicy:
    """Decides what follows when nats-server ends although it is wanted."""

    def __init__(self) -> None:
        self._has_run = False
        self._backoff = FIRST_BACKOFF

    def delay_after(self, code: int, lived: float) -> float | None:
        """Seconds to wait before the next start; None when starting again is pointless.

        Args:
            code: the exit code, negative for a signal.
            lived: seconds since its start.
        """
        # A first start that ends by itself at once has a reason that stays: the port is
        # taken, the store is not writable. One that was killed had no such reason.
        if not self._has_run and code >= 0 and lived < SETTLED_AFTER:
            return None
        self._has_run = True
        if lived >= SETTLED_AFTER:
            self._backoff = FIRST_BACKOFF
        delay = self._backoff
        self._backoff = min(2 * self._backoff, LAST_BACKOFF)
        return delay


class Guard:
    """Runs one nats-server for as long as somebody holds `users.lock`."""

    def __init__(self, folder: DataFolder, binary: str) -> None:
        self._folder = folder
        self._binary = binary
        self._users = FileLock(folder.users_lock)
        self._policy = RestartPolicy()
        self._terminated = False
        self._wakeup = _wakeup_on_signals()
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self) -> int:
        """Keep the server running until it is no longer wanted; returns the exit code."""
        while True:
            started = time.monotonic()
            server = self._start()
            if self._is_unwanted_before(server.poll):
                _stop(server)
                return 0
            code, lived = server.wait(), time.monotonic() - started
            delay = self._policy.delay_after(code, lived)
            if delay is None:
                _log(f"nats-server cannot start: exit code {code}")
                return 1
            _log(f"nats-server ended after {lived:.1f} s with {code}; next in {delay:g} s")
            if self._is_unwanted_before(_after(delay)):
                return 0

    def _is_unwanted_before(self, event: Callable[[], int | None]) -> bool:
        """Wait until `event` gives a number; True when the server is no longer wanted before it."""
        while event() is None:
            if self._terminated or self._users.try_acquire():
                return True
            self._sleep()
        return False

    def _sleep(self) -> None:
        """Wait for `POLL` seconds or the next signal, the server's end among them."""
        if select.select([self._wakeup], [], [], POLL)[0]:
            os.read(self._wakeup, 4096)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _start(self) -> subprocess.Popen[bytes]:
        lock = FileLock(self._folder.server_lock)
        if not acquire_within(lock, 2.0):
            raise RuntimeError(f"another nats-server holds {lock.path}")
        guard = os.getpid()
        # Loaded here: the child may do no more than a few calls before its exec.
        libc = ctypes.CDLL(None)

        def in_child() -> None:
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), b"%d\n" % os.getpid(), 0)
            if sys.platform == "linux":
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != guard:
                    os._exit(1)

        try:
            return subprocess.Popen(
                [self._binary, "-c", str(self._folder.config)],
                stdin=subprocess.DEVNULL,
                pass_fds=(lock.fileno(),),
                preexec_fn=in_child,  # safe: the guard has a single thread
            )
        finally:
            # From here on the lock lives and dies with the server alone.
            lock.abandon()


def acquire_within(lock: FileLock, seconds: float) -> bool:
    """Take a lock exclusively that others hold for moments only, blocking meanwhile."""
    deadline = time.monotonic() + seconds
    while not lock.try_acquire():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _wakeup_on_signals() -> int:
    """A descriptor that becomes readable when a signal arrives, SIGCHLD included."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def _after(seconds: float) -> Callable[[], int | None]:
    """An event that comes `seconds` from now."""
    at = time.monotonic() + seconds
    return lambda: 0 if time.monotonic() >= at else None


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    server.send_signal(signal.SIGCONT)
    try:
        server.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        _log(f"nats-server did not end within {STOP_TIMEOUT:g} s and was killed")
        server.kill()
        server.wait()


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


def main(arguments: list[str]) -> int:
    """Detach from the starter and guard; the exit code 3 means that a guard is alive.

    The process that was started ends with 0 as soon as the detached one holds `guard.lock`.
    """
    folder, binary = DataFolder(Path(arguments[0])), arguments[1]
    lock = FileLock(folder.guard_lock)
    if not acquire_within(lock, 1.0):
        return GUARD_IS_ALIVE
    if os.fork():
        os._exit(0)
    os.setsid()
    try:
        return Guard(folder, binary).run()
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
