"""Outputs with a form that vLLM makes from their beginning, where it goes on with one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ResumeMismatch
from dynbus.llm.generation import Generated, GenerateRequest, StructuredOutput
from dynbus.llm.vllm.requests import Again, from_its_beginning

FORM = StructuredOutput(regex="a+")
OUTPUT = list(range(10, 30))


def test_what_continues_an_output_with_a_form_is_asked_for_from_its_beginning() -> None:
    asked = GenerateRequest([1, 2, 3], 20, structured=FORM)

    whole, _ = from_its_beginning(asked.continued([4, 5, 6]))

    assert (whole.token_ids, whole.max_tokens, whole.generated) == ([1, 2, 3], 20, 0)
    # No end comes among the tokens that had come.
    assert whole.min_tokens == 3
    assert from_its_beginning(GenerateRequest([1, 4], generated=1))[0].max_tokens is None
    with pytest.raises(ValueError, match="one output that has a form at a time"):
        from_its_beginning(GenerateRequest([1, 4], 9, n=2, generated=1))


@given(st.integers(1, 19), st.sets(st.integers(1, 19)))
def test_of_an_output_that_comes_again_only_the_rest_is_new(came: int, cuts: set[int]) -> None:
    again = Again(OUTPUT[:came])
    found: list[int] = []
    new: Generated | None = None
    bounds = [0, *sorted(cuts), 20]

    for start, end in pairwise(bounds):
        made = Generated(OUTPUT[start:end], finish_reason="stop" if end == 20 else None)
        new = again.new_of(made)
        if new is not None:
            found += new.token_ids

    assert found == OUTPUT[came:]
    assert new is not None
    assert new.finish_reason == "stop"


@pytest.mark.parametrize(
    "item",
    [
        Generated([12]),
        Generated([11, 99, 13]),
        Generated([11], finish_reason="stop"),
    ],
)
def test_an_output_that_comes_out_differently_is_not_spliced(item: Generated) -> None:
    again = Again([10, 11, 12])
    again.new_of(Generated([10]))

    with pytest.raises(ResumeMismatch, match="of 3 tokens that had come"):
        again.new_of(item)
