"""What routers and engines tell each other, and keep, is written and read as in version 1."""

from __future__ import annotations

import msgspec
import pytest

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    Tier,
    decode_events,
    encode_events,
)
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.radix.snapshot import dump_index, load_index
from dynbus.kvrouter.routing.decision import (
    Explanation,
    Question,
    encode_explanation,
    read_question,
)
from dynbus.kvrouter.routing.shared_load import (
    ActiveSet,
    Added,
    Ask,
    Freed,
    Left,
    LoadChanges,
    LoadMessage,
    PrefillCompleted,
    decode_message,
    encode_message,
)
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.election import ElectionRecord
from dynbus.kvrouter.stream.resync import ResyncRequest, decode_resync, encode_resync

# Events ------------------------------------------------------------------------------------

EVENTS = bytes.fromhex(
    "01000200 04000000 0500000000000000 0600000000000000 01000000 05000000 02000000 00000000"
    "0c010203 02000000 01000000 00000000 02000000 00000000"
    "0700000000000000"
    "0800000000000000 0900000000000000 0800000000000000 0300000000000000 0400000000000000"
    "0a00000000000000 0b00000000000000"
)
"""Of rank 2: two blocks stored on the host, one removed, all cleared, a digest."""


def test_a_message_of_events_has_these_bytes() -> None:
    events = (
        BlockStored(7, [8, 9], [10, 11], Tier.HOST),
        BlockRemoved([8]),
        AllBlocksCleared(),
        CacheDigest(3, 4),
    )

    assert encode_events(list(events), event_epoch=5, first_id=6, dp_rank=2) == EVENTS


def test_these_bytes_are_read_as_these_events() -> None:
    batch = decode_events(EVENTS)

    assert (batch.event_epoch, batch.first_id, batch.dp_rank, len(batch)) == (5, 6, 2, 4)
    assert (batch.operations, batch.parents) == ([0, 1, 2, 3], [7, None, None, None])
    assert (batch.tiers, batch.bounds) == ([1, 0, 0, 0], [0, 2, 3, 3, 5])
    assert batch.blocks == bytes.fromhex("0a00000000000000 0b00000000000000")
    assert batch.engine_hashes == [8, 9, 8, 3, 4]


# Snapshots ---------------------------------------------------------------------------------

SNAPSHOT = bytes.fromhex(
    "64796e6275732d6b762d696e646578017008600cf4e0ea708ae14d44809fd83c962902049297a26931020502"
    "c292940100c41008000000000000000900000000000000c41000000001000000000100000100000000940201"
    "c4080c00000000000000c4080000000100000000a097a26932000701c291940300c4080100000000000000c4"
    "080000000100000000a09197010000c4100a000000000000000b0000000000000083010202010301809000"
)
"""Magic and version, a digest, then the index."""


def index_of_two_instances() -> RadixIndex:
    index = RadixIndex()
    stored = [BlockStored(None, [8, 9], [10, 11]), BlockStored(None, [12], [10], Tier.HOST)]
    index.apply("i1", encode_events([*stored], event_epoch=5, first_id=0, dp_rank=2))
    index.apply("i2", encode_events([BlockStored(None, [1], [10])], event_epoch=7, first_id=0))
    return index


def test_a_snapshot_has_these_bytes() -> None:
    assert dump_index(index_of_two_instances(), 41) == SNAPSHOT


def test_a_snapshot_that_was_stored_is_read() -> None:
    index, sequence = load_index(SNAPSHOT, max_blocks=100)

    expected = index_of_two_instances()
    assert sequence == 41
    for rank in (Rank("i1", 2), Rank("i2", 0)):
        assert index_digest(index, rank) == index_digest(expected, rank)
    assert index.lookup([10, 11]) == expected.lookup([10, 11])


# Messages of routers -----------------------------------------------------------------------

ADDED = Added(1, "i1", 0, 32, 16, None, bytes(range(16)))
_ADDED = b"\x99\xa1a\x01\xa2i1\x00 \x10\xc0\xc4\x10" + bytes(range(16)) + b"\xc2"

MESSAGES: list[tuple[LoadMessage, bytes]] = [
    (
        LoadChanges(1, "r", 3, [ADDED, PrefillCompleted(1), Freed(1)]),
        b"\x95\xa1c\x01\xa1r\x03\x93" + _ADDED + b"\x92\xa1p\x01\x92\xa1f\x01",
    ),
    (ActiveSet(1, "r", 3, 0, 1, [ADDED]), b"\x97\xa1s\x01\xa1r\x03\x00\x01\x91" + _ADDED),
    (Ask(1, "r", ["o"]), b"\x94\xa1?\x01\xa1r\x91\xa1o"),
    (Left(1, "r"), b"\x93\xa1l\x01\xa1r"),
]


@pytest.mark.parametrize(("message", "data"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_of_routers_load_has_these_bytes(message: LoadMessage, data: bytes) -> None:
    assert encode_message(message) == data
    assert decode_message(data) == message


def test_the_goldens_cover_every_message_of_routers_load() -> None:
    assert {type(message) for message, _ in MESSAGES} == set(LoadMessage.__args__)


def test_a_request_for_a_resync_has_these_bytes() -> None:
    request, data = ResyncRequest(5, "a gap"), b'{"event_epoch":5,"reason":"a gap"}'

    assert encode_resync(request) == data
    assert decode_resync(data) == request


def test_the_record_of_an_elected_router_has_these_bytes() -> None:
    record, data = ElectionRecord("r1"), b'{"holder":"r1"}'

    assert msgspec.json.encode(record) == data
    assert msgspec.json.decode(data, type=ElectionRecord) == record


# Questions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "question"),
    [
        (b'{"request_id":"r1"}', Question("r1")),
        (b'{"latest":20}', Question(latest=20)),
    ],
)
def test_a_question_for_decisions_is_read_so(data: bytes, question: Question) -> None:
    assert read_question(data) == question


def test_an_answer_about_decisions_has_these_bytes() -> None:
    known = Explanation("r1", "host:7", "demo.Engine", "exact", 0, 512, None)

    assert encode_explanation(known, [], 0.0, 4096) == (
        b'{"router":"r1","process":"host:7","target":"demo.Engine","cache_aware":"exact","kept":0,'
        b'"limit":512,"oldest_s":null,"decisions":[],"decisions_left_out":0}'
    )
