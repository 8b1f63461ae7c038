"""KV-cache events over a real server: whatever dies, every index ends as the engines' caches."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.bus.errors import PermissionDenied
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockStored,
    CacheDigest,
    KvEvent,
    encode_events,
)
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.event_stream import latest_epoch
from dynbus.kvrouter.stream.follower import IndexFollower

from .processes import Process

pytestmark = pytest.mark.anyio

STREAM = "DYNBUS_EVENTS_scenario"


class Engines:
    """Engine processes that end with their test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []

    async def begin(
        self, url: str, instance_id: str, *, seed: int = 1, steps: int = 1500
    ) -> Process:
        """An engine process, once it publishes."""
        log = self._folder / f"engine-{len(self._started)}.log"
        arguments = (url, instance_id, str(seed), str(steps), "0.001")
        process = Process(log, "tests.scenarios.kv_engine", *arguments)
        self._started.append(process)
        await process.says("publishing")
        return process

    def end_all(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    started = Engines(tmp_path)
    try:
        yield started
    finally:
        started.end_all()


async def truth(engine: Process) -> CacheDigest:
    """What an engine holds when it has published everything."""
    await engine.says(" .\n", 2 * PATIENCE)
    found = re.search(r"holds (\d+) (\d+) \.", engine.output)
    assert found is not None
    return CacheDigest(int(found[1]), int(found[2]))


@asynccontextmanager
async def followers(url: str, count: int = 2) -> AsyncGenerator[list[IndexFollower]]:
    """Followers, each on a connection of its own."""
    connections = [await connect([url], name=f"router {n}") for n in range(count)]
    all_of_them = [IndexFollower(each, "scenario", "Engine") for each in connections]
    try:
        for follower in all_of_them:
            await follower.__aenter__()
        yield all_of_them
    finally:
        for follower in all_of_them:
            await follower.close()
        for connection in connections:
            await connection.close()


async def agree(
    routers: list[IndexFollower], held: dict[str, CacheDigest], within: float = 2.0
) -> float:
    """Wait until every index holds what the engines do; returns the seconds that it took."""
    return await eventually(
        lambda: all(
            index_digest(router.index, Rank(instance, 0)) == digest
            for router in routers
            for instance, digest in held.items()
        ),
        within,
        what=f"{routers} agree with {held}",
    )


async def test_all_events_of_two_engines_reach_two_routers(
    own_server: RunningServer, engines: Engines
) -> None:
    async with followers(own_server.url) as routers:
        a = await engines.begin(own_server.url, "a", seed=1)
        b = await engines.begin(own_server.url, "b", seed=2)

        held = {"a": await truth(a), "b": await truth(b)}
        await agree(routers, held)

        assert [router.status().requests for router in routers] == [0, 0]
        assert all(digest.blocks > 0 for digest in held.values())
    async with followers(own_server.url, 1) as late:
        await agree(late, held)


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_publisher.py::test_while_the_server_is_away_events_wait_and_go_out_in_order",
    "tests/contracts/test_consumer_contract.py::test_a_consumer_goes_on_after_a_restart_of_the_server",
    "tests/kvrouter/stream/test_follower.py::test_a_follower_says_that_the_server_is_out_of_reach_and_heals_after_it",
)
@pytest.mark.parametrize("outage", [0.1, 1.5])
async def test_a_restart_of_the_server_in_the_middle_costs_no_event(
    own_server: RunningServer, engines: Engines, outage: float
) -> None:
    async with followers(own_server.url) as routers:
        engine = await engines.begin(own_server.url, "a", steps=3000)
        await eventually(lambda: routers[0].position.sequence > 100)
        await asyncio.to_thread(own_server.kill)
        await asyncio.sleep(outage)
        await own_server.start()

        held = await truth(engine)
        await agree(routers, {"a": held})


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_follower.py::test_an_actor_s_blocks_come_with_its_lease_and_go_with_it_but_not_with_its_connection",
)
async def test_an_engine_that_is_killed_and_comes_back_is_known_as_it_is_now(
    own_server: RunningServer, engines: Engines
) -> None:
    async with followers(own_server.url) as routers:
        first = await engines.begin(own_server.url, "a", seed=1)
        await eventually(lambda: routers[0].position.sequence > 100)
        first.kill()

        second = await engines.begin(own_server.url, "a", seed=2, steps=500)
        await agree(routers, {"a": await truth(second)})


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_publisher.py::test_a_stream_made_again_is_told_everything_with_the_next_message",
    "tests/kvrouter/stream/test_follower.py::test_a_stream_made_again_is_followed_from_its_beginning",
)
async def test_a_stream_that_is_deleted_in_the_middle_is_filled_again(
    own_server: RunningServer, engines: Engines
) -> None:
    async with followers(own_server.url) as routers:
        engine = await engines.begin(own_server.url, "a")
        await eventually(lambda: routers[0].position.sequence > 100)
        admin = await connect([own_server.url], name="admin")
        await admin.jetstream.delete_stream(STREAM)
        await admin.close()

        held = await truth(engine)
        await agree(routers, {"a": held}, within=5.0)


