"""A tenant's limits, leased by several front ends: the pure part."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.tenants.ledger import LEASE_SECONDS, Ledger, end_of, window_of
from dynbus.llm.tenants.limits import BUDGET, PER_MINUTE, REQUESTS, RUNNING
from dynbus.llm.tenants.purse import LOOK_AGAIN, UNKNOWN_MEMBERS, Purse, Standing, Taken

START = datetime(2026, 3, 31, 23, 55, tzinfo=UTC).timestamp()


class Bus:
    """A ledger, and front ends that lease from it."""

    def __init__(self, limits: dict[str, int], count: int) -> None:
        self.limits = limits
        self.ledger = Ledger()
        self.now = START
        self.names = count
        self.purses = {str(one): Purse(limits) for one in range(count)}
        self.held: dict[str, list[Taken]] = {name: [] for name in self.purses}
        # What was granted, by limit and its window.
        self.granted = Counter[tuple[str, int]]()

    def ask(self, name: str, amounts: dict[str, int], *, leaves: bool = False) -> None:
        """Have a front end speak to the ledger."""
        purse = self.purses[name]
        said = purse.state(amounts, self.now, leaves=leaves)
        self.ledger, part = self.ledger.settle(purse.limits, name, said, self.now)
        purse.accept(said, part, self.now)

    def take(self, name: str, amounts: dict[str, int]) -> bool:
        """Have a front end take amounts, and ask for them where that may help."""
        purse = self.purses[name]
        taken = purse.take(amounts, self.now)
        if taken is None and purse.may_ask(amounts, self.now):
            self.ask(name, amounts)
            taken = purse.take(amounts, self.now)
        if taken is None:
            return False
        self.held[name].append(taken)
        window = window_of(self.now)
        for limit in amounts:
            at = window.minute if limit in PER_MINUTE else window.month
            self.granted[limit, at] += amounts[limit]
        return True

    def end(self, name: str, real: dict[str, int]) -> None:
        """Have the oldest request of a front end end."""
        taken = self.held[name].pop(0)
        before = dict(taken.amounts)
        self.purses[name].settle(taken, real)
        for limit, amount in before.items():
            at = taken.window.minute if limit in PER_MINUTE else taken.window.month
            self.granted[limit, at] -= amount - real.get(limit, 0)

    def kill(self, name: str) -> str:
        """Have a front end gone without a word, and another one begin."""
        del self.purses[name], self.held[name]
        self.names += 1
        new = str(self.names)
        self.purses[new], self.held[new] = Purse(self.limits), []
        return new

    @property
    def running(self) -> int:
        """The requests that run at all front ends."""
        return sum(one.amounts.get(RUNNING, 0) for held in self.held.values() for one in held)


def test_one_front_end_has_the_whole_limit_and_few_questions() -> None:
    bus = Bus({REQUESTS: 1000}, 1)
    questions = 0
    for _ in range(1000):
        taken = bus.purses["0"].take({REQUESTS: 1}, bus.now)
        if taken is None:
            questions += 1
            assert bus.take("0", {REQUESTS: 1})

    assert not bus.take("0", {REQUESTS: 1})
    assert questions <= 12
    (short,) = bus.purses["0"].shortages({REQUESTS: 1}, bus.now)
    assert (short.limit, short.left) == (1000, 0)
    assert short.retry_after == pytest.approx(60.0)


def test_a_new_minute_begins_with_the_whole_limit() -> None:
    bus = Bus({REQUESTS: 2}, 2)
    first = [bus.take(name, {REQUESTS: 1}) for name in "010"]

    bus.now += 60

    assert first == [True, True, False]
    assert [bus.take(name, {REQUESTS: 1}) for name in "110"] == [True, True, False]


def test_what_is_not_used_is_given_back_to_who_needs_it() -> None:
    bus = Bus({REQUESTS: 100}, 2)
    assert bus.take("0", {REQUESTS: 1})
    while bus.take("1", {REQUESTS: 1}):
        pass
    before = bus.granted[REQUESTS, window_of(bus.now).minute]

    for _ in range(2):
        bus.ask("0", {})
    bus.now += LOOK_AGAIN
    while bus.take("1", {REQUESTS: 1}):
        pass

    assert before < 100
    assert bus.granted[REQUESTS, window_of(bus.now).minute] == 100


def test_a_refusal_is_brief_while_others_have_something_unused() -> None:
    bus = Bus({REQUESTS: 100}, 2)
    assert bus.take("0", {REQUESTS: 1})
    while bus.take("1", {REQUESTS: 1}):
        pass

    (short,) = bus.purses["1"].shortages({REQUESTS: 1}, bus.now)

    # What cannot be had now is not told as left.
    assert (short.left, short.elsewhere > 0) == (0, True)
    assert short.retry_after == LOOK_AGAIN


def test_a_minute_that_turns_while_the_ledger_is_asked_is_no_refusal() -> None:
    bus = Bus({REQUESTS: 8}, 1)
    while bus.take("0", {REQUESTS: 1}):
        pass
    purse = bus.purses["0"]
    said = purse.state({REQUESTS: 1}, bus.now)
    bus.now += 60

    bus.ledger, part = bus.ledger.settle(purse.limits, "0", said, bus.now)
    purse.accept(said, part, bus.now)

    assert [bus.take("0", {REQUESTS: 1}) for _ in range(9)] == [True] * 8 + [False]


def test_what_a_killed_front_end_had_comes_back_after_its_lease() -> None:
    bus = Bus({RUNNING: 2, BUDGET: 100}, 2)
    assert bus.take("0", {RUNNING: 2, BUDGET: 60})
    bus.ask("0", {})
    new = bus.kill("0")
    at_once = bus.take(new, {RUNNING: 1}), bus.take("1", {RUNNING: 1})

    bus.now += LEASE_SECONDS
    later = bus.take(new, {RUNNING: 1}), bus.take("1", {RUNNING: 1})

    assert at_once == (False, False)
    assert later == (True, True)
    # What it had said it used of the month stays used.
    assert not bus.take("1", {BUDGET: 41})
    bus.now += LOOK_AGAIN
    assert bus.take("1", {BUDGET: 40})


def test_what_a_killed_front_end_had_of_a_minute_counts_until_its_end() -> None:
    bus = Bus({REQUESTS: 4}, 1)
    assert bus.take("0", {REQUESTS: 1})
    new = bus.kill("0")

    bus.now += LEASE_SECONDS
    granted = sum(bus.take(new, {REQUESTS: 1}) for _ in range(4))

    # It may have used the half that it had.
    assert granted == 2


def test_a_front_end_that_leaves_gives_all_back_but_what_it_used() -> None:
    bus = Bus({REQUESTS: 10, BUDGET: 100, RUNNING: 3}, 2)
    assert bus.take("0", {REQUESTS: 1, BUDGET: 30, RUNNING: 3})
    bus.end("0", {REQUESTS: 1, BUDGET: 10})

    bus.ask("0", {}, leaves=True)
    granted = sum(bus.take("1", {REQUESTS: 1, BUDGET: 10}) for _ in range(11))

    assert granted == 9
    assert list(bus.ledger.holders) == ["1"]


def test_a_frozen_front_end_does_not_count_twice() -> None:
    bus = Bus({REQUESTS: 10, BUDGET: 100}, 2)
    assert bus.take("0", {REQUESTS: 2, BUDGET: 20})
    bus.ask("0", {})
    bus.now += LEASE_SECONDS
    bus.ask("1", {BUDGET: 1})

    bus.ask("0", {})

    assert bus.ledger.spent[BUDGET] == 20
    assert bus.ledger.holders["0"].used == {}
    assert bus.take("0", {BUDGET: 40})


def test_a_frozen_front_end_takes_nothing_that_others_may_have() -> None:
    bus = Bus({RUNNING: 8, BUDGET: 80}, 2)
    assert bus.take("0", {RUNNING: 1, BUDGET: 10})
    assert bus.purses["0"].take({RUNNING: 1, BUDGET: 10}, bus.now) is not None
    bus.now += LEASE_SECONDS

    assert bus.purses["0"].take({RUNNING: 1}, bus.now) is None
    assert bus.purses["0"].take({BUDGET: 1}, bus.now) is None


def test_an_answer_of_an_earlier_minute_gives_nothing_to_the_present_one() -> None:
    bus = Bus({REQUESTS: 10}, 1)
    purse = bus.purses["0"]
    said = purse.state({REQUESTS: 5}, bus.now)
    bus.ledger, part = bus.ledger.settle(purse.limits, "0", said, bus.now)
    assert purse.take({REQUESTS: 1}, bus.now + 60) is None

    purse.accept(said, part, bus.now)

    assert purse.take({REQUESTS: 1}, bus.now + 60) is None
    assert purse.remaining(REQUESTS) == 10


def test_a_clock_that_was_ahead_is_put_right() -> None:
    bus = Bus({REQUESTS: 4}, 1)
    purse = bus.purses["0"]
    purse.cut_off()
    assert purse.take({REQUESTS: 1}, bus.now + 7200) is not None

    purse.begin_anew()
    bus.ask("0", {})

    assert sum(bus.take("0", {REQUESTS: 1}) for _ in range(5)) == 4
    bus.now += 60
    assert bus.take("0", {REQUESTS: 1})


def test_more_than_was_predicted_counts_and_less_is_given_back() -> None:
    bus = Bus({BUDGET: 100}, 1)
    assert bus.take("0", {BUDGET: 40})
    bus.end("0", {BUDGET: 90})
    bus.ask("0", {})

    assert not bus.take("0", {BUDGET: 11})
    assert bus.take("0", {BUDGET: 10})
    bus.end("0", {BUDGET: 0})
    assert bus.purses["0"].remaining(BUDGET) == 10


def test_what_is_used_and_left_is_told_for_all_front_ends() -> None:
    bus = Bus({BUDGET: 1000, REQUESTS: 100, RUNNING: 3}, 3)
    assert bus.take("0", {BUDGET: 300, REQUESTS: 1, RUNNING: 1})
    assert bus.take("1", {BUDGET: 20, REQUESTS: 1, RUNNING: 1})
    bus.end("1", {BUDGET: 50, REQUESTS: 1})
    bus.ask("1", {}, leaves=True)
    for name in ("0", "2"):
        bus.ask(name, {})

    told = bus.purses["2"].standings(bus.now)
    bus.now += 60.0
    next_minute = bus.purses["2"].standings(bus.now)

    month_end = datetime(2026, 4, 1, tzinfo=UTC).timestamp()
    assert told[BUDGET] == Standing(1000, 350, 650, month_end)
    assert told[REQUESTS] == Standing(100, 2, 98, START + 60.0)
    assert told[RUNNING] == Standing(3, 1, 2, None)
    assert (next_minute[BUDGET].used, next_minute[REQUESTS].used) == (350, 0)


def test_what_is_used_beyond_a_limit_is_told() -> None:
    bus = Bus({BUDGET: 1000}, 2)
    assert bus.take("0", {BUDGET: 10})
    bus.end("0", {BUDGET: 1200})
    for name in bus.purses:
        bus.ask(name, {})

    told = [purse.standings(bus.now)[BUDGET] for purse in bus.purses.values()]

    assert [(one.used, one.remaining) for one in told] == [(1200, 0)] * 2


def test_what_ends_in_a_later_minute_gives_nothing_back_to_it() -> None:
    bus = Bus({REQUESTS: 2}, 1)
    assert bus.take("0", {REQUESTS: 2})
    bus.now += 60
    assert bus.take("0", {REQUESTS: 2})

    bus.end("0", {})

    assert not bus.take("0", {REQUESTS: 1})


def test_other_limits_hold_at_once_and_keep_what_was_used() -> None:
    bus = Bus({REQUESTS: 10}, 1)
    purse = bus.purses["0"]
    assert sum(bus.take("0", {REQUESTS: 1}) for _ in range(5)) == 5

    purse.change({REQUESTS: 7, RUNNING: 1})

    assert sum(bus.take("0", {REQUESTS: 1}) for _ in range(5)) == 2
    purse.change({})
    assert bus.take("0", {REQUESTS: 1000})


def test_what_was_used_counts_of_a_limit_that_was_none_for_a_while() -> None:
    bus = Bus({BUDGET: 10, RUNNING: 2}, 2)
    purse = bus.purses["0"]
    assert bus.take("0", {BUDGET: 6, RUNNING: 1})

    for limits in ({REQUESTS: 100}, bus.limits):
        purse.change(limits)
        bus.ask("0", {})
        assert not purse.is_due(bus.now)
    left = {name: sum(bus.take(name, {BUDGET: 1}) for _ in range(11)) for name in bus.purses}
    bus.end("0", {BUDGET: 6})

    assert sum(left.values()) == 4
    assert [bus.take("0", {RUNNING: 1}) for _ in range(3)] == [True, True, False]


def test_a_limit_of_nothing_is_none_while_the_ledger_is_away() -> None:
    purse = Purse({REQUESTS: 0})
    purse.cut_off()

    assert purse.take({REQUESTS: 1}, START) is None


def test_months_end_by_utc() -> None:
    window = window_of(START)

    assert datetime.fromtimestamp(end_of(BUDGET, window), UTC) == datetime(2026, 4, 1, tzinfo=UTC)
    assert end_of(REQUESTS, window) == START + 60
    december = window_of(datetime(2026, 12, 31, tzinfo=UTC).timestamp())
    assert datetime.fromtimestamp(end_of(BUDGET, december), UTC).year == 2027


def test_a_front_end_that_knows_nothing_has_a_part_of_the_limit_while_it_is_cut_off() -> None:
    purse = Purse({REQUESTS: 100, RUNNING: 2})
    purse.cut_off()

    granted = 0
    while purse.take({REQUESTS: 1}, START) is not None:
        granted += 1

    assert granted == 100 // UNKNOWN_MEMBERS
    assert purse.take({RUNNING: 1}, START) is not None
    assert purse.take({RUNNING: 1}, START) is None


class Step(NamedTuple):
    """Something that happens on a bus."""

    what: str
    who: int
    amount: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(
            [
                "take",
                "take",
                "take",
                "take",
                "end",
                "end",
                "tell",
                "leave",
                "kill",
                "second",
                "minute",
            ]
        ),
        st.integers(0, 3),
        st.integers(1, 12),
    ),
    max_size=120,
)


@given(STEPS, st.integers(1, 4), st.integers(1, 40))
def test_never_more_than_the_limit_is_granted_in_any_window(
    steps: list[Step], count: int, limit: int
) -> None:
    bus = Bus({REQUESTS: limit, RUNNING: limit // 2 + 1}, count)
    for what, who, amount in steps:
        name = list(bus.purses)[who % count]
        if what == "take":
            bus.take(name, {REQUESTS: amount, RUNNING: 1})
        elif what == "end" and bus.held[name]:
            taken = bus.held[name][0].amounts
            bus.end(name, {REQUESTS: min(amount, taken[REQUESTS])})
        elif what == "tell":
            bus.ask(name, {})
        elif what == "leave" and not bus.held[name]:
            bus.ask(name, {}, leaves=True)
        elif what == "kill":
            bus.kill(name)
        elif what in ("second", "minute"):
            # A front end that lives says so more often than that.
            bus.now += amount if what == "second" else 60
            for one in bus.purses:
                bus.ask(one, {})

        assert all(bus.granted[one] <= limit for one in bus.granted if one[0] == REQUESTS)
        assert bus.running <= limit // 2 + 1
        has = Counter(bus.ledger.spent)
        for holder in bus.ledger.holders.values():
            has.update(holder.has)
        assert has[REQUESTS] <= limit


@given(STEPS, st.integers(1, 4), st.integers(1, 40))
def test_all_that_is_given_back_can_be_taken_by_one(
    steps: list[Step], count: int, limit: int
) -> None:
    bus = Bus({RUNNING: limit}, count)
    for what, who, amount in steps:
        name = list(bus.purses)[who % count]
        if what == "take":
            bus.take(name, {RUNNING: amount})
        elif what == "end" and bus.held[name]:
            bus.end(name, {})
    for name, held in bus.held.items():
        while held:
            bus.end(name, {})
    for _ in range(2):
        for name in bus.purses:
            bus.ask(name, {})
    bus.now += LOOK_AGAIN

    assert bus.take("0", {RUNNING: limit})


@given(STEPS, st.integers(1, 4), st.integers(4, 40))
def test_a_partition_has_its_bound(steps: list[Step], count: int, limit: int) -> None:
    bus = Bus({REQUESTS: limit}, count)
    for name in bus.purses:
        bus.take(name, {REQUESTS: 1})
    for name in bus.purses:
        bus.ask(name, {})
    for purse in bus.purses.values():
        purse.cut_off()

    for what, who, amount in steps:
        name = list(bus.purses)[who % count]
        if what == "take":
            bus.take(name, {REQUESTS: amount})
        elif what == "minute":
            bus.now += 60

    first = window_of(START).minute
    for (_, minute), granted in bus.granted.items():
        assert granted <= (2 * limit if minute == first else limit)
    bus.now += 60
    assert all(bus.take(name, {REQUESTS: 1}) for name in bus.purses)
