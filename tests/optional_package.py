"""Tests of what comes with a package that is not everywhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

import pytest


def skip_without(package: str, items: Iterable[pytest.Item], below: Path, guide: str) -> None:
    """Skip the tests in a folder where a package is missing.

    Args:
        below: the folder.
        guide: the page that says how the package is had.

    Raises:
        pytest.UsageError: it is missing where `NEEDS_{PACKAGE}` says that they have to run.
    """
    if importlib.util.find_spec(package) is not None:
        return
    variable = f"NEEDS_{package.upper()}"
    if os.environ.get(variable):
        raise pytest.UsageError(f"{variable} is set, and {package} is not installed here")
    for item in items:
        if below in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed: see {guide}"))
