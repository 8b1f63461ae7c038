"""Outputs of engines that were broken off: what came and what comes are the whole."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.actors.declaring.resume import ResumeParts
from dynbus.bus.errors import ResumeMismatch
from dynbus.llm.continuing import Again, resume
from dynbus.llm.generation import Generated, GenerateRequest, Sampling, StructuredOutput
from dynbus.llm.mock.engine import MockConfig, MockEngine

CONFIG = MockConfig(block_size=4, blocks=64, vocabulary=6)


def made_by_an_engine(request: GenerateRequest) -> list[Generated]:
    """All items of a request; each time by a new engine."""
    engine = MockEngine(CONFIG)
    engine.add("a", request)
    items: list[Generated] = []
    while engine.has_work:
        items += [item for _, item in engine.step().outputs]
    return items


def requests_for(rest: GenerateRequest | ResumeParts | None) -> list[GenerateRequest]:
    """What is asked for the rest."""
    if isinstance(rest, ResumeParts):
        return list(rest.requests)
    return [] if rest is None else [rest]


def told(items: list[Generated]) -> dict[int, tuple[list[int], Any]]:
    """The tokens and the finish reason of each continuation."""
    found: dict[int, tuple[list[int], Any]] = {}
    for item in items:
        tokens, reason = found.get(item.index, ([], None))
        assert reason is None, "something comes after the end"
        found[item.index] = ([*tokens, *item.token_ids], item.finish_reason)
    return found


requests = st.builds(
    GenerateRequest,
    token_ids=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.lists(st.integers(0, 5), max_size=2),
    sampling=st.builds(
        Sampling,
        seed=st.none() | st.integers(0, 1 << 32),
        logprobs=st.none() | st.integers(0, 2),
    ),
).filter(lambda request: request.min_tokens <= (request.max_tokens or 0))


@settings(max_examples=150, deadline=None)
@given(requests, st.lists(st.integers(0, 12), max_size=4))
def test_a_stream_that_is_cut_anywhere_is_the_whole_one(
    request: GenerateRequest, cuts: list[int]
) -> None:
    whole = made_by_an_engine(request)

    came: list[Generated] = []
    left = [request]
    for cut in cuts:
        for rest in left:
            came += islice(made_by_an_engine(rest), cut)
        left = requests_for(resume(request, came))
    for rest in left:
        came += made_by_an_engine(rest)

    assert told(came) == told(whole)
    assert [item.logprobs for item in came] == [item.logprobs for item in whole]


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(2, 4), st.integers(0, 40))
def test_each_of_several_continuations_goes_on_by_itself(
    request: GenerateRequest, n: int, cut: int
) -> None:
    request = msgspec.structs.replace(request, n=n)
    whole = made_by_an_engine(request)

    came = whole[:cut]
    for rest in requests_for(resume(request, came)):
        came += made_by_an_engine(rest)

    assert told(came) == told(whole)


def test_items_may_be_as_they_came_as_json() -> None:
    request = GenerateRequest([1, 2], 5, sampling=Sampling(seed=3))
    came = made_by_an_engine(request)[:2]

    assert resume(request, [msgspec.to_builtins(item) for item in came]) == resume(request, came)


# What is made once more from its beginning ------------------------------------------------------

FORM = StructuredOutput(regex="a+")
OUTPUT = list(range(10, 30))


def test_the_whole_of_an_output_is_asked_for_without_an_end_in_what_came() -> None:
    rest = GenerateRequest([1, 2, 3], 20, structured=FORM).continued([4, 5, 6])

    whole = rest.from_its_beginning()

    assert rest.output == [4, 5, 6]
    assert (whole.token_ids, whole.max_tokens, whole.generated) == ([1, 2, 3], 20, 0)
    assert (whole.min_tokens, whole.output) == (3, [])
    assert GenerateRequest([1, 4], generated=1).from_its_beginning().max_tokens is None
    with pytest.raises(ValueError, match="one output is made once more at a time"):
        GenerateRequest([1, 4], 9, n=2, generated=1).from_its_beginning()


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


def test_an_output_that_is_broken_off_once_more_has_not_come_out_differently() -> None:
    again = Again([10, 11, 12])

    new = again.new_of(Generated([10], finish_reason="cancelled"))

    assert new == Generated([], finish_reason="cancelled")


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
