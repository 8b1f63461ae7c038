"""What the server does not allow is said at once and as such."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import PermissionDenied, Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer, run_server

from .workload import Count, Item, Source

pytestmark = pytest.mark.anyio

USERS = """
authorization {
  users = [
    { user: "operator", password: "secret" }
    { user: "outsider", password: "secret", permissions: {
        publish: { deny: ["scenario.Source.>"] } } }
    { user: "mute", password: "secret", permissions: {
        publish: { deny: ["scenario.Source._ctl.>"] } } }
    { user: "deaf", password: "secret", permissions: {
        subscribe: { deny: ["_R.>"] } } }
    { user: "idler", password: "secret", permissions: {
        subscribe: { deny: ["scenario.>"] } } }
  ]
}
"""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server with users of different rights."""
    server = await run_server(store_dir=tmp_path / "nats-server", config=USERS)
    try:
        yield server
    finally:
        await server.stop()


async def read_all(stream: AsyncGenerator[Item, None]) -> int:
    return len([item async for item in stream])


def url_of(server: RunningServer, user: str, password: str = "secret") -> str:
    return f"nats://{user}:{password}@127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    "url", ["nats://operator:wrong@", "nats://nobody:secret@", "nats://", "operator:wrong@"]
)
async def test_wrong_credentials_are_told_at_once_and_without_the_password(
    guarded: RunningServer, url: str
) -> None:
    watch = Stopwatch()

    with pytest.raises(PermissionDenied) as raised:
        await Runtime.connect(f"{url}127.0.0.1:{guarded.port}")

    assert watch.seconds() < 2.0
    assert f"127.0.0.1:{guarded.port}" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "wrong" not in str(raised.value)


async def test_a_caller_that_may_not_publish_to_an_endpoint_is_told_so(
    guarded: RunningServer,
) -> None:
    async with (
        Runtime.connect(url_of(guarded, "operator")) as serving,
        Runtime.connect(url_of(guarded, "outsider")) as calling,
    ):
        await serving.start(Source)
        source = calling.client(Source)

        watch = Stopwatch()
        with pytest.raises(PermissionDenied) as of_unary, call_options(wait=60.0):
            await source.where()
        with pytest.raises(PermissionDenied):
            async for _ in source.count(Count(items=3)):
                pass
        took = watch.seconds()

    assert took < 2.0
    assert "scenario.Source.where" in str(of_unary.value)


async def test_a_caller_that_may_not_use_the_control_lane_is_told_so(
    guarded: RunningServer,
) -> None:
    async with (
        Runtime.connect(url_of(guarded, "operator")) as serving,
        Runtime.connect(url_of(guarded, "mute")) as calling,
    ):
        await serving.start(Source)
        source = calling.client(Source)

        with call_options(wait=60.0):
            stream = source.count(Count(items=10**9, pause=0.01))
        with pytest.raises(PermissionDenied):
            await asyncio.wait_for(read_all(stream), PATIENCE)


async def test_a_runtime_that_may_not_hear_its_replies_does_not_connect(
    guarded: RunningServer,
) -> None:
    with pytest.raises(PermissionDenied) as raised:
        await Runtime.connect(url_of(guarded, "deaf"))

    assert "_R." in str(raised.value)


async def test_an_instance_that_may_not_subscribe_does_not_start_and_is_not_announced(
    guarded: RunningServer,
) -> None:
    async with (
        Runtime.connect(url_of(guarded, "idler")) as serving,
        Runtime.connect(url_of(guarded, "operator")) as watching,
    ):
        with pytest.raises(PermissionDenied):
            await serving.start(Source, instance_id="idler")
        await watching.discovery.wait_synchronized(60.0)

        assert watching.instance_ids("scenario", "Source") == []
        assert serving.instances == {}


async def test_credentials_that_are_withdrawn_and_given_back_are_found_out_by_reconnecting(
    guarded: RunningServer,
) -> None:
    async with Runtime.connect(url_of(guarded, "operator")) as runtime:
        await runtime.start(Source)
        source = runtime.client(Source)
        with call_options(wait=60.0):
            before = await source.where()

        await guarded.stop()
        changed = USERS.replace('password: "secret" }', 'password: "changed" }')
        async with RunningServer(guarded.port, store_dir=guarded.store_dir, config=changed):
            await asyncio.sleep(0.5)
            refused_while_withdrawn = not runtime.is_connected
        await guarded.start()
        await eventually(lambda: runtime.is_connected)
        after = await source.where()

    assert refused_while_withdrawn
    assert after.instance == before.instance
