"""What an `ObjectStore` promises, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from base64 import urlsafe_b64encode

import pytest

from dynbus.bus.clock import unix_time
from dynbus.bus.errors import ConfigError
from dynbus.bus.records.objects import (
    NoObject,
    ObjectBucket,
    ObjectDamaged,
    ObjectStore,
)
from dynbus.bus.transport import Connection, NoStream, StreamFull

from .conftest import Bus

pytestmark = pytest.mark.anyio

CHUNK = 1000


@pytest.fixture
def bucket() -> str:
    return f"b{secrets.token_hex(6)}"


async def opened(
    connection: Connection, bucket: str, *, max_bytes: int | None = None
) -> ObjectStore:
    config = ObjectBucket(bucket, max_bytes=max_bytes, in_memory=True)
    store = ObjectStore(connection.jetstream, config, chunk_size=CHUNK)
    await store.ensure()
    return store


async def held_at_least(connection: Connection, bucket: str, count: int) -> None:
    """Wait until a bucket holds that many messages."""
    async with asyncio.timeout(60):
        while await held(connection, bucket) < count:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)


async def held(connection: Connection, bucket: str) -> int:
    """How many messages a bucket holds, chunks and records."""
    return (await connection.jetstream.stream_info(f"OBJ_{bucket}")).messages


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK])
async def test_an_object_is_read_as_it_was_put(bus: Bus, bucket: str, size: int) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    data = secrets.token_bytes(size)

    put = await store.put("a/name with ünicode", data, headers={"Covers": "7"})
    found = await store.get("a/name with ünicode")
    info = await store.info("a/name with ünicode")

    assert found.data == data
    assert found.info == info
    assert (info.name, info.size, info.headers) == ("a/name with ünicode", size, {"Covers": "7"})
    assert info.digest == "SHA-256=" + urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    assert info.chunks == -(-size // CHUNK)
    assert abs(info.modified - unix_time()) < 60
    assert put.revision == info.revision


async def test_an_object_is_replaced_and_the_old_chunks_go(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)

    first = await store.put("o", bytes(5 * CHUNK), headers={"Old": "yes"})
    second = await store.put("o", b"new")
    found = await store.get("o")

    assert (found.data, found.info.headers) == (b"new", {})
    assert second.revision > first.revision
    assert await held(connection, bucket) == 2


async def test_a_deleted_object_is_gone_with_its_chunks(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    await store.put("o", bytes(3 * CHUNK))

    await store.delete("o")
    await store.delete("o")
    await store.delete("never there")

    with pytest.raises(NoObject, match="no object o"):
        await store.get("o")
    with pytest.raises(NoObject):
        await store.info("o")
    assert await store.list_objects() == []
    assert await held(connection, bucket) == 1


async def test_a_deleted_object_can_be_put_again(bus: Bus, bucket: str) -> None:
    store = await opened(await bus.connect(), bucket)
    await store.put("o", b"1")
    await store.delete("o")

    await store.put("o", b"2")

    assert (await store.get("o")).data == b"2"


async def test_the_list_has_every_object_by_name(bus: Bus, bucket: str) -> None:
    store = await opened(await bus.connect(), bucket)
    empty = await store.list_objects()

    for name in ("b", "a", "c", "b"):
        await store.put(name, name.encode() * 2000)
    await store.delete("c")
    found = await store.list_objects()

    assert empty == []
    assert [(info.name, info.size) for info in found] == [("a", 2000), ("b", 2000)]


async def test_an_object_without_name_and_a_bucket_with_a_bad_one_are_refused(
    bus: Bus, bucket: str
) -> None:
    store = await opened(await bus.connect(), bucket)

    with pytest.raises(ConfigError, match="needs a name"):
        await store.put("", b"")
    with pytest.raises(ConfigError, match="object bucket"):
        _ = ObjectBucket("not.a.name").stream


async def test_a_missing_bucket_says_so(bus: Bus, bucket: str) -> None:
    store = ObjectStore((await bus.connect()).jetstream, ObjectBucket(bucket))

    with pytest.raises(NoStream):
        await store.get("o")
    with pytest.raises(NoStream):
        await store.list_objects()


async def test_an_object_whose_chunk_was_changed_is_never_returned(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    await store.put("o", bytes(2 * CHUNK))
    js = connection.jetstream
    chunk = await js.last(f"OBJ_{bucket}", f"$O.{bucket}.C.*")
    assert chunk is not None

    await js.purge(f"OBJ_{bucket}", chunk.subject)
    await js.publish(chunk.subject, bytes(CHUNK))
    await js.publish(chunk.subject, b"\1" + bytes(CHUNK - 1))

    with pytest.raises(ObjectDamaged, match="is damaged"):
        await store.get("o")


async def test_an_object_whose_chunks_are_gone_is_said_to_be_damaged(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    await store.put("o", bytes(3 * CHUNK))
    chunk = await connection.jetstream.last(f"OBJ_{bucket}", f"$O.{bucket}.C.*")
    assert chunk is not None

    await connection.jetstream.purge(f"OBJ_{bucket}", chunk.subject)

    with pytest.raises(ObjectDamaged, match="0 of 3000 bytes"):
        await store.get("o")


async def test_an_object_that_does_not_fit_leaves_the_old_one_and_nothing_else(
    bus: Bus, bucket: str
) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket, max_bytes=8 * CHUNK)
    await store.put("o", bytes(4 * CHUNK))
    before = await held(connection, bucket)

    with pytest.raises(StreamFull):
        await store.put("o", bytes(7 * CHUNK))

    assert (await store.get("o")).data == bytes(4 * CHUNK)
    assert await held(connection, bucket) == before


async def test_a_cancelled_put_leaves_the_old_object_and_no_chunks(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    await store.put("o", b"old")
    before = await held(connection, bucket)

    putting = asyncio.create_task(store.put("o", bytes(5000 * CHUNK)))
    await held_at_least(connection, bucket, before + 3)
    putting.cancel()
    await asyncio.wait([putting])

    assert putting.cancelled()
    assert (await store.get("o")).data == b"old"
    assert await held(connection, bucket) == before


async def test_a_half_written_object_is_not_visible(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)

    await connection.jetstream.publish(f"$O.{bucket}.C.half", bytes(CHUNK))

    assert await store.list_objects() == []
    with pytest.raises(NoObject):
        await store.get("half")


async def test_the_chunks_of_a_put_that_died_are_dropped_in_time(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    await store.put("o", bytes(3 * CHUNK))
    before = await held(connection, bucket)
    for _ in range(4):
        await connection.jetstream.publish(f"$O.{bucket}.C.died", bytes(CHUNK))

    young = await store.drop_abandoned()
    old = await store.drop_abandoned(older_than=-60.0)

    assert (young, old) == (0, 1)
    assert await held(connection, bucket) == before
    assert (await store.get("o")).data == bytes(3 * CHUNK)


async def test_of_many_that_put_one_name_each_reader_gets_a_whole_one(
    bus: Bus, bucket: str
) -> None:
    connections = [await bus.connect() for _ in range(4)]
    stores = [await opened(connection, bucket) for connection in connections]
    await stores[0].put("o", bytes(5 * CHUNK))
    wholes = {bytes([number]) * (5 * CHUNK) for number in range(10)}

    async def write(store: ObjectStore, numbers: range) -> None:
        for number in numbers:
            await store.put("o", bytes([number]) * (5 * CHUNK))

    async def read() -> list[bytes]:
        return [(await stores[3].get("o")).data for _ in range(20)]

    *_, read_data = await asyncio.gather(
        write(stores[0], range(1, 4)),
        write(stores[1], range(4, 7)),
        write(stores[2], range(7, 10)),
        read(),
    )

    assert set(read_data) <= wholes
    assert await held(connections[0], bucket) == 6


async def test_an_object_is_put_through_a_restart_of_the_server(own_bus: Bus, bucket: str) -> None:
    connection = await own_bus.connect()
    store = ObjectStore(connection.jetstream, ObjectBucket(bucket), chunk_size=CHUNK)
    await store.ensure()
    data = secrets.token_bytes(300 * CHUNK)

    putting = asyncio.create_task(store.put("o", data))
    await held_at_least(connection, bucket, 20)
    await own_bus.restart_server()
    put = await putting

    found = await store.get("o")
    assert found.data == data
    assert found.info.revision == put.revision
    assert await held(connection, bucket) == 301


async def test_a_deleted_object_may_be_forgotten(bus: Bus, bucket: str) -> None:
    connection = await bus.connect()
    store = await opened(connection, bucket)
    for name in ("kept", "forgotten"):
        await store.put(name, b"abc")
        await store.delete(name, forget=name == "forgotten")
    await store.delete("kept", forget=True)
    await store.delete("never", forget=True)

    assert await held(connection, bucket) == 0
    assert await store.list_objects() == []
