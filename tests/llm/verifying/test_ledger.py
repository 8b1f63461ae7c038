"""The ledger knows where blocks come from, and who has used them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.engine.interface import Came
from dynbus.llm.verifying import ledger as ledgers
from dynbus.llm.verifying.ledger import BlockLedger, Source


def test_a_block_has_the_source_from_which_it_was_stored_last() -> None:
    ledger = BlockLedger(8)
    ledger.came("a", [1, 2], 0, 2, "computed", "", [1, 2])
    ledger.came("b", [1, 2], 0, 1, "host", "", [1])
    ledger.came("c", [3], 0, 1, "moved", "peer", [3])

    assert [ledger.source(each) for each in (1, 2, 3, 4)] == [
        Source("host"),
        Source("own", "a"),
        Source("instance", "peer"),
        Source("own"),
    ]


def test_a_request_knows_the_sources_of_what_it_has_not_computed() -> None:
    ledger = BlockLedger(8)
    hashes = [1, 2, 3, 4]
    ledger.came("a", hashes, 0, 1, "computed", "", [1])
    ledger.came("b", hashes, 0, 1, "cached", "", ())
    ledger.came("b", hashes, 1, 2, "host", "", [2])
    ledger.came("b", hashes, 2, 3, "moved", "peer", [3])
    ledger.came("b", hashes, 3, 4, "computed", "", [4])

    assert ledger.begun("b") == (
        hashes,
        [Source("own", "a"), Source("host"), Source("instance", "peer"), None],
    )
    assert ledger.begun("b") == ([], ())


def test_a_request_that_lost_its_blocks_begins_anew() -> None:
    ledger = BlockLedger(8)
    ledger.came("b", [1, 2], 0, 0, "cached", "", ())
    ledger.came("b", [1, 2], 0, 2, "moved", "peer", [1, 2])
    ledger.came("b", [1, 2], 0, 0, "cached", "", ())
    ledger.came("b", [1, 2], 0, 2, "computed", "", ())

    assert ledger.begun("b") == ([1, 2], [None, None])


def test_who_used_a_block_before_it_was_stored_anew_is_not_touched() -> None:
    ledger = BlockLedger(8)
    ledger.came("a", [1], 0, 1, "computed", "", [1])
    ledger.came("b", [1], 0, 1, "cached", "", ())
    ledger.came("c", [1], 0, 1, "host", "", [1])
    ledger.came("d", [1, 2], 0, 1, "cached", "", ())
    ledger.came("e", [2], 0, 1, "cached", "", ())

    assert ledger.touched({1}) == ["c", "d"]


def test_who_computed_a_block_is_touched_by_its_damage() -> None:
    ledger = BlockLedger(8)
    ledger.came("a", [1], 0, 1, "computed", "", [1])
    ledger.came("b", [1], 0, 1, "cached", "", ())

    assert ledger.touched({1}) == ["a", "b"]


names = st.sampled_from("abcdef")
hows: st.SearchStrategy[Came] = st.sampled_from(["computed", "cached", "host", "moved"])
steps = st.lists(
    st.tuples(names, st.lists(st.integers(0, 9), unique=True, max_size=4), hows, st.booleans()),
    max_size=60,
)


@given(steps)
def test_all_who_came_to_a_block_since_it_was_stored_are_touched_and_no_others(
    story: list[tuple[str, list[int], Came, bool]],
) -> None:
    ledger = BlockLedger(64)
    users: dict[int, dict[str, None]] = {}
    for number, (name, hashes, how, stores) in enumerate(story):
        # Each use is a request of its own.
        request = f"{name}.{number}"
        stored = hashes if stores and how != "cached" else []
        ledger.came(request, hashes, 0, len(hashes), how, "peer", stored)
        for each in hashes:
            if each in stored:
                users[each] = {}
            if how != "computed" or each in stored:
                users.setdefault(each, {})[request] = None

    for each, known in users.items():
        assert set(ledger.touched({each})) == set(known)


def test_its_memory_is_bounded() -> None:
    ledger = BlockLedger(4)
    for at in range(2 * ledgers.MAX_BEGUN):
        ledger.came(f"r{at}", [at], 0, 0, "cached", "", ())
        ledger.came(f"r{at}", [at], 0, 1, "host", "", [at])
    for at in range(20):
        long = list(range(ledgers.MAX_USES // 8))
        ledger.came(f"long{at}", long, 0, len(long), "cached", "", ())

    assert repr(ledger) == "<BlockLedger [16 blocks, 8 requests]>"
    within: Any = ledger
    assert len(within._begun) == ledgers.MAX_BEGUN
