from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.text.stop_strings import StopStrings

from .first_stop import cut_at_first

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
many = st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=20)


@given(st.lists(st.text("abc", max_size=12), max_size=6), many)
def test_many_strings_are_found_as_one_by_one_however_the_text_is_cut(
    pieces: list[str], strings: list[str]
) -> None:
    stop = StopStrings(strings)
    given_out, found = "", None

    for piece in pieces:
        text, found = stop.push(piece)
        given_out += text
        if found is not None:
            break
    given_out += stop.take_held()

    whole = "".join(pieces)
    assert given_out == cut_at_first(whole, strings)
    assert (found is not None) == any(string in whole for string in strings)
    assert found is None or whole.startswith(given_out + found)


@given(letters, letters, stops)
def test_what_was_given_out_stays_right_whatever_comes(
    text: str, more: str, strings: list[str]
) -> None:
    given_out, _ = StopStrings(strings).push(text)

    assert cut_at_first(text + more, strings).startswith(given_out)


@given(letters, stops)
def test_no_more_is_held_back_than_what_may_begin_a_stop_string(
    text: str, strings: list[str]
) -> None:
    stop = StopStrings(strings)
    given_out, found = stop.push(text)
    held = stop.take_held()

    assert found or given_out + held == text
    assert not held or any(string.startswith(held) for string in strings)


def test_text_that_begins_no_stop_string_is_given_out_at_once() -> None:
    assert StopStrings(["\n\n"]).push("one two") == ("one two", None)


def test_what_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    stop = StopStrings(["END"])

    assert stop.push("the EN") == ("the ", None)
    assert stop.push("EN") == ("EN", None)
    assert stop.push("emy") == ("ENemy", None)


@pytest.mark.parametrize(
    ("strings", "text", "before", "found"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bcd", "abcd"], "xabcd", "x", "abcd"),
        (["aab"], "aaab", "a", "aab"),
        (["x"], "xx", "", "x"),
    ],
)
def test_the_first_is_the_one_that_is_complete_first_and_then_the_longest(
    strings: list[str], text: str, before: str, found: str
) -> None:
    for order in (strings, strings[::-1]):
        assert StopStrings(order).push(text) == (before, found)


def test_a_long_stop_string_costs_no_more_for_its_length() -> None:
    stop = StopStrings(["a" * 20_000 + "b"])

    text = "".join(stop.push("a")[0] for _ in range(40_000)) + stop.take_held()

    assert text == "a" * 40_000
