"""Version 1 of the wire: its bytes, and that nothing which arrives can raise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.calling.remote_instance import ACKNOWLEDGEMENT_BYTES, MAX_CONTROL_FRAMES
from dynbus.bus.protocol.call_ranges import CALL_BYTES, heartbeat_room
from dynbus.bus.protocol.wire import (
    MAX_CALLS,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_INCARNATION,
    MAX_SENDER,
    Batch,
    Cancel,
    Credit,
    End,
    Failed,
    Frame,
    Heartbeat,
    InstanceRecord,
    Item,
    Items,
    Open,
    Part,
    Ping,
    Pong,
    Resume,
    Unknown,
    decode_batch,
    decode_record,
    encode_batch,
    encode_record,
)
from dynbus.bus.serving.outbox import FRAME_OVERHEAD

SECRET = b"0123456789abcdef"
HEAD = b"\x95\x01\xa1i\xa1n\x02\x91"
CALL = b"\x07\xc4\x100123456789abcdef\x01"

GOLDEN: list[tuple[Frame, bytes]] = [
    (
        Items(7, SECRET, 1, 3, [b"a", b"bc"]),
        b"\x95\x01\xa1i\xa1n\x02\x91"
        b"\x96\x00\x07\xc4\x100123456789abcdef\x01\x03\x92\xc4\x01a\xc4\x02bc",
    ),
    (Item(7, SECRET, 1, 3, b"a"), HEAD + b"\x96\x0c" + CALL + b"\x03\xc4\x01a"),
    (Part(7, SECRET, 1, 5, b"xyz"), HEAD + b"\x96\x01" + CALL + b"\x05\xc4\x03xyz"),
    (End(7, SECRET, 1, 6, None), HEAD + b"\x96\x02" + CALL + b"\x06\xc0"),
    (End(7, SECRET, 1, 6, b"r"), HEAD + b"\x96\x02" + CALL + b"\x06\xc4\x01r"),
    (
        Failed(7, SECRET, 1, 6, "Overloaded", "full", True, False, "d.S.g@i", "id", 1.5, "", "E"),
        HEAD + b"\x9e\x03" + CALL + b"\x06\xaaOverloaded\xa4full\xc3\xc2\xa7d.S.g@i\xa2id"
        b"\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa0\xa1E",
    ),
    (Credit(7, SECRET, 1, 4096, 3), HEAD + b"\x96\x04" + CALL + b"\xcd\x10\x00\x03"),
    (
        Cancel(7, SECRET, 1, 1.0),
        HEAD + b"\x95\x05" + CALL + b"\xcb?\xf0\x00\x00\x00\x00\x00\x00",
    ),
    (Resume(7, SECRET, 1, 4), HEAD + b"\x96\x06" + CALL + b"\x04\xc0"),
    (
        Resume(7, SECRET, 1, 4, 0.25),
        HEAD + b"\x96\x06" + CALL + b"\x04\xcb?\xd0\x00\x00\x00\x00\x00\x00",
    ),
    (Unknown(7, SECRET, 1), HEAD + b"\x94\x07" + CALL),
    (
        Open(1, [(7, 3), (8, 0)], [(6, SECRET)]),
        HEAD
        + b"\x96\x08\x01\x92\x92\x07\x03\x92\x08\x00\x91\x92\x06\xc4\x100123456789abcdef\x00\xc0",
    ),
    (Open(1, [(7, 3)], [], 5, 9), HEAD + b"\x96\x08\x01\x91\x92\x07\x03\x90\x05\x09"),
    (
        Heartbeat(1, 0.25, False, [(7, 9)]),
        HEAD + b"\x97\t\x01\xcb?\xd0\x00\x00\x00\x00\x00\x00\xc2\x91\x92\x07\t\x00\xc0",
    ),
    (
        Heartbeat(1, 0.25, False, [(7, 9)], 5, 9),
        HEAD + b"\x97\t\x01\xcb?\xd0\x00\x00\x00\x00\x00\x00\xc2\x91\x92\x07\t\x05\x09",
    ),
    (Ping(5), HEAD + b"\x92\n\x05"),
    (Pong(5), HEAD + b"\x92\x0b\x05"),
]

integers = st.integers(0, 2**63 - 1)
secrets = st.binary(min_size=16, max_size=16)
seconds = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)
blobs = st.binary(max_size=40)
call = (integers, secrets, integers)
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Items, *call, integers, st.lists(blobs, max_size=4)),
    st.builds(Item, *call, integers, blobs),
    st.builds(Part, *call, integers, blobs),
    st.builds(End, *call, integers, st.none() | blobs),
    st.builds(
        Failed,
        *call,
        integers,
        texts,
        texts,
        st.booleans(),
        st.booleans(),
        texts,
        texts,
        seconds,
        texts,
    ),
    st.builds(Credit, *call, integers, integers),
    st.builds(Cancel, *call, seconds),
    st.builds(Resume, *call, integers, st.none() | seconds),
    st.builds(Unknown, *call),
    st.builds(
        Open,
        integers,
        st.lists(st.tuples(integers, integers)),
        st.lists(st.tuples(integers, secrets)),
        integers,
        st.none() | integers,
    ),
    st.builds(
        Heartbeat,
        integers,
        seconds,
        st.booleans(),
        st.lists(st.tuples(integers, integers)),
        integers,
        st.none() | integers,
    ),
    st.builds(Ping, integers),
    st.builds(Pong, integers),
)


@pytest.mark.parametrize(("frame", "message"), GOLDEN, ids=lambda value: type(value).__name__)
def test_a_frame_has_these_bytes(frame: Frame, message: bytes) -> None:
    assert encode_batch("i", "n", 2, [frame]) == message
    assert decode_batch(message) == Batch(1, "i", "n", 2, [frame])


def test_the_golden_bytes_cover_every_kind_of_frame() -> None:
    assert {type(frame) for frame, _ in GOLDEN} == set(Frame.__args__)


@given(texts, texts, integers, st.lists(frames, max_size=6))
def test_decode_is_the_inverse_of_encode(
    sender: str, incarnation: str, load: int, several: list[Frame]
) -> None:
    message = encode_batch(sender, incarnation, load, several)

    assert decode_batch(message) == Batch(1, sender, incarnation, load, several)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused_but_never_raise(data: bytes) -> None:
    batch, record = decode_batch(data), decode_record(data)

    assert batch is None or batch.version == 1
    assert record is None or record.namespace is not None


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_a_damaged_message_never_raises(several: list[Frame], data: st.DataObject) -> None:
    message = bytearray(encode_batch("sender", "incarnation", 1, several))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))

    for damaged in (bytes(message), bytes(message[:cut])):
        batch = decode_batch(damaged)
        assert batch is None or batch.version == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"not msgpack at all",
        b"\x95\x02\xa1i\xa1n\x02\x90",
        b"\x95\x01\xa1\xff\xa1n\x02\x90",
        b"\x95\x01\xa1i\xa1n\x02\x91\x92\x63\x05",
        b"\x95\x01\xa1i\xa1n\x02" + b"\x91" * 100_000,
        b"\x95\x01\xa1i\xa1n\x02\xdd\xff\xff\xff\xff",
    ],
    ids=[
        "empty",
        "nil",
        "text",
        "version 2",
        "not UTF-8",
        "unknown frame",
        "nested without end",
        "a length that is not there",
    ],
)
def test_what_is_not_a_batch_of_version_1_is_none(data: bytes) -> None:
    assert decode_batch(data) is None


def test_an_instance_record_is_this_json() -> None:
    record = InstanceRecord(
        namespace="demo",
        component="Shouter",
        instance_id="i1",
        incarnation="n1",
        endpoints={"generate": "stream"},
        started=1.5,
    )
    data = (
        b'{"namespace":"demo","component":"Shouter","instance_id":"i1","incarnation":"n1",'
        b'"endpoints":{"generate":"stream"},"started":1.5}'
    )

    assert encode_record(record) == data
    assert decode_record(data) == record


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b'{"namespace":"\xff"}', b"[" * 100_000, b'{"a":' * 100_000],
    ids=["empty", "object", "array", "null", "not UTF-8", "nested arrays", "nested objects"],
)
def test_what_is_not_a_record_is_none(data: bytes) -> None:
    assert decode_record(data) is None


def test_a_record_of_another_version_is_none() -> None:
    owner = b'"namespace":"demo","component":"Shouter","instance_id":"i1","incarnation":"n1"'
    record = b'{"version":%d,' + owner + b',"endpoints":{},"started":1.5}'

    assert decode_record(record % 1) is not None
    assert decode_record(record % 2) is None


@pytest.mark.parametrize(
    "batch",
    [
        [1, "i", "n", 0, [[10, 1]] * (MAX_FRAMES + 1)],
        [1, "i" * (MAX_SENDER + 1), "n", 0, []],
        [1, "i", "n" * (MAX_INCARNATION + 1), 0, []],
        [1, "i", "n", 0, [[8, [[1, 1]] * (MAX_CALLS + 1), []]]],
        [1, "i", "n", 0, [[8, [], [[1, SECRET]] * (MAX_CALLS + 1)]]],
        [1, "i", "n", 0, [[8, [], [[1, SECRET * 2]]]]],
        [1, "i", "n", 0, [[9, 0.0, False, [[1, 1]] * (MAX_CALLS + 1)]]],
        [1, "i", "n", 0, [[5, 1, SECRET * 2, 1, 0.0]]],
    ],
    ids=[
        "frames",
        "sender",
        "incarnation",
        "open calls",
        "ended calls",
        "a secret of an ended call",
        "calls of a heartbeat",
        "a secret",
    ],
)
def test_a_message_with_more_than_is_ever_needed_is_none(batch: list[object]) -> None:
    assert decode_batch(msgspec.msgpack.encode(batch)) is None


def test_the_largest_heartbeat_fits_the_bounds_of_a_message() -> None:
    room = heartbeat_room(64 * 1024 * 1024)

    assert room // CALL_BYTES <= MAX_CALLS
    assert room // ACKNOWLEDGEMENT_BYTES <= MAX_CALLS
    assert MAX_FRAME_BYTES // FRAME_OVERHEAD <= MAX_FRAMES
    assert MAX_CONTROL_FRAMES <= MAX_FRAMES
