"""Room that owners share, and wait for."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import eventually

from dynbus.kvrouter.routing.fairness import Shares
from dynbus.llm.shares import SharedRoom


def taken(shares: Shares, owner: str, size: int = 1) -> int:
    """How often an owner takes so much until that is refused."""
    count = 0
    while shares.reserve(owner, size):
        count += 1
    return count


def test_an_owner_leaves_room_for_the_next_one_and_everybody_has_all() -> None:
    shares = Shares(80, 7)

    assert taken(shares, "ada") == 70
    assert taken(shares, "bob") == 8
    shares.give_back("ada", 70)
    shares.give_back("bob", 8)

    assert taken(shares, "") == 80
    assert not shares.reserve("ada")


def test_one_that_has_nothing_may_take_all_that_is_free() -> None:
    shares = Shares(10, 1)

    assert shares.reserve("ada", 8)
    assert not shares.reserve("ada", 1)
    assert not shares.reserve("bob", 3)
    assert shares.reserve("bob", 2)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.booleans())))
def test_what_is_taken_is_never_more_than_there_is(steps: list[tuple[str, int, bool]]) -> None:
    shares, held = Shares(100, 1), list[tuple[str, int]]()
    for owner, size, takes in steps:
        if takes:
            if shares.reserve(owner, size):
                held.append((owner, size))
        elif held:
            shares.give_back(*held.pop(0))
        assert shares.taken == sum(size for _, size in held) <= 100
    for one in held:
        shares.give_back(*one)

    assert shares.reserve("e", 100)


@pytest.mark.anyio
async def test_who_waits_has_room_as_soon_as_its_own_is_free_and_waits_for_no_other_owner() -> None:
    room = SharedRoom(Shares(100, 1))
    await room.reserve("ada", 50)
    second, third = (asyncio.create_task(room.reserve("ada", 40)) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.wait_for(room.reserve("bob", 25), 5)
    assert not second.done()

    second.cancel()
    await asyncio.wait([second])
    room.give_back("ada", 50)
    await asyncio.wait_for(third, 5)

    room.give_back("ada", 40)
    room.give_back("bob", 25)
    await asyncio.wait_for(room.reserve("eve", 1000), 5)
    assert "100 of 100" in repr(room)


@pytest.mark.anyio
async def test_one_that_is_cancelled_as_it_gets_room_gives_it_back() -> None:
    shares = Shares(10, 1)
    room = SharedRoom(shares)
    await room.reserve("ada", 10)
    waiting = asyncio.create_task(room.reserve("ada", 10))
    await eventually(lambda: "1 owners" in repr(room))
    room.give_back("ada", 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert shares.taken == 0
