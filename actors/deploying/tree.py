"""The folder of a deployment: written whole, and compared with what is there.

Each file begins with a line that says so; no other file is written over or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.files import write_whole

MARK: Final = "Made by dynbus deploy"


class Difference(NamedTuple):
    """A file that is not as it would be written: `missing`, `differs`, or `left over`."""

    name: str
    how: str


def heading(target: str) -> str:
    """The line that each file has at its top."""
    return f"{MARK} {target}: change the graph or the command, not this file."


def differences(folder: Path, files: Mapping[str, str]) -> list[Difference]:
    """The files that are not as they would be written.

    Raises:
        ConfigError: a file cannot be read.
    """
    changed: list[Difference] = []
    for name, text in sorted(files.items()):
        there = _read(folder / name)
        if there is None:
            changed.append(Difference(name, "missing"))
        elif there != text:
            changed.append(Difference(name, "differs"))
    return changed + [Difference(name, "left over") for name in _left_over(folder, files)]


def write(folder: Path, files: Mapping[str, str], *, force: bool) -> list[Difference]:
    """Write the files, and remove those of an earlier deployment that are no more of it; what was
    done.

    Args:
        force: whether files that are not of a deployment are written over.

    Raises:
        ConfigError: a file that is not of a deployment is in the way, or cannot be written.
    """
    changed = differences(folder, files)
    foreign = [
        each.name
        for each in changed
        if each.how == "differs" and MARK not in (_read(folder / each.name) or "")[:200]
    ]
    if foreign and not force:
        raise ConfigError(
            f"{folder / foreign[0]} was not made by dynbus deploy: give another folder by --out, "
            "or --force to write over it"
        )
    for name, how in changed:
        if how == "left over":
            (folder / name).unlink()
        else:
            write_whole(folder / name, files[name])
    return changed


def _left_over(folder: Path, files: Mapping[str, str]) -> list[str]:
    if not folder.is_dir():
        return []
    return [
        path.name
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in files and MARK in (_read(path) or "")[:200]
    ]


def _read(path: Path) -> str | None:
    """The text of a file; None where there is none, nothing of one that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
