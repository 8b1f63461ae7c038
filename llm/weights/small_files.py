"""Reading of the small files of a model's folder: configurations, tokenizers."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from .errors import BrokenModel

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
"""Of a small file; the largest tokenizers in use are a third of it."""


def resolved_file(path: Path) -> Path:
    """The plain file that a file in a model's folder is, or is a link to.

    Raises:
        BrokenModel: it is no plain file, or is a link to elsewhere.
        OSError: it cannot be looked at.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise BrokenModel(f"{path} is no plain file")
    target, home = path.resolve(), _home(path.parent.resolve())
    if not target.is_relative_to(home):
        raise BrokenModel(
            f"{path} is a link to {target}, out of the model's folder: copy the file into it"
        )
    return target


def read_small_file(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file in a model's folder.

    What is in such files is told to others. So a link counts only where it leads to a file of this
    folder, or of the hub's cache that the folder belongs to.

    Raises:
        FileNotFoundError: there is none.
        BrokenModel: it cannot be read, is no plain file or too large, or is a link to elsewhere.
    """
    try:
        with resolved_file(path).open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise BrokenModel(f"{path} is larger than {limit} bytes")
    return data


def read_json_object(path: Path, *, required: bool = False) -> Mapping[str, Any]:
    """The JSON object in a file of a model's folder; an empty one where there is no file.

    Raises:
        BrokenModel: the file cannot be read or has something else, or is missing and required.
    """
    try:
        data = read_small_file(path)
    except FileNotFoundError:
        if required:
            raise BrokenModel(f"{path.parent}: {path.name} is missing") from None
        return {}
    try:
        # Python writes NaN and Infinity, which JSON has not: later readers get nothing instead.
        value: object = json.loads(data, parse_constant=lambda _: None)
        # Half a surrogate pair could not be told to anybody.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} has {type(value).__name__}, not an object")
    return cast("Mapping[str, Any]", value)


def is_snapshot(folder: Path) -> bool:
    """True for a folder of a hub's cache that has a revision of a repository; it is called by its
    commit."""
    parents = folder.parents
    return len(parents) > 1 and (
        folder.parent.name == "snapshots" and parents[1].name.startswith("models--")
    )


def _home(folder: Path) -> Path:
    """The folder where the files of a folder may lie: itself, or the cache of a hub of whose
    snapshot it is.
    """
    snapshots = (one for one in (folder, *folder.parents) if is_snapshot(one))
    return next((one.parents[2] for one in snapshots), folder)
