"""What `BatchStore` promises, in memory and over nats-server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from functools import partial

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from dynbus.bus.records.objects import ObjectStore
from dynbus.llm.batches import lines, store
from dynbus.llm.batches.records import OUTPUT, Batch, Status, StoredFile
from dynbus.llm.batches.store import FILES, RECORDS_STREAM, BatchStore
from dynbus.llm.openai.errors import BadRequest

from .conftest import Bus

pytestmark = pytest.mark.anyio


@pytest.fixture
async def batches(bus: Bus) -> BatchStore:
    return BatchStore((await bus.connect()).jetstream)


@pytest.fixture
def tenant() -> str:
    """A tenant of this test alone: the server keeps what others have stored."""
    return f"ada@{secrets.token_hex(4)}"


async def pieces(*given: bytes) -> AsyncGenerator[bytes]:
    for piece in given:
        yield piece


async def broken(data: bytes) -> AsyncGenerator[bytes]:
    yield data
    raise BadRequest("the form ends in its middle")


async def content(batches: BatchStore, file: StoredFile) -> bytes:
    return b"".join([piece async for piece in batches.content(file)])


async def parts(bus: Bus, file: str) -> int:
    """How many parts of a file the bucket has."""
    objects = ObjectStore((await bus.connect()).jetstream, FILES)
    return sum(one.name.startswith(f"{file}.") for one in await objects.list_objects())


async def uploaded(batches: BatchStore) -> int:
    """The bytes of all files that clients have sent; the server keeps those of other tests."""
    files = await batches._all("_batches.*.file.*", StoredFile)  # pyright: ignore[reportPrivateUsage]
    return sum(file.size for file in files if file.purpose != OUTPUT)


def batch(tenant: str) -> Batch:
    name = f"batch_{secrets.token_hex(8)}"
    return Batch(
        id=name,
        tenant=tenant,
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=86_401,
    )


async def test_a_file_is_there_whole_for_its_tenant_alone_until_it_is_deleted(
    bus: Bus, batches: BatchStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PART_BYTES", 1000)
    data = b"".join(b"line %d\n" % number for number in range(1000))

    file = await batches.create_file(
        tenant, "in.jsonl", pieces(data[:3000], data[3000:]), limit=len(data)
    )
    read = await content(batches, file)
    second = await batches.lines(file.id, 1)
    others = await batches.file("bob", file.id), await batches.files("bob-" + tenant)
    listed = await batches.files(tenant)
    stored = await parts(bus, file.id)
    await batches.delete_file(file)

    assert (read, file.size, sum(file.lines)) == (data, len(data), 1000)
    assert len(file.parts) == stored > 5
    assert second == data.splitlines()[file.lines[0] : file.lines[0] + file.lines[1]]
    assert others == (None, [])
    assert [one.id for one in listed] == [file.id]
    assert (await batches.file(tenant, file.id), await batches.files(tenant)) == (None, [])
    assert await parts(bus, file.id) == 0


async def test_a_file_that_does_not_come_to_its_end_leaves_nothing(
    bus: Bus, batches: BatchStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PART_BYTES", 10)
    objects = ObjectStore((await bus.connect()).jetstream, FILES)
    await batches.ensure()
    before = await objects.list_objects()

    for given, limit in ((broken(b"a line\n" * 9), 1000), (pieces(b"a line\n" * 9), 20)):
        with pytest.raises(BadRequest):
            await batches.create_file(tenant, "in.jsonl", given, limit=limit)

    assert await objects.list_objects() == before
    assert await batches.files(tenant) == []


async def test_what_is_left_of_files_whose_process_was_killed_is_dropped(
    bus: Bus, batches: BatchStore, tenant: str
) -> None:
    file = await batches.create_file(tenant, "in.jsonl", pieces(b"x"), limit=10)
    runs, ended = batch(tenant), replace(batch(tenant), status=Status.CANCELLED)
    for one in (runs, ended):
        await batches.create_batch(one)
        await batches.put_part(one.written("output"), 0, b"a line\n")
    by_hand = f"notes-{secrets.token_hex(8)}.txt"
    await ObjectStore((await bus.connect()).jetstream, FILES).put(by_hand, b"ours")
    killed = f"file-{secrets.token_hex(8)}"
    for number in range(2):
        await batches.put_part(killed, number, b"a line\n")

    await batches.drop_abandoned()
    fresh = await parts(bus, killed)
    dropped = await batches.drop_abandoned(older_than=0.0)
    kept = (file.id, runs.written("output"), by_hand.removesuffix(".txt"))
    left = [await parts(bus, one) for one in kept]
    gone = [await parts(bus, one) for one in (ended.written("output"), killed)]

    assert fresh == 2
    # The server keeps those of other tests.
    assert dropped >= 2
    assert (left, gone) == ([1, 1, 1], [0, 0])


async def test_files_of_clients_have_bounded_room_and_those_that_batches_write_have_theirs(
    batches: BatchStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = sum(one.size for one in await batches.files(tenant))
    file = await batches.create_file(tenant, "in.jsonl", pieces(b"x" * 100), limit=1000)
    written = StoredFile(
        id=f"{file.id}o",
        tenant=tenant,
        filename="out.jsonl",
        purpose=OUTPUT,
        created_at=file.created_at,
        expires_at=file.expires_at,
        parts=file.parts,
    )
    await batches.put_file(written)
    monkeypatch.setattr(store, "MAX_UPLOADED", await uploaded(batches) + 50)

    with pytest.raises(BadRequest, match="there is no room for this file") as refused:
        await batches.create_file(tenant, "in.jsonl", pieces(b"x" * 100), limit=1000)

    assert taken == 0
    assert (refused.value.status, refused.value.reason) == (413, "storage_full")


async def test_what_batches_write_has_bounded_room_of_which_tenants_have_their_parts(
    batches: BatchStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_UPLOADED", store.MAX_STORED - 100_000)
    other = f"bob-{tenant}"
    read = await batches.create_file(tenant, "in.jsonl", pieces(b"x" * 30_000), limit=30_000)
    await batches.check_room(tenant, read.size)
    runs = replace(batch(tenant), input_file_id=read.id)
    await batches.create_batch(runs)
    await batches.put_file(replace(read, id=f"{read.id}o", purpose=OUTPUT))

    with pytest.raises(store.StorageFull, match="no room for this batch"):
        await batches.check_room(tenant, read.size)
    await batches.check_room(other, read.size)
    await batches.delete_batch(runs)
    await batches.check_room(tenant, read.size)


async def test_files_that_come_at_the_same_time_share_what_room_is_left(
    bus: Bus, batches: BatchStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PART_BYTES", 10)
    monkeypatch.setattr(store, "MAX_UPLOADED", await uploaded(batches) + 1000)
    refused: list[BadRequest] = []
    stored: list[StoredFile] = []

    async def send() -> None:
        given = pieces(*[b"a line or so\n"] * 20)
        try:
            stored.append(await batches.create_file("", tenant, given, limit=1000))
        except BadRequest as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(send)
    total = sum(file.size for file in stored)
    # What was refused takes none of it.
    for file in stored:
        await batches.delete_file(file)
    await send()

    assert refused
    assert {error.reason for error in refused} == {"storage_full"}
    assert total <= 1000
    assert stored[-1].size == 260


async def test_a_tenant_has_bounded_room_for_records(
    batches: BatchStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_RECORDS", 1000)
    runs = batch(tenant)
    await batches.create_batch(runs)
    ended = [
        replace(batch(tenant), status=Status.FAILED, created_at=2 + number) for number in range(6)
    ]
    for one in ended:
        await batches.create_batch(one)
    while sum(len(msgspec.json.encode(one)) for one in await batches.files(tenant)) <= 1000:
        await batches.create_file(tenant, "in.jsonl", pieces(b""), limit=10)
    with pytest.raises(BadRequest, match="there are [0-9]+ files of yours") as refused:
        await batches.create_file(tenant, "in.jsonl", pieces(b""), limit=10)
    known = {one.id for one in await batches.batches(tenant)}
    other = await batches.create_file(f"{tenant}2", "in.jsonl", pieces(b""), limit=10)

    assert refused.value.status == 413
    assert {runs.id, ended[-1].id} < known
    assert ended[0].id not in known
    assert other.size == 0


async def test_a_file_whose_age_is_over_is_not_there(batches: BatchStore, tenant: str) -> None:
    file = await batches.create_file(tenant, "in.jsonl", pieces(b"x"), limit=10)

    await batches.put_file(
        StoredFile(
            id=file.id,
            tenant=tenant,
            filename="in.jsonl",
            purpose="batch",
            created_at=0,
            expires_at=1,
            parts=file.parts,
        )
    )

    assert (await batches.file(tenant, file.id), await batches.files(tenant)) == (None, [])


async def test_changes_of_a_batch_by_several_are_all_kept(batches: BatchStore, tenant: str) -> None:
    stored = batch(tenant)
    await batches.create_batch(stored)
    changes: list[Callable[[Batch], Batch]] = [
        lambda one: one.begun(100, 2),
        *(partial(Batch.counted, completed=count, failed=0) for count in range(1, 20)),
        lambda one: one.cancelling(3),
    ]

    async with anyio.create_task_group() as tasks:
        for change in changes:
            tasks.start_soon(batches.change_batch, tenant, stored.id, change)
    after = await batches.batch(tenant, stored.id)
    await batches.delete_batch(stored)

    assert after is not None
    assert (after.status, after.counts.completed) == (Status.CANCELLING, 19)
    assert await batches.batch("bob", stored.id) is None
    assert await batches.change_batch(tenant, stored.id, lambda one: one) is None
    assert await batches.batches(tenant) == []


@pytest.mark.parametrize("name", ["", "*", "a.b", ">", "x y", "é", "a" * 65])
async def test_what_is_no_id_is_the_id_of_nothing(
    batches: BatchStore, tenant: str, name: str
) -> None:
    await batches.ensure()

    assert (await batches.file(tenant, name), await batches.batch(tenant, name)) == (None, None)
    assert RECORDS_STREAM.limits.max_age is not None
