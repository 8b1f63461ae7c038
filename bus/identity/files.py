"""Files of users: their names, and their writing, by which a reader has the whole of one, old or
new.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dynbus.bus.errors import ConfigError

USERS_FILE: Final = "users.json"
ACCOUNTS_FILE: Final = "accounts.json"
SERVER_FILE: Final = "nats-users.conf"
"""The file that nats-server includes."""
CREDS_FOLDER: Final = "creds"
"""The folder with one for the credentials files of each account."""
LOCK_FILE: Final = ".lock"


@contextmanager
def locked(folder: Path, *, make: bool = False) -> Generator[None]:
    """A lock of a folder of users, from before it is read until its change is saved.

    Another process waits for it meanwhile.

    Args:
        make: the folder is made if it is missing.

    Raises:
        ConfigError: there is no such folder, or it cannot be locked.
    """
    path = folder / LOCK_FILE
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no folder {folder}: make it with `dynbus auth init`, or name another by "
            "--folder"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be locked: {error.strerror}; have the folder where files can be"
            ) from None
        yield
    finally:
        os.close(number)


def write_whole(path: Path, text: str, *, secret: bool = False) -> None:
    """Write a file, and its folder where that is missing.

    Args:
        secret: the file, and a folder that is made for it, are for their owner alone.

    Raises:
        ConfigError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        path.parent.mkdir(mode=0o700 if secret else 0o777, parents=True, exist_ok=True)
        number = os.open(beside, flags, 0o600 if secret else 0o666)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def write_changed(path: Path, text: str) -> bool:
    """Write a file that has no secrets; True if it was not there, or had another content.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        is_changed = path.read_text(encoding="utf-8") != text
    except (OSError, UnicodeDecodeError):
        is_changed = True
    if is_changed:
        write_whole(path, text)
    return is_changed


def write_secrets(files: dict[Path, str | None]) -> None:
    """Write secret files, or remove those that have no text, and forget them.

    Raises:
        ConfigError: one cannot be written or removed.
    """
    for path, text in files.items():
        if text is not None:
            write_whole(path, text, secret=True)
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be removed: {error.strerror}; remove it by hand"
            ) from None
    files.clear()


def check_unused(folder: Path) -> None:
    """Refuse a folder that has users already.

    Raises:
        ConfigError: it has.
    """
    for name in (USERS_FILE, ACCOUNTS_FILE):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} is there already: add users to it with `dynbus auth add`, or "
                "name another folder by --folder"
            )


def server_file_of(folder: Path) -> Path:
    """The file for nats-server that goes with a folder of credentials, which `dynbus auth` made."""
    of_account = folder.parent.name == CREDS_FOLDER
    return (folder.parents[1] if of_account else folder.parent) / SERVER_FILE
