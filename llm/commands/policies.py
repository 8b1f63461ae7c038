"""The policies that a command line names."""

from __future__ import annotations

import os
import re
import sys
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dynbus import ConfigError

_BETWEEN: Final = re.compile(r",(?![^()]*\))")
"""Commas, but for those between the arguments of a policy."""


def policy_names(text: str) -> list[str]:
    """The policies that `--policy` names, with commas between.

    Modules are looked for in the current folder first. `my_costs.py:cost` is `my_costs:cost` with
    the folder of that file first on the path, as in `dynbus run`.

    Raises:
        ConfigError: it names none, or a file that is not there.
    """
    _look_first_in(os.getcwd())
    names = [name.strip() for name in _BETWEEN.split(text) if name.strip()]
    if not names:
        raise ConfigError(f"--policy {text!r} names no policy")
    files = {name: file for name in names if (file := _file_of(name)) is not None}
    for file in files.values():
        _look_first_in(str(file.parent))
    for name, file in files.items():
        spec = find_spec(file.stem)
        if spec is None or spec.origin is None or not file.samefile(spec.origin):
            where = "no module" if spec is None else f"another module ({spec.origin})"
            raise ConfigError(
                f"policy {name!r}: the name {file.stem!r} belongs to {where}: rename the file"
            )
    return [
        f"{files[name].stem}:{name.partition(':')[2]}" if name in files else name for name in names
    ]


def _look_first_in(folder: str) -> None:
    sys.path.insert(0, folder)
    invalidate_caches()


def _file_of(name: str) -> Path | None:
    """The file of `my_costs.py:cost`; None for any other name."""
    place, colon, _ = name.partition(":")
    if not (colon and place.endswith(".py")):
        return None
    file = Path(place).absolute()
    if not file.is_file():
        raise ConfigError(f"policy {name!r}: there is no file {place} in {Path.cwd()}")
    return file


def policy_name(text: str) -> str:
    """The one policy that `--policy` names, as of `policy_names`.

    Raises:
        ConfigError: it names none, or several.
    """
    names = policy_names(text)
    if len(names) > 1:
        raise ConfigError(f"--policy {text!r} names {len(names)} policies: give one")
    return names[0]
