"""No peer keeps the others waiting, and none can make an inbox grow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus import inbox as limits
from dynbus.bus.inbox import COST, FRAME_COST, PEER_COST, TURN_COST, Inbox


class Turns:
    """A main loop that the test turns by hand, and what was carried out on it."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []
        self.done: list[str] = []
        self.inbox: Inbox[str] = Inbox(self.done.append, self.ready.append)

    def turn(self) -> None:
        ready, self.ready[:] = self.ready[:], []
        for function in ready:
            function()

    def all_turns(self) -> int:
        count = 0
        while self.ready:
            self.turn()
            count += 1
        return count


def test_what_a_peer_says_is_carried_out_in_order() -> None:
    turns = Turns()

    for text in ("a", "b", "c"):
        assert turns.inbox.put("p", text, 1)
    turns.turn()

    assert turns.done == ["a", "b", "c"]
    assert turns.ready == []


def test_the_loop_is_asked_for_one_turn_however_much_is_said() -> None:
    turns = Turns()

    for _ in range(10):
        turns.inbox.put("p", "a", 1)

    assert len(turns.ready) == 1


def test_peers_take_turns() -> None:
    turns = Turns()
    for index in range(3):
        turns.inbox.put("many", f"m{index}", 1)
    turns.inbox.put("few", "f0", 1)

    turns.turn()

    assert turns.done == ["m0", "f0", "m1", "m2"]


def test_a_turn_carries_out_a_bounded_amount() -> None:
    turns = Turns()
    for _ in range(3):
        turns.inbox.put("p", "a", TURN_COST)

    turns.turn()

    assert turns.done == ["a"]
    assert turns.all_turns() == 2
    assert turns.done == ["a"] * 3


def test_a_peer_that_says_too_much_is_refused_and_the_others_are_not() -> None:
    turns = Turns()
    taken = [turns.inbox.put("many", "m", FRAME_COST) for _ in range(PEER_COST // FRAME_COST + 1)]

    assert taken == [True] * (PEER_COST // FRAME_COST) + [False]
    assert turns.inbox.put("few", "f", FRAME_COST)
    turns.turn()
    assert "f" in turns.done[:2]


def test_however_many_peers_there_are_what_waits_is_bounded() -> None:
    turns = Turns()

    taken = sum(turns.inbox.put(f"p{index}", "a", FRAME_COST) for index in range(COST))

    assert taken == COST // FRAME_COST
    turns.all_turns()
    assert len(turns.done) == taken
    assert turns.inbox.put("p", "a", FRAME_COST)


def test_one_thing_is_taken_however_much_it_costs() -> None:
    turns = Turns()

    assert turns.inbox.put("p", "a", 2 * COST)
    turns.all_turns()

    assert turns.done == ["a"]


def test_what_cannot_be_carried_out_keeps_nothing_else_waiting() -> None:
    ready: list[Callable[[], None]] = []
    done: list[str] = []

    def carry_out(item: str) -> None:
        if item == "bad":
            raise ValueError(item)
        done.append(item)

    inbox: Inbox[str] = Inbox(carry_out, ready.append)
    for item in ("a", "bad", "b"):
        inbox.put("p", item, 1)

    with pytest.raises(ValueError, match="bad"):
        ready.pop()()
    ready.pop()()

    assert done == ["a", "b"]
    assert ready == []
    assert repr(inbox) == "<Inbox [0 peers, cost: 0]>"


said = st.tuples(st.sampled_from("abc"), st.integers(1, limits.PEER_COST // 3))


@given(st.lists(st.one_of(said, st.none()), max_size=60))
def test_all_that_is_taken_is_carried_out_once_and_in_order(
    steps: list[tuple[str, int] | None],
) -> None:
    turns = Turns()
    expected: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    for index, step in enumerate(steps):
        if step is None:
            turns.turn()
        elif turns.inbox.put(step[0], f"{step[0]}{index}", step[1]):
            expected[step[0]].append(f"{step[0]}{index}")
    turns.all_turns()

    for peer, items in expected.items():
        assert [item for item in turns.done if item[0] == peer] == items
