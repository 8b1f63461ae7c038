"""Fixtures for all tests: real nats-servers, and the event loop that async tests run on.

An async test is marked with `pytest.mark.anyio`, on itself or as its module's `pytestmark`. A test
fails when an event loop reports something that nobody is left to hear: see `loops_report_nothing`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dynbus.bus.nats.server_process import RunningServer, run_server

# How long an example takes says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("tests"), max_examples=10)
settings.load_profile("tests")


class ReportingLoop(asyncio.SelectorEventLoop):
    """The loop of async tests: whatever goes wrong unheard is logged, as on any other loop.

    anyio's handler would raise it into the test instead, or lose it when the test is over.
    """

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.default_exception_handler(context)

    def run_until_complete(self, future: Any) -> Any:
        """Of a test that hangs until it is failed, its output has what each task waits for."""
        try:
            return super().run_until_complete(future)
        except pytest.fail.Exception:
            for task in asyncio.all_tasks(self):
                task.print_stack(file=sys.stdout)
            raise


class LoopReports(logging.Handler):
    """Keeps what event loops log: exceptions that nobody retrieved, tasks that nobody awaited."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.reports: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reports.append(self.format(record))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-parameters",
        action="store_true",
        help="run each test once, with the first of its parameters",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark what starts a nats-server or other processes; the rest needs this one alone."""
    for item in items:
        if isinstance(item, pytest.Function) and needs_server(item):
            item.add_marker("server")
    written = list(items)
    yield
    if config.getoption("first_parameters"):
        chosen = set(items)
        firsts = {
            item.nodeid.partition("[")[0]: item for item in reversed(written) if item in chosen
        }
        items[:] = [item for item in items if firsts[item.nodeid.partition("[")[0]] is item]
        config.hook.pytest_deselected(items=list(chosen.difference(items)))


def needs_server(item: pytest.Function) -> bool:
    here = Path(__file__).parent
    is_story = here in item.path.parents and item.path.relative_to(here).parts[0] in STORIES
    names = {*item.fixturenames, *vars(item.module)}
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        is_story
        or not names.isdisjoint({"nats_server", "own_server", "run_server", "subprocess"})
        or parameters.get("bus_kind") == "nats"
    )


STORIES = {"clients", "examples", "guides", "hosts", "nixl", "scenarios", "vllm", "test_docs.py"}
"""Folders whose tests start servers and processes in ways of their own."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed may hold what is no text, and could not be told to another process."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Async tests run on asyncio, the only loop that dynbus supports."""
    return "asyncio", {"loop_factory": ReportingLoop}


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_no_garbage() -> None:
    """What was there before a module of tests stays: collections need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loops_report_nothing(what_stays_is_no_garbage: None) -> Iterator[None]:
    """A test fails when a loop, on any thread, reports what nobody retrieved or awaited."""
    handler = LoopReports()
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield
        # Reports come from finalizers: they belong to the test that left the garbage.
        gc.collect()
    finally:
        logger.removeHandler(handler)
    assert not handler.reports, "an event loop reported:\n" + "\n".join(handler.reports)


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
