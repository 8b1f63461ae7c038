"""Candidates by column are the same as one by one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.candidates import NO_OVERLAP, Candidate, Candidates, Offer

from .routing_fixtures import profile

NUMBERS = st.integers(0, 1 << 40)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.builds(Rank, st.text(max_size=3), st.integers(0, 3)),
        st.just(NO_OVERLAP) | st.builds(Overlap, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
        NUMBERS,
        st.floats(0, 1e9),
        NUMBERS,
        NUMBERS,
        st.none() | NUMBERS,
        st.none() | NUMBERS,
        NUMBERS,
        st.floats(0, 1e3),
    ),
    max_size=6,
)


@given(candidates=CANDIDATES)
def test_columns_give_back_what_they_were_made_of(candidates: Sequence[Candidate]) -> None:
    columns = Candidates.of(candidates)

    assert list(columns) == list(candidates)
    assert [columns[at] for at in range(len(columns))] == list(candidates)
    assert [columns[at - len(columns)] for at in range(len(columns))] == list(candidates)
    assert columns[1:] == tuple(candidates[1:])
    assert Candidates.of(columns) is columns


def test_an_offer_has_the_ranks_of_its_instances_by_position() -> None:
    offer = Offer((profile("a", dp_size=2, total_blocks=7), profile("b", max_batched_tokens=5)))

    assert offer.ranks == (Rank("a", 0), Rank("a", 1), Rank("b", 0))
    assert [offer.positions[rank] for rank in offer.ranks] == [0, 1, 2]
    assert offer.total_blocks == (7, 7, None)
    assert offer.totals.tolist() == [7, 7, float("inf")]
    assert offer.max_batched_tokens == (None, None, 5)
    assert offer.hops({"a": 2.5}).tolist() == [2.5, 2.5, 0.0]
