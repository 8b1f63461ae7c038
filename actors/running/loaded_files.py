"""The files of a user's that this process has loaded: a change of one of them matters to it."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("site-packages", "dist-packages")


def loaded_files() -> list[str]:
    """The real paths of the files behind all modules of this process, except for those of Python,
    of installed packages and of dynbus."""
    paths: set[str] = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name.partition(".")[0] not in ("__main__", "dynbus"):
            path = _real_path(file)
            if not _is_installed(path):
                paths.add(path)
    return sorted(paths)


@cache
def _real_path(path: str) -> str:
    return os.path.realpath(path)


@cache
def _is_installed(path: str) -> bool:
    return path.startswith(_python_folders()) or any(
        folder in _PACKAGES for folder in Path(path).parts
    )


@cache
def _python_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({f"{os.path.realpath(paths[name])}{os.sep}" for name in names})
