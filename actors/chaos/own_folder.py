"""The folder of a run: its own, and gone with it, or with the next run where it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "dynbus-chaos-"
LOCK: Final = "lock"
"""The file in it that is locked as long as the run lives, however it ends."""


@contextmanager
def own_folder() -> Generator[Path]:
    """A temporary folder, which is removed at the end; those of runs that were killed are, too."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unlocked = folder / f"{LOCK}.new"
        with unlocked.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Nobody ever sees it under its name without the lock.
            unlocked.rename(folder / LOCK)
            yield folder


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if _is_ours(folder):
                with (folder / LOCK).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """True if only this user can have filled the folder."""
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
    )
