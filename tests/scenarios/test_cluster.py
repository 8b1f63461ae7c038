"""A cluster of three servers loses one at a time: whoever was on it goes on at another."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import NoInstances, Runtime, UnknownOutcome
from dynbus.bus.commands.diagnosis import Check, diagnose
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError
from dynbus.bus.nats.connection import NatsConnection, connect_as
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.transport import StoredMessage
from dynbus.llm.commands.setting_up import needed_in, set_up
from dynbus.llm.resumable.records import Begun, StreamLog
from dynbus.llm.resumable.store import StreamStore

from .cluster import Cluster, three_servers
from .observation import leftovers
from .processes import Processes
from .workload import Count, Done, Source, payload

pytestmark = pytest.mark.anyio

ITEMS = 400
LEASE_TTL = BusConfig().lease_ttl
WORKS_WITHIN = 2.0
"""Seconds until a new client has an answer, whichever server was killed."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with JetStream, once it can store records."""
    async with three_servers(tmp_path) as running:
        yield running


async def read(source: Source) -> int:
    """Read one stream to its end, and check every byte of it."""
    count = 0
    async for item in source.count(Count(items=ITEMS, size=700, pause=0.01)):
        assert (item.index, item.text) == (count, payload(count, 700))
        count += 1
    return count


