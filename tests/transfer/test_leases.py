"""Leases: a reader learns whether the blocks stayed in place until it had read them."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynbus.transfer.errors import BadDescription, InvalidTransfer
from dynbus.transfer.leases import MAX_SECONDS, LeaseTable, Ticket

LEASES = st.integers(1, 12)
BLOCKS = st.sets(st.integers(0, 5), min_size=1)
SECONDS = st.integers(1, 5)


class LeaseMachine(RuleBasedStateMachine):
    """Compares a table with the history of each lease: until when it was held, and of what.

    The owner of the blocks obeys the table: it overwrites whatever block is not held, at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable("now")
        self.now = 0
        self.deadlines: dict[int, float] = {}
        self.blocks: dict[int, set[int]] = {}
        self.writable: set[int] = set()
        self.overdue: set[int] = set()
        self.overwritten: set[int] = set()

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule(blocks=BLOCKS, seconds=SECONDS, writable=st.booleans())
    def grant(self, blocks: set[int], seconds: int, writable: bool) -> None:
        lease = self.table.grant(sorted(blocks), seconds, self.now, writable=writable)
        if writable:
            self.writable.add(lease.lease_id)
        assert lease.lease_id not in self.deadlines, "a number is never used again"
        assert lease.deadline == self.now + seconds
        self.deadlines[lease.lease_id] = lease.deadline
        self.blocks[lease.lease_id] = blocks

    @rule(lease=LEASES, epoch=st.sampled_from(["now", "before"]))
    def settle(self, lease: int, epoch: str) -> None:
        good = self.is_good(lease, epoch)
        held = self.table.held(lease, epoch, self.now)
        assert (held is not None) is good
        assert held is None or set(held.blocks) == self.blocks[lease]
        assert self.table.settle(lease, epoch, self.now) is good
        if good:
            assert lease not in self.overwritten, "a settled lease was held throughout"
            self.end(lease)

    @rule(lease=LEASES, epoch=st.sampled_from(["now", "before"]))
    def release(self, lease: int, epoch: str) -> None:
        held = epoch == "now" and lease in self.blocks
        assert self.table.release(lease, epoch) is held
        if held:
            self.end(lease)

    @rule()
    def expire(self) -> None:
        over = {lease for lease in self.blocks if self.deadlines[lease] <= self.now} - self.overdue
        assert {lease.lease_id for lease in self.table.expired(self.now)} == over
        # What a peer may write is free when it says so, and not before.
        self.overdue |= over & self.writable
        for lease in over - self.writable:
            self.end(lease)

    @rule(block=st.integers(0, 5))
    def overwrite(self, block: int) -> None:
        if not self.table.holds(block):
            self.overwritten |= {lease for lease, held in self.blocks.items() if block in held}

    @invariant()
    def no_block_is_free_while_it_is_held(self) -> None:
        held = {block for blocks in self.blocks.values() for block in blocks}
        assert {block for block in range(6) if self.table.holds(block)} == held
        assert self.table.blocks_held == len(held)
        assert len(self.table) == len(self.blocks)
        assert self.table.overdue == len(self.overdue)

    def is_good(self, lease: int, epoch: str) -> bool:
        return epoch == "now" and lease in self.blocks and self.now < self.deadlines[lease]

    def end(self, lease: int) -> None:
        del self.blocks[lease]
        self.overdue.discard(lease)


TestLeases = LeaseMachine.TestCase


def test_each_lease_that_is_over_is_told_once_however_it_ended() -> None:
    over: list[int] = []
    table = LeaseTable("now", over=lambda lease: over.append(lease.lease_id))
    settled, released, expired, written = (
        table.grant([block], 1.0, 0.0, writable=block == 3).lease_id for block in range(4)
    )

    assert table.settle(settled, "now", 0.5)
    assert table.release(released, "now")
    assert over == [settled, released]
    table.expired(2.0)
    # What its writer may still write is held.
    assert over == [settled, released, expired]
    assert table.release(written, "now")
    assert not table.release(settled, "now")

    assert over == [settled, released, expired, written]
    assert table.blocks_held == 0


def test_a_lease_is_settled_once() -> None:
    table = LeaseTable("e")
    lease = table.grant([1, 2], 5.0, 0.0)

    assert table.settle(lease.lease_id, "e", 4.9)
    assert not table.settle(lease.lease_id, "e", 4.9)


