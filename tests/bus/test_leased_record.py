"""A lease is written with what it expects, and knows an expiry from a conflict."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from dynbus.bus.errors import DynbusError, PermissionDenied, Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.records.leased_record import Lease, LeasedRecord, LeaseState
from dynbus.bus.transport import JetStream, StoredMessage, StreamConfig, StreamLimits
from dynbus.testing import run

BUCKET = StreamConfig(
    "KV_held", ("held.>",), StreamLimits(max_messages_per_subject=1), marker_ttl=60.0
)


def stored(
    sequence: int, data: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
) -> StoredMessage:
    return StoredMessage("held.a", sequence, 0.0, headers, data)


def held(sequence: int = 5) -> Lease:
    lease = Lease("a", 10.0)
    lease.begin()
    lease.stored(sequence, 100.0)
    return lease


def test_the_first_write_expects_that_nothing_is_there() -> None:
    lease = Lease("a", 10.0)

    assert lease.begin() == 0
    assert repr(lease) == "<Lease a [new | rev 0]>"


def test_a_stored_lease_is_held_and_its_next_write_expects_the_last_one() -> None:
    lease = held(5)

    assert lease.begin() == 5
    assert lease.state is LeaseState.HELD


def test_a_lease_is_nobody_else_s_for_its_ttl_after_its_last_write_began() -> None:
    lease = held()

    assert [lease.left(now) for now in (100.0, 107.5, 110.0, 200.0)] == [10.0, 2.5, 0.0, 0.0]


def test_a_lease_that_is_not_held_has_no_time_left() -> None:
    lost = held()
    lost.observe(None, is_mine=False)

    assert (Lease("a", 10.0).left(100.0), lost.left(101.0)) == (0.0, 0.0)


def test_nothing_stored_means_that_the_lease_expired() -> None:
    lease = held()

    lease.observe(None, is_mine=False)

    assert (lease.state, lease.begin()) == (LeaseState.LOST, 0)


@pytest.mark.parametrize("header", [{"Nats-Marker-Reason": "MaxAge"}, {"KV-Operation": "DEL"}])
def test_a_marker_means_that_the_lease_expired(header: dict[str, str]) -> None:
    lease = held()

    lease.observe(stored(9, headers=header), is_mine=False)

    assert (lease.state, lease.begin()) == (LeaseState.LOST, 9)


def test_a_record_of_its_own_is_taken_over() -> None:
    lease = held()

    lease.observe(stored(9, b"mine"), is_mine=True)

    assert (lease.state, lease.begin()) == (LeaseState.LOST, 9)


def test_another_s_record_is_a_conflict() -> None:
    lease = held()

    lease.observe(stored(9, b"another's"), is_mine=False)

    assert lease.state is LeaseState.CONFLICT


def leased(jetstream: JetStream, holder: bytes) -> LeasedRecord:
    async def make() -> None:
        await jetstream.ensure_stream(BUCKET)

    return LeasedRecord(
        jetstream,
        BUCKET.name,
        "held.a",
        10.0,
        marker_ttl=60.0,
        is_mine=lambda stored: stored.data == holder,
        make=make,
        remake=make,
    )


def test_of_two_that_write_one_holds_the_record_until_it_is_withdrawn() -> None:
    async def story() -> list[bool]:
        bus = MemoryBus()
        one, two = [leased((await bus.connect()).jetstream, holder) for holder in (b"one", b"two")]
        written = [await one.write(b"one"), await two.write(b"two"), await one.write(b"one")]
        await one.withdraw()
        written += [await two.write(b"two"), await one.write(b"one")]
        return written

    assert run(story()) == [True, False, True, True, False]


def test_a_record_whose_bucket_is_lost_is_written_again() -> None:
    async def story() -> tuple[bool, LeaseState]:
        jetstream = (await MemoryBus().connect()).jetstream
        record = leased(jetstream, b"one")
        await record.write(b"one")
        await record.write(b"one")
        await jetstream.delete_stream(BUCKET.name)

        return await record.write(b"one"), record.lease.state

    assert run(story()) == (True, LeaseState.HELD)


@pytest.mark.parametrize(
    ("error", "longest"),
    [
        (Unavailable("nobody answers"), [0.5, 10 / 12, 10 / 12, 10 / 12]),
        (PermissionDenied("not yours"), [0.5, 1.0, 2.0, 10 / 3]),
    ],
)
def test_a_write_is_tried_again_later_each_time(error: DynbusError, longest: list[float]) -> None:
    async def story() -> list[list[float]]:
        record = leased((await MemoryBus().connect()).jetstream, b"one")
        delays: list[list[float]] = []
        for _ in range(4):
            await record.after_failure(error)
            delays.append([record.pause() for _ in range(50)])
        await record.write(b"one")
        assert min(record.pause() for _ in range(50)) > 2.0
        return delays

    drawn = run(story())

    for delays, most in zip(drawn, longest, strict=True):
        assert most / 2 <= min(delays) < max(delays) <= most


def test_why_a_record_is_not_written_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        record = leased((await MemoryBus().connect()).jetstream, b"one")
        for why in ("away", "away", "full", "away", "full"):
            await record.after_failure(Unavailable(why))

    run(story())

    assert [text.rpartition(" ")[2] for text in caplog.messages] == ["away", "full"]
