"""A program that runs in namespaces: started, signalled and waited for from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from tests.conditions import PATIENCE, wait_until

from .namespaces import Namespaces

ROOT = Path(__file__).parents[2]


def dynbus_in(folder: Path, *words: str) -> str:
    """The output of a command of dynbus that asks nobody, in a folder of the operator's machine."""
    done = subprocess.run(
        [sys.executable, "-m", "dynbus", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Program:
    """A program that runs in namespaces; its output goes to a file.

    What starts it waits for it outside, and stops as long as it is stopped. That ends with the
    thread that made this object.
    """

    def __init__(self, namespaces: Namespaces, log: Path, *command: str) -> None:
        self.log = log
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as output:
            self._waiting = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *namespaces.enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )

    def __repr__(self) -> str:
        return f"<Program {self.log.parent.name}/{self.log.stem} [{self._waiting.poll()}]>"

    @property
    def has_ended(self) -> bool:
        return self._waiting.poll() is not None

    @property
    def output(self) -> str:
        """What it has printed and logged so far."""
        return self.log.read_text(errors="replace")

    def says(self, text: str, within: float = PATIENCE) -> None:
        """Wait until its output holds `text`."""
        wait_until(
            lambda: text in self.output or self.has_ended,
            within,
            what=lambda: f"{self!r} says {text!r}: {self.output[-2000:]}",
        )
        assert text in self.output, f"{self!r} ended: {self.output[-2000:]}"

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended is no error."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._waiting.pid).children():
                process.send_signal(number)

    def end(self, within: float = PATIENCE) -> int:
        """Tell it to end with SIGTERM and wait for that; returns its exit status."""
        self.signal(signal.SIGTERM)
        wait_until(lambda: self.has_ended, within, what=lambda: f"{self!r}: {self.output[-2000:]}")
        return self._waiting.wait()

    def kill(self) -> None:
        """SIGKILL; takes effect before this returns."""
        self.signal(signal.SIGKILL)
        self._waiting.wait(PATIENCE)

    def goes_on(self) -> None:
        """It was stopped and goes on: so does what waits for it."""
        self._waiting.send_signal(signal.SIGCONT)

    def is_gone(self) -> None:
        """It was killed, stopped or not: hear of it."""
        self.goes_on()
        self._waiting.wait(PATIENCE)
