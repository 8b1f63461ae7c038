"""Those that hold little keep it, whatever others hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.radix.eviction import fair_share


@pytest.mark.parametrize(
    ("held", "room", "expected"),
    [
        ([], 10, 0),
        ([10, 20], 30, 20),
        ([10, 20], 29, 19),
        ([880, 272, 200_000], 45_000, 43_848),
        ([10, 10, 10], 15, 5),
        ([5, 50, 50], 25, 10),
        ([5], 0, 0),
    ],
)
def test_a_share_is_the_same_for_all_that_hold_more(
    held: list[int], room: int, expected: int
) -> None:
    assert fair_share(held, room) == expected


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(0, 5000))
def test_shares_fill_the_room_and_take_from_nobody_who_holds_less(
    held: list[int], room: int
) -> None:
    share = fair_share(held, room)

    kept = [min(blocks, share) for blocks in held]
    assert sum(kept) <= room
    assert sum(kept) == sum(held) or sum(kept) > room - len(held)
