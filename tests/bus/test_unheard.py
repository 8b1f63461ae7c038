"""Two peers that fall silent with nobody heard since speak against the server between."""

from __future__ import annotations

import pytest

from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL, SILENCE_LIMIT
from dynbus.bus.protocol.unheard import REMEMBERED, Unheard

CUT = 100.0


def test_one_silent_peer_says_nothing_of_the_server_however_often_it_is_silent() -> None:
    unheard = Unheard()

    assert not unheard.note({"a": CUT}, CUT, CUT + SILENCE_LIMIT)
    assert not unheard.note({"a": CUT + 2.0}, CUT, CUT + 2.0 + SILENCE_LIMIT)


def test_two_that_fall_silent_together_do() -> None:
    beats = {"a": CUT - HEARTBEAT_INTERVAL, "b": CUT}

    assert Unheard().note(beats, CUT, CUT + SILENCE_LIMIT)


def test_two_of_which_the_second_was_called_when_the_first_was_gone_do() -> None:
    unheard = Unheard()
    called = CUT + SILENCE_LIMIT

    assert not unheard.note({"a": CUT}, CUT, called)
    assert unheard.note({"b": called}, CUT, called + SILENCE_LIMIT)


def test_they_do_not_where_another_one_is_heard() -> None:
    beats = {"a": CUT, "b": CUT}

    assert not Unheard().note(beats, CUT + SILENCE_LIMIT, CUT + SILENCE_LIMIT)


def test_they_do_not_where_anybody_was_heard_between_the_two() -> None:
    unheard = Unheard()
    later = CUT + 3.0

    unheard.note({"a": CUT}, CUT, CUT + SILENCE_LIMIT)

    assert not unheard.note({"b": later}, later, later + SILENCE_LIMIT)


def test_a_silence_is_remembered_for_a_while_only() -> None:
    unheard = Unheard()
    later = CUT + REMEMBERED

    unheard.note({"a": CUT}, CUT, CUT + SILENCE_LIMIT)

    assert not unheard.note({"b": later}, CUT, later + SILENCE_LIMIT)


@pytest.mark.parametrize("again", [False, True])
def test_what_led_to_a_server_being_left_counts_once(again: bool) -> None:
    unheard = Unheard()
    assert unheard.note({"a": CUT, "b": CUT}, CUT, CUT + SILENCE_LIMIT)
    more = {"c": CUT + 1.0} | ({"d": CUT + 1.0} if again else {})

    assert unheard.note(more, CUT, CUT + 1.0 + SILENCE_LIMIT) is again
