"""Files of users, written so that who reads one meanwhile has the whole of it, old or new."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dynbus.bus.errors import ConfigError


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
