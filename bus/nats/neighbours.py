"""Where the embedded servers of this user's other folders keep their data, by port.

A run in one folder meets the server of a run in another at the port that both use. It must
become a user of that server, or it would lose it with the other run. The notes are hints: the
server's name tells whether one is still true.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from .embedded_guard import DataFolder

logger = logging.getLogger(__name__)


def notes_dir() -> Path:
    """The folder of the notes, which only this user may write."""
    return Path(tempfile.gettempdir()) / f"dynbus-{os.getuid()}"


def announce(port: int, folder: DataFolder) -> None:
    """Note whose server has a port."""
    notes = notes_dir()
    try:
        notes.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(notes):
            raise PermissionError(f"others may write {notes}")
        (notes / str(port)).write_text(str(folder.path))
    except OSError as error:
        # Runs in other folders will use the server without being counted among its users.
        logger.warning("the port of nats-server cannot be noted in %s: %s", notes, error)


def data_folder(port: int) -> DataFolder | None:
    """The data folder of the server that was last started at a port; None for unknown."""
    notes = notes_dir()
    try:
        if not _is_private(notes):
            return None
        path = Path((notes / str(port)).read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return DataFolder(path) if path.is_absolute() and path.is_dir() else None


def _is_private(folder: Path) -> bool:
    """Whether nobody else could have written there."""
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
