"""Fixtures for all tests: real nats-servers, and the event loop that async tests run on.

An async test is marked with `pytest.mark.anyio`, on itself or as its module's `pytestmark`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynbus.bus.nats_server import RunningServer, run_server


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, the only loop that dynbus supports."""
    return "asyncio"


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A nats-server that all tests share: nobody stops, pauses or reconfigures it."""
    server = asyncio.run(run_server(store_dir=tmp_path_factory.mktemp("nats-server")))
    try:
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A nats-server for one test, which may kill, pause and restart it at will.

    `await server.restart()` brings it back at the same port with the same store.
    """
    server = asyncio.run(run_server(store_dir=tmp_path / "nats-server"))
    try:
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands and the functions under test configure logging for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    # Not the attribute: loggers remember what their level came to.
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell starts background jobs with SIGINT ignored, and their children would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