def test_a_lease_whose_time_is_over_is_not_settled_though_its_blocks_are_still_held() -> None:
    table = LeaseTable("e")
    lease = table.grant([1], 5.0, 0.0)

    assert not table.settle(lease.lease_id, "e", 5.0)
    assert table.holds(1)
    assert [one.lease_id for one in table.expired(5.0)] == [lease.lease_id]
    assert not table.holds(1)


def test_blocks_that_a_peer_may_write_are_held_until_it_is_quiet_however_late() -> None:
    table = LeaseTable("e")
    lease = table.grant([1], 5.0, 0.0, writable=True)

    assert table.expired(5.0) == [lease]
    assert table.expired(1e6) == []
    assert not table.settle(lease.lease_id, "e", 1e6)
    assert table.held(lease.lease_id, "e", 1e6) is None
    assert table.holds(1)
    assert table.overdue == 1

    assert table.release(lease.lease_id, "e")
    assert not table.holds(1)
    assert table.overdue == 0


def test_a_clock_that_goes_back_revives_no_lease() -> None:
    table = LeaseTable("e")
    lease = table.grant([1], 5.0, 0.0)
    table.expired(4.0)

    table.held(lease.lease_id, "e", 6.0)

    assert not table.settle(lease.lease_id, "e", 1.0)


def test_a_lease_of_an_agent_that_had_the_same_name_is_not_settled() -> None:
    before, now = LeaseTable("before"), LeaseTable("now")
    lease = before.grant([1], 5.0, 0.0)
    assert now.grant([1], 5.0, 0.0).lease_id == lease.lease_id

    assert not now.settle(lease.lease_id, lease.epoch, 1.0)
    assert not now.release(lease.lease_id, lease.epoch)
    assert now.held(lease.lease_id, lease.epoch, 1.0) is None
    assert now.holds(1)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, MAX_SECONDS + 1])
def test_a_time_that_is_not_usable_is_refused(seconds: float) -> None:
    table = LeaseTable("e")
    table.grant([1], 5.0, 0.0)

    with pytest.raises(InvalidTransfer, match="choose more than 0 and at most 86400 s"):
        table.grant([2], seconds, 0.0)
    assert len(table) == 1


@pytest.mark.parametrize("blocks", [[], [-1], [2**31], [3, 4, 3]])
def test_blocks_that_cannot_be_are_refused(blocks: list[int]) -> None:
    table = LeaseTable("e")
    table.grant([3], 5.0, 0.0)

    with pytest.raises(InvalidTransfer):
        table.grant(blocks, 5.0, 0.0)
    assert table.blocks_held == 1


def ticket(**changed: Any) -> Ticket:
    given: dict[str, Any] = {
        "agent": "prefill-1",
        "epoch": "e",
        "lease_id": 7,
        "blocks": (4, 2),
        "tokens": 20,
        "seconds": 3.5,
    }
    return Ticket(**{**given, **changed})


def test_a_ticket_survives_its_encoding() -> None:
    assert Ticket.decode(ticket().encode()) == ticket()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"agent": ""}, "names an agent"),
        ({"epoch": ""}, "names an agent"),
        ({"lease_id": 0}, "lease 0"),
        ({"blocks": (1, 1)}, "block 1 is given twice"),
        ({"blocks": ()}, "at least one block"),
        ({"blocks": (-1,)}, "block ids are from 0"),
        ({"tokens": -1}, "-1 tokens"),
        ({"seconds": -1.0}, "-1 s"),
        ({"seconds": math.nan}, "nan s"),
    ],
)
def test_a_ticket_that_cannot_be_is_refused_when_made_and_when_decoded(
    changed: dict[str, Any], told: str
) -> None:
    fields = {**msgspec.structs.asdict(ticket()), **changed}

    with pytest.raises(InvalidTransfer, match=told):
        Ticket(**fields)
    with pytest.raises(BadDescription, match=told):
        Ticket.decode(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=64))
def test_bytes_that_are_no_ticket_are_refused(data: bytes) -> None:
    with pytest.raises(BadDescription):
        Ticket.decode(data)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_ticket_is_refused_or_still_one(at: int, byte: int) -> None:
    data = bytearray(ticket().encode())
    data[at % len(data)] = byte

    with contextlib.suppress(BadDescription):
        Ticket.decode(bytes(data))
