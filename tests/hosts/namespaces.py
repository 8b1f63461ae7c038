"""Namespaces of Linux that live as long as whoever made them: one set for a lab, one for each host.

The first process of a set reads from a pipe that its maker holds. When that closes, by will or
because the maker was killed, the process ends, and the kernel ends all others of the set with it.
Namespaces have no names, so nothing is left behind, and sets of others are never in the way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

import psutil
from tests.conditions import PATIENCE, wait_until

KINDS = ("net", "mount", "pid", "ipc", "uts")
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount")


class NamespaceError(Exception):
    """Raised where this machine does not make namespaces; it says why."""


class Namespaces:
    """A network, processes, mounts and a name of its own, until `close`.

    Args:
        setup: lines of sh that are carried out inside, before anything else runs there.
        inside: the set around it; whatever ends that one ends this one too.

    Raises:
        NamespaceError: they cannot be made here.
    """

    def __init__(self, setup: str, *, inside: Namespaces | None = None) -> None:
        around = inside.enter if inside is not None else []
        own_user = inside is None and os.geteuid() != 0
        user = ["--user", "--map-root-user"] if own_user else []
        kinds = [f"--{kind}" for kind in KINDS]
        script = f"set -e\n{setup}\nexec 2>&-\necho ready\nexec cat"
        self._maker = subprocess.Popen(
            [*around, "unshare", *user, *kinds, "--fork", "--kill-child", "--mount-proc"]
            + ["sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._maker.stdout is not None
        if self._maker.stdout.readline() != "ready\n":
            _, errors = self._maker.communicate(timeout=PATIENCE)
            raise NamespaceError(errors.strip() or "unshare ended")
        [self._first] = [
            process
            for process in psutil.Process(self._maker.pid).children(recursive=True)
            if not process.children()
        ]

    def __repr__(self) -> str:
        return f"<Namespaces of {self.pid}>"

    @property
    def pid(self) -> int:
        """The first process inside, as it is called outside."""
        return self._first.pid

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that runs inside; its working folder is `/`."""
        return self._enter(*KINDS)

    def run(self, *command: str) -> str:
        """What a command prints inside.

        Raises:
            AssertionError: it failed, or did not end.
        """
        return self._run([*self.enter, *command])

    def ip(self, words: str) -> None:
        """Carry out `ip WORDS` for this network, with process ids as they are outside."""
        self._run([*self._enter("net"), "ip", *words.split()])

    def kill(self) -> None:
        """Kill all that runs inside at once; `close` waits until nothing is left."""
        self._first.kill()

    def _enter(self, *kinds: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if os.geteuid() != 0 else []
        return ["nsenter", "--target", str(self.pid), *user, *(f"--{k}" for k in kinds), "--"]

    def _run(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End all that runs inside; returns when nothing does any longer."""
        assert self._maker.stdin is not None
        self._maker.stdin.close()
        self._maker.wait(PATIENCE)
        for stream in (self._maker.stdout, self._maker.stderr):
            assert stream is not None
            stream.close()
        wait_until(lambda: not self._first.is_running(), what=f"{self!r} ends")


@cache
def why_there_are_none() -> str:
    """Why this machine makes no namespaces with a network between them; empty where it does."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} on this machine"
    try:
        outer = Namespaces("ip link add test0 type bridge")
        try:
            Namespaces("mount -t tmpfs shm /dev/shm", inside=outer).close()
        finally:
            outer.close()
    except (NamespaceError, OSError) as error:
        return f"namespaces need root or user namespaces here: {error}"
    return ""
