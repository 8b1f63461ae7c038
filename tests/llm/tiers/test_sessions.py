"""Blocks that are kept for conversations: what they have in common, their time, owners' shares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.engine.interface import CachedBlock
from dynbus.llm.tiers.host_index import HostIndex
from dynbus.llm.tiers.sessions import KeptSessions, SessionKey


def key(name: str, owner: str = "") -> SessionKey:
    return SessionKey(owner, name)


def kept(sessions: KeptSessions, among: Iterable[int] = range(100)) -> list[int]:
    return [one for one in among if one in sessions]


def test_the_next_request_of_a_conversation_takes_the_place_of_the_one_before() -> None:
    sessions = KeptSessions(10)
    assert sessions.keep(key("a"), [1, 2, 3], 10.0) == []
    assert sessions.keep(key("a"), [1, 2, 4, 5], 20.0) == [3]

    assert kept(sessions) == [1, 2, 4, 5]
    assert sessions.end_those_over(15.0) == []
    assert sessions.end_those_over(20.0) == [1, 2, 4, 5]
    assert (len(sessions), sessions.blocks) == (0, 0)


def test_what_two_conversations_have_in_common_counts_once_and_stays_as_long_as_one_is() -> None:
    sessions = KeptSessions(5)
    sessions.keep(key("a"), [1, 2, 3], 10.0)
    assert sessions.keep(key("fork"), [1, 2, 4], 20.0) == []
    assert sessions.blocks == 4

    assert sessions.end_those_over(10.0) == [3]
    assert kept(sessions) == [1, 2, 4]


def test_two_branches_are_kept_beside_each_other_in_place_of_what_they_go_on_from() -> None:
    sessions = KeptSessions(20)

    def keep(branch: str, after: str, hashes: list[int], until: float) -> list[int]:
        return sessions.keep(key(branch), hashes, until, key(after))

    assert keep("second", "first", [1, 2, 3], 10.0) == []
    # The end of an answer is seldom what the next prompt has.
    assert keep("left", "second", [1, 2, 4, 5], 20.0) == [3]
    assert keep("right", "second", [1, 2, 6], 30.0) == []
    assert (len(sessions), sessions.blocks) == (2, 5)

    assert keep("left-again", "left", [1, 2, 4, 5, 7], 40.0) == []
    assert kept(sessions) == [1, 2, 4, 5, 6, 7]
    assert sessions.end_those_over(30.0) == [6]


def test_an_owner_gives_up_its_own_conversations_and_never_those_of_others() -> None:
    sessions = KeptSessions(10)
    sessions.keep(key("small", "ada"), [1, 2], 5.0)
    sessions.keep(key("first", "bob"), [11, 12], 7.0)
    sessions.keep(key("second", "bob"), [21, 22], 6.0)

    assert sessions.keep(key("third", "bob"), [31, 32, 33, 34], 9.0) == [21, 22]
    assert kept(sessions) == [1, 2, 11, 12, 31, 32, 33, 34]


def test_conversations_that_take_no_blocks_of_their_own_are_no_more_than_there_are_blocks() -> None:
    sessions = KeptSessions(16)
    for number in range(100):
        sessions.keep(key(f"a{number}", "ada"), [1, 2], float(number))
    sessions.keep(key("b", "bob"), [3], 0.5)

    assert len(sessions) == 15
    assert sessions.blocks == 3


class Hash(int):
    """A hash that counts how often any was looked up."""

    lookups = 0

    def __hash__(self) -> int:
        Hash.lookups += 1
        return super().__hash__()


class End(float):
    """An end that counts how often any was compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        End.comparisons += 1
        return super().__lt__(other)


def test_many_conversations_give_way_to_a_long_one_in_no_time() -> None:
    sessions = KeptSessions(1000)
    for number in range(800):
        sessions.keep(key(f"a{number}"), [number], End(number))
    sessions.keep(key("long"), [Hash(1000 + number) for number in range(900)], End(2000))

    assert len(sessions) == 101
    assert Hash.lookups < 10 * 900
    assert End.comparisons < 40 * 800


def test_conversations_that_go_on_for_long_leave_nothing_behind() -> None:
    sessions = KeptSessions(100)
    for turn in range(10_000):
        sessions.keep(key(f"a{turn % 3}"), [1, 2, turn], float(turn))

    within: Any = sessions
    assert (len(sessions), len(within._ends._order) < 200) == (3, True)
    sessions.end_those_over(10_000.0)
    assert (sessions.blocks, len(sessions), len(within._ends_of)) == (0, 0, 0)


def test_a_conversation_that_is_too_long_keeps_its_beginning() -> None:
    sessions = KeptSessions(4)
    sessions.keep(key("a"), [*range(50)], 1.0)

    assert kept(sessions) == [0, 1, 2]


keeping = st.tuples(
    st.sampled_from(["ada", "bob", ""]),
    st.sampled_from("abc"),
    st.integers(0, 40),
    st.integers(1, 9),
)


@given(st.lists(keeping, max_size=40), st.integers(0, 30))
def test_what_is_freed_is_what_is_kept_no_longer(
    turns: list[tuple[str, str, int, int]], limit: int
) -> None:
    sessions = KeptSessions(limit)
    among = set[int]()
    for now, (owner, name, length, seconds) in enumerate(turns):
        # An owner's blocks are its own, and its conversations begin in the same way.
        base = ["ada", "bob", ""].index(owner) * 10_000
        own = base + 1000 * "abc".index(name)
        hashes = [*range(base, base + length // 2), *range(own + 500, own + 500 + length // 2)]
        among.update(hashes)
        before = set(kept(sessions, among))
        freed = sessions.end_those_over(now)
        assert before - set(kept(sessions, among)) == set(freed)
        before = set(kept(sessions, among))
        replaced = None if length % 3 else key("abc"[length % 2], owner)
        freed = sessions.keep(key(name, owner), hashes, now + seconds, replaced)
        after = set(kept(sessions, among))
        assert before - after == set(freed)
        assert len(freed) == len(set(freed))
        assert sessions.blocks == len(after) <= limit
    sessions.end_those_over(1000)
    assert (len(sessions), sessions.blocks) == (0, 0)


def chain(first: int, count: int) -> list[CachedBlock]:
    return [
        CachedBlock(at, first + at, first + at - 1 if at else None, first + at)
        for at in range(count)
    ]


def test_a_store_keeps_what_is_kept_though_others_were_used_later() -> None:
    sessions = KeptSessions(6)
    index = HostIndex(8, sessions)
    sessions.keep(key("a"), [100, 101, 102], 10.0)
    index.take_in(chain(100, 3), lambda _: None)
    for other in range(5):
        index.take_in(chain(200 + 10 * other, 4), lambda _: None)
    assert [one in index for one in (100, 101, 102)] == [True] * 3
    assert len(index) == 8

    index.end_those_over(10.0)
    for other in range(5):
        index.take_in(chain(300 + 10 * other, 4), lambda _: None)
    assert [one in index for one in (100, 101, 102)] == [False] * 3


def test_what_is_kept_before_it_comes_stays_too() -> None:
    sessions = KeptSessions(6)
    index = HostIndex(4, sessions)
    index.take_in(chain(200, 4), lambda _: None)
    sessions.keep(key("a"), [100, 101], 10.0)
    index.take_in(chain(100, 2), lambda _: None)
    index.take_in(chain(300, 4), lambda _: None)

    assert 100 in index
    assert 101 in index
