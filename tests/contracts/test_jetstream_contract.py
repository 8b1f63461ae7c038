"""What every `JetStream` promises, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.conditions import eventually

from dynbus.bus.clock import unix_time
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import (
    Connection,
    NoRollup,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
)

from .conftest import Bus, Received, settled

pytestmark = pytest.mark.anyio

ONE_EACH = StreamLimits(max_messages_per_subject=1)


async def last_when(
    connection: Connection, stream: str, subject: str, *, marker: bool | None
) -> StoredMessage | None:
    """The last message once it is a marker, or is none (`marker=None`), within 15 s."""
    async with asyncio.timeout(60):
        while True:
            found = await connection.jetstream.last(stream, subject)
            if (None if found is None else found.is_marker) == marker:
                return found
            await asyncio.sleep(0.05)


async def stored_data(connection: Connection, stream: str, count: int) -> list[bytes]:
    """The data of all messages of a stream, which are `count`."""
    received = Received()
    consumer = await connection.jetstream.consume(stream, received)
    await received.wait(count)
    await settled(connection)
    await consumer.stop()
    return [message.data for message in received]


async def test_publish_returns_the_sequence_and_last_the_message(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream

    first = await js.publish(f"{stream}.a", b"1", headers={"Key": "value"})
    second = await js.publish(f"{stream}.b", b"2")
    last = await js.last(stream, f"{stream}.a")

    assert (first, second) == (1, 2)
    assert last is not None
    assert (last.subject, last.sequence, last.data) == (f"{stream}.a", 1, b"1")
    assert last.headers["Key"] == "value"
    assert abs(last.time - unix_time()) < 60
    assert not last.is_marker


async def test_last_is_none_for_a_subject_without_messages(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream

    assert await js.last(stream, f"{stream}.a") is None


async def test_the_last_messages_of_several_subjects_are_read_in_one_question(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for subject, data in (("a.x", b"1"), ("b.x", b"2"), ("a.x", b"3"), ("a.y", b"4"), ("c", b"5")):
        await js.publish(f"{stream}.{subject}", data)

    some = await js.read_last(stream, [f"{stream}.a.>", f"{stream}.b.x", f"{stream}.none.>"])
    nothing = await js.read_last(stream, [f"{stream}.none"])
    with pytest.raises(NoStream):
        await js.read_last("missing", ["missing.a"])

    assert [(one.sequence, one.data) for one in some] == [(2, b"2"), (3, b"3"), (4, b"4")]
    assert nothing == []


async def test_the_last_message_of_one_subject_is_read_at_a_subject_that_names_it(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"1")
    await js.publish(f"{stream}.a", b"2", headers={"Key": "value"})

    one = await js.read_one(stream, f"{stream}.a")
    none = await js.read_one(stream, f"{stream}.b")
    with pytest.raises(NoStream):
        await js.read_one("missing", "missing.a")

    assert one is not None
    assert (one.subject, one.sequence, one.data) == (f"{stream}.a", 2, b"2")
    assert one.headers == {"Key": "value"}
    assert none is None


async def test_publish_to_a_subject_of_no_stream_says_so_at_once(bus: Bus, subject: str) -> None:
    js = (await bus.connect()).jetstream
    started = time.monotonic()

    with pytest.raises(NoStream):
        await js.publish(subject, b"", timeout=600.0)

    assert time.monotonic() - started < 60


async def test_last_and_consume_of_a_missing_stream_say_so(bus: Bus) -> None:
    js = (await bus.connect()).jetstream

    with pytest.raises(NoStream):
        await js.stream_info("missing")
    with pytest.raises(NoStream):
        await js.last("missing", "missing.a")
    with pytest.raises(NoStream):
        await js.consume("missing", Received())


async def test_an_existing_stream_is_left_as_it_is(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(max_messages=5))
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"kept")

    await js.ensure_stream(StreamConfig(stream, (f"{stream}.>",), in_memory=True))

    assert await js.last(stream, f"{stream}.a") is not None


async def test_an_existing_stream_with_other_subjects_is_refused(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream

    with pytest.raises(ConfigError, match="exists with subjects"):
        await js.ensure_stream(StreamConfig(stream, (f"{stream}.other",), in_memory=True))


async def test_whether_a_stream_is_there_is_told_without_making_it(bus: Bus) -> None:
    js = (await bus.connect()).jetstream
    config = StreamConfig(f"S{random_id()[:12]}", ("looked.at.>",), in_memory=True)

    before = [await js.has_stream(config) for _ in range(2)]
    await js.ensure_stream(config)
    after = await js.has_stream(config)
    with pytest.raises(ConfigError, match=f"stream {config.name} exists with subjects"):
        await js.has_stream(config._replace(subjects=("looked.for.>",)))
    with pytest.raises(ConfigError, match=f"stream {config.name} exists with .*retention"):
        await js.ensure_stream(config._replace(work_queue=True))
    await js.delete_stream(config.name)

    assert before == [False, False]
    assert after


async def test_keys_are_spread_over_lanes_each_into_one(bus: Bus) -> None:
    js = (await bus.connect()).jetstream
    name = f"S{random_id()[:12]}"
    config = StreamConfig(name, (f"{name}.event.*", f"{name}.other.>"), lanes=16)
    await js.ensure_stream(config)
    await js.ensure_stream(config)

    for subject in ("event.c1", "event.=", "event.x", "event.c1", "other.c1"):
        await js.publish(f"{name}.{subject}", b"")

    kept = [one.subject.removeprefix(f"{name}.") for one in await js.read(name)]
    assert kept == ["event.9.c1", "event.8.=", "event.7.x", "event.9.c1", "other.c1"]
    assert (await js.stream_config(name)).lanes == 16
    with pytest.raises(ConfigError, match="exists with"):
        await js.ensure_stream(config._replace(lanes=0))
    await js.delete_stream(name)


async def test_a_stream_is_read_in_pages_from_a_sequence_on(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for number in range(12):
        await js.publish(f"{stream}.{'ab'[number % 2]}", bytes(900_000))

    pages: list[list[int]] = []
    start = 1
    while page := await js.read_page(stream, f"{stream}.a", start=start):
        pages.append([one.sequence for one in page])
        start = page[-1].sequence + 1

    together = [sequence for page in pages for sequence in page]
    assert together == [1, 3, 5, 7, 9, 11]
    assert [one.sequence for one in await js.read(stream, f"{stream}.a")] == together
    assert [one.sequence for one in await js.read_page(stream, start=11)] == [11, 12]
    await js.delete_stream(stream)
    with pytest.raises(NoStream):
        await js.read_page(stream)


async def test_a_deleted_stream_is_gone_and_deleting_it_again_is_no_error(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"")

    await js.delete_stream(stream)
    await js.delete_stream(stream)

    with pytest.raises(NoStream):
        await js.publish(f"{stream}.a", b"")


async def test_a_repeated_message_id_is_stored_once(bus: Bus) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    js = connection.jetstream

    first = await js.publish(f"{stream}.a", b"1", message_id="m")
    again = await js.publish(f"{stream}.a", b"1", message_id="m")
    other = await js.publish(f"{stream}.a", b"2", message_id="n")

    assert (first, again, other) == (1, 1, 2)
    assert await stored_data(connection, stream, 2) == [b"1", b"2"]


async def test_a_message_id_is_forgotten_after_the_window(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(duplicate_window=0.5))
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"1", message_id="m")

    repeated = await js.publish(f"{stream}.a", b"1", message_id="m")
    async with asyncio.timeout(60):
        later = 1
        while later == 1:
            await asyncio.sleep(0.1)
            later = await js.publish(f"{stream}.a", b"1", message_id="m")

    assert (repeated, later) == (1, 2)


async def test_an_expected_sequence_that_holds_is_stored(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream

    created = await js.publish(f"{stream}.a", b"1", expected_last_subject_sequence=0)
    await js.publish(f"{stream}.b", b"")
    updated = await js.publish(f"{stream}.a", b"2", expected_last_subject_sequence=created)

    assert (created, updated) == (1, 3)


async def test_an_expected_sequence_may_be_that_of_another_subject(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    claim = await js.publish(f"{stream}.claim", b"")

    await js.publish(
        f"{stream}.a",
        b"1",
        expected_last_subject_sequence=claim,
        expected_subject=f"{stream}.claim",
    )
    await js.publish(f"{stream}.claim", b"")

    for subject in ("claim", "nothing"):
        with pytest.raises(WrongLastSequence):
            await js.publish(
                f"{stream}.a",
                b"2",
                expected_last_subject_sequence=claim,
                expected_subject=f"{stream}.{subject}",
            )


@pytest.mark.parametrize("expected", [0, 7])
async def test_an_expected_sequence_that_does_not_hold_names_the_actual(
    bus: Bus, expected: int
) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    js = connection.jetstream
    await js.publish(f"{stream}.b", b"")
    await js.publish(f"{stream}.a", b"kept")

    with pytest.raises(WrongLastSequence, match="wrong last sequence: 2"):
        await js.publish(f"{stream}.a", b"", expected_last_subject_sequence=expected)

    assert await stored_data(connection, stream, 2) == [b"", b"kept"]


async def test_an_expected_sequence_is_checked_before_a_repeated_message_id(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"", message_id="m", expected_last_subject_sequence=0)

    with pytest.raises(WrongLastSequence, match="wrong last sequence: 1"):
        await js.publish(f"{stream}.a", b"", message_id="m", expected_last_subject_sequence=0)


async def test_of_two_that_create_a_key_one_succeeds(bus: Bus) -> None:
    stream = await bus.stream()
    one, two = await bus.connect(), await bus.connect()

    results = await asyncio.gather(
        *(
            connection.jetstream.publish(f"{stream}.a", b"", expected_last_subject_sequence=0)
            for connection in (one, two)
        ),
        return_exceptions=True,
    )

    assert sorted(type(result).__name__ for result in results) == ["WrongLastSequence", "int"]


async def test_a_lease_expires_into_a_marker_and_is_taken_again_at_its_sequence(bus: Bus) -> None:
    stream = await bus.stream(ONE_EACH, marker_ttl=60)
    connection = await bus.connect()
    js = connection.jetstream
    key = f"{stream}.lease"
    await js.publish(key, b"mine", ttl=1, expected_last_subject_sequence=0)

    marker = await last_when(connection, stream, key, marker=True)
    assert marker is not None
    with pytest.raises(WrongLastSequence, match=f"wrong last sequence: {marker.sequence}"):
        await js.publish(key, b"", ttl=1, expected_last_subject_sequence=0)
    again = await js.publish(key, b"again", ttl=60, expected_last_subject_sequence=marker.sequence)

    assert (marker.data, marker.headers["Nats-Marker-Reason"]) == (b"", "MaxAge")
    found = await js.last(stream, key)
    assert found is not None
    assert (found.sequence, found.data, found.is_marker) == (again, b"again", False)


async def test_a_marker_expires_and_leaves_nothing(bus: Bus) -> None:
    stream = await bus.stream(ONE_EACH, marker_ttl=1)
    connection = await bus.connect()
    js = connection.jetstream
    key = f"{stream}.lease"
    await js.publish(key, b"", ttl=1, expected_last_subject_sequence=0)

    await last_when(connection, stream, key, marker=True)
    await last_when(connection, stream, key, marker=None)

    assert await js.publish(key, b"", expected_last_subject_sequence=0) == 3


async def test_where_subjects_keep_a_history_a_message_lives_as_long_as_its_marker(
    bus: Bus,
) -> None:
    history = await bus.stream(marker_ttl=3)
    connection = await bus.connect()
    begun = unix_time()
    await connection.jetstream.publish(f"{history}.a", b"", ttl=1)

    marker = await last_when(connection, history, f"{history}.a", marker=True)

    assert marker is not None
    assert marker.time - begun >= 2.99


async def test_a_renewed_lease_does_not_expire(bus: Bus) -> None:
    stream = await bus.stream(ONE_EACH, marker_ttl=60)
    js = (await bus.connect()).jetstream
    key, other = f"{stream}.lease", f"{stream}.other"
    sequence = await js.publish(key, b"0", ttl=2)
    await js.publish(other, b"", ttl=2)

    expired = None
    async with asyncio.timeout(60):
        while expired is None or not expired.is_marker:
            sequence = await js.publish(
                key, b"1", ttl=2, rollup=True, expected_last_subject_sequence=sequence
            )
            await asyncio.sleep(0.2)
            expired = await js.last(stream, other)

    found = await js.last(stream, key)
    assert found is not None
    assert (found.sequence, found.is_marker) == (sequence, False)


async def test_a_consumer_hears_of_an_expiry(bus: Bus) -> None:
    stream = await bus.stream(ONE_EACH, marker_ttl=60)
    js = (await bus.connect()).jetstream
    received = Received()
    consumer = await js.consume(stream, received, last_per_subject=True)

    await js.publish(f"{stream}.lease", b"", ttl=1)
    await received.wait(2)

    assert [message.is_marker for message in received] == [False, True]
    await consumer.stop()


@pytest.mark.parametrize("marker_ttl", [None, 0])
async def test_a_stream_that_takes_no_rollup_refuses_one(
    bus: Bus, marker_ttl: float | None
) -> None:
    stream = await bus.stream(marker_ttl=marker_ttl)
    connection = await bus.connect()
    js = connection.jetstream
    await js.publish(f"{stream}.a", b"1")

    with pytest.raises(NoRollup, match="rollup not permitted"):
        await js.publish(f"{stream}.b", b"2", rollup=True)
    with pytest.raises(NoRollup, match="rollup not permitted"):
        await js.publish(f"{stream}.b", b"2", headers={"Nats-Rollup": "all"})

    assert await stored_data(connection, stream, 1) == [b"1"]


async def test_a_record_may_expire_without_a_marker(bus: Bus) -> None:
    stream = await bus.stream(ONE_EACH, marker_ttl=0)
    js = (await bus.connect()).jetstream

    await js.publish(f"{stream}.lease", b"", ttl=1)

    async def is_gone() -> bool:
        return await js.last(stream, f"{stream}.lease") is None

    await eventually(is_gone)
    config = await js.stream_config(stream)
    assert (config.marker_ttl, config.rollup) == (0, False)


async def test_a_rollup_drops_the_earlier_messages_of_its_subject(bus: Bus) -> None:
    stream = await bus.stream(rollup=True)
    connection = await bus.connect()
    js = connection.jetstream
    for subject, data in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        await js.publish(f"{stream}.{subject}", data)

    await js.publish(f"{stream}.a", b"4", rollup=True)

    assert await stored_data(connection, stream, 2) == [b"2", b"4"]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (StreamLimits(max_messages=3), [b"7", b"8", b"9"]),
        (StreamLimits(max_messages_per_subject=1), [b"8", b"9"]),
        (StreamLimits(max_messages_per_subject=2), [b"6", b"7", b"8", b"9"]),
    ],
)
async def test_over_a_limit_the_oldest_messages_go(
    bus: Bus, limits: StreamLimits, kept: list[bytes]
) -> None:
    stream = await bus.stream(limits)
    connection = await bus.connect()

    for number in range(10):
        await connection.jetstream.publish(f"{stream}.{number % 2}", b"%d" % number)

    assert await stored_data(connection, stream, len(kept)) == kept


async def test_over_the_byte_limit_the_oldest_messages_go(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(max_bytes=10_000))
    connection = await bus.connect()

    for number in range(20):
        await connection.jetstream.publish(f"{stream}.a", b"%02d" % number + bytes(1000))

    kept = await stored_data(connection, stream, 9)
    assert [int(data[:2]) for data in kept] == list(range(11, 20))


async def test_messages_older_than_the_maximum_age_go(bus: Bus) -> None:
    stream = await bus.stream(StreamLimits(max_age=1.0))
    connection = await bus.connect()

    await connection.jetstream.publish(f"{stream}.a", b"")
    await last_when(connection, stream, f"{stream}.a", marker=None)

    assert await connection.jetstream.publish(f"{stream}.a", b"") == 2


async def test_core_subscribers_hear_what_is_stored_and_core_messages_are_stored(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    heard = Received()
    connection.subscribe(f"{stream}.>", heard)

    await connection.jetstream.publish(f"{stream}.a", b"1")
    connection.publish(f"{stream}.a", b"2")
    await heard.wait(2)

    assert await stored_data(connection, stream, 2) == [b"1", b"2"]
