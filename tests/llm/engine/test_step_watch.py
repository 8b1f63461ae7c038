"""The decision that an engine hangs, by literals and by whatever Hypothesis thinks of."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.engine.step_watch import HangLimits, LearnedSteps, StepProgress, StepWatch, Turn

TICK = 0.25
LIMITS = HangLimits(longest=60.0, least=2.0, factor=10.0)


class Watched:
    """A watch that is shown an engine, a look at a time.

    Attributes:
        reason: why it counts as hung; empty while it does not.
    """

    def __init__(self, limits: HangLimits = LIMITS) -> None:
        self.watch = StepWatch(limits, TICK)
        self.reason = ""
        self.now = 1000.0
        self.steps = self.made = 0

    def look(
        self,
        turn: Turn = Turn.BUSY,
        *,
        steps: int = 0,
        made: int | None = None,
        tokens: int = 1,
        fruitless: int = 1,
        after: float = TICK,
    ) -> str:
        self.now += after
        self.steps += steps
        self.made += steps if made is None else made
        seen = StepProgress(turn, self.steps, self.made, tokens, fruitless)
        self.reason = self.reason or self.watch.look(self.now, seen)
        return self.reason

    def run(self, seconds: float, *, tokens: int = 1) -> None:
        """It goes on, some steps in each look."""
        for _ in range(round(seconds / TICK)):
            self.look(steps=3, tokens=tokens)

    def stand(self, turn: Turn = Turn.BUSY, *, most: float = 1000.0, tokens: int = 1) -> float:
        """No step ends; seconds until it counts as hung, at most `most`."""
        began = self.now
        while not self.look(turn, tokens=tokens) and self.now - began < most:
            pass
        return self.now - began


def test_an_engine_that_makes_no_step_hangs_after_the_longest_legal_one() -> None:
    watched = Watched()
    watched.run(10.0)

    seconds = watched.stand()

    assert watched.watch.limit == 2.0
    assert 2.0 < seconds <= 2.0 + 2 * TICK
    assert watched.reason == (
        "it has work and has ended no step for 2.2 s; the longest legal one takes 2.0 s"
    )


def test_before_anything_is_learned_the_upper_bound_counts() -> None:
    watched = Watched()

    assert 60.0 < watched.stand() <= 60.0 + 2 * TICK


@pytest.mark.parametrize("turn", [Turn.IDLE, Turn.HELD])
def test_an_engine_whose_turn_it_is_not_does_not_hang(turn: Turn) -> None:
    watched = Watched()
    watched.run(10.0)

    assert watched.stand(turn, most=500.0) >= 500.0
    assert watched.reason == ""


def test_an_engine_that_schedules_none_of_its_requests_hangs() -> None:
    watched = Watched()
    watched.run(10.0)

    began = watched.now
    while not watched.look(steps=1000, made=0):
        assert watched.now - began < 100.0

    assert 2 * 2.0 < watched.now - began <= 2 * 2.0 + 2 * TICK
    assert "it schedules none of its requests" in watched.reason


def test_steps_of_a_long_prompt_may_make_nothing() -> None:
    watched = Watched()
    watched.run(10.0)

    # 40 chunks of a second each, which nobody sees anything of.
    for second in range(40):
        for tick in range(4):
            watched.look(steps=tick == 3, made=0, tokens=8192, fruitless=40)
        assert watched.reason == "", second


def test_a_step_with_more_tokens_than_any_before_may_take_as_much_longer() -> None:
    watched = Watched(HangLimits(longest=600.0, least=2.0, factor=12.0))
    watched.run(10.0, tokens=64)

    # Twelve times a twelfth of a second, and 16 times the tokens.
    assert 16.0 < watched.stand(tokens=1024) <= 16.0 + 2 * TICK


@pytest.mark.parametrize("away", [3.0, 3600.0])
def test_a_process_that_was_stopped_and_goes_on_does_not_hang(away: float) -> None:
    watched = Watched()
    watched.run(10.0)

    for _ in range(50):
        watched.look(after=away)
        watched.look(steps=1)

    assert watched.reason == ""


def test_a_watcher_without_a_processor_counts_no_more_than_it_has_run() -> None:
    watched = Watched()
    watched.run(10.0)

    # Each look comes four times as late as it should.
    looks = 0
    while not watched.look(after=4 * TICK):
        looks += 1

    assert looks >= 2.0 / TICK


def test_a_first_step_that_compiles_is_forgotten_in_time() -> None:
    watched = Watched(HangLimits(longest=300.0, least=2.0, factor=10.0))
    for _ in range(100):
        watched.look()
    watched.look(steps=1)
    after_it = watched.watch.limit
    watched.run(1500.0)

    assert after_it > 200.0
    assert watched.watch.limit < 10.0


def test_the_learned_bound_lies_between_the_two_that_are_given() -> None:
    learned = LearnedSteps(LIMITS)
    learned.note(100, 0.5)

    assert [learned.limit(tokens) for tokens in (1, 100, 200, 400, 100_000)] == [
        *(5.0, 5.0, 10.0, 20.0, 60.0)
    ]


steps = st.lists(
    st.tuples(st.integers(1, 100_000), st.floats(0.0, 1000.0)), min_size=1, max_size=50
)


def limits_of(least: float, more: float, factor: float) -> HangLimits:
    return HangLimits(least + more, least, factor)


limits = st.builds(
    limits_of,
    st.floats(0.1, 100.0),
    st.floats(0.0, 1000.0),
    st.floats(1.0, 20.0),
)


@given(steps, limits, st.integers(1, 100_000), st.integers(0, 100_000))
def test_the_bound_is_within_its_limits_and_no_less_for_more_tokens(
    seen: list[tuple[int, float]], limits: HangLimits, tokens: int, more: int
) -> None:
    learned = LearnedSteps(limits)
    for size, seconds in seen:
        learned.note(size, seconds)

    bound = learned.limit(tokens)

    assert limits.least <= bound <= limits.longest
    assert bound <= learned.limit(tokens + more)


@given(steps, limits)
def test_a_step_as_long_as_the_last_one_of_its_size_is_legal(
    seen: list[tuple[int, float]], limits: HangLimits
) -> None:
    learned = LearnedSteps(limits)
    for size, seconds in seen:
        learned.note(size, seconds)

    size, seconds = seen[-1]
    assert learned.limit(size) >= min(seconds, limits.longest)


looks = st.lists(
    st.tuples(
        st.sampled_from(Turn),
        st.integers(0, 3),
        st.booleans(),
        st.integers(1, 100_000),
        st.floats(0.0, 10_000.0),
    ),
    max_size=200,
)


def silences(seen: Iterable[tuple[Turn, int, bool, int, float]]) -> Iterable[int]:
    """The number of looks in a row, up to each, in which an engine with work made nothing."""
    count = 0
    for turn, ended, made, _, _ in seen:
        count = 0 if turn is Turn.IDLE or (ended and made) else count + 1
        yield count


@given(looks, limits)
def test_nothing_hangs_before_the_watch_has_run_for_the_least_bound(
    seen: list[tuple[Turn, int, bool, int, float]], limits: HangLimits
) -> None:
    watched = Watched(limits)

    for (turn, ended, made, tokens, after), silent in zip(seen, silences(seen), strict=True):
        watched.look(turn, steps=ended, made=int(ended and made), tokens=tokens, after=after)
        if watched.reason:
            assert silent * TICK >= limits.least
            break


@given(looks, limits, st.integers(1, 100_000))
def test_whatever_came_before_an_engine_that_stands_still_hangs_in_time(
    seen: list[tuple[Turn, int, bool, int, float]], limits: HangLimits, tokens: int
) -> None:
    watched = Watched(limits)
    for turn, ended, made, size, after in seen:
        watched.look(turn, steps=ended, made=int(ended and made), tokens=size, after=after)

    assert watched.stand(tokens=tokens, most=5000.0) <= limits.longest + 2 * TICK
