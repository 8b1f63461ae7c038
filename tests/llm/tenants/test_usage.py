"""What front ends count of their tenants' tokens, as pure objects."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.llm.answers import Usage
from dynbus.llm.tenants.usage import (
    HOUR,
    MOST_ENTRIES,
    Payer,
    Tally,
    Tokens,
    UsageBook,
    UsageRecord,
    counted_of,
    hour_of,
)
from dynbus.llm.tenants.usage_sums import HourOfUsage, UsageSum, sum_up

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()
ADA = Payer("ada", "k1", "tiny")


class Written:
    """The records on the bus, by their subjects."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def write(self, book: UsageBook) -> None:
        for page in book.pages:
            self.records[page.subject] = page.data
            page.stored = page.version

    def of(self, writer: str) -> list[UsageRecord]:
        return [
            msgspec.json.decode(data, type=UsageRecord)
            for subject, data in self.records.items()
            if subject.split(".")[5] == writer
        ]

    def sums(self, *by: str) -> list[UsageSum]:
        hours = [
            HourOfUsage(hour_of(subject), msgspec.json.decode(data, type=UsageRecord))
            for subject, data in self.records.items()
        ]
        return sum_up(hours, by)


def test_an_answer_is_counted_once_however_often_it_is_told() -> None:
    book, bus, tally = UsageBook("a"), Written(), Tally(ADA)
    book.count(tally, Usage(10, 1), ["one"], NOON)
    bus.write(book)
    book.count(tally, Usage(10, 3, 4), ["one"], NOON)
    book.count(tally, Usage(10, 3, 4), ["one"], NOON)
    book.end(tally)
    book.count(tally, Usage(10, 9, 4), ["one"], NOON)
    bus.write(book)
    bus.write(book)

    assert bus.sums("tenant", "model", "key", "instance") == [
        UsageSum({"tenant": "ada", "model": "tiny", "key": "k1", "instance": "one"}, 1, 10, 4, 3)
    ]
    [total] = bus.sums()
    assert (total.total, total.saved) == (13, 0.4)


def test_tokens_count_at_the_instance_and_in_the_hour_in_which_they_were_made() -> None:
    book, bus, tally = UsageBook("a"), Written(), Tally(ADA)
    book.count(tally, Usage(10, 2), ["one"], NOON)
    book.count(tally, Usage(10, 5), ["one", "two"], NOON + HOUR)
    bus.write(book)

    by_instance = {one.group["instance"]: one[1:] for one in bus.sums("instance")}
    by_hour = {one.group["hour"]: one[1:] for one in bus.sums("hour")}
    assert by_instance == {"one": (1, 10, 0, 2), "two": (0, 0, 0, 3)}
    assert by_hour == {"2026-11-27T12:00Z": (1, 10, 0, 2), "2026-11-27T13:00Z": (0, 0, 0, 3)}


def test_cached_tokens_count_with_their_prompt_where_its_engine_was_killed() -> None:
    book, bus, tally = UsageBook("a"), Written(), Tally(ADA)
    book.count(tally, Usage(10, 0), ["one"], NOON)
    bus.write(book)
    book.drop_before(NOON + HOUR)

    # It was killed before it made anything, and the next one says what it had in its cache.
    changed = book.count(tally, Usage(10, 5, 8), ["one", "two"], NOON + HOUR)
    bus.write(book)

    by_instance = {one.group["instance"]: one[1:] for one in bus.sums("instance")}
    by_hour = {one.group["hour"]: one[1:] for one in bus.sums("hour")}
    assert by_instance == {"one": (1, 10, 8, 0), "two": (0, 0, 0, 5)}
    assert by_hour == {"2026-11-27T12:00Z": (1, 10, 8, 0), "2026-11-27T13:00Z": (0, 0, 0, 5)}
    assert [hour_of(page.subject).hour for page in changed] == [13, 12]


def test_a_record_stays_small_and_leaves_when_it_is_stored_and_its_hour_is_over() -> None:
    book, bus = UsageBook("a"), Written()
    for number in range(3 * MOST_ENTRIES):
        book.count(Tally(ADA), Usage(1, 1), [f"i{number}"], NOON)
    assert [len(page.record.entries) for page in book.pages] == [MOST_ENTRIES] * 3
    bus.write(book)
    book.drop_before(NOON)
    assert len(list(book.pages)) == 3
    book.count(Tally(ADA), Usage(1, 1), ["i0"], NOON)
    book.drop_before(NOON + HOUR)
    assert len(list(book.pages)) == 3
    bus.write(book)
    book.drop_before(NOON + HOUR)
    assert not list(book.pages)

    # A clock that is set back has no record take the place of one that was dropped.
    book.count(Tally(ADA), Usage(1, 1), ["i0"], NOON)
    bus.write(book)
    assert bus.sums()[0].requests == 3 * MOST_ENTRIES + 2


