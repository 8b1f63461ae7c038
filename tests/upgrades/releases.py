"""The release before this one, as who has it installed it."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASE = "0.1.0"
COMMIT = "3118ee76d5bbee39a8989056ae2742030512d654"
"""The commit of that tag: a clone may have it without its tags."""


def install(folder: Path) -> Path:
    """Make the wheel of the release from its sources, and unpack it; the folder to import it from.

    What it depends on is what this version does. Skips the test where the clone has no history.
    """
    known = subprocess.run(
        ["git", "cat-file", "-e", COMMIT], cwd=ROOT, capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip(f"the history of this copy does not reach back to {RELEASE} ({COMMIT})")
    archive = subprocess.run(
        ["git", "archive", COMMIT, "pyproject.toml", "README.md", "LICENSE"]
        + ["src", "bus", "actors", "kvrouter", "llm", "transfer"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    sources, wheels, site = (folder / name for name in ("sources", "wheels", "site"))
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(sources, filter="tar")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", wheels],
        cwd=sources,
        capture_output=True,
        check=True,
    )
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith(f"dynbus-{RELEASE}-"), wheel.name
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return site
