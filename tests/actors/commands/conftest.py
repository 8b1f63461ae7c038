"""The working directory of the tests of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MakeFolder = Callable[[str, str], Path]


@pytest.fixture
def folder_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFolder:
    """Makes the working directory one with a module of actors, given its name and source, which is
    imported anew."""

    def make(module: str, source: str) -> Path:
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return tmp_path

    return make