@pytest.mark.parametrize(
    "end",
    [
        "killed",
        pytest.param(
            "told to go",
            marks=pytest.mark.nightly(
                "tests/bus/nats/test_connection.py::test_a_server_that_is_going_away_is_left_for_another_before_it_goes"
            ),
        ),
    ],
)
async def test_streams_go_on_when_the_server_of_their_caller_ends(
    cluster: Cluster, processes: Processes, end: str
) -> None:
    await processes.worker(cluster.url)
    async with Runtime.connect(cluster.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(60.0)
        streams = [asyncio.create_task(read(source)) for _ in range(32)]
        await asyncio.sleep(1.0)
        left = cluster.server_of(runtime)

        if end == "killed":
            await asyncio.to_thread(left.kill)
        else:
            os.kill(left.pid, signal.SIGUSR2)  # lame duck
        counts = await asyncio.gather(*streams)
        moved_to = cluster.server_of(runtime)

        assert counts == [ITEMS] * 32
        assert moved_to is not left
        assert leftovers(runtime) == {}


@pytest.mark.nightly(
    "tests/scenarios/test_cluster.py::test_streams_go_on_when_the_server_of_their_caller_ends"
)
async def test_streams_and_calls_go_on_while_every_server_is_restarted_in_turn(
    cluster: Cluster, processes: Processes
) -> None:
    await processes.worker(cluster.url, ttl=10.0)
    async with Runtime.connect(cluster.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(60.0)
        results: list[Done | int] = []
        rolled = asyncio.Event()

        async def keep_calling() -> None:
            while not rolled.is_set():
                results.append(await source.where())
                results.append(await read(source))

        calling = [asyncio.create_task(keep_calling()) for _ in range(8)]
        for server in cluster.servers:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(1.0)
            await server.start()
            await eventually(lambda: runtime.is_connected)
            await asyncio.sleep(1.0)
        rolled.set()
        await asyncio.gather(*calling)

        assert {result for result in results if isinstance(result, int)} == {ITEMS}
        assert leftovers(runtime) == {}


async def is_whole(runtime: Runtime) -> bool:
    """Whether all three servers keep the instances bucket, and have all that is in it."""
    connection = runtime.bus.data
    assert isinstance(connection, NatsConnection)
    try:
        info = await connection.jetstream.api(
            f"STREAM.INFO.{INSTANCES_STREAM.name}", {}, timeout=2.0
        )
    except DynbusError:
        return False
    followers = info["cluster"].get("replicas") or ()
    return len(followers) == 2 and all(one["current"] for one in followers)


@pytest.mark.timeout(120)
async def test_a_bucket_that_one_server_keeps_gets_replicas_by_itself(
    cluster: Cluster, processes: Processes
) -> None:
    config = BusConfig(servers=tuple(server.url for server in cluster.servers))
    async with Runtime.connect(cluster.url) as runtime:
        jetstream = runtime.bus.data.jetstream
        await jetstream.delete_stream(INSTANCES_STREAM.name)
        await jetstream.ensure_stream(INSTANCES_STREAM._replace(replicas=1))
        before = [check for check in await diagnose(config) if "replicas" in check.name]

        await processes.worker(cluster.url)
        await eventually(lambda: is_whole(runtime), what="the bucket is whole")
        after = [check for check in await diagnose(config) if "replicas" in check.name]

    assert [check.status for check in before] == ["warn"]
    assert "--replicas 3" in before[0].remedy
    assert [check.status for check in after] == ["ok"]


@pytest.mark.timeout(120)
async def test_every_stream_and_bucket_is_kept_by_as_many_servers_as_the_setting_says(
    cluster: Cluster,
) -> None:
    needed = needed_in("demo", ["Printer.print"], ["page.printed,retain=1h"])
    servers = tuple(server.url for server in cluster.servers)
    found: list[dict[str, int]] = []
    for replicas in (1, 3):
        config = BusConfig(servers=servers, replicas=replicas)
        connection = await connect_as(config, name="operator", inbox="_INBOX.operator")
        try:
            # The fixture has made the bucket of instances.
            await connection.jetstream.delete_stream(INSTANCES_STREAM.name)
            await set_up(connection.jetstream, needed)
            found.append(
                {
                    one.stream.name: (
                        await connection.jetstream.stream_info(one.stream.name)
                    ).replicas
                    for one in needed
                }
            )
        finally:
            await connection.close()

    names = [one.stream.name for one in needed]
    assert found == [dict.fromkeys(names, 1), dict.fromkeys(names, 3)]


class OldCaller:
    """Calls now and then through a runtime that is there all the time.

    Attributes:
        unknown: calls of which nobody knows whether they were carried out.
        errors: what the others ended with.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._source = runtime.client(Source)
        self.calls = 0
        self.unknown = 0
        self.errors: list[str] = []

    async def call(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                await self._source.where()
            except UnknownOutcome:
                # Whether a request was carried out that was on its way then, nobody knows.
                self.unknown += 1
            except DynbusError as error:
                self.errors.append(repr(error))
            self.calls += 1
            await asyncio.sleep(0.02)


class NewCallers:
    """One after the other comes, calls once and leaves.

    Attributes:
        slowest: seconds by a stopwatch.
        answered: the instances that did.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.slowest = 0.0
        self.answered: set[str] = set()

    async def call(self) -> None:
        while True:
            watch = Stopwatch()
            async with Runtime.connect(self._url) as new:
                self.answered.add(await self._first_answer(new, watch))
            self.slowest = max(self.slowest, watch.seconds())
            await asyncio.sleep(0.5)

    async def _first_answer(self, new: Runtime, watch: Stopwatch) -> str:
        """The instance that answers; in two seconds it may have to be asked for again."""
        while True:
            try:
                return (await new.client(Source).where()).instance
            except NoInstances:
                if watch.seconds() >= WORKS_WITHIN:
                    raise
                await asyncio.sleep(0.05)


@pytest.mark.nightly(
    "tests/bus/nats/test_one_server.py::test_both_leave_a_server_that_falls_silent_on_either_and_are_soon_at_another",
    "tests/scenarios/test_registration.py::test_all_leases_survive_a_restart_of_the_broker_when_they_are_about_to_expire",
)
@pytest.mark.timeout(240)
async def test_old_and_new_callers_find_their_instances_whichever_server_is_killed(
    cluster: Cluster, processes: Processes
) -> None:
    workers = [await processes.worker(cluster.url, instance_id=f"w{n}") for n in range(2)]
    async with Runtime.connect(cluster.url) as runtime:
        await runtime.discovery.wait_synchronized(60.0)
        old, new, rolled = OldCaller(runtime), NewCallers(cluster.url), asyncio.Event()

        async with asyncio.TaskGroup() as calling:
            for _ in range(2):
                calling.create_task(old.call(rolled))
            for server in cluster.servers:
                await eventually(lambda: is_whole(runtime), what="the bucket is whole")
                await asyncio.to_thread(server.kill)
                coming = calling.create_task(new.call())
                # As long as the servers that are left may take to elect their leaders, and
                # longer than a record lives.
                await asyncio.sleep(LEASE_TTL + 0.5)
                coming.cancel()
                await asyncio.wait({coming})
                await server.start()
            rolled.set()
        log = "".join(worker.output for worker in workers)

    assert old.errors == []
    assert old.unknown <= 2 * len(cluster.servers)
    assert old.calls > 0
    assert new.slowest < WORKS_WITHIN
    assert new.answered == {"w0", "w1"}
    assert "[lost" not in log  # as a lease shows itself


class StoredStreams:
    """Resumable streams that a front end begins, until its host loses its power.

    Args:
        chance: draws when each is begun.

    Attributes:
        stored: the keys of those of which a client may have been told.
    """

    def __init__(self, runtime: Runtime, chance: random.Random) -> None:
        self._store = StreamStore(runtime, lambda _: True)
        self._chance = chance
        self.stored: list[str] = []

    async def begin(self, count: int, *, within: float = 1.0, size: int = 100) -> None:
        """Begin so many, at any time."""
        await eventually(self._is_ready, what="logs can be stored")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._begin(self._chance.uniform(0, within), size))

    async def _is_ready(self) -> bool:
        try:
            await self._store.make_ready()
        except DynbusError:
            return False
        return True

    async def _begin(self, delay: float, size: int) -> None:
        await asyncio.sleep(delay)
        key = f"{self._chance.getrandbits(128):032x}"
        begun = Begun(self._store.me, "/v1/completions", bytes(size), key, 1.0, 60.0, "seed")
        try:
            await self._store.append(key, StreamLog(), begun)
        except DynbusError:
            # Its client is told that it has no stream that can be resumed.
            return
        self.stored.append(key)


async def is_found(store: StreamStore, key: str) -> bool:
    """Whether another front end finds a stream; it asks again where it cannot know."""
    watch = Stopwatch()
    while True:
        log, read = StreamLog(), asyncio.Event()
        try:
            await store.make_ready()
            async with store.reading(key, partial(take, log), read.set, read.set):
                async with asyncio.timeout(10.0):
                    await read.wait()
        except (DynbusError, TimeoutError):
            watch.check(PATIENCE, f"the log {key} can be read")
            await asyncio.sleep(0.1)
            continue
        return log.begun is not None


def take(log: StreamLog, stored: StoredMessage) -> None:
    log.read(stored.data, stored.sequence, 0.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rounds", "each"), [(2, 40), pytest.param(25, 40, marks=pytest.mark.soak)]
)
async def test_a_stream_that_was_stored_is_found_whichever_server_dies_or_comes_back(
    cluster: Cluster, rounds: int, each: int
) -> None:
    chance = random.Random(rounds)
    stored = 0
    async with Runtime.connect(cluster.url) as runtime:
        # What a server fetches first that comes back with nothing.
        await StoredStreams(runtime, chance).begin(60, size=400_000)
    for place in range(rounds):
        dies = cluster.servers[place % 3]
        others = ",".join(server.url for server in cluster.servers if server is not dies)
        async with (
            Runtime.connect(f"{dies.url},{others}") as first,
            Runtime.connect(others) as other,
        ):
            streams = StoredStreams(first, chance)
            beginning = asyncio.create_task(streams.begin(each))
            await asyncio.sleep(chance.uniform(0.2, 1.2))
            await asyncio.to_thread(dies.kill)
            await beginning
            store = StreamStore(other, lambda _: False)
            half = len(streams.stored) // 2
            found = [await is_found(store, key) for key in streams.stored[:half]]
            coming_back = asyncio.create_task(dies.start())
            await asyncio.sleep(chance.uniform(0.1, 0.5))
            found += await asyncio.gather(*(is_found(store, key) for key in streams.stored[half:]))
            await coming_back
        assert all(found), f"{found.count(False)} of {len(found)} are unknown"
        stored += len(found)
    assert stored > rounds * each // 4


async def test_doctor_names_who_lacks_a_stream_and_then_that_there_is_no_leader(
    cluster: Cluster,
) -> None:
    first, second, last = cluster.servers
    config = BusConfig(servers=(last.url,))

    async def found(name: str) -> Check | None:
        return next((check for check in await diagnose(config) if check.name == name), None)

    async def is_complete() -> bool:
        check = await found("replicas of KV_dynbus_instances")
        return check is not None and check.status == "ok"

    async def is_named() -> bool:
        check = await found("replicas of KV_dynbus_instances")
        return check is not None and check.found.startswith("complete at 2 of 3 servers, and")

    async def has_no_leader() -> bool:
        check = await found("JetStream")
        return check is not None and "servers of the cluster that are away" in check.remedy

    await eventually(is_complete, what="each server has all of it")
    await asyncio.to_thread(first.kill)
    await eventually(is_named, what="the one that is away is named")
    await asyncio.to_thread(second.kill)
    await eventually(has_no_leader, what="the others are missed")
