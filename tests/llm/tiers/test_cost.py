"""Whether blocks are brought from elsewhere or computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.tiers.cost import MAX_PAUSE, MAX_PEERS, Rates

BLOCK = 16 * 46_080
"""Bytes of a block of 16 tokens of SmolLM2-135M in float32."""


def measured(*, tokens_per_s: float = 700.0, bytes_per_s: float = 1.4e9) -> Rates:
    rates = Rates(16, BLOCK)
    rates.note_prefill(512, 512 / tokens_per_s)
    rates.note_transfer("peer", 1 << 26, (1 << 26) / bytes_per_s, 0.01)
    return rates


def test_a_long_prefix_is_fetched_from_a_peer_that_is_faster_than_computing() -> None:
    verdict = measured().fetches("peer", 93, now=0.0)

    assert verdict.moves
    assert verdict.compute_s == pytest.approx(93 * 16 / 700)
    assert verdict.move_s == pytest.approx(0.01 + 93 * BLOCK / 1.4e9)


def test_an_engine_that_computes_as_fast_as_blocks_come_computes() -> None:
    rates = measured(tokens_per_s=40_000)

    assert rates.fetches("peer", 93, now=0.0).reason == "computing is as fast"


def test_transfers_that_run_already_make_one_more_slower() -> None:
    rates = measured(tokens_per_s=10_000)

    assert rates.fetches("peer", 93, now=0.0).moves
    assert not rates.fetches("peer", 93, now=0.0, running=4).moves


def test_nothing_is_fetched_where_the_deadline_leaves_no_time_to_compute_after_a_failure() -> None:
    rates = measured()
    needed = sum(rates.fetches("peer", 93, now=5.0)[:2])

    assert rates.fetches("peer", 93, now=5.0, deadline=5.0 + needed).moves
    assert "deadline" in rates.fetches("peer", 93, now=5.0, deadline=4.9 + needed).reason


def test_a_peer_that_fails_is_asked_again_after_a_time_that_doubles_up_to_a_minute() -> None:
    rates = measured()
    waits: list[float] = []
    for _ in range(10):
        rates.note_failure("peer", 100.0)
        waits.append(rates.peer("peer").paused_until - 100.0)

    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == MAX_PAUSE
    assert "asked again" in rates.fetches("peer", 93, now=100.0).reason
    assert rates.fetches("peer", 93, now=100.0 + MAX_PAUSE).moves


def test_what_was_never_measured_is_taken_for_a_fast_engine_and_a_slow_peer() -> None:
    rates = Rates(16, BLOCK)

    assert not rates.fetches("peer", 10, now=0.0).moves
    assert rates.fetches("peer", 1000, now=0.0).compute_s == pytest.approx(3.2)


def test_a_copy_in_memory_is_taken_where_it_is_faster_than_computing() -> None:
    rates = measured()
    rates.note_copy(10, 0.001)
    assert rates.copies(10)
    rates.note_prefill(512, 1e-6)
    rates.note_prefill(512, 1e-6)
    for _ in range(40):
        rates.note_prefill(512, 1e-6)
    assert not rates.copies(10)


def test_the_rates_of_a_bounded_number_of_peers_are_remembered() -> None:
    rates = measured()
    for number in range(MAX_PEERS):
        rates.peer(f"other {number}")

    assert not rates.peer("peer").latency.measured


@given(
    st.integers(0, 5000),
    st.floats(0.0, 1e6),
    st.floats(1.0, 1e6),
    st.floats(1e3, 1e12),
    st.floats(0.0, 100.0),
)
def test_a_prefix_is_fetched_only_where_that_is_expected_to_be_faster_and_in_time(
    blocks: int, now: float, tokens_per_s: float, bytes_per_s: float, left: float
) -> None:
    rates = measured(tokens_per_s=tokens_per_s, bytes_per_s=bytes_per_s)

    verdict = rates.fetches("peer", blocks, now=now, deadline=now + left)

    if verdict.moves:
        assert verdict.move_s < verdict.compute_s
        assert verdict.move_s + verdict.compute_s <= left + 1e-6 * (1 + now)
