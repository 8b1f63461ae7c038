"""Block and sequence hashes are Dynamo's, and refuse what they cannot hash."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter.hashing import (
    block_hashes,
    hash_seed,
    multimodal_hash,
    objects_by_block,
    sequence_hashes,
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)
block_sizes = st.integers(1, 20)


# Golden values were printed by compute_block_hash_for_seq of ai-dynamo-runtime 1.6.1.
GOLDEN: list[tuple[dict[str, Any], int]] = [
    ({}, 15310707395893867146),
    ({"lora_name": "", "salt": ""}, 15310707395893867146),
    ({"lora_name": "a"}, 13515555613885636154),
    ({"salt": "a"}, 11791696510155702327),
    ({"lora_name": "a", "salt": "b"}, 5050453992389298789),
    ({"multimodal": [[77, 5]]}, 14122648657659247109),
]


@pytest.mark.parametrize(("options", "expected"), GOLDEN)
def test_a_block_has_the_hash_that_dynamo_gives_it(
    options: dict[str, object], expected: int
) -> None:
    found = block_hashes(range(16), 16, **options)  # type: ignore[arg-type]

    assert found.tolist() == [expected]
    assert found.dtype == np.uint64


@given(tokens, block_sizes, st.text(max_size=5), st.text(max_size=5))
def test_hashes_agree_with_dynamo_where_it_is_installed(
    ids: list[int], block_size: int, lora_name: str, salt: str
) -> None:
    dynamo: Any = pytest.importorskip("dynamo._core")

    found = block_hashes(ids, block_size, lora_name=lora_name, salt=salt)

    assert found.tolist() == dynamo.compute_block_hash_for_seq(
        ids, block_size, lora_name=lora_name, cache_namespace=salt
    )


@given(tokens, block_sizes)
def test_lists_arrays_and_bytes_of_the_same_tokens_have_the_same_hashes(
    ids: list[int], block_size: int
) -> None:
    expected = block_hashes(ids, block_size).tolist()

    assert block_hashes(np.array(ids, dtype=np.uint32), block_size).tolist() == expected
    assert block_hashes(np.array(ids, dtype=np.int64), block_size).tolist() == expected
    assert block_hashes(struct.pack(f"<{len(ids)}I", *ids), block_size).tolist() == expected


@given(tokens, block_sizes)
def test_an_incomplete_last_block_has_no_hash(ids: list[int], block_size: int) -> None:
    whole = len(ids) // block_size * block_size

    found = block_hashes(ids, block_size).tolist()

    assert len(found) == len(ids) // block_size
    assert found == block_hashes(ids[:whole], block_size).tolist()


def test_every_adapter_tenant_and_image_has_blocks_of_its_own() -> None:
    def first(**options: Any) -> int:
        return int(block_hashes(range(4), 4, **options)[0])

    seen = {
        first(),
        first(lora_name="x"),
        first(salt="x"),
        first(lora_name="x", salt="x"),
        first(lora_name="xx"),
        first(multimodal=[[1]]),
        first(multimodal=[[2]]),
    }

    assert len(seen) == 7


def test_the_order_of_the_images_of_a_block_is_of_no_matter() -> None:
    one = block_hashes(range(8), 4, multimodal=[None, [3, 1, 2]])
    other = block_hashes(range(8), 4, multimodal=[None, [1, 2, 3]])

    assert one.tolist() == other.tolist()
    assert one[0] == block_hashes(range(4), 4)[0]


def test_an_image_is_in_each_block_that_has_a_token_of_it() -> None:
    cat, dog = multimodal_hash("cat"), multimodal_hash("dog")

    within = objects_by_block([("cat", 3, 5), ("dog", 7, 1), ("fox", 99, 9)], 4, 4)

    assert within == [[cat], [cat, dog], None, None]


@pytest.mark.parametrize("place", [(-1, 2), (0, 0), (3, -1)])
def test_an_image_at_no_place_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="one or more from 0"):
        objects_by_block([("cat", *place)], 4, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([-1, 0], "from 0 to 2\\^32 - 1"),
        ([2**32, 0], "from 0 to 2\\^32 - 1"),
        (["a", 0], "from 0 to 2\\^32 - 1"),
        (np.array([0, -1]), "from 0 to 2\\^32 - 1"),
        (np.array([0.5, 1.0]), "not float64"),
        (b"12345", "not a multiple of 4"),
    ],
)
def test_what_is_no_token_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_hashes(wrong, 2)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size = 0"):
        block_hashes([1], 0)


def test_a_multimodal_hash_that_does_not_fit_is_refused_with_its_block() -> None:
    with pytest.raises(ValueError, match="multimodal hash of block 1"):
        block_hashes(range(8), 4, multimodal=[None, [2**64]])


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_a_sequence_hash_chains_the_one_before_and_its_block(blocks: list[int]) -> None:
    found = sequence_hashes(np.array(blocks, dtype=np.uint64)).tolist()

    expected: list[int] = []
    for block in blocks:
        if not expected:
            expected.append(block)
        else:
            expected.append(xxh3_64_intdigest(struct.pack("<QQ", expected[-1], block), 1337))
    assert found == expected


def test_the_seed_without_names_is_dynamos() -> None:
    assert hash_seed() == hash_seed("", "") == 1337
