"""A host of a lab: a machine of its own to whatever runs on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.conditions import no_loop_reports

from .namespaces import Namespaces
from .program import Program

SETUP = """
hostname {name}
mount -t tmpfs shm /dev/shm
cat /proc/sys/kernel/random/uuid > /dev/shm/.boot_id
mount --bind /dev/shm/.boot_id /proc/sys/kernel/random/boot_id
ip link set lo up
"""


class Host:
    """A host: a network interface, a host name, a boot id, processes and `/dev/shm` of its own.

    Files are those of the machine underneath, and so are the clock and the processors.

    Attributes:
        address: where other hosts reach it.
        route_address: a second one, which servers use among each other.
        folder: what its programs print and keep, from one boot to the next.
        programs: that were started on it.
    """

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.address = f"10.0.0.{number}"
        self.route_address = f"10.0.1.{number}"
        self.hardware_address = f"02:00:00:00:00:{number:02x}"
        self.folder = folder
        self.programs: list[Program] = []
        self._namespaces: Namespaces | None = None

    def __repr__(self) -> str:
        return f"<Host {self.name} [{'on' if self.is_on else 'off'}]>"

    @property
    def is_on(self) -> bool:
        return self._namespaces is not None

    @property
    def namespaces(self) -> Namespaces:
        """Where its programs run, as long as it is on."""
        assert self._namespaces is not None, f"{self!r}: nothing runs there"
        return self._namespaces

    def boot(self, inside: Namespaces) -> None:
        """Switch it on, with a new boot id; nothing runs on it, and no link leads to it."""
        assert not self.is_on, f"{self!r} is on"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._namespaces = Namespaces(SETUP.format(name=self.name), inside=inside)

    def die(self) -> None:
        """Switch it off: everything on it ends at once."""
        self.namespaces.kill()
        # A namespace is gone when whoever waits for its programs has heard of their ends.
        for program in self.programs:
            program.is_gone()
        self.namespaces.close()
        self._namespaces = None

    def freeze(self) -> None:
        """Stop all programs on it at once; its kernel goes on, and takes what comes for them."""
        self._tell_all("STOP")

    def thaw(self) -> None:
        """The inverse of `freeze`."""
        self._tell_all("CONT")
        for program in self.programs:
            program.goes_on()

    def _tell_all(self, signal: str) -> None:
        """Send a signal to everything that runs here, which may be nothing."""
        self.run("sh", "-c", f"kill -{signal} -1 || :")

    def run(self, *command: str) -> str:
        """What a command prints on this host.

        Raises:
            AssertionError: it failed, or did not end.
        """
        return self.namespaces.run(*command)

    def popen(self, *command: str, name: str = "") -> Program:
        """Start a program on this host.

        Args:
            name: how it is called, and its log in the host's folder; as its file unless given.
        """
        name = f"{name or Path(command[0]).stem}-{len(self.programs)}"
        program = Program(self.namespaces, self.folder / f"{name}.log", *command)
        self.programs.append(program)
        return program

    def python(self, module: str, *arguments: Any) -> Program:
        """Start a module of these tests on this host."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return self.popen(*command, name=module.rpartition(".")[2])

    def check(self) -> None:
        """Check what its programs said.

        Raises:
            AssertionError: a loop in one of them reported what nobody retrieved or awaited.
        """
        for program in self.programs:
            assert no_loop_reports(program.output), f"{program!r}: {program.output[-2000:]}"