async def test_a_deleted_stream_is_noticed_within_two_seconds_also_when_nobody_publishes(
    own_server: RunningServer, engines: Engines
) -> None:
    async with followers(own_server.url) as routers:
        engine = await engines.begin(own_server.url, "a", steps=100)
        held = await truth(engine)
        await agree(routers, {"a": held})
        admin = await connect([own_server.url], name="admin")
        await admin.jetstream.delete_stream(STREAM)
        await admin.close()

        noticed = await eventually(
            lambda: all(router.status().recreations for router in routers), 2.5
        )
        healed = await agree(routers, {"a": held}, within=2.5)
        print(f"noticed after {noticed:.2f} s, agreed {healed:.2f} s later")
        assert [router.status().recreations for router in routers] == [1, 1]


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_follower.py::test_what_a_purge_took_of_an_idle_instance_with_a_lease_is_asked_for_soon",
    "tests/kvrouter/stream/test_publisher.py::test_a_publish_whose_acknowledgement_is_lost_is_repeated_and_stored_once",
)
async def test_messages_that_are_purged_or_come_twice_leave_no_trace(
    own_server: RunningServer, engines: Engines
) -> None:
    admin = await connect([own_server.url], name="admin")
    engine = await engines.begin(own_server.url, "a")
    await engine.says("holds")
    await admin.jetstream.purge(STREAM)
    more = await engines.begin(own_server.url, "b", seed=3, steps=200)
    await more.says("holds")
    last = await admin.jetstream.last(STREAM, "scenario.Engine._kv.b.0")
    assert last is not None
    for _ in range(3):
        await admin.jetstream.publish(last.subject, last.data)

    async with followers(own_server.url) as routers:
        await agree(routers, {"b": await truth(more)})
        # Of `a` the stream holds nothing any longer, until its next digest comes.
        await agree(routers, {"a": await truth(engine)}, within=15.0)
    await admin.close()


def users() -> str:
    allowed = ["_R.>", "$JS.API.>", "$JS.FC.>", "scenario.Engine._kv.x.>"]
    listed = ", ".join(f'"{subject}"' for subject in allowed)
    return (
        'authorization { users = [ { user: "x", password: "s", permissions: { '
        f'publish: {{ allow: [{listed}] }}, subscribe: {{ allow: [">"] }} }} }}, '
        '{ user: "admin", password: "s" } ] }'
    )


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server whose user `x` may publish for the instance `x` alone."""
    server = await run_server(store_dir=tmp_path / "nats-server", config=users())
    try:
        yield server
    finally:
        await server.stop()


async def forge(
    connection: NatsConnection, subject: str, *, dp_rank: int = 0, event_epoch: int | None = None
) -> None:
    """Say that an instance holds nothing but one block, in an epoch above all others."""
    events: list[KvEvent] = [AllBlocksCleared(), BlockStored(None, [666], [666])]
    epoch = latest_epoch(time.time() - 60.0) if event_epoch is None else event_epoch
    data = encode_events(events, event_epoch=epoch, first_id=0, dp_rank=dp_rank)
    await connection.jetstream.publish(subject, data, timeout=PATIENCE)


async def test_an_instance_can_only_speak_for_itself(
    guarded: RunningServer, engines: Engines
) -> None:
    url = f"nats://admin:s@127.0.0.1:{guarded.port}"
    async with followers(url, 1) as [router]:
        engine = await engines.begin(url, "a", steps=200)
        held = await truth(engine)
        forger = await connect(
            [f"nats://x:s@127.0.0.1:{guarded.port}"], name="forger", inbox="_R.x.1"
        )

        with pytest.raises(PermissionDenied):
            await forge(forger, "scenario.Engine._kv.a.0")
        with pytest.raises(PermissionDenied):
            await forge(forger, "scenario.Engine._kv_resync.a.0")
        await forge(forger, "scenario.Engine._kv.x.0", dp_rank=7)
        await forge(forger, "scenario.Engine._kv.x.0", event_epoch=(1 << 63) - 1)
        await forge(forger, "scenario.Engine._kv.x.0")

        await eventually(lambda: router.lookup([666]) == {"x": 1})
        await agree([router], {"a": held})
        assert router.status().refused == 2
        await forger.close()
