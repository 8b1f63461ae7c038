"""The judgement of differences."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.verifying.judging import Compared, Judgement, Suspects, judge
from dynbus.llm.verifying.ledger import Source
from dynbus.llm.verifying.noise import OTHER, SAME, Bounds, Difference

BOUNDS = Bounds(0.1, 1.0, 0.01)
OWN, HOST, PEER = Source("own", "x"), Source("host"), Source("instance", "peer")


def test_what_is_within_the_noise_is_no_damage() -> None:
    compared = Compared([SAME, Difference(0.1, 1.0), None], 0.01)

    assert judge(compared, BOUNDS, [OWN, OWN, None], [OWN] * 3) is None


@pytest.mark.parametrize("wrong", [Difference(0.2, 0.0), Difference(0.0, 2.0), OTHER])
def test_the_source_of_the_first_wrong_block_is_to_blame_and_no_other(wrong: Difference) -> None:
    compared = Compared([SAME, None, wrong, OTHER], 5.0)

    judged = judge(compared, BOUNDS, [OWN] * 4, [OWN, OWN, PEER, HOST])

    assert judged == Judgement("blocks", [2, 3], (PEER,))


def test_an_answer_that_differs_while_no_block_does_is_blamed_on_all_from_elsewhere() -> None:
    compared = Compared([SAME, None, None, SAME], 0.02)

    judged = judge(compared, BOUNDS, [OWN, HOST, PEER, None], [OWN] * 4)

    assert judged == Judgement("logits", [0, 1, 2], [HOST, PEER])


def test_an_answer_that_differs_without_blocks_from_elsewhere_is_blamed_on_the_instance() -> None:
    judged = judge(Compared([SAME], math.inf), BOUNDS, [OWN, None], [OWN])

    assert judged == Judgement("logits", [0], (Source("own"),))


differences = st.one_of(
    st.none(),
    st.builds(Difference, st.floats(0, 1), st.floats(0, 10)),
    st.just(OTHER),
)


@given(st.lists(differences, max_size=8), st.floats(0, 0.02), st.data())
def test_there_is_a_damage_where_a_block_or_the_answer_is_beyond_the_bounds_and_only_there(
    blocks: list[Difference | None], logits: float, data: st.DataObject
) -> None:
    sources = [data.draw(st.sampled_from([OWN, HOST, PEER])) for _ in blocks]
    wrong = [at for at, each in enumerate(blocks) if each is not None and not BOUNDS.allow(each)]

    judged = judge(Compared(blocks, logits), BOUNDS, sources, sources)

    assert (judged is None) == (not wrong and logits <= BOUNDS.logits)
    if judged is not None and wrong:
        assert list(judged.damaged) == wrong
        assert judged.blamed == (sources[wrong[0]],)


def test_who_has_lied_is_left_and_an_instance_that_lies_too_often_is_withdrawn() -> None:
    suspects = Suspects(2)

    assert suspects.blame(HOST) == "close_host"
    assert suspects.blame(PEER) == "leave_instance"
    assert suspects.instances == {"peer"}
    assert [suspects.blame(OWN) for _ in range(3)] == ["none", "none", "withdraw"]
    # Nobody can be left whose name is not known.
    assert suspects.blame(Source("instance")) == "withdraw"
    assert suspects.own == 4
