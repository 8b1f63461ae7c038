"""The life of a transfer: when its memory is quiet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.transfer.states import (
    TRANSITIONS,
    Event,
    ImpossibleEventError,
    State,
    after,
    is_over,
    is_quiet,
)


@given(st.lists(st.sampled_from(Event)))
def test_memory_that_was_posted_is_quiet_only_by_the_end_of_its_handle_or_of_its_link(
    events: list[Event],
) -> None:
    state = State.NEW
    posted = proved = False
    for event in events:
        try:
            state = after(state, event)
        except ImpossibleEventError:
            continue
        posted = posted or event is Event.POST
        if event in (Event.FINISHED, Event.BROKE, Event.DESTROYED):
            proved = True

        assert is_quiet(state) == (not posted or proved)


@given(st.lists(st.sampled_from(Event)))
def test_what_is_quiet_after_its_end_stays_as_it_is(events: list[Event]) -> None:
    state = State.NEW
    for event in events:
        try:
            following = after(state, event)
        except ImpossibleEventError:
            continue
        assert following is state or not (is_over(state) and is_quiet(state))
        assert is_over(following) >= is_over(state)
        state = following


@pytest.mark.parametrize("state", State)
def test_it_can_be_cancelled_and_its_link_be_destroyed_in_every_state(state: State) -> None:
    assert is_over(after(state, Event.CANCEL))
    assert is_over(after(state, Event.DESTROYED))
    assert is_quiet(after(state, Event.DESTROYED))


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_each_event_of_each_state_has_an_answer_or_is_a_bug(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(ImpossibleEventError, match=f"{state.value} .* {event.value}"):
            after(state, event)


@pytest.mark.parametrize("event", [Event.FINISHED, Event.BROKE, Event.LOST, Event.POSTED])
def test_a_handle_that_is_over_or_was_never_posted_has_nothing_to_say(event: Event) -> None:
    for state in (State.NEW, State.DONE, State.FAILED, State.QUIET):
        with pytest.raises(ImpossibleEventError):
            after(state, event)


@pytest.mark.parametrize("state", [State.POSTING, State.ACTIVE])
def test_a_handle_that_cannot_be_asked_any_more_leaves_the_memory_unquiet(state: State) -> None:
    abandoned = after(state, Event.LOST)

    assert is_over(abandoned)
    assert not is_quiet(abandoned)
    assert after(abandoned, Event.DESTROYED) is State.QUIET
