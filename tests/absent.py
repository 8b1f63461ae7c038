"""A Python in which some packages are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec


class Absent:
    """A finder that finds no module of these, nor below them."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = tuple(modules)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if any(name == each or name.startswith(f"{each}.") for each in self._modules):
            raise ModuleNotFoundError(f"No module named {name!r}: it is absent here", name=name)
        return None


def make_absent(modules: Iterable[str]) -> None:
    """Let this process find none of these modules, and nothing below them."""
    sys.meta_path.insert(0, Absent(modules))


def run_without(modules: Iterable[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where these modules are absent."""
    begin = f"from tests.absent import make_absent; make_absent({sorted(modules)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", begin + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
    )
