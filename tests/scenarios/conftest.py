"""Fixtures of the failure stories: processes that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts worker and caller processes that end with the test."""
    started = Processes(tmp_path)
    try:
        yield started
    finally:
        started.end_all()
