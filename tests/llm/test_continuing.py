"""The rest of a request that an engine has broken off: what came and what comes are the whole."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.llm.continuing import resume, unfinished
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
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
    rest: GenerateRequest | None = request
    for cut in cuts:
        assert rest is not None
        came += islice(made_by_an_engine(rest), cut)
        rest = resume(request, came)
        if rest is None:
            break
    if rest is not None:
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
    for rest in unfinished(request, came):
        came += made_by_an_engine(rest)

    assert told(came) == told(whole)


def test_items_may_be_as_they_came_as_json() -> None:
    request = GenerateRequest([1, 2], 5, sampling=Sampling(seed=3))
    came = made_by_an_engine(request)[:2]

    assert resume(request, [msgspec.to_builtins(item) for item in came]) == resume(request, came)
