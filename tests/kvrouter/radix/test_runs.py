"""The common beginning of two stretches of blocks is found to the block."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.radix.runs import Run, common_bytes


def packed(blocks: list[int]) -> bytes:
    return struct.pack(f"<{len(blocks)}Q", *blocks)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_what_two_stretches_begin_with_alike_is_counted_in_whole_blocks(
    pairs: list[tuple[int, int]],
) -> None:
    first, second = packed([a for a, _ in pairs]), packed([b for _, b in pairs])

    found = common_bytes(first, bytearray(second))

    alike = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert found == 8 * alike


def test_a_run_shows_its_place_and_holders() -> None:
    run = Run(3, 10, bytearray(packed([1, 2])), None)
    run.ends[1] = 12

    assert run.end == 12
    assert repr(run) == "<Run 3 [10:12 | holders: 1]>"
