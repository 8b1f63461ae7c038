"""An instance's record lives for as long as its keeper, whatever becomes of its bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from statistics import stdev
from typing import TypeVar

import msgspec
import pytest
from tests.conditions import eventually

from dynbus.bus.background import Background
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_records import (
    INSTANCES_STREAM,
    RENEWALS_PER_COUNT,
    LeaseKeeper,
    ensure_bucket,
    record_subject,
)
from dynbus.bus.records.leased_record import LeaseState
from dynbus.bus.transport import ConnectionState, JetStream, StoredMessage, StreamConfig
from dynbus.testing import run

T = TypeVar("T")

RECORD = InstanceRecord(
    namespace="demo",
    component="Splitter",
    instance_id="a1",
    incarnation="mine",
    endpoints={"split": "stream"},
    started=1.0,
)
SUBJECT = "$KV.dynbus_instances.demo.Splitter.a1"


async def on_lane(story: Callable[[Background], Awaitable[T]]) -> T:
    """Tell a story in which keepers work; none may fail."""
    failures: list[BaseException] = []
    async with Background("test lane", failures.append) as lane:
        result = await story(lane)
    assert not failures
    return result


def test_a_record_is_stored_under_the_instance_s_three_names() -> None:
    assert record_subject("demo", "Splitter", "a1") == SUBJECT


def test_the_bucket_keeps_one_record_per_instance_and_markers_of_expired_ones() -> None:
    assert INSTANCES_STREAM.name == "KV_dynbus_instances"
    assert INSTANCES_STREAM.subjects == ("$KV.dynbus_instances.>",)
    assert INSTANCES_STREAM.limits.max_messages_per_subject == 1
    assert INSTANCES_STREAM.marker_ttl == 120.0


def test_keepers_tell_how_many_records_there_are_at_first_and_then_now_and_then() -> None:
    async def story(lane: Background) -> tuple[list[int], list[int]]:
        jetstream = (await MemoryBus().connect()).jetstream
        counts: list[int] = []
        keepers = [
            LeaseKeeper(
                jetstream,
                lane,
                msgspec.structs.replace(RECORD, instance_id=f"a{number}"),
                9.0,
                on_count=counts.append,
            )
            for number in range(3)
        ]
        for keeper in keepers:
            await keeper.announce()
        at_first = list(counts)
        await asyncio.sleep(3.0 * RENEWALS_PER_COUNT + 1.0)
        for keeper in keepers:
            await keeper.withdraw()
        return at_first, counts[len(at_first) :]

    assert run(on_lane(story)) == ([1, 2, 3], [3, 3, 3])


def test_instances_that_begin_together_do_not_renew_their_records_together_ever_after() -> None:
    async def story(lane: Background) -> list[float]:
        jetstream = (await MemoryBus().connect()).jetstream
        written: dict[str, list[float]] = {}
        keepers: list[LeaseKeeper] = []
        for number in range(60):
            name = f"a{number}"
            times = written[name] = []
            record = msgspec.structs.replace(RECORD, instance_id=name)
            note = partial(_note, times)
            keepers.append(LeaseKeeper(jetstream, lane, record, 30.0, on_written=note))
            await keepers[-1].announce()
        await asyncio.sleep(200.0)
        for keeper in keepers:
            await keeper.withdraw()
        for times in written.values():
            assert all(8.0 <= b - a <= 10.0 for a, b in pairwise(times[:-1]))
        return [next(at for at in times if at > times[0] + 150.0) for times in written.values()]

    later = run(on_lane(story))
    assert stdev(later) > 1.0


def _note(times: list[float], record: bytes) -> None:
    times.append(monotonic())


FULL = "no space left on device"


def test_a_bucket_whose_store_takes_nothing_any_more_is_made_again_in_memory() -> None:
    async def story(
        lane: Background,
    ) -> tuple[list[LeaseState], StreamConfig, StoredMessage | None]:
        bus = MemoryBus()
        jetstream = (await bus.connect()).jetstream
        states: list[LeaseState] = []
        keeper = LeaseKeeper(jetstream, lane, RECORD, 9.0, states.append)
        await keeper.announce()

        bus.jetstream.break_store(INSTANCES_STREAM.name, FULL)
        await asyncio.sleep(9.0)
        config = await jetstream.stream_config(INSTANCES_STREAM.name)
        last = await jetstream.last(INSTANCES_STREAM.name, SUBJECT)
        await keeper.withdraw()
        return states, config, last

    states, config, last = run(on_lane(story))
    assert states == [LeaseState.HELD, LeaseState.ENDED]
    assert config.in_memory
    assert last is not None
    assert not last.is_marker


def test_an_instance_can_start_while_the_store_of_the_bucket_takes_nothing() -> None:
    async def story(lane: Background) -> StoredMessage | None:
        bus = MemoryBus()
        jetstream = (await bus.connect()).jetstream
        await ensure_bucket(jetstream)
        bus.jetstream.break_store(INSTANCES_STREAM.name, FULL)

        keeper = LeaseKeeper(jetstream, lane, RECORD, 9.0)
        await keeper.announce()
        last = await jetstream.last(INSTANCES_STREAM.name, SUBJECT)
        await keeper.withdraw()
        return last

    last = run(on_lane(story))
    assert last is not None
    assert not last.is_marker


def test_the_bucket_is_made_again_once_by_all_whose_leases_are_not_renewed() -> None:
    async def story(lane: Background) -> tuple[int, int]:
        bus = MemoryBus()
        keepers = [
            LeaseKeeper(
                (await bus.connect()).jetstream,
                lane,
                msgspec.structs.replace(RECORD, instance_id=f"a{number}"),
                9.0,
            )
            for number in range(20)
        ]
        for keeper in keepers:
            await keeper.announce()
        jetstream = (await bus.connect()).jetstream
        made: list[float] = []

        bus.jetstream.break_store(INSTANCES_STREAM.name, FULL)
        for _ in range(90):
            await asyncio.sleep(0.1)
            made.append((await jetstream.stream_info(INSTANCES_STREAM.name)).created)
        info = await jetstream.stream_info(INSTANCES_STREAM.name)
        for keeper in keepers:
            await keeper.withdraw()
        return len(set(made)), info.messages

    assert run(on_lane(story)) == (2, 20)


def test_a_bucket_that_is_merely_slow_to_answer_is_left_as_it_is() -> None:
    async def story(lane: Background) -> tuple[float, float]:
        bus = MemoryBus()
        jetstream = (await bus.connect()).jetstream
        keeper = LeaseKeeper(jetstream, lane, RECORD, 9.0)
        await keeper.announce()
        before = await jetstream.stream_info(INSTANCES_STREAM.name)

        with bus.drop("$KV.>", count=2):
            await asyncio.sleep(9.0)
        after = await jetstream.stream_info(INSTANCES_STREAM.name)
        await keeper.withdraw()
        return before.created, after.created

    before, after = run(on_lane(story))
    assert before == after


def test_a_lease_stays_held_while_the_servers_elect_a_leader() -> None:
    async def story(lane: Background) -> tuple[list[LeaseState], int]:
        bus = MemoryBus()
        jetstream = (await bus.connect()).jetstream
        states: list[LeaseState] = []
        keeper = LeaseKeeper(jetstream, lane, RECORD, 9.0, states.append)
        await keeper.announce()
        subjects = bus.jetstream.streams[INSTANCES_STREAM.name].config

        # Nobody listens where records go, and the bucket is there all the same.
        stream = bus.jetstream.streams[INSTANCES_STREAM.name]
        stream.config = subjects._replace(subjects=())
        bus.jetstream.ensure = lambda config: None  # type: ignore[method-assign]
        await asyncio.sleep(5.0)
        stream.config = subjects
        await asyncio.sleep(3.0)
        revision = keeper.revision
        await keeper.withdraw()
        return states, revision

    states, revision = run(on_lane(story))
    assert states == [LeaseState.HELD, LeaseState.ENDED]
    assert revision > 1


@pytest.mark.parametrize(("elects_for", "is_known"), [(3.0, True), (60.0, False)])
def test_who_holds_an_id_is_asked_for_until_a_leader_is_elected(
    elects_for: float, is_known: bool
) -> None:
    async def story(lane: Background) -> str:
        jetstream = (await MemoryBus().connect()).jetstream
        other = LeaseKeeper(
            jetstream, lane, msgspec.structs.replace(RECORD, incarnation="other"), 9.0
        )
        await other.announce()
        elected_at, last = monotonic() + elects_for, jetstream.last

        async def last_of_a_leader(stream: str, subject: str, **given: float) -> object:
            if monotonic() < elected_at:
                raise Unavailable("JetStream system temporarily unavailable")
            return await last(stream, subject, **given)

        jetstream.last = last_of_a_leader  # type: ignore[assignment,method-assign]
        keeper = LeaseKeeper(jetstream, lane, RECORD, 9.0)
        try:
            held = await keeper.other_holder()
        except Unavailable:
            held = None
        await other.withdraw()
        return held.record.incarnation if held else ""

    assert run(on_lane(story)) == ("other" if is_known else "")


async def announced(
    lane: Background, jetstream: JetStream, count: int, written: set[str]
) -> list[LeaseKeeper]:
    """Many keepers, each of which knows of all.

    Args:
        written: to which the id of each record is added that is stored.
    """
    keepers: list[LeaseKeeper] = []
    for number in range(count):
        name = f"a{number}"
        record = msgspec.structs.replace(RECORD, instance_id=name)
        note = partial(_add, written, name)
        keepers.append(LeaseKeeper(jetstream, lane, record, 9.0, on_written=note))
        await keepers[-1].announce()
    await asyncio.sleep(3.0 * RENEWALS_PER_COUNT + 1.0)
    return keepers


def _add(written: set[str], name: str, record: bytes) -> None:
    written.add(name)


def test_of_many_instances_a_few_ask_what_became_of_a_bucket_that_takes_nothing() -> None:
    async def story(lane: Background) -> int:
        bus = MemoryBus()
        keepers = await announced(lane, (await bus.connect()).jetstream, 400, set())
        asked: list[StreamConfig] = []

        stream = bus.jetstream.streams[INSTANCES_STREAM.name]
        config = stream.config
        # Nobody listens where records go, as in an election; who asks is noted.
        stream.config = config._replace(subjects=())
        bus.jetstream.ensure = asked.append  # type: ignore[assignment,method-assign]
        await asyncio.sleep(4.0)
        stream.config = config
        for keeper in keepers:
            await keeper.withdraw()
        return len(asked)

    # Together they try some 2,000 times.
    assert 1 <= run(on_lane(story)) < 600


def test_a_bucket_of_many_that_is_lost_is_made_again_and_has_all_of_them() -> None:
    async def story(lane: Background) -> tuple[int, bool]:
        jetstream = (await MemoryBus().connect()).jetstream
        written: set[str] = set()
        keepers = await announced(lane, jetstream, 200, written)

        await jetstream.delete_stream(INSTANCES_STREAM.name)
        written.clear()
        await eventually(lambda: len(written) == 200)
        info = await jetstream.stream_info(INSTANCES_STREAM.name)
        config = await jetstream.stream_config(INSTANCES_STREAM.name)
        for keeper in keepers:
            await keeper.withdraw()
        return info.messages, config.in_memory

    assert run(on_lane(story)) == (200, False)


def test_a_record_is_renewed_at_once_after_a_reconnect_however_often_that_failed_before() -> None:
    async def story(lane: Background) -> float:
        bus = MemoryBus()
        jetstream = (await bus.connect()).jetstream
        written: list[float] = []
        note = partial(_note, written)
        keeper = LeaseKeeper(jetstream, lane, RECORD, 120.0, on_written=note)
        await keeper.announce()
        stream = bus.jetstream.streams[INSTANCES_STREAM.name]
        config = stream.config
        # Nobody listens where records go, and the bucket is there all the same.
        stream.config = config._replace(subjects=())
        bus.jetstream.ensure = lambda config: None  # type: ignore[method-assign]
        keeper.connection_changed(ConnectionState.CONNECTED)
        await asyncio.sleep(100.0)

        stream.config = config
        keeper.connection_changed(ConnectionState.CONNECTED)
        begun = monotonic()
        await eventually(lambda: len(written) > 1)
        await keeper.withdraw()
        return written[1] - begun

    assert run(on_lane(story)) < 0.5


def test_a_record_that_ran_out_and_cannot_be_renewed_is_told_and_again_ever_later() -> None:
    async def story(lane: Background) -> tuple[list[float], LeaseState]:
        bus = MemoryBus()
        told: list[float] = []
        keeper = LeaseKeeper(
            (await bus.connect()).jetstream,
            lane,
            RECORD,
            9.0,
            on_lapse=lambda: told.append(monotonic()),
        )
        await keeper.announce()
        began = monotonic()

        stream = bus.jetstream.streams[INSTANCES_STREAM.name]
        config = stream.config
        stream.config = config._replace(subjects=())
        bus.jetstream.ensure = lambda config: None  # type: ignore[method-assign]
        await asyncio.sleep(60.0)
        stream.config = config
        await asyncio.sleep(5.0)
        state = keeper.state
        await keeper.withdraw()
        return [at - began for at in told], state

    told, state = run(on_lane(story))
    assert told == [pytest.approx(at, abs=2.0) for at in (9.0, 27.0)]
    assert state is LeaseState.HELD


def test_an_end_without_a_connection_waits_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def story(lane: Background) -> tuple[LeaseState, float]:
        keeper = LeaseKeeper((await MemoryBus().connect()).jetstream, lane, RECORD, 9.0)
        await keeper.announce()
        keeper.connection_changed(ConnectionState.DISCONNECTED)
        begun = monotonic()
        await keeper.withdraw()
        return keeper.state, monotonic() - begun

    assert run(on_lane(story)) == (LeaseState.ENDED, 0.0)
    assert caplog.messages == [f"the record of {SUBJECT} expires by itself: there is no connection"]


async def cancelled_while_writing(
    lane: Background, fault: str, after: float
) -> StoredMessage | None:
    """What is stored of an instance whose start was given up during its first write.

    Args:
        fault: the subject that is slow: of the record, or of what the server answers.
        after: seconds.
    """
    bus = MemoryBus()
    connection = await bus.connect()
    other = await bus.connect()
    keeper = LeaseKeeper(connection.jetstream, lane, RECORD, 9.0)
    await connection.jetstream.ensure_stream(INSTANCES_STREAM)

    with bus.delay(fault.format(inbox=connection.inbox), 0.1):
        announcing = asyncio.create_task(keeper.announce())
        await asyncio.sleep(after)
        announcing.cancel()
        await asyncio.wait([announcing])
        await keeper.withdraw()
    await asyncio.sleep(1.0)

    assert announcing.cancelled()
    assert keeper.state is LeaseState.ENDED
    return await other.jetstream.last(INSTANCES_STREAM.name, SUBJECT)


# The first answer says that the bucket is there.
@pytest.mark.parametrize(("fault", "after"), [("$KV.>", 0.05), ("{inbox}.>", 0.15)])
def test_a_start_that_is_cancelled_during_its_first_write_leaves_no_record(
    fault: str, after: float
) -> None:
    last = run(on_lane(partial(cancelled_while_writing, fault=fault, after=after)))

    assert last is None or last.is_marker


def test_a_lease_that_was_never_written_is_ended_without_a_word() -> None:
    async def story(lane: Background) -> StoredMessage | None:
        jetstream = (await MemoryBus().connect()).jetstream
        await jetstream.ensure_stream(INSTANCES_STREAM)

        await LeaseKeeper(jetstream, lane, RECORD, 9.0).withdraw()

        return await jetstream.last(INSTANCES_STREAM.name, SUBJECT)

    assert run(on_lane(story)) is None


def test_the_record_of_another_process_outlives_our_end() -> None:
    async def story(lane: Background) -> StoredMessage | None:
        jetstream = (await MemoryBus().connect()).jetstream
        other = msgspec.structs.replace(RECORD, incarnation="another")
        theirs, ours = (LeaseKeeper(jetstream, lane, record, 9.0) for record in (other, RECORD))
        await theirs.announce()

        with pytest.raises(ConfigError):
            await ours.announce()
        await ours.withdraw()
        last = await jetstream.last(INSTANCES_STREAM.name, SUBJECT)
        await theirs.withdraw()
        return last

    last = run(on_lane(story))
    assert last is not None
    assert not last.is_marker


def test_an_end_without_a_bucket_has_nothing_to_withdraw(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(lane: Background) -> LeaseState:
        jetstream = (await MemoryBus().connect()).jetstream
        keeper = LeaseKeeper(jetstream, lane, RECORD, 9.0)
        await keeper.announce()
        await jetstream.delete_stream(INSTANCES_STREAM.name)

        await keeper.withdraw()

        return keeper.state

    assert run(on_lane(story)) is LeaseState.ENDED
    assert caplog.text == ""
