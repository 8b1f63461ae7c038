"""`@dynamo_worker`: a function that is the program of a process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from dynbus import ConfigError
from dynbus.bus.nats.server_process import RunningServer
from dynbus.compat.runtime import DistributedRuntime, dynamo_worker, is_shutting_down

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def server(nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus of the workers."""
    monkeypatch.setenv("NATS_URL", nats_server.url)


async def test_a_worker_is_given_its_runtime_and_arguments() -> None:
    @dynamo_worker(static=True)
    async def worker(runtime: DistributedRuntime, first: int, *, second: int) -> Any:
        return runtime.runtime.is_connected, first, second

    assert await worker(1, second=2) == (True, 1, 2)


async def test_what_a_worker_raises_ends_its_program() -> None:
    @dynamo_worker()
    async def worker(runtime: DistributedRuntime) -> None:
        raise ValueError("no engine")

    with pytest.raises(ValueError, match="no engine"):
        await worker()


async def test_a_worker_that_serves_nothing_is_cancelled_at_sigterm_and_may_clean_up() -> None:
    seen: list[bool] = []

    @dynamo_worker()
    async def worker(runtime: DistributedRuntime) -> str:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(600)
            return "never"
        finally:
            await asyncio.sleep(0)
            seen.append(is_shutting_down())

    assert await worker() is None
    assert seen == [True]


async def test_a_worker_goes_on_behind_what_it_served() -> None:
    async def generate(request: Any) -> Any:
        yield request

    @dynamo_worker()
    async def worker(runtime: DistributedRuntime) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        await runtime.endpoint("worker.of.tests").serve_endpoint(generate)
        return "the end"

    assert await worker() == "the end"


async def test_a_bus_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nonsense://")

    @dynamo_worker()
    async def worker(runtime: DistributedRuntime) -> None: ...

    with pytest.raises(ConfigError, match="NATS_URL"):
        await worker()
