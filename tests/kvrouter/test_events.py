"""Events cross the wire unchanged; whatever else arrives is refused whole."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kvrouter.event_strategies import removed_events, stored_events

from dynbus.kvrouter.events import (
    HEADER,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    InvalidEvents,
    KvEvent,
    Operation,
    Tier,
    decode_events,
    encode_events,
)
from dynbus.kvrouter.radix.index import MessageOutcome, RadixIndex

hashes = st.integers(0, 2**64 - 1)
tiers = st.sampled_from(Tier)
events = st.lists(
    st.one_of(
        stored_events(hashes, hashes, tiers=tiers, min_size=0),
        removed_events(hashes, tiers=tiers, min_size=0),
        st.just(AllBlocksCleared()),
    ),
    max_size=12,
)


def decoded(message: bytes) -> list[KvEvent]:
    """The events of a message, one by one."""
    batch = decode_events(message)
    found: list[KvEvent] = []
    at = 0
    for event in range(len(batch)):
        engine = batch.engine_hashes[batch.bounds[event] : batch.bounds[event + 1]]
        operation = batch.operations[event]
        if operation == Operation.STORED:
            blocks = list(struct.unpack_from(f"<{len(engine)}Q", batch.blocks, at))
            at += 8 * len(engine)
            parent, tier = batch.parents[event], Tier(batch.tiers[event])
            found.append(BlockStored(parent, engine, blocks, tier))
        elif operation == Operation.REMOVED:
            found.append(BlockRemoved(engine, Tier(batch.tiers[event])))
        else:
            found.append(AllBlocksCleared())
    return found


@given(events, st.integers(0, 2**63 - 1), st.integers(0, 2**63), st.integers(0, 2**16 - 1))
def test_events_cross_the_wire_unchanged(
    sent: list[KvEvent], epoch: int, first_id: int, dp_rank: int
) -> None:
    message = encode_events(sent, event_epoch=epoch, first_id=first_id, dp_rank=dp_rank)

    batch = decode_events(message)
    assert decoded(message) == sent
    assert (batch.event_epoch, batch.first_id, batch.dp_rank) == (epoch, first_id, dp_rank)


def test_arrays_are_taken_as_they_are() -> None:
    lists = BlockStored(None, [1, 2], [3, 4])
    arrays = BlockStored(None, np.array([1, 2], dtype=np.uint64), np.array([3, 4], dtype=np.uint64))

    assert encode_events([arrays], event_epoch=0, first_id=0) == encode_events(
        [lists], event_epoch=0, first_id=0
    )


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (BlockStored(None, [1, 2], [3]), "2 engine hashes for 1 block hashes"),
        (BlockStored(None, [-1], [3]), "unsigned integer"),
        (BlockStored(2**64, [1], [3]), "unsigned integer"),
        (BlockRemoved([2**64]), "unsigned integer"),
        (BlockRemoved(["a"]), "unsigned integer"),  # type: ignore[list-item]
        (BlockRemoved(np.array([1.5])), "unsigned integer"),
    ],
)
def test_what_cannot_be_encoded_is_refused(event: KvEvent, message: str) -> None:
    with pytest.raises(InvalidEvents, match=message):
        encode_events([event], event_epoch=0, first_id=0)


@given(events, st.data())
def test_a_message_that_is_cut_or_longer_is_refused(
    sent: list[KvEvent], data: st.DataObject
) -> None:
    message = encode_events(sent, event_epoch=1, first_id=0)
    cut = data.draw(st.integers(0, len(message) - 1))

    for wrong in (message[:cut], message + bytes(8)):
        with pytest.raises(InvalidEvents):
            decode_events(wrong)


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_decoded_or_refused(data: bytes) -> None:
    for message in (data, b"\x01\x00" + data, HEADER.pack(1, 0, 0, 1, 1, 0, 0, 1, 0, 0) + data):
        try:
            batch = decode_events(message)
        except InvalidEvents:
            continue
        assert len(batch.bounds) == len(batch) + 1


@given(events, st.data())
def test_a_changed_byte_is_refused_or_gives_a_sound_batch(
    sent: list[KvEvent], data: st.DataObject
) -> None:
    message = bytearray(encode_events(sent, event_epoch=1, first_id=0))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))

    try:
        batch = decode_events(bytes(message))
    except InvalidEvents:
        return
    count = sum(
        batch.bounds[i + 1] - batch.bounds[i]
        for i, operation in enumerate(batch.operations)
        if operation == Operation.STORED
    )
    assert len(batch.blocks) == 8 * count
    assert batch.bounds[-1] == len(batch.engine_hashes)
    assert len(batch.parents) == len(batch)


def test_blocks_without_an_event_that_stores_them_are_refused() -> None:
    message = bytearray(encode_events([BlockStored(None, [1], [2])], event_epoch=1, first_id=0))
    message[HEADER.size] = Operation.REMOVED

    with pytest.raises(InvalidEvents, match="do not add up"):
        decode_events(bytes(message))


@pytest.mark.parametrize(
    ("epoch", "first_id"), [(1 << 63, 0), ((1 << 64) - 1, 0), (1, (1 << 64) - 2)]
)
def test_numbers_that_nothing_could_follow_are_refused(epoch: int, first_id: int) -> None:
    removed = [BlockRemoved([1]), BlockRemoved([2])]
    forged = bytearray(encode_events(removed, event_epoch=1, first_id=0))
    struct.pack_into("<QQ", forged, 8, epoch, first_id)

    with pytest.raises(InvalidEvents, match=f"epoch {epoch}, 2 events from id {first_id} on"):
        decode_events(bytes(forged))
    with pytest.raises(InvalidEvents, match=f"epoch {epoch}, 2 events from id {first_id} on"):
        encode_events(removed, event_epoch=epoch, first_id=first_id)


def test_the_highest_numbers_are_those_that_something_can_follow() -> None:
    highest = encode_events([BlockRemoved([1])], event_epoch=2**63 - 1, first_id=2**64 - 2)

    assert decode_events(highest).first_id == 2**64 - 2


def test_a_digest_is_an_event_of_its_own_and_found_at_the_end_of_its_message() -> None:
    digest = CacheDigest(2, (1 << 64) - 1)
    events: list[KvEvent | CacheDigest] = [BlockStored(None, [1, 2], [3, 4]), digest]

    message = encode_events(events, event_epoch=1, first_id=0)

    batch = decode_events(message)
    assert batch.operations == [Operation.STORED, Operation.DIGEST]
    assert decode_events(message).closing_digest == digest
    first = encode_events([digest, events[0]], event_epoch=1, first_id=0)
    assert decode_events(first).closing_digest is None
    assert decode_events(encode_events([], event_epoch=1, first_id=0)).closing_digest is None


def test_a_digest_changes_nothing_in_an_index_and_takes_an_id() -> None:
    index = RadixIndex()

    message = encode_events(
        [BlockStored(None, [1], [1]), CacheDigest(9, 9)], event_epoch=1, first_id=0
    )
    index.apply("a", message)
    following = index.apply("a", encode_events([BlockRemoved([1])], event_epoch=1, first_id=2))

    assert following.verdict is MessageOutcome.APPLIED
    assert index.lookup([1]) == {}


def test_a_digest_that_is_not_two_numbers_is_refused() -> None:
    removed = bytearray(encode_events([BlockRemoved([1, 2, 3])], event_epoch=1, first_id=0))
    removed[HEADER.size] = Operation.DIGEST

    with pytest.raises(InvalidEvents, match="two numbers"):
        decode_events(bytes(removed))
