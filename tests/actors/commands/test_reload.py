"""A reloading run watches the right folders, and repeats its command line without itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dynbus.actors.commands import reload
from dynbus.actors.commands.reload import (
    check_arguments,
    inner_arguments,
    watch_and_run,
    watched_folders,
)
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError

from .options import run_options


def test_the_folders_of_targets_and_of_the_settings_are_watched_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)

    found = watched_folders(["a/x.py", "a/y.py:Name", "package.module:Name"], ["b/config.yaml"])

    assert found == [tmp_path, tmp_path / "a", tmp_path / "b"]


def test_targets_in_no_folder_that_exists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reload: none of the folders of /missing/x.py exists"):
        watched_folders(["/missing/x.py"], [])


def test_the_inner_run_is_the_same_without_reload_and_fresh() -> None:
    arguments = ["actors.py", "--reload", "--fresh", "--A.b=c", "-f", "x.yaml"]

    assert inner_arguments(arguments, 7) == [
        "run", "--parent-fd=7", "actors.py", "--A.b=c", "-f", "x.yaml",
    ]  # fmt: skip


def test_a_change_is_checked_by_a_dry_run_of_the_same() -> None:
    assert check_arguments(["actors.py", "--reload", "--A.b=c"]) == [
        "run", "--dry-run", "actors.py", "--A.b=c",
    ]  # fmt: skip


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, whose settings name a server that is not embedded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NATS_URL", raising=False)
    (tmp_path / "config.yaml").write_text("bus: {servers: 'nats://192.0.2.1:4222'}\n")
    return tmp_path


def test_a_signal_while_the_run_is_being_spawned_ends_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[asyncio.subprocess.Process] = []

    async def spawn(arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)  # now it has been heard
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        spawned.append(await asyncio.create_subprocess_exec(*command))
        return spawned[-1]

    monkeypatch.setattr(reload, "_dynbus", spawn)

    code = watch_and_run(run_options(targets=["actors.py"], config_files=["config.yaml"]))

    assert code == exit_codes.OK
    assert [process.returncode for process in spawned] == [-signal.SIGTERM]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["config.yaml"]
