"""The grants for events, snapshots, transfers and resumable streams are enough for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.conditions import eventually
from tests.transfer.kv_blocks import small_layout

from dynbus import Runtime
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_replies,
)
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.protocol.names import ComponentName
from dynbus.kvrouter import BlockStored, KvEventPublisher, event_grants, routing_grants
from dynbus.kvrouter.stream import IndexFollower, SnapshotStore
from dynbus.kvrouter.stream.election import Election
from dynbus.kvrouter.stream.snapshots import Coverage
from dynbus.llm.resumable.store import StreamStore, stream_grants
from dynbus.transfer.descriptors import AgentDescription
from dynbus.transfer.exchange import MAX_RECORD_BYTES, announced, look_up, transfer_grants
from dynbus.transfer.layout import Region

from .permissions import entry
from .stream_maker import OPERATOR, make_streams

pytestmark = pytest.mark.anyio

ENGINE = ComponentName("demo", "Engine")
CALLING = [finds_instances(), calls_all("demo"), hears_cancels("demo")]


@asynccontextmanager
async def guarded(
    folder: Path, rows: Sequence[Grant], more: Sequence[Grant] = ()
) -> AsyncGenerator[tuple[RunningServer, Bus]]:
    """A server with streams and one user, who connects and hears its replies.

    Args:
        rows: its grants, as packages above the kernel give them.
        more: other grants that it has.
    """
    user = entry("p", [hears_replies("p"), *more, *rows])
    config = f"authorization {{ users = [\n{OPERATOR}\n{user}\n] }}"
    server = await run_server(store_dir=folder / "nats-server", config=config)
    try:
        await make_streams(server, "demo")
        url = f"nats://p:secret@127.0.0.1:{server.port}"
        bus = await Bus.connect(BusConfig(servers=(url,), principal="p"))
        try:
            yield server, bus
        finally:
            await bus.close()
        log = server.log.read_text()
        assert "iolation" not in log, log[-2000:]
    finally:
        await server.stop()


async def test_an_instance_publishes_its_events_with_its_grants(tmp_path: Path) -> None:
    async with guarded(tmp_path, event_grants(ENGINE)) as (_, bus):
        publisher = KvEventPublisher(bus.data, "demo", "Engine", "one", background=bus.background)
        async with publisher:
            publisher.publish([BlockStored(None, [1, 2], [1, 2])])
            await publisher.flush()


async def test_a_router_follows_and_takes_snapshots_with_its_grants(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path, routing_grants(["demo"]), CALLING) as (_, bus):
        jetstream = bus.data.jetstream
        store = SnapshotStore(jetstream, "demo")
        async with AsyncExitStack() as exits:
            follower = IndexFollower(bus.data, "demo", "Engine", background=bus.background)
            await exits.enter_async_context(follower)
            election = Election(jetstream, "demo", "Engine", "one")
            await exits.enter_async_context(election)
            await eventually(lambda: election.is_elected)
            coverage = Coverage(sequence=1, created=1.0)
            await store.write("Engine", coverage, b"nothing", blocks=0, instances=0)

            assert [one.coverage for one in await store.snapshots("Engine")] == [coverage]


@pytest.mark.parametrize("size", [10, MAX_RECORD_BYTES])
async def test_an_agent_is_announced_and_found_with_its_grants(tmp_path: Path, size: int) -> None:
    async with guarded(tmp_path, transfer_grants("demo.Engine.*")) as (_, bus):
        description = AgentDescription(
            "demo.Engine.1", "e", small_layout(), (Region(2**20, 2**20),) * 2, bytes(size)
        )
        async with announced(bus, bus.background, description):
            found = await look_up(bus, "demo.Engine.1", "e", seconds=10.0)

    assert found == description


async def test_a_front_end_keeps_resumable_streams_with_its_grants(tmp_path: Path) -> None:
    async with guarded(tmp_path, stream_grants(), CALLING) as (server, _):
        url = f"nats://p:secret@127.0.0.1:{server.port}"
        async with Runtime.connect(url, principal="p") as runtime:
            store = StreamStore(runtime, lambda _: False)
            await store.make_ready()
            store.close()
