"""Blocks of one layout become blocks of another: which bytes are which."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.kv_blocks import AXES, arrays_of, filled, layouts, read, small_layout, tokens_of

from dynbus.transfer.errors import InvalidTransfer, LayoutMismatch
from dynbus.transfer.layout import BlockLayout, KvMemory, Region, copy, plan, transfer_bytes


@given(st.data())
def test_any_layout_becomes_any_other_of_the_same_model(data: st.DataObject) -> None:
    there = data.draw(layouts(), "there")
    here = data.draw(layouts(like=there), "here")
    # Where the tokens begin in both lists, and how many there are.
    remote_start = data.draw(st.integers(0, there.blocks * there.block_size - 1), "remote start")
    local_start = data.draw(st.integers(0, here.blocks * here.block_size - 1), "local start")
    room = min(
        there.blocks * there.block_size - remote_start, here.blocks * here.block_size - local_start
    )
    tokens = data.draw(st.integers(1, room), "tokens")
    theirs = data.draw(st.permutations(range(there.blocks)), "theirs")
    ours = data.draw(st.permutations(range(here.blocks)), "ours")
    source, target = filled(there), KvMemory.allocate(here)

    pieces = plan(
        here, ours, there, theirs, tokens, local_start=local_start, remote_start=remote_start
    )
    read(pieces, target, source)

    heads = range(
        max(here.first_head, there.first_head),
        min(here.first_head + here.kv_heads, there.first_head + there.kv_heads),
    )
    arrived = tokens_of(target, ours, range(local_start, local_start + tokens), heads)
    assert arrived == tokens_of(source, theirs, range(remote_start, remote_start + tokens), heads)
    assert pieces.bytes == transfer_bytes(here, there, tokens)
    # Nothing else was written: no byte of the source is 0.
    assert sum(np.count_nonzero(array) for array in arrays_of(target)) == pieces.bytes

    copied = KvMemory.allocate(here)
    starts = {"local_start": local_start, "remote_start": remote_start}
    assert copy(copied, ours, source, theirs, tokens, **starts) == pieces.bytes
    assert all(map(np.array_equal, copied.views(), target.views()))


def test_two_halves_of_the_heads_become_a_whole_and_halves_again() -> None:
    whole = small_layout(kv_heads=4)
    halves = [small_layout(total_heads=4, first_head=first) for first in (0, 2)]
    parts = [filled(half, seed) for seed, half in enumerate(halves)]
    joined = KvMemory.allocate(whole)
    back = [KvMemory.allocate(half) for half in halves]

    for half, part in zip(halves, parts, strict=True):
        read(plan(whole, [7, 0], half, [1, 2], 8), joined, part)
    for half, part in zip(halves, back, strict=True):
        read(plan(half, [5, 6], whole, [7, 0], 8), part, joined)

    for part, again in zip(parts, back, strict=True):
        assert tokens_of(again, [5, 6], range(8)) == tokens_of(part, [1, 2], range(8))


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens"),
    [
        ([0, 1, 2, 3], [4, 5, 6, 7], 16),
        ([3, 2, 1, 0], [7, 6, 5, 4], 16),
        ([0, 1, 2, 3], [4, 5, 6, 7], 14),
    ],
)
def test_blocks_that_follow_each_other_on_both_sides_are_one_piece_of_each_head(
    ours: list[int], theirs: list[int], tokens: int
) -> None:
    layout = small_layout()

    pieces = plan(layout, ours, layout, theirs, tokens)

    assert len(pieces) == 2 * 2 * 2
    assert set(pieces.length.tolist()) == {tokens * layout.token_bytes}


def test_whole_blocks_that_are_contiguous_are_one_piece() -> None:
    layout = small_layout(("block", "layer", "kv", "head", "token"))

    pieces = plan(layout, [1, 2, 3, 6], layout, [0, 1, 2, 3], 16)

    assert pieces.length.tolist() == [3 * layout.block_bytes, layout.block_bytes]


def test_blocks_beyond_the_tokens_are_not_touched() -> None:
    layout = small_layout()

    pieces = plan(layout, [0, 99], layout, [1, 1], 4)

    assert pieces.bytes == layout.block_bytes


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dtype": "int8"}, "dtype is int8 there and float32 here"),
        ({"head_dim": 8}, "head_dim is 8 there and 4 here"),
        ({"layers": 3}, "layers is 3 there and 2 here"),
        ({"total_heads": 4}, "total_heads is 4 there and 2 here"),
    ],
)
def test_other_numbers_are_refused_with_both_layouts_named(
    changed: dict[str, Any], told: str
) -> None:
    here, there = small_layout(), small_layout(**changed)

    with pytest.raises(LayoutMismatch) as refused:
        plan(here, [0], there, [0], 4)

    assert told in str(refused.value)
    assert "float32, 2 layers, heads 0 to 1 of 2, head_dim 4, blocks of 4 tokens" in str(
        refused.value
    )


def test_layouts_without_a_common_head_are_refused() -> None:
    here, there = (small_layout(total_heads=4, first_head=first) for first in (0, 2))

    with pytest.raises(LayoutMismatch, match="no head in common"):
        plan(here, [0], there, [0], 4)


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens", "told"),
    [
        ([0], [1, 2], 5, "need 2 local blocks of 4 tokens; 1 are given"),
        ([0, 1], [1], 5, "need 2 remote blocks of 4 tokens; 1 are given"),
        ([0, 8], [1, 2], 5, "local blocks 0 to 8 are not among the 8 there"),
        ([0, 1], [-1, 2], 5, "remote blocks -1 to 2 are not among the 8 there"),
        ([0, 0], [1, 2], 5, "local block 0 is given twice"),
        ([0, 1], [2, 2], 5, "remote block 2 is given twice"),
        ([0, 1], [1, 2], 0, "0 tokens"),
        ([0, 1.5], [1, 2], 5, "local block ids are a list of integers"),
        ([0, 2**70], [1, 2], 5, "local block ids are a list of integers"),
        ([0, 2**64 - 1], [1, 2], 5, "local block ids are a list of integers"),
        ([[0, 1]], [1], 4, "local block ids are a list of integers"),
    ],
)
def test_blocks_that_are_not_usable_are_refused(
    ours: list[int], theirs: list[int], tokens: int, told: str
) -> None:
    layout = small_layout()

    with pytest.raises(InvalidTransfer, match=told):
        plan(layout, ours, layout, theirs, tokens)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dtype": "complex64"}, "'complex64' are not known: choose one of float64, float32"),
        ({"layers": 0}, "layers = 0"),
        ({"block_size": -1}, "block_size = -1"),
        ({"blocks": 2**40}, "blocks = 1099511627776"),
        ({"first_head": 1}, "heads 1 to 2 are not among 2 heads"),
        ({"offsets": ((0, 0),)}, "2 layers has 1 offsets"),
        ({"offsets": ((0, 0), (0, -1))}, "outside of its region"),
        ({"offsets": ((-1, 0), (0, 0))}, "outside of its region"),
        ({"offsets": ((2**40, 0), (0, 0))}, "outside of its region"),
        ({"strides": (0, 512, 256, 16)}, "overlap"),
        ({"strides": (64, 32, 256, 16)}, "overlap"),
        ({"strides": (64, 512, 256, -16)}, "overlap"),
        ({"strides": (2**61, 512, 256, 16)}, "too large"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_when_made_and_when_decoded(
    changed: dict[str, Any], told: str
) -> None:
    fields: dict[str, Any] = {**msgspec.structs.asdict(small_layout()), **changed}

    with pytest.raises(InvalidTransfer, match=told):
        BlockLayout(**fields)
    with pytest.raises(msgspec.ValidationError, match=told):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=BlockLayout)


def test_an_order_that_lacks_an_axis_is_refused() -> None:
    with pytest.raises(InvalidTransfer, match="is not an order of layer, block, kv, head, token"):
        small_layout(("block", "kv", "head"))


@given(layouts())
def test_a_layout_takes_its_regions_to_the_last_byte(layout: BlockLayout) -> None:
    sizes = layout.region_bytes()

    assert sum(sizes) == layout.blocks * layout.block_bytes


def test_memory_of_arrays_lies_where_they_do_and_keeps_them() -> None:
    layout = small_layout(AXES, layers=1)
    cache = np.zeros((2, 2, 32, 4), np.float32)

    memory = KvMemory.of_arrays(layout, [cache])

    assert memory.regions == (Region(address=cache.ctypes.data, size=cache.nbytes),)
    assert memory.owner == (cache,)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((2, 2, 32, 8), np.float32)[..., :4], "contiguous"),
        (np.frombuffer(bytes(2048), np.float32), "writable"),
        (np.zeros(255, np.float32), "region 0 has 1020 bytes, and its layers take 2048"),
        (np.zeros(0, np.float32), "0 bytes at"),
    ],
)
def test_memory_that_a_layout_does_not_fit_is_refused(
    array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], told: str
) -> None:
    with pytest.raises(InvalidTransfer, match=told):
        KvMemory.of_arrays(small_layout(AXES, layers=1), [array])


def test_a_layout_without_its_regions_is_refused() -> None:
    with pytest.raises(InvalidTransfer, match="2 regions does not fit into 1 regions"):
        KvMemory.of_arrays(small_layout(), [np.zeros(512, np.float32)])


@pytest.mark.parametrize(
    "fields",
    [(0, 1), (-1, 1), (1, 0), (2**63, 1), (2**62, 2**62 + 1), (1, 1, -1), (1, 1, 2**16)],
)
def test_a_region_that_cannot_be_is_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidTransfer, match=r"no region of memory|no device"):
        Region(*fields)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such call")
def test_the_bytes_of_a_gpu_are_not_at_hand() -> None:
    layout = small_layout()
    [size] = set(layout.region_bytes())
    regions = [Region(4096, size, 0, "VRAM")] * len(layout.region_bytes())

    with pytest.raises(InvalidTransfer, match="on a GPU are not at hand: copy them first"):
        KvMemory(layout, regions).views()


def test_memory_that_is_populated_keeps_what_is_in_it_and_has_its_pages() -> None:
    layout = small_layout(blocks=65_536)
    # Fresh from the system: numpy may have memory at hand that has its pages.
    arrays = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for size in layout.region_bytes()]
    memory = KvMemory.of_arrays(layout, arrays)
    arrays[0][:3] = 7
    before = psutil.Process().memory_info().rss

    memory.populate()

    gained = psutil.Process().memory_info().rss - before
    assert gained > 0.9 * sum(layout.region_bytes())
    assert arrays[0][:4].tolist() == [7, 7, 7, 0]
