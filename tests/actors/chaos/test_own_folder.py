"""A run's folder goes with it, or with the next one; nobody else's is touched."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dynbus.actors.chaos.own_folder import LOCK, PREFIX, own_folder

WAIT_IN_ONE = """
from dynbus.actors.chaos.own_folder import own_folder
with own_folder() as folder:
    (folder / "server-1").mkdir()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_run_that_was_killed_goes_with_the_next_run(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT_IN_ONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        left = Path(run.stdout.readline().strip())
        with own_folder() as mine:
            beside = sorted(temporary.iterdir())
        run.kill()
    killed = left.is_dir()
    with own_folder():
        pass

    assert left.parent == temporary
    assert beside == sorted([left, mine])
    assert killed
    assert list(temporary.iterdir()) == []


def test_folders_of_others_stay(temporary: Path) -> None:
    without_lock = temporary / f"{PREFIX}without-lock"
    without_lock.mkdir(mode=0o700)
    open_to_all = temporary / f"{PREFIX}open-to-all"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = temporary / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    for folder in (open_to_all, elsewhere):
        (folder / LOCK).touch()

    with own_folder():
        pass

    assert sorted(temporary.iterdir()) == sorted([elsewhere, without_lock, open_to_all, link])
    assert (elsewhere / LOCK).exists()
