"""Where a prompt is computed, by its length, the queue and the load, with reasons that hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.disaggregated.decision import (
    BUSY_QUEUE_FACTOR,
    PrefillLoad,
    PrefillReason,
    PromptSize,
    Saturation,
    decide,
)
from dynbus.llm.disaggregated.settings import DisaggregationSettings

SETTINGS = DisaggregationSettings(
    local_prompt_tokens=100, max_queue_length=4, max_queued_tokens=1000, busy_decode_load=0.8
)
LONG = PromptSize(500)
FREE = PrefillLoad(instances=1, decode_running=1)


@st.composite
def all_settings(draw: st.DrawFn) -> DisaggregationSettings:
    return DisaggregationSettings(
        local_prompt_tokens=draw(st.integers(0, 2000)),
        idle_local_prompt_tokens=draw(st.integers(0, 4000)),
        max_queue_length=draw(st.integers(1, 20)),
        max_queued_tokens=draw(st.integers(0, 20_000)),
        busy_decode_load=draw(st.floats(0, 1)),
        resume_share=draw(st.floats(0, 1)),
    )


requests = st.builds(PromptSize, st.integers(0, 5000), st.integers(0, 5000))
loads = st.builds(
    PrefillLoad,
    instances=st.integers(0, 5),
    queue_length=st.integers(0, 100),
    queued_tokens=st.integers(0, 100_000),
    decode_running=st.integers(0, 10),
    decode_load=st.floats(0, 1),
)
saturations = st.builds(Saturation, st.booleans(), st.booleans(), st.booleans())


@pytest.mark.parametrize(
    ("settings", "request_", "load", "reason"),
    [
        (SETTINGS, LONG, FREE, PrefillReason.LONG_PROMPT),
        (SETTINGS, PromptSize(100), FREE, PrefillReason.SHORT_PROMPT),
        (SETTINGS, PromptSize(500, 400), FREE, PrefillReason.SHORT_PROMPT),
        (SETTINGS, PromptSize(500, 399), FREE, PrefillReason.LONG_PROMPT),
        (SETTINGS, PromptSize(5, 900), FREE, PrefillReason.SHORT_PROMPT),
        (SETTINGS, LONG, FREE._replace(instances=0), PrefillReason.NO_PREFILL),
        (SETTINGS, LONG, FREE._replace(queue_length=3), PrefillReason.LONG_PROMPT),
        (SETTINGS, LONG, FREE._replace(queue_length=4), PrefillReason.QUEUE_FULL),
        (SETTINGS, LONG, PrefillLoad(2, 7, decode_running=1), PrefillReason.LONG_PROMPT),
        (SETTINGS, LONG, PrefillLoad(2, 8, decode_running=1), PrefillReason.QUEUE_FULL),
        (SETTINGS, LONG, FREE._replace(queued_tokens=1000), PrefillReason.TOKENS_FULL),
        (SETTINGS, LONG, PrefillLoad(1, 4, 0, 8, 0.8), PrefillReason.BUSY_DECODE),
        (SETTINGS, LONG, PrefillLoad(1, 8, 0, 8, 0.8), PrefillReason.QUEUE_FULL),
        (
            SETTINGS.changed({"idle_local_prompt_tokens": 500}),
            LONG,
            PrefillLoad(1),
            PrefillReason.IDLE_DECODE,
        ),
        (SETTINGS.changed({"mode": "local"}), LONG, FREE, PrefillReason.LOCAL_MODE),
        (SETTINGS.changed({"mode": "remote"}), PromptSize(1), FREE, PrefillReason.REMOTE_MODE),
        (
            SETTINGS.changed({"mode": "remote"}),
            LONG,
            PrefillLoad(0),
            PrefillReason.NO_PREFILL,
        ),
    ],
)
def test_a_prompt_is_computed_where_the_settings_want_it(
    settings: DisaggregationSettings,
    request_: PromptSize,
    load: PrefillLoad,
    reason: PrefillReason,
) -> None:
    decision = decide(settings, request_, load)

    assert decision.reason is reason
    assert decision.remote is (
        reason in (PrefillReason.LONG_PROMPT, PrefillReason.BUSY_DECODE, PrefillReason.REMOTE_MODE)
    )


def test_a_decision_tells_the_figures_behind_it() -> None:
    decision = decide(SETTINGS, PromptSize(500, 100), PrefillLoad(2, 3, 900, 1, 0.25))

    assert decision.describe() == (
        "remote: long prompt (400 of 500 tokens to compute, 3 prompts with 900 tokens wait for 2 "
        "prefill instances, decode load 0.25)"
    )


def test_a_queue_that_was_full_is_full_until_it_is_clearly_shorter() -> None:
    saturation = Saturation()
    remote: list[bool] = []
    for length in (3, 4, 3, 4, 3, 2, 3, 3, 4):
        decision = decide(SETTINGS, LONG, FREE._replace(queue_length=length), saturation)
        saturation = decision.saturation
        remote.append(decision.remote)

    assert remote == [True, False, False, False, False, True, True, True, False]


@given(all_settings(), requests, loads, saturations, st.integers(0, 1000))
def test_a_longer_prompt_is_never_the_one_that_stays(
    settings: DisaggregationSettings,
    request_: PromptSize,
    load: PrefillLoad,
    before: Saturation,
    more: int,
) -> None:
    longer = request_._replace(prompt_tokens=request_.prompt_tokens + more)

    if decide(settings, request_, load, before).remote:
        assert decide(settings, longer, load, before).remote


@given(all_settings(), requests, loads, saturations, st.integers(0, 50), st.integers(0, 9999))
def test_a_longer_queue_never_makes_a_prompt_go(
    settings: DisaggregationSettings,
    request_: PromptSize,
    load: PrefillLoad,
    before: Saturation,
    more: int,
    tokens: int,
) -> None:
    longer = load._replace(
        queue_length=load.queue_length + more, queued_tokens=load.queued_tokens + tokens
    )

    if not decide(settings, request_, load, before).remote:
        assert not decide(settings, request_, longer, before).remote


@given(all_settings(), requests, loads, saturations, st.integers(1, 5))
def test_another_prefill_instance_never_keeps_a_prompt_here(
    settings: DisaggregationSettings,
    request_: PromptSize,
    load: PrefillLoad,
    before: Saturation,
    more: int,
) -> None:
    wider = load._replace(instances=load.instances + more)

    if decide(settings, request_, load, before).remote:
        assert decide(settings, request_, wider, before).remote


@given(all_settings(), requests, loads, saturations)
def test_the_same_load_is_judged_the_same_from_then_on(
    settings: DisaggregationSettings,
    request_: PromptSize,
    load: PrefillLoad,
    before: Saturation,
) -> None:
    first = decide(settings, request_, load, before)
    again = [first]
    for _ in range(3):
        again.append(decide(settings, request_, load, again[-1].saturation))

    assert all(one.remote == two.remote for one, two in pairwise(again[1:]))


@given(all_settings(), loads, st.lists(st.integers(0, 100), min_size=2, max_size=20))
def test_a_queue_between_its_two_limits_never_tips_the_decision(
    settings: DisaggregationSettings, load: PrefillLoad, lengths: list[int]
) -> None:
    load = load._replace(queued_tokens=0)
    saturation = decide(settings, PromptSize(10_000), load).saturation
    limit = settings.max_queue_length * max(1, load.instances)
    if saturation.decode:
        limit *= BUSY_QUEUE_FACTOR
    between = [n for n in lengths if limit * settings.resume_share < n < limit]

    told: set[bool] = set()
    for length in between:
        decision = decide(
            settings, PromptSize(10_000), load._replace(queue_length=length), saturation
        )
        saturation = decision.saturation
        told.add(decision.remote)

    assert len(told) <= 1
