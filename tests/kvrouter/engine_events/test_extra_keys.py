"""Salts and images are told apart among a block's extra keys."""

from __future__ import annotations

from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter.engine_events.extra_keys import ExtraKeys, read_extra_keys
from dynbus.kvrouter.engine_events.messages import Quarantined
from dynbus.kvrouter.hashing import multimodal_hash

from .frames import IMAGE, WITH_IMAGE


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([], ExtraKeys()),
        ([None, None], ExtraKeys()),
        ([["tenant"], None], ExtraKeys("tenant")),
        ([["sql", "tenant"], ["sql"]], ExtraKeys("tenant")),
        ([["sql", "sql"], ["sql"]], ExtraKeys("sql")),
        ([[7, "tenant"], [7]], ExtraKeys("tenant")),
        ([[[IMAGE, 0], "tenant"], [[IMAGE, -4]]], ExtraKeys("tenant", [WITH_IMAGE] * 2)),
        ([["sql", [f"sql:{IMAGE}", 1]]], ExtraKeys(None, [WITH_IMAGE])),
        ([[IMAGE]], ExtraKeys(IMAGE)),
        ([["sql", IMAGE], ["sql"]], ExtraKeys(IMAGE)),
        ([[[IMAGE, 0], IMAGE], [[IMAGE, -4]]], ExtraKeys(IMAGE, [WITH_IMAGE] * 2)),
        ([None, [IMAGE]], ExtraKeys(None, [None, WITH_IMAGE])),
        ([[b"embeds"]], ExtraKeys(None, [(xxh3_64_intdigest(b"embeds"),)])),
        ([None, ["a-cat"]], ExtraKeys(None, [None, (xxh3_64_intdigest(b"a-cat"),)])),
    ],
)
def test_the_first_block_has_the_salt_and_any_block_images(
    blocks: list[list[Any] | None], expected: ExtraKeys
) -> None:
    found = read_extra_keys(blocks, lora_id=7, lora_name="sql", begins=True)

    assert found.salt == expected.salt
    assert [tuple(one or ()) for one in found.multimodal] == [
        tuple(one or ()) for one in expected.multimodal
    ]


def test_a_text_in_a_later_event_of_a_sequence_is_no_salt() -> None:
    found = read_extra_keys([["a-cat"]], begins=False)

    assert (found.salt, found.multimodal) == (None, [[multimodal_hash("a-cat")]])


def test_keys_that_differ_in_something_unknown_make_different_blocks() -> None:
    one = read_extra_keys([[{"type": "legacy", "value": 1}]], begins=True)
    other = read_extra_keys([[{"type": "legacy", "value": 2}]], begins=True)

    assert one.multimodal != other.multimodal


def test_a_digest_is_known_by_its_first_64_bits() -> None:
    assert multimodal_hash("ff" * 32) == 2**64 - 1


def test_a_key_that_nests_too_deeply_is_quarantined() -> None:
    key: list[Any] = []
    for _ in range(100_000):
        key = [key]

    with pytest.raises(Quarantined, match="nests too deeply"):
        read_extra_keys([[key]], begins=True)
