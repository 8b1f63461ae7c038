"""Fixtures of the failure stories: stages that are set, and processes that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynbus import Runtime
from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.nats.server_process import RunningServer, run_server

from .permissions import users
from .processes import Processes
from .project import Folder, project_folder
from .stage import Link, Stage, set_stage
from .stream_maker import make_streams


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts worker and caller processes that end with the test."""
    started = Processes(tmp_path)
    try:
        yield started
    finally:
        started.end_all()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A project folder; nothing that is started in it outlives the test."""
    with project_folder(tmp_path) as project:
        yield project


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server whose users have the grants of their roles."""
    server = await run_server(store_dir=tmp_path / "nats-server", config=users())
    try:
        await make_streams(server, "scenario")
        yield server
    finally:
        await server.stop()


@pytest.fixture
def settings() -> dict[str, Any]:
    """Fields of `BusConfig` for the runtimes of `stage`; a module may have its own."""
    return {}


@pytest.fixture
async def stage(own_server: RunningServer, settings: dict[str, Any]) -> AsyncIterator[Stage]:
    """Two runtimes of this process, with every actor of `workload` between them."""
    async with set_stage(own_server.url, **settings) as at:
        yield at


@pytest.fixture
async def proxy(own_server: RunningServer) -> AsyncIterator[Proxy]:
    """A proxy in front of the test's server."""
    async with Proxy(own_server.port) as running:
        yield running


@pytest.fixture
def proxied() -> str:
    """Who is behind the proxy of `link`, `caller` or `worker`: parametrize it to choose."""
    return "caller"


@pytest.fixture
async def link(
    own_server: RunningServer, processes: Processes, proxy: Proxy, proxied: str
) -> AsyncIterator[Link]:
    """A runtime that knows `Source` in a worker process, with a proxy on the way of one of them."""
    urls = {"caller": own_server.url, "worker": own_server.url, proxied: proxy.url}
    worker = await processes.worker(urls["worker"])
    async with Runtime.connect(urls["caller"]) as runtime:
        endpoint = runtime.namespace("scenario").component("Source").endpoint("where")
        await (await endpoint.client()).wait_for_instances(timeout=60.0)
        yield Link(proxy, worker, runtime)
