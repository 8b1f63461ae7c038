"""What the page lists for events, snapshots, transfers and resumable streams is enough for them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.conditions import eventually
from tests.transfer.kv_blocks import small_layout

from dynbus import Runtime
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.kvrouter import BlockStored, KvEventPublisher
from dynbus.kvrouter.stream import IndexFollower, SnapshotStore
from dynbus.kvrouter.stream.election import Election
from dynbus.kvrouter.stream.snapshots import Coverage
from dynbus.llm.resumable.store import StreamStore
from dynbus.transfer.descriptors import AgentDescription
from dynbus.transfer.exchange import MAX_RECORD_BYTES, announced, look_up
from dynbus.transfer.layout import Region

from .stream_maker import OPERATOR, make_streams
from .test_model_permissions import expanded, of_table

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def between(beginning: str, end: str) -> list[str]:
    """The subjects that the page has between two texts."""
    text = PAGE.partition(beginning)[2].partition(end)[0]
    assert text, beginning
    return [one for each in re.findall(r"`([^`]+)`", text) for one in expanded(each)]


PUBLISHING = between("an instance `i` publishes", "A router publishes")
ROUTING = [
    *between("`$JS.API.STREAM.MSG.GET.DYNBUS_EVENTS_demo`. A router publishes", "The subjects of"),
    *between("takes its turn in writing them also publishes", "Without them"),
]
STREAMING = between("For resumable streams it also publishes to", ", and subscribes to")
AGENT = between("An agent `demo.Engine.1` publishes", "; it subscribes")


@asynccontextmanager
async def guarded(
    folder: Path, publish: Sequence[str], subscribe: Sequence[str]
) -> AsyncGenerator[tuple[RunningServer, Bus]]:
    """A server with streams and one user of these permissions, who connects.

    Args:
        publish, subscribe: beside replies of the own process.
    """
    subjects = json.dumps(list(publish)), json.dumps([*subscribe, "_R.p.>"])
    user = (
        f'{{ user: "p", password: "secret", permissions: {{ publish: {{ allow: {subjects[0]} }}, '
        f"subscribe: {{ allow: {subjects[1]} }} }} }}"
    )
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


async def test_an_instance_publishes_its_events_with_what_the_page_lists(tmp_path: Path) -> None:
    publish = [re.sub(r"\.i\.", ".one.", one) for one in PUBLISHING]
    async with guarded(tmp_path, publish, ["demo.Engine.>"]) as (_, bus):
        publisher = KvEventPublisher(bus.data, "demo", "Engine", "one", background=bus.background)
        async with publisher:
            publisher.publish([BlockStored(None, [1, 2], [1, 2])])
            await publisher.flush()


async def test_a_router_follows_and_takes_snapshots_with_what_the_page_lists(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path, [*ROUTING, *of_table(2)], []) as (_, bus):
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
async def test_an_agent_is_announced_and_found_with_what_the_page_lists(
    tmp_path: Path, size: int
) -> None:
    async with guarded(tmp_path, AGENT, ["demo.Engine.*._transfer.*"]) as (_, bus):
        description = AgentDescription(
            "demo.Engine.1", "e", small_layout(), (Region(2**20, 2**20),) * 2, bytes(size)
        )
        async with announced(bus, bus.background, description):
            found = await look_up(bus, "demo.Engine.1", "e", seconds=10.0)

    assert found == description


async def test_a_front_end_keeps_resumable_streams_with_what_the_page_lists(tmp_path: Path) -> None:
    async with guarded(tmp_path, [*STREAMING, *of_table(2)], ["_streams.owner.*"]) as (server, _):
        url = f"nats://p:secret@127.0.0.1:{server.port}"
        async with Runtime.connect(url, principal="p") as runtime:
            store = StreamStore(runtime, lambda _: False)
            await store.make_ready()
            store.close()
