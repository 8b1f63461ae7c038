"""Object stores under faults; what works without any is in `contracts`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.bus.clock import JumpingLoop, monotonic, run
from dynbus.bus.errors import Unavailable
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.records.objects import NoObject, ObjectBucket, ObjectStore, record_subject
from dynbus.bus.transport import Message

pytestmark = pytest.mark.anyio

CHUNK = 100
RECORD = record_subject("b", "o")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    needs_server = "nats_server" in request.fixturenames
    return ("asyncio", {} if needs_server else {"loop_factory": JumpingLoop})


async def opened(bus: MemoryBus) -> tuple[MemoryConnection, ObjectStore]:
    connection = await bus.connect()
    store = ObjectStore(connection.jetstream, ObjectBucket("b"), chunk_size=CHUNK)
    await store.ensure()
    return connection, store


def held(bus: MemoryBus) -> int:
    return bus.jetstream.streams["OBJ_b"].info(0.0).messages


async def test_a_chunk_whose_acknowledgement_is_lost_is_stored_once() -> None:
    bus = MemoryBus()
    connection, store = await opened(bus)

    with bus.drop(f"{connection.inbox}.>", 2):
        await store.put("o", bytes(3 * CHUNK))

    assert (await store.get("o")).data == bytes(3 * CHUNK)
    assert held(bus) == 4


async def test_a_record_whose_acknowledgement_is_lost_replaces_the_old_one_once() -> None:
    bus = MemoryBus()
    connection, store = await opened(bus)
    await store.put("o", bytes(3 * CHUNK))

    def acknowledges_the_record(_: Message) -> bool:
        last = bus.jetstream.streams["OBJ_b"].last(RECORD)
        return last is not None and last.sequence == 5

    with bus.drop(f"{connection.inbox}.>", 1, when=acknowledges_the_record) as lost:
        put = await store.put("o", b"")

    assert (lost.hits, put.revision) == (1, 5)
    assert (await store.get("o")).data == b""
    assert held(bus) == 1


async def test_the_old_object_stays_while_the_server_is_away() -> None:
    bus = MemoryBus()
    connection, store = await opened(bus)
    await store.put("o", b"old")
    started = monotonic()

    connection.disconnect()
    with pytest.raises(Unavailable):
        await store.put("o", b"new", timeout=20.0)
    waited = monotonic() - started
    connection.reconnect()

    assert waited <= 20.0 + 5.0 + 1.0
    assert (await store.get("o")).data == b"old"


async def test_every_wait_is_bounded_while_the_server_is_away() -> None:
    bus = MemoryBus()
    connection, store = await opened(bus)
    connection.disconnect()

    for attempt in (
        store.get("o", timeout=3.0),
        store.info("o", timeout=3.0),
        store.delete("o", timeout=3.0),
        store.list_objects(timeout=3.0),
        store.drop_abandoned(timeout=3.0),
    ):
        started = monotonic()
        with pytest.raises(Unavailable):
            await attempt
        assert monotonic() - started == pytest.approx(3.0, abs=0.5)


async def test_a_reader_whose_object_is_replaced_under_it_gets_the_new_one() -> None:
    bus = MemoryBus()
    _, store = await opened(bus)
    _, other = await opened(bus)
    await store.put("o", bytes(3 * CHUNK))

    bus.delay("$JS.API.CONSUMER.>", 2.0)
    reading = asyncio.create_task(store.get("o"))
    await asyncio.sleep(1.0)
    await other.put("o", b"new")

    assert (await reading).data == b"new"


async def test_a_reader_whose_object_is_deleted_under_it_is_told_so() -> None:
    bus = MemoryBus()
    _, store = await opened(bus)
    _, other = await opened(bus)
    await store.put("o", bytes(3 * CHUNK))

    bus.delay("$JS.API.CONSUMER.>", 2.0)
    reading = asyncio.create_task(store.get("o"))
    await asyncio.sleep(1.0)
    await other.delete("o")

    with pytest.raises(NoObject):
        await reading


async def test_chunks_that_cannot_be_dropped_are_dropped_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MemoryBus()
    _, store = await opened(bus)
    await store.put("o", bytes(3 * CHUNK))

    with bus.drop("$JS.API.STREAM.PURGE.>"):
        await store.put("o", bytes(CHUNK))
    left_over = held(bus)
    await asyncio.sleep(3600.0)
    dropped = await store.drop_abandoned()

    assert "stay until drop_abandoned()" in caplog.text
    assert (left_over, dropped, held(bus)) == (5, 1, 2)
    assert (await store.get("o")).data == bytes(CHUNK)


@pytest.mark.parametrize("max_payload", [4096, 65536])
async def test_chunks_fit_the_messages_of_a_server_that_takes_only_small_ones(
    max_payload: int,
) -> None:
    connection = await MemoryBus(max_payload=max_payload).connect()
    store = ObjectStore(connection.jetstream, ObjectBucket("b"))
    await store.ensure()
    data = secrets.token_bytes(200_000)

    put = await store.put("o", data)

    assert (await store.get("o")).data == data
    assert put.chunks <= len(data) // (max_payload - 1024) + 1


@pytest.mark.parametrize("asked_again", [False, True])
async def test_a_put_that_is_cancelled_before_its_record_is_sent_leaves_nothing(
    asked_again: bool,
) -> None:
    bus = MemoryBus()
    _, store = await opened(bus)
    await store.put("o", b"old")

    with bus.delay("$JS.API.DIRECT.GET.>", 1.0), bus.delay("$JS.API.STREAM.MSG.GET.>", 1.0):
        putting = asyncio.create_task(store.put("o", bytes(3 * CHUNK)))
        await asyncio.sleep(0.5)
        putting.cancel()
        if asked_again:
            await asyncio.sleep(0)
            putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting

    assert held(bus) == 2
    assert (await store.get("o")).data == b"old"


@pytest.mark.parametrize("slow", ["$O.b.M.>", "{inbox}.>"])
async def test_a_put_that_is_cancelled_while_its_record_is_sent_leaves_one_whole_object(
    slow: str,
) -> None:
    bus = MemoryBus()
    connection, store = await opened(bus)
    await store.put("o", b"old")

    putting = asyncio.create_task(store.put("o", bytes(3 * CHUNK)))
    with bus.delay(slow.format(inbox=connection.inbox), 1.0):
        await asyncio.sleep(0.5 if "$O" in slow else 3.5)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
    await asyncio.sleep(5.0)

    info = await store.info("o")
    assert held(bus) == info.chunks + 1
    assert (await store.get("o")).data in (b"old", bytes(3 * CHUNK))


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_whatever_is_lost_a_reader_never_gets_a_torn_object(seed: int) -> None:
    chance = random.Random(seed)

    def unlucky(message: Message) -> bool:
        return chance.random() < 0.1

    async def write(store: ObjectStore, letter: bytes) -> None:
        for _ in range(4):
            size = chance.randrange(6 * CHUNK)
            with contextlib.suppress(Unavailable):
                if chance.random() < 0.2:
                    await store.delete("o", timeout=30.0)
                await store.put("o", letter * size, headers={"Of": letter.decode()}, timeout=30.0)

    async def read(store: ObjectStore) -> None:
        for _ in range(20):
            await asyncio.sleep(chance.random())
            try:
                found = await store.get("o", timeout=30.0)
            except (NoObject, Unavailable):
                continue
            assert found.data == found.info.headers["Of"].encode() * found.info.size

    async def disturb(connections: list[MemoryConnection]) -> None:
        for _ in range(10):
            await asyncio.sleep(2 * chance.random())
            connection = chance.choice(connections)
            connection.disconnect()
            await asyncio.sleep(chance.random())
            connection.reconnect()

    async def story() -> None:
        bus = MemoryBus(seed=seed)
        opened_all = [await opened(bus) for _ in range(3)]
        with bus.drop(">", when=unlucky), bus.delay("$O.b.M.>", 0.3):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write(opened_all[0][1], b"x"))
                tasks.create_task(write(opened_all[1][1], b"y"))
                tasks.create_task(read(opened_all[2][1]))
                tasks.create_task(disturb([connection for connection, _ in opened_all]))
        store = opened_all[0][1]
        await asyncio.sleep(3600.0)
        await store.drop_abandoned()
        infos = await store.list_objects()
        for info in infos:
            assert (await store.get("o")).info == info
        assert held(bus) == sum(info.chunks for info in infos) + min(1, held_records(bus))

    run(story())


def held_records(bus: MemoryBus) -> int:
    return len(bus.jetstream.streams["OBJ_b"].after(1, RECORD))


async def test_objects_are_those_of_other_nats_clients(nats_server: RunningServer) -> None:
    nats: Any = importlib.import_module("nats")  # its annotations do not satisfy strict checks
    bucket = f"b{secrets.token_hex(6)}"
    connection = await connect([nats_server.url])
    client = await nats.connect(nats_server.url)
    store = ObjectStore(connection.jetstream, ObjectBucket(bucket, in_memory=True))
    await store.ensure()
    theirs = await client.jetstream().object_store(bucket)
    data = secrets.token_bytes(300_000)

    await store.put("ours", data, headers={"Key": "value"})
    await theirs.put("theirs", data)
    read_by_them = await theirs.get("ours")
    read_by_us = await store.get("theirs")
    await theirs.delete("theirs")
    left = [info.name for info in await store.list_objects()]
    await connection.jetstream.delete_stream(f"OBJ_{bucket}")
    await client.close()
    await connection.close()

    assert (read_by_them.data, read_by_us.data) == (data, data)
    assert read_by_them.info.size == 300_000
    assert left == ["ours"]
