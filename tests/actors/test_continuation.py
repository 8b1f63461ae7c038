"""What a caller keeps of a stream, shows of its attempts and asks for next: without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dynbus import Overloaded, ResumeMismatch, StreamLost
from dynbus.actors.calling import continuation
from dynbus.actors.calling.continuation import (
    MOST_MARKS,
    RESUME_BYTES,
    Continuation,
    NextRequest,
    Replay,
    resume_by,
)
from dynbus.actors.declaring.resume import ResumeParts, ResumeRule

REQUEST = NextRequest(b'"all"', "all")


def numbers(*values: int) -> list[bytes]:
    return [str(value).encode() for value in values]


def rest(first: Any, items: list[Any]) -> Any:
    """How many are left of so many."""
    return first - len(items) or None


def counting(limit: int, function: Any = rest) -> Continuation:
    resume = resume_by(
        function,
        label="rest",
        decode=json.loads,
        decode_many=lambda items: [json.loads(item) for item in items],
        encode=lambda value: json.dumps(value).encode(),
    )
    made = resume(str(limit).encode(), limit)
    assert made is not None
    return made


# The same request once more -----------------------------------------------------------------


def test_a_replay_shows_what_is_new_and_hides_what_comes_again() -> None:
    replay = Replay(*REQUEST[:2])

    first = [replay.accept(numbers(1, 2)), replay.accept(numbers(3))]
    asked = replay.next_requests()
    again = [replay.accept(numbers(1)), replay.accept(numbers(2, 3, 4)), replay.accept(numbers(5))]
    replay.check_end()

    assert first == [numbers(1, 2), numbers(3)]
    assert list(asked) == [REQUEST]
    assert again == [[], numbers(4), numbers(5)]
    assert replay.accepted == 5


@pytest.mark.parametrize("other", [numbers(1, 2, 4), numbers(9), numbers(12, 3), numbers(1, 23)])
def test_the_first_item_that_differs_ends_a_replay(other: list[bytes]) -> None:
    replay = Replay(*REQUEST[:2])
    replay.accept(numbers(1, 2, 3))
    replay.next_requests()

    with pytest.raises(ResumeMismatch, match=r"of 3, item \d differs"):
        replay.accept(other)


def test_a_replay_that_ends_too_soon_does_not_fit() -> None:
    replay = Replay(*REQUEST[:2])
    replay.accept(numbers(1, 2, 3))
    replay.next_requests()
    replay.accept(numbers(1, 2))

    with pytest.raises(ResumeMismatch, match="ended after 2 items, but 3 had been delivered"):
        replay.check_end()


def test_a_replay_that_is_lost_again_begins_at_the_first_item_once_more() -> None:
    replay = Replay(*REQUEST[:2])
    replay.accept(numbers(1, 2, 3))
    replay.next_requests()
    replay.accept(numbers(1, 2))

    replay.next_requests()

    assert replay.accept(numbers(1, 2, 3, 4)) == numbers(4)


@pytest.mark.parametrize("wrong", [0, 1, MOST_MARKS, 3 * MOST_MARKS, 5 * MOST_MARKS - 1])
def test_a_long_stream_is_compared_by_a_bounded_number_of_digests(wrong: int) -> None:
    count = 5 * MOST_MARKS
    items = numbers(*range(count))
    replay = Replay(*REQUEST[:2])
    replay.accept(items)
    replay.next_requests()
    items[wrong] = b"other"

    assert replay.accept(items[:wrong]) == []
    with pytest.raises(ResumeMismatch, match="or one of the 7 before it differs"):
        replay.accept(items[wrong : wrong + 8])
    assert len(replay._marks) <= MOST_MARKS  # pyright: ignore[reportPrivateUsage]


# Another request ----------------------------------------------------------------------------


def test_the_next_request_is_made_of_the_first_one_and_all_accepted_items() -> None:
    seen: list[Any] = []

    def note(request: Any, items: list[Any]) -> Any:
        seen.append((request, items))
        return request - len(items)

    going = counting(5, note)

    shown = [going.accept(numbers(1, 2)), going.next_requests(), going.accept(numbers(3))]
    asked = going.next_requests()

    assert shown == [numbers(1, 2), [NextRequest(b"3", 3)], numbers(3)]
    assert asked == [NextRequest(b"2", 2)]
    assert seen == [(5, [1, 2]), (5, [1, 2, 3])]


def test_a_stream_of_which_nothing_is_left_ends_well() -> None:
    going = counting(2)
    going.accept(numbers(1, 2))

    assert going.next_requests() == []


def test_what_a_function_raises_ends_the_stream_and_is_told() -> None:
    def fail(request: Any, items: list[Any]) -> Any:
        raise KeyError("seed")

    def refuse(request: Any, items: list[Any]) -> Any:
        raise Overloaded("not now")

    with pytest.raises(StreamLost, match="rest raised KeyError: 'seed'"):
        counting(2, fail).next_requests()
    with pytest.raises(Overloaded, match="not now"):
        counting(2, refuse).next_requests()


def test_a_request_that_cannot_be_encoded_ends_the_stream() -> None:
    def make(request: Any, items: list[Any]) -> Any:
        return object()

    with pytest.raises(StreamLost, match="rest raised TypeError"):
        counting(2, make).next_requests()


def test_items_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "RESUME_BYTES", 1 << 20)
    going = counting(1 << 30)
    item = b'"' + b"x" * 1022 + b'"'

    for _ in range(1020):
        assert going.accept([item]) == [item]
    kept = going.next_requests()
    for _ in range(10):
        assert going.accept([item]) == [item]

    assert len(kept) == 1
    with pytest.raises(StreamLost, match="its 1030 items are more than the 1 MiB that are kept"):
        going.next_requests()


def test_many_empty_items_are_not_kept_without_end() -> None:
    going = counting(1 << 30)

    going.accept([b""] * (RESUME_BYTES // 4 + 1))

    with pytest.raises(StreamLost, match="4 MiB"):
        going.next_requests()


# In parts ---------------------------------------------------------------------------------------


def test_of_several_requests_each_goes_on_with_a_part_by_what_came_of_that() -> None:
    def halves(request: Any, items: list[Any]) -> Any:
        left = request - len(items)
        return ResumeParts([left // 2, left - left // 2]) if request > 5 else left or None

    going = counting(10, halves)
    going.accept(numbers(1, 2, 3))

    parts = going.next_requests()
    first, second = (one.part for one in parts)
    assert first is not None
    assert second is not None
    first.accept(numbers(4))

    assert [(one.data, one.request) for one in parts] == [(b"3", 3), (b"4", 4)]
    assert first.next_requests() == [NextRequest(b"2", 2)]
    assert second.next_requests() == [NextRequest(b"4", 4)]
    # The reader has items of the whole.
    assert (first.accepted, second.accepted) == (4, 3)


def test_a_rule_says_of_each_request_whether_its_stream_goes_on() -> None:
    class Even(ResumeRule):
        def __call__(self, request: Any, items: list[Any]) -> Any:
            return rest(request, items)

        def applies(self, request: Any) -> bool:
            return bool(request % 2 == 0)

    resume = resume_by(
        Even(), label="even", decode=json.loads, decode_many=list, encode=lambda value: b""
    )

    assert resume(b"3", 3) is None
    assert resume(b"4", 4) is not None


# Over any number of attempts ----------------------------------------------------------------

SOURCE = st.lists(st.integers(0, 3).map(str).map(str.encode), max_size=40)


class Attempts(RuleBasedStateMachine):
    """A stream that is lost at any moment is shown to its reader as if it never were."""

    made: Continuation

    @initialize(source=SOURCE, replays=st.booleans())
    def begin(self, source: list[bytes], replays: bool) -> None:
        self.source = source
        self.shown: list[bytes] = []
        self.replays = replays
        self.made = Replay(*REQUEST[:2]) if replays else counting(len(source))
        self.rest: Sequence[bytes] = source
        self.is_over = False

    @precondition(lambda self: self.is_over)
    @rule(source=SOURCE, replays=st.booleans())
    def begin_another(self, source: list[bytes], replays: bool) -> None:
        self.begin(source, replays)

    @precondition(lambda self: not self.is_over and self.rest)
    @rule(size=st.integers(1, 10))
    def arrive(self, size: int) -> None:
        self.shown += self.made.accept(self.rest[:size])
        self.rest = self.rest[size:]

    @precondition(lambda self: not self.is_over)
    @rule()
    def lose(self) -> None:
        following = self.made.next_requests()
        if not following:
            self.is_over = True
            assert self.shown == self.source
        else:
            begun = 0 if self.replays else len(self.source) - following[0].request
            self.rest = self.source[begun:]

    @precondition(lambda self: not self.is_over and not self.rest)
    @rule()
    def end(self) -> None:
        self.made.check_end()
        assert self.shown == self.source
        self.is_over = True

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "shown"):
            assert self.shown == self.source[: len(self.shown)]
            assert self.made.accepted == len(self.shown)


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(SOURCE, st.data())
def test_a_replay_never_shows_what_follows_other_items(
    source: list[bytes], data: st.DataObject
) -> None:
    replay = Replay(*REQUEST[:2])
    accepted = data.draw(st.integers(0, len(source)))
    replay.accept(source[:accepted])
    replay.next_requests()
    other = data.draw(SOURCE)

    shown: list[bytes] = []
    try:
        shown += replay.accept(other)
        replay.check_end()
    except ResumeMismatch:
        assert other[:accepted] != source[:accepted]
        assert not shown
    else:
        assert other[:accepted] == source[:accepted]
        assert shown == other[accepted:]