def test_a_clock_that_was_ahead_for_a_while_leaves_later_requests_in_their_hours() -> None:
    book, bus = UsageBook("a"), Written()
    for at in (NOON, NOON + 30 * HOUR, NOON, NOON + HOUR):
        book.count(Tally(ADA), Usage(1, 1), ["one"], at)
        bus.write(book)
        book.drop_before(at)

    by_hour = {one.group["hour"]: one.requests for one in bus.sums("hour")}
    assert by_hour == {"2026-11-27T12:00Z": 2, "2026-11-27T13:00Z": 1, "2026-11-28T18:00Z": 1}


def test_a_second_request_by_the_id_of_a_stream_leaves_what_is_said_of_it() -> None:
    book, bus, stream, second = UsageBook("a"), Written(), Tally(ADA), Tally(ADA)
    book.mark(stream, "s", NOON)
    book.count(stream, Usage(7, 5), ["one"], NOON)
    book.mark(second, "s", NOON)
    book.count(second, Usage(7, 1), ["one"], NOON)
    bus.write(book)
    during = counted_of(bus.of("a"), "s")
    book.end(second)
    bus.write(book)

    assert during == counted_of(bus.of("a"), "s") == Tokens(7, 0, 5)
    book.end(stream)
    bus.write(book)
    assert counted_of(bus.of("a"), "s") is None


class Fleet:
    """Front ends that go on with one another's streams, and a log that knows what was made."""

    def __init__(self) -> None:
        self.bus = Written()
        self.books = {name: UsageBook(name) for name in "abc"}
        self.killed = 0

    def restart(self, name: str) -> str:
        """Kill a front end: what it has not written is lost; the name of the next one."""
        self.killed += 1
        del self.books[name]
        new = f"{name[0]}{self.killed}"
        self.books[new] = UsageBook(new)
        return new


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["make", "progress", "kill", "kill while it stores", "hand on"]),
        st.integers(1, 9),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_a_stream_counts_once_wherever_it_is_made_and_whoever_dies(
    steps: list[tuple[str, int]], turn: int
) -> None:
    fleet = Fleet()
    prompt, made, most, now = 7, 0, 0, NOON
    owner = "a"
    tally = Tally(ADA)
    fleet.books[owner].mark(tally, "s", now)
    fleet.bus.write(fleet.books[owner])

    def take_over(new: str, counted: Tokens) -> Tally:
        tally = Tally(ADA, counted)
        fleet.books[new].mark(tally, "s", now)
        fleet.bus.write(fleet.books[new])
        return tally

    for number, (step, amount) in enumerate(steps):
        now += turn * 600
        book = fleet.books[owner]
        if step == "make":
            # It is counted, then it is stored in the log, and told.
            made += amount
            if amount % 3:
                book.count(tally, Usage(prompt, made), ["i0"], now)
        elif step == "progress":
            book.count(tally, Usage(prompt, made), [f"i{number % 3}"], now)
            if amount % 2:
                fleet.bus.write(book)
        elif step.startswith("kill"):
            dead = owner
            if step != "kill":
                # What the log has not is made again.
                most = max(most, made + amount)
                book.count(tally, Usage(prompt, made + amount), ["i0"], now)
                fleet.bus.write(book)
            fleet.restart(dead)
            owner = next(name for name in fleet.books if name[0] != dead[0])
            counted = counted_of(fleet.bus.of(dead), "s")
            assert counted is not None
            tally = take_over(owner, counted)
        else:
            made = max(made, most)
            book.count(tally, Usage(prompt, made), ["i0"], now)
            book.end(tally)
            fleet.bus.write(book)
            owner = next(name for name in fleet.books if name != owner)
            tally = take_over(owner, Tokens(prompt, 0, made))
    book, made = fleet.books[owner], max(made, most)
    book.count(tally, Usage(prompt, made), ["i0"], now)
    book.end(tally)
    fleet.bus.write(book)

    [total] = fleet.bus.sums("tenant")
    assert total[1:] == (1, prompt, 0, made)
    assert counted_of(fleet.bus.of(owner), "s") is None
