"""The times of Dynamo's mock engine, step by step or many at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.mock.timing import Timing

CAPACITY = 16_384 * 64


def test_a_full_prefill_step_takes_what_dynamo_measured_for_it() -> None:
    assert Timing().prefill(8192) == pytest.approx(0.169136918, abs=1e-9)


def test_a_decode_step_takes_what_dynamo_measured_for_it() -> None:
    # The second token of a prompt of 7,322 in Dynamo's replay, beside a prefill of 8,191.
    step = Timing().prefill(8191) + Timing().decode(7323, CAPACITY)

    assert 0.169136918 + step == pytest.approx(0.344367693, abs=2e-9)


def test_nothing_to_prefill_takes_no_time() -> None:
    assert Timing().prefill(0) == 0.0


def test_a_context_beyond_the_cache_counts_as_a_full_cache() -> None:
    timing = Timing()

    assert timing.decode(3 * CAPACITY, CAPACITY) == timing.decode(CAPACITY, CAPACITY)


@given(st.integers(1, 2 * CAPACITY), st.integers(1, 256), st.integers(1, 64))
def test_several_decode_steps_take_what_each_takes(
    context_tokens: int, requests: int, steps: int
) -> None:
    timing = Timing(speedup_ratio=1.5)

    many = timing.decode_steps(context_tokens, requests, steps, CAPACITY)

    one_by_one = [
        timing.decode(context_tokens + requests * step, CAPACITY) for step in range(steps)
    ]
    assert many.tolist() == pytest.approx(one_by_one, rel=1e-12)


def test_a_speedup_divides_all_times() -> None:
    fast, normal = Timing(speedup_ratio=4.0), Timing()

    assert fast.prefill(100) == pytest.approx(normal.prefill(100) / 4)
    assert fast.decode(100, CAPACITY) == pytest.approx(normal.decode(100, CAPACITY) / 4)


def test_a_speedup_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"speedup_ratio = 0\.0"):
        Timing(speedup_ratio=0.0)
