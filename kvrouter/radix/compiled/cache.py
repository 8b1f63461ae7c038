"""Where compiled code is kept between processes. Imports no Numba.

Numba notices a change only in the file of the entry point itself, not in the files of the
functions that it calls. So what is compiled is kept in a folder that is named after all
sources of this package, those whose constants are compiled in, and the version of Numba.
"""

from __future__ import annotations

import os
import sys
import tempfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Final

_WHOLE: Final = "whole"
_OF_CONSTANTS: Final = ("kernel.py", "records.py")
"""Files of the folder above."""


def cache_folder() -> Path | None:
    """Where compiled code is kept; None where nothing can be written."""
    digest = sha256(f"{version('numba')} {sys.implementation.cache_tag}".encode())
    here = Path(__file__).parent
    for source in (*sorted(here.glob("*.py")), *(here.parent / name for name in _OF_CONSTANTS)):
        digest.update(source.read_bytes())
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        base = Path(given)
    elif sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = base.expanduser() / "dynbus" / f"kernel-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):
        return None
    return folder


def is_whole(folder: Path | None) -> bool:
    """Whether everything was compiled into a folder, so that loading it is quick."""
    return folder is not None and (folder / _WHOLE).exists()


def note_whole(folder: Path | None) -> None:
    """Everything was compiled into a folder."""
    if folder is not None:
        (folder / _WHOLE).touch()
