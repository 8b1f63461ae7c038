"""The embedded servers of this user, by port: where each keeps its data, and what lets in to it.

A run in one folder meets the server of a run in another at the port that both use. It must
become a user of that server, or it would lose it with the other run. And a program in any folder
finds the credential of the server by its port. The notes are hints: the server's name and its lock
tell whether one is still true.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dynbus.bus.config import is_loopback

from .embedded_guard import DataFolder, is_locked
from .server_process import DEFAULT_PORT

logger = logging.getLogger(__name__)

PROJECT_FOLDER: Final = ".dynbus"
"""The data folder of a project, in the project's own."""


def notes_dir() -> Path:
    """The folder of the notes, which only this user may write."""
    return Path(tempfile.gettempdir()) / f"dynbus-{os.getuid()}"


def announce(port: int, folder: DataFolder) -> bool:
    """Note whose server has a port; returns whether that was possible."""
    notes = notes_dir()
    try:
        notes.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(notes):
            raise PermissionError(f"others may write {notes}")
        (notes / str(port)).write_text(str(folder.path))
    except OSError as error:
        # Runs in other folders will use the server without being counted among its users.
        logger.warning("the port of nats-server cannot be noted in %s: %s", notes, error)
        return False
    return True


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


def with_credential(url: str) -> str:
    """The URL of this user's embedded server with its credential; any other URL as it is.

    Nothing is shown to a program that took the port of a server that has ended: the lock of the
    server says that it runs.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        return url  # the connection says so
    if "@" in parts.netloc or parts.scheme != "nats" or not is_loopback(parts.hostname or ""):
        return url
    for folder in (data_folder(port), DataFolder(Path(PROJECT_FOLDER))):
        known = None if folder is None else _own_url(folder)
        if known is not None and known.endswith(f":{port}"):
            return known
    return url


def _own_url(folder: DataFolder) -> str | None:
    """The URL in a data folder whose server runs; None where there is none."""
    try:
        is_there = folder.url.is_file() and folder.server_lock.exists()
        if is_there and folder.url.stat().st_uid == os.getuid() and is_locked(folder.server_lock):
            return folder.url.read_text().strip()
    except (OSError, UnicodeDecodeError):
        # As good as none: the server says so if it wants one.
        return None
    return None


def _is_private(folder: Path) -> bool:
    """True if only this user can have written there."""
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
