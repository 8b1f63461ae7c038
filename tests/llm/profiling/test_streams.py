"""The steps of an engine elsewhere are told from when the tokens of its streams came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.profiles import made_profile

from dynbus.llm.mock import MockConfig, MockEngine
from dynbus.llm.profiling.batches import plain_request
from dynbus.llm.profiling.bench import Measured
from dynbus.llm.profiling.streams import ServedRequest, steps_of

PROFILE = made_profile()
LATENCY = 0.002


def served(arrivals: Sequence[tuple[float, int, int]], *, deaf: float = 0.0) -> list[ServedRequest]:
    """The streams of an engine that takes the times of the profile, each token `LATENCY` late.

    Args:
        arrivals: when each request is sent, the tokens of its prompt, and of its output.
        deaf: seconds from when a request is sent until the engine has it.
    """
    engine = MockEngine(MockConfig(**PROFILE.size(), timing=PROFILE.timing()))
    requests = [
        ServedRequest(plain_request([number, *range(length - 1)], output), sent)
        for number, (sent, length, output) in enumerate(arrivals)
    ]
    now, coming = 0.0, 0
    while coming < len(requests) or engine.has_work:
        if not engine.has_work:
            now = max(now, requests[coming].sent + deaf)
        while coming < len(requests) and requests[coming].sent + deaf <= now:
            engine.add(str(coming), requests[coming].request)
            coming += 1
        step = engine.step()
        now += step.delay
        for at, (name, item) in enumerate(step.outputs):
            # They are read one behind the other.
            requests[int(name)].tokens += [now + LATENCY + 1e-6 * at] * len(item.token_ids)
    return requests


def check(measured: Sequence[Measured], tolerance: float = 1e-5) -> None:
    timing = PROFILE.timing()
    assert measured
    for works, seconds, is_answer in measured:
        expected = sum(timing.step(work, 0) for work in works)
        if not is_answer:
            assert seconds == pytest.approx(expected, abs=tolerance)


def test_steps_take_what_is_between_their_tokens() -> None:
    measured = steps_of(served([(0.0, 100, 4), (0.0, 60, 8)]), PROFILE_LIMITS)

    check(measured)
    assert [one.is_answer for one in measured] == [True] + [False] * 7
    assert measured[0].seconds == pytest.approx(
        LATENCY + PROFILE.timing().step(measured[0].works[0], 0)
    )
    assert [one.works[0].requests for one in measured] == [0, 2, 2, 2, 1, 1, 1, 1]


def test_a_prompt_in_parts_is_measured_as_one() -> None:
    measured = steps_of(served([(0.0, 900, 3)]), PROFILE_LIMITS)

    check(measured)
    assert [len(one.works) for one in measured] == [4, 1, 1]


def test_requests_that_the_engine_had_later_than_they_were_sent_are_taken_in_later() -> None:
    together = served([(0.0, 16, 12), *[(1e-4, 40, 6)] * 3], deaf=0.0005)

    measured = steps_of(together, PROFILE_LIMITS)

    check(measured)
    assert [one.works[0].prompts for one in measured[:3]] == [1, 3, 0]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.2), st.integers(4, 60), st.integers(2, 12)),
        min_size=1,
        max_size=10,
    ),
    st.floats(0.0, 0.004),
)
def test_the_steps_of_requests_whose_prompts_take_one_step_are_told(
    arrivals: list[tuple[float, int, int]], deaf: float
) -> None:
    measured = steps_of(served(sorted(arrivals), deaf=deaf), PROFILE_LIMITS)

    check(measured)


def test_a_prompt_in_parts_beside_outputs_is_told() -> None:
    measured = steps_of(served([(0.0, 16, 40), (0.012, 700, 3)], deaf=0.0005), PROFILE_LIMITS)

    check(measured)
    mixed = [works[0] for works, _, _ in measured if works[0].prompts and works[0].requests]
    assert [one.prompt_tokens for one in mixed] == [255, 255, 190]


def test_steps_whose_tokens_came_together_are_measured_together() -> None:
    requests = served([(0.0, 100, 10), (0.0, 60, 30)])
    alone = steps_of(requests, PROFILE_LIMITS)
    for one in requests:
        # A machine that is busy reads every 10 ms.
        one.tokens = [0.01 * math.ceil(time / 0.01) for time in one.tokens]

    measured = steps_of(requests, PROFILE_LIMITS)

    assert 1 < len(measured) < len(alone)
    assert [work for one in measured for work in one.works] == [one.works[0] for one in alone]
    assert sum(one.seconds for one in measured) == pytest.approx(
        sum(one.seconds for one in alone), abs=0.01
    )


def test_a_step_that_was_read_in_two_parts_is_one() -> None:
    requests = served([(0.0, 100, 6), (0.0, 60, 6)])
    requests[1].tokens[3] += 0.0012

    check(steps_of(requests, PROFILE_LIMITS))


def test_an_order_that_no_steps_give_has_none() -> None:
    requests = served([(0.0, 100, 6), (0.0, 60, 6)])
    requests[0].tokens = [time + 1.0 for time in requests[0].tokens]

    assert steps_of(requests, PROFILE_LIMITS) == []


PROFILE_LIMITS = replace(MockConfig(**PROFILE.size()).limits, vocabulary=256)
