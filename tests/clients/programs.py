"""Programs of clients, run in the environments that have their packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

HERE: Final = Path(__file__).parent
ENVIRONMENT: Final = HERE.parents[1] / ".venv-clients" / "bin"
"""The commands of the dependency group `clients`."""
MODULES: Final = HERE / "node_modules"
"""The packages of `package.json`."""
KEY: Final = "sk-ada-1234"
"""The key of the page, and of LiteLLM's proxy."""
VARIABLES: Final = {
    **os.environ,
    # LiteLLM asks elsewhere for prices unless told otherwise.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MASTER_KEY": KEY,
    "DO_NOT_TRACK": "1",
}


def command_of_clients(name: str) -> Path:
    """A command of the environment with the packages of clients; a test without it is skipped."""
    return _needed(ENVIRONMENT / name)


def node() -> str:
    """The command of Node, beside the packages that it imports; a test without is skipped."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not on the path")
    _needed(MODULES)
    return found


def _needed(path: Path) -> Path:
    if not path.exists():
        assert not os.environ.get("NEEDS_CLIENTS"), f"NEEDS_CLIENTS is set, and there is no {path}"
        pytest.skip("the packages of clients are not installed: scripts/test-clients does that")
    return path


def output_of(command: Sequence[str | Path], folder: Path) -> str:
    """The output of a program, which is to end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=VARIABLES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
