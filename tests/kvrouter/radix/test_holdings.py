"""What a holder has of one run: a prefix, pieces behind holes, and where each ends."""

from __future__ import annotations

from tests.kvrouter.naive_caches import packed

from dynbus.kvrouter.radix.holdings import cut, mark, next_start, reach
from dynbus.kvrouter.radix.runs import Holder, Run


def run_of(blocks: int) -> Run:
    return Run(1, 0, bytearray(packed(range(1, blocks + 1))), None)


def test_a_prefix_reaches_to_its_end_and_no_further() -> None:
    run, holder = run_of(10), Holder(1)

    mark(holder, run, 0, 4, True)

    assert [reach(run, 1, depth) for depth in (0, 3, 4)] == [4, 4, None]
    assert reach(run, 2, 0) is None


def test_a_piece_behind_a_hole_is_held_but_not_reached_from_the_root() -> None:
    run, holder = run_of(10), Holder(1)
    mark(holder, run, 0, 8, True)

    cut(holder, run, 3)

    assert run.ends == {1: 3}
    assert holder.detached == 4
    assert [reach(run, 1, depth) for depth in (2, 3, 4, 7, 8)] == [3, None, 8, 8, None]
    assert next_start(run, 1, 3) == 4
    assert next_start(run, 1, 8) == run.end


def test_filling_the_hole_joins_the_pieces() -> None:
    run, holder = run_of(10), Holder(1)
    mark(holder, run, 0, 8, True)
    cut(holder, run, 3)
    cut(holder, run, 5)

    mark(holder, run, 3, 4, True)

    assert run.ends == {1: 5}
    assert run.detached == {1: [(6, 8)]}
    assert holder.detached == 2


def test_a_block_that_is_marked_twice_has_a_copy() -> None:
    run, holder = run_of(4), Holder(1)
    mark(holder, run, 0, 3, True)

    mark(holder, run, 1, 4, True)

    assert run.copies == {(1, 1): 1, (1, 2): 1}
    assert run.ends == {1: 4}


def test_what_is_below_a_removed_block_is_detached_in_every_run() -> None:
    upper, holder = run_of(4), Holder(1)
    lower = Run(2, 4, bytearray(packed([7, 8])), upper)
    upper.children = {packed([7]): lower}
    mark(holder, upper, 0, 4, True)
    mark(holder, lower, 4, 6, True)

    cut(holder, upper, 1)

    assert upper.ends == {1: 1}
    assert lower.ends == {}
    assert lower.detached == {1: [(4, 6)]}
    assert holder.detached == 4
