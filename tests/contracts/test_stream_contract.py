"""What every `JetStream` promises of a stream as a whole, in memory and over nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from dynbus.bus.clock import unix_time
from dynbus.bus.errors import DynbusError
from dynbus.bus.transport import (
    JetStream,
    NoStream,
    StoredMessage,
    StreamFull,
    StreamLimits,
)

from .conftest import Bus

pytestmark = pytest.mark.anyio


async def all_data(js: JetStream, stream: str) -> list[bytes]:
    """The data of all messages of a stream."""
    found: list[StoredMessage] = []
    read = asyncio.Event()
    consumer = await js.consume(stream, found.append, on_caught_up=read.set)
    async with asyncio.timeout(60):
        await read.wait()
    await consumer.stop()
    return [message.data for message in found]


async def test_a_new_stream_holds_nothing_and_knows_when_it_was_made(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream

    info = await js.stream_info(stream)

    assert info[:4] == (0, 0, 0, 0)
    assert abs(info.created - unix_time()) < 60


@pytest.mark.parametrize(("in_memory", "size"), [(True, 42 + 28), (False, 60 + 42)])
async def test_a_streams_size_is_what_the_server_counts(
    bus: Bus, in_memory: bool, size: int
) -> None:
    stream = await bus.stream(in_memory=in_memory)
    js = (await bus.connect()).jetstream
    subject = f"{stream}.a"

    await js.publish(subject, b"1234", headers={"K": "v"})
    await js.publish(subject, b"12345678")

    info = await js.stream_info(stream)
    assert (info.messages, info.first_sequence, info.last_sequence) == (2, 1, 2)
    assert info.size - 2 * (len(subject) - len("S1.a")) == size


async def test_the_last_message_of_a_subject_is_found(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"1", headers={"Key": "value"})
    await js.publish(f"{stream}.b", b"2")

    found = await js.last(stream, f"{stream}.a")
    missing = await js.last(stream, f"{stream}.c")

    assert isinstance(found, StoredMessage)
    assert (found.subject, found.sequence, found.data) == (f"{stream}.a", 1, b"1")
    assert found.headers["Key"] == "value"
    assert missing is None


async def test_a_purge_drops_the_messages_of_its_subject_and_says_how_many(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for subject in ("a.1", "b", "a.2", "b"):
        await js.publish(f"{stream}.{subject}", subject.encode())

    gone = await js.purge(stream, f"{stream}.a.*")
    again = await js.purge(stream, f"{stream}.a.*")

    assert (gone, again) == (2, 0)
    assert await all_data(js, stream) == [b"b", b"b"]
    assert (await js.stream_info(stream)).first_sequence == 2


async def test_a_purged_stream_goes_on_counting(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for _ in range(3):
        await js.publish(f"{stream}.a", b"")

    gone = await js.purge(stream)
    info = await js.stream_info(stream)
    sequence = await js.publish(f"{stream}.a", b"")

    assert gone == 3
    assert (info.messages, info.size, info.first_sequence, info.last_sequence) == (0, 0, 4, 3)
    assert sequence == 4


async def test_a_stream_made_again_is_another_one(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"")
    before = await js.stream_info(stream)

    same = await js.stream_info(stream)
    await bus.make_again(stream)
    after = await js.stream_info(stream)

    assert same._replace(now=before.now) == before
    assert after.created > before.created
    assert after.last_sequence == 0


async def test_what_is_asked_of_a_missing_stream_says_so(bus: Bus) -> None:
    js = (await bus.connect()).jetstream

    with pytest.raises(NoStream):
        await js.stream_info("missing")
    with pytest.raises(NoStream):
        await js.last("missing", "a")
    with pytest.raises(NoStream):
        await js.purge("missing")


async def outcome(
    js: JetStream,
    subject: str,
    data: bytes,
    *,
    rollup: bool = False,
    headers: Mapping[str, str] | None = None,
) -> int | str:
    """The sequence of a publish, or the code of its refusal."""
    try:
        return await js.publish(subject, data, rollup=rollup, headers=headers)
    except DynbusError as error:
        return error.code


FULL = "StreamFull"


@pytest.mark.parametrize(
    ("limits", "outcomes"),
    [
        (StreamLimits(max_messages=2), [1, 2, FULL, FULL, FULL]),
        (StreamLimits(max_messages=2, max_messages_per_subject=1), [1, 2, 3, 4, 5]),
        (StreamLimits(max_messages=3, max_messages_per_subject=2), [1, 2, 3, FULL, 4]),
        (StreamLimits(max_messages_per_subject=1), [1, 2, 3, 4, 5]),
        # A message has 69 bytes here.
        (StreamLimits(max_bytes=3 * 69), [1, 2, 3, FULL, FULL]),
        (StreamLimits(max_bytes=3 * 69 - 1), [1, 2, FULL, FULL, FULL]),
        (StreamLimits(max_bytes=100, max_messages_per_subject=1), [1, FULL, 2, FULL, 3]),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_stream_that_discards_what_is_new_refuses_it_when_full(
    bus: Bus, limits: StreamLimits, outcomes: list[int | str], in_memory: bool
) -> None:
    stream = await bus.stream(limits._replace(discard_new=True), in_memory=in_memory)
    js = (await bus.connect()).jetstream
    overhead = 16 if in_memory else 30
    data = bytes(69 - overhead - len(f"{stream}.0"))

    found = [await outcome(js, f"{stream}.{number % 2}", data) for number in range(5)]

    assert found == outcomes


async def test_a_stream_refuses_a_message_above_the_size_that_it_takes(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(max_message_size=100))
    js = (await bus.connect()).jetstream

    found = [await outcome(js, f"{stream}.a", bytes(size)) for size in (100, 101)]
    with_headers = await outcome(js, f"{stream}.a", bytes(80), headers={"Some": "header"})
    config = await js.stream_config(stream)

    assert found == [1, "PayloadTooLarge"]
    assert with_headers == "PayloadTooLarge"
    assert config.limits.max_message_size == 100


async def test_a_full_stream_takes_messages_again_once_there_is_room(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(max_messages=1, discard_new=True))
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"")

    with pytest.raises(StreamFull, match="maximum messages"):
        await js.publish(f"{stream}.b", b"", message_id="m")
    await js.purge(stream)

    assert await js.publish(f"{stream}.b", b"", message_id="m") == 2


async def test_what_a_stream_keeps_first_is_replaced_only_after_a_purge(bus: Bus) -> None:
    limits = StreamLimits(max_messages_per_subject=1, discard_new=True, keep_first=True)
    stream = await bus.stream(limits)
    js = (await bus.connect()).jetstream
    first = await js.publish(f"{stream}.a", b"first")

    for expected in (None, first):
        with pytest.raises(StreamFull, match="maximum messages per subject"):
            await js.publish(f"{stream}.a", b"", expected_last_subject_sequence=expected)
    await js.publish(f"{stream}.b", b"other")
    kept = await all_data(js, stream)
    await js.purge(stream, f"{stream}.a")
    await js.publish(f"{stream}.a", b"second")

    assert kept == [b"first", b"other"]
    assert await all_data(js, stream) == [b"other", b"second"]
    assert (await js.stream_config(stream)).limits.keep_first


async def test_a_rollup_needs_the_room_of_a_message_before_it_makes_any(bus: Bus) -> None:
    dropping = await bus.stream(StreamLimits(max_messages=2), rollup=True)
    refusing = await bus.stream(StreamLimits(max_messages=2, discard_new=True), rollup=True)
    js = (await bus.connect()).jetstream
    for stream in (dropping, refusing):
        await js.publish(f"{stream}.b", b"b")
        await js.publish(f"{stream}.a", b"a")

    outcomes = [
        await outcome(js, f"{stream}.a", b"new", rollup=True) for stream in (dropping, refusing)
    ]

    assert outcomes == [3, FULL]
    assert await all_data(js, dropping) == [b"new"]
    assert await all_data(js, refusing) == [b"b", b"a"]


async def test_what_a_stream_holds_is_read_as_it_was_stored_oldest_first(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(max_messages_per_subject=1))
    js = (await bus.connect()).jetstream
    for number, name in enumerate(("a", "b", "a", "other.c")):
        await js.publish(f"{stream}.{name}", b"%d" % number, headers={"Name": name})

    everything = await js.read(stream)
    some = await js.read(stream, f"{stream}.*")
    nothing = await js.read(stream, f"{stream}.none")

    assert [(one.sequence, one.data) for one in everything] == [(2, b"1"), (3, b"2"), (4, b"3")]
    assert [one.subject for one in some] == [f"{stream}.b", f"{stream}.a"]
    assert [dict(one.headers) for one in some] == [{"Name": "b"}, {"Name": "a"}]
    assert all(abs(one.time - unix_time()) < 60 for one in everything)
    assert nothing == []


async def test_a_stream_of_more_than_one_answer_is_read_whole(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for first in range(0, 2500, 250):
        await asyncio.gather(*(js.publish(f"{stream}.a", b"") for _ in range(first, first + 250)))

    found = await js.read(stream, timeout=20.0)

    assert [one.sequence for one in found] == list(range(1, 2501))


async def test_a_stream_that_is_not_there_cannot_be_read_nor_looked_at(bus: Bus) -> None:
    js = (await bus.connect()).jetstream

    with pytest.raises(NoStream):
        await js.read("missing")
    with pytest.raises(NoStream):
        await js.write_error("missing")


async def test_a_stream_that_is_well_has_no_write_error_and_keeps_its_messages(bus: Bus) -> None:
    stream = await bus.stream(in_memory=False)
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"")

    assert await js.write_error(stream) == ""
    assert (await js.stream_info(stream)).messages == 1
