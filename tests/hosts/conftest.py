"""Fixtures of the stories on several hosts, which are skipped where there can be no hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster
from .lab import Lab
from .namespaces import why_there_are_none


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips what needs hosts on a machine that makes none."""
    if reason := why_there_are_none():
        pytest.skip(reason)


@pytest.fixture
def lab(namespaces: None, tmp_path: Path) -> Iterator[Lab]:
    """Three hosts for one test."""
    with Lab("abc", tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def shared_cluster(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Servers on a, b and c, workers on d and e; f has nothing yet."""
    with Lab("abcdef", tmp_path_factory.mktemp("hosts")) as hosts:
        running = Cluster(hosts, servers="abc", workers="de")
        running.start()
        yield running


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster that the tests of a module share: each heals what it breaks."""
    yield shared_cluster
    for host in shared_cluster.lab:
        host.check()
