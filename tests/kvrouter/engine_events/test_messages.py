"""What cannot be used of a payload is quarantined with its reason; the rest is used."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.kvrouter.engine_events.messages import (
    MAX_PAYLOAD,
    EngineRemoved,
    QuarantineReason,
    decode_payload,
    read_hash,
)

from .frames import encode, vllm


def reasons(payload: bytes) -> list[QuarantineReason]:
    return [one.reason for one in decode_payload(payload).quarantined]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (None, QuarantineReason.MALFORMED),
        ([], QuarantineReason.MALFORMED),
        ("BlockStored", QuarantineReason.MALFORMED),
        ([7, [1]], QuarantineReason.MALFORMED),
        ({"block_hashes": [1]}, QuarantineReason.MALFORMED),
        (["BlockPinned", [1]], QuarantineReason.UNKNOWN_TYPE),
        ({"type": "BlockPinned"}, QuarantineReason.UNKNOWN_TYPE),
        (["BlockRemoved"], QuarantineReason.BAD_HASH),
        (["BlockRemoved", 7], QuarantineReason.BAD_HASH),
        (["BlockRemoved", [1, None]], QuarantineReason.BAD_HASH),
        (["BlockRemoved", [True]], QuarantineReason.BAD_HASH),
        (["BlockRemoved", [1.0]], QuarantineReason.BAD_HASH),
        (["BlockRemoved", [b""]], QuarantineReason.BAD_HASH),
        (["BlockRemoved", [1], 7], QuarantineReason.BAD_FIELD),
        (["BlockRemoved", [1], "GPU", "first"], QuarantineReason.BAD_FIELD),
        (vllm(parent_block_hash="root"), QuarantineReason.BAD_HASH),
        (vllm(token_ids=[1, -2]), QuarantineReason.BAD_TOKENS),
        (vllm(token_ids=[1 << 32]), QuarantineReason.BAD_TOKENS),
        (vllm(token_ids=["a"]), QuarantineReason.BAD_TOKENS),
        (vllm(token_ids=[[1, 2], [3]]), QuarantineReason.BAD_TOKENS),
        (vllm(token_ids=b"123"), QuarantineReason.BAD_TOKENS),
        (vllm(token_ids="abc"), QuarantineReason.BAD_TOKENS),
        (vllm(block_size=-1), QuarantineReason.BAD_FIELD),
        (vllm(lora_id=[1]), QuarantineReason.BAD_FIELD),
        (vllm(lora_name=1), QuarantineReason.BAD_FIELD),
        (vllm(extra_keys={}), QuarantineReason.BAD_FIELD),
        (vllm(extra_keys=["tenant"]), QuarantineReason.BAD_FIELD),
    ],
)
def test_a_bad_event_is_quarantined_and_its_neighbours_are_used(
    event: Any, reason: QuarantineReason
) -> None:
    good = ["BlockRemoved", [1]]

    batch = decode_payload(encode([1.5, [good, event, good], 0]))

    assert [one.reason for one in batch.quarantined] == [reason]
    assert batch.events == [EngineRemoved([1])] * 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        encode(7),
        encode([]),
        encode([1.5]),
        encode([1.5, None]),
        encode({"ts": 1.5}),
        encode([1.5, []]) + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xc0\xdd\xff\xff\xff\xff\xc0",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 1_000_000,
        b"\x92\xc0\x91" + b"\x91" * 1_000_000,
    ],
    ids=lambda payload: payload[:12].hex(),
)
def test_bytes_that_are_no_batch_are_malformed(payload: bytes) -> None:
    assert reasons(payload) == [QuarantineReason.MALFORMED]


def test_an_event_with_text_that_is_no_text_is_malformed_by_itself() -> None:
    payload = b"\x92\xc0\x92" + b"\xa2\xff\xff" + encode(["AllBlocksCleared"])

    batch = decode_payload(payload)

    assert [one.reason for one in batch.quarantined] == [QuarantineReason.MALFORMED]
    assert len(batch.events) == 1


def test_a_payload_that_is_too_large_is_not_looked_at() -> None:
    assert reasons(bytes(MAX_PAYLOAD + 1)) == [QuarantineReason.TOO_LARGE]


@pytest.mark.parametrize("rank", [-1, 1 << 16, "0", 1.0, True, [0]])
def test_a_batch_of_an_impossible_rank_is_quarantined(rank: Any) -> None:
    assert reasons(encode([1.5, [["AllBlocksCleared"]], rank])) == [QuarantineReason.WRONG_RANK]


def test_the_rank_of_a_map_has_either_name() -> None:
    by_vllm = decode_payload(encode({"ts": 1, "events": [], "data_parallel_rank": 3}))
    by_sglang = decode_payload(encode({"ts": 1, "events": [], "attn_dp_rank": 4}))

    assert (by_vllm.dp_rank, by_sglang.dp_rank) == (3, 4)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (b"\x01", 1),
        (bytes(24) + b"\x80" + bytes(7), 2**63),
        (b"\xff" * 32, 2**64 - 1),
    ],
)
def test_a_hash_of_any_form_is_an_unsigned_64_bit_number(value: Any, number: int) -> None:
    assert read_hash(value) == number
