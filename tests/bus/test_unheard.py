"""Two peers that fall silent with nobody heard since speak against the server between."""

from __future__ import annotations

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


def test_one_more_silent_peer_is_enough_while_nobody_is_heard_since_a_server_was_left() -> None:
    unheard = Unheard()
    left = CUT + SILENCE_LIMIT
    assert unheard.note({"a": CUT, "b": CUT}, CUT, left)

    assert unheard.hears_nobody(CUT, left)
    assert unheard.note({"a": left}, CUT, left + SILENCE_LIMIT)
    assert unheard.hears_nobody(left, left + SILENCE_LIMIT)


def test_two_are_needed_again_when_anybody_was_heard_after_a_server_was_left() -> None:
    unheard = Unheard()
    left = CUT + SILENCE_LIMIT
    assert unheard.note({"a": CUT, "b": CUT}, CUT, left)
    heard = left + 1.0

    assert not unheard.hears_nobody(heard, heard)
    assert not unheard.note({"a": heard}, heard, heard + SILENCE_LIMIT)
    assert unheard.note({"b": heard}, heard, heard + SILENCE_LIMIT)


def test_a_server_that_was_left_long_since_says_nothing_of_who_is_silent_now() -> None:
    unheard = Unheard()
    left = CUT + SILENCE_LIMIT
    assert unheard.note({"a": CUT, "b": CUT}, CUT, left)
    later = left + REMEMBERED

    assert not unheard.hears_nobody(CUT, later)
    assert not unheard.note({"a": later - SILENCE_LIMIT}, CUT, later)


def test_the_first_that_is_heard_after_a_server_was_left_is_told_apart() -> None:
    unheard = Unheard()
    before = unheard.heard()
    unheard.note({"a": CUT, "b": CUT}, CUT, CUT + SILENCE_LIMIT)

    assert (before, unheard.heard(), unheard.heard()) == (False, True, False)
    assert not unheard.hears_nobody(CUT, CUT + SILENCE_LIMIT)
