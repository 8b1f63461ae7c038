"""The two versions, and processes of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scenarios.processes import ROOT

from dynbus.bus.nats.server_process import RunningServer

from .releases import install
from .versions import NEW, OLD, Shops


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders from which each version is imported."""
    return {OLD: install(tmp_path_factory.mktemp("release")), NEW: ROOT / "src"}


@pytest.fixture
def shops(own_server: RunningServer, tmp_path: Path, packages: dict[str, Path]) -> Iterator[Shops]:
    made = Shops(own_server.url, tmp_path, packages)
    try:
        yield made
    finally:
        made.end()
