"""A stream delivers what was pushed: in order, once, with bounded memory, over any channel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynbus.bus.errors import HandlerError, PayloadTooLarge
from dynbus.bus.protocol.stream_reader import StreamReader
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.protocol.wire import End, Failed, Items, Part, Terminal

SECRET = bytes(16)
WINDOW = 100
MAX_ITEM = 240
MAX_UNIT = 60


def make_writer(window: int = WINDOW) -> StreamWriter:
    return StreamWriter(
        7, SECRET, 1, granted=window, max_unit_bytes=MAX_UNIT, max_item_bytes=MAX_ITEM
    )


def make_reader(window: int = WINDOW) -> StreamReader:
    return StreamReader(window=window, max_item_bytes=MAX_ITEM)


def held_bytes(writer: StreamWriter) -> int:
    """Bytes that are kept for the reader."""
    units = writer._units  # pyright: ignore[reportPrivateUsage]
    return sum(len(unit) for unit in units if isinstance(unit, bytes))


def receive_all(reader: StreamReader, frames: Sequence[Items | Part | Terminal]) -> None:
    for frame in frames:
        reader.receive(frame)


class StreamOverABadChannel(RuleBasedStateMachine):
    """A writer and a reader with a channel that loses, repeats, reorders and is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = make_writer()
        self.reader = make_reader()
        self.pushed: list[bytes] = []
        self.delivered: list[bytes] = []
        self.drained: list[bytes] = []
        self.forward: list[Items | Part | Terminal] = []
        self.credits: list[tuple[int, int]] = []
        self.resumes: list[int] = []
        self.terminals = 0

    @precondition(lambda self: not self.writer.blocked and not self.writer.ended)
    @rule(size=st.integers(1, MAX_ITEM))
    def push(self, size: int) -> None:
        item = len(self.pushed).to_bytes(2, "big") * size
        self.pushed.append(item[:size])
        self.writer.push(item[:size])

    @precondition(lambda self: len(self.pushed) > 3)
    @rule(well=st.booleans())
    def end(self, well: bool) -> None:
        if well:
            self.writer.end()
        else:
            self.writer.fail(HandlerError("no"))

    @rule(limit=st.integers(1, 400))
    def send(self, limit: int) -> None:
        self.forward += self.writer.take_frames(limit)

    @precondition(lambda self: self.forward)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.arrive(self.forward.pop(data.draw(st.integers(0, len(self.forward) - 1))))

    @precondition(lambda self: self.forward)
    @rule()
    def deliver_all_in_order(self) -> None:
        arriving, self.forward = self.forward, []
        for frame in arriving:
            self.arrive(frame)

    @precondition(lambda self: self.forward)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.forward.append(self.forward[data.draw(st.integers(0, len(self.forward) - 1))])

    @precondition(lambda self: self.forward)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.forward.pop(data.draw(st.integers(0, len(self.forward) - 1)))

    @rule()
    def cut(self) -> None:
        self.forward.clear()
        self.credits.clear()
        self.resumes.clear()

    @rule(count=st.integers(1, 5))
    def consume(self, count: int) -> None:
        for item in self.drained[:count]:
            self.delivered.append(item)
            granted = self.reader.consume(len(item))
            if granted is not None:
                self.credits.append((granted, self.reader.next_sequence))
        del self.drained[:count]

    @precondition(lambda self: self.credits)
    @rule(data=st.data(), keep=st.booleans())
    def deliver_credit(self, data: st.DataObject, keep: bool) -> None:
        place = data.draw(st.integers(0, len(self.credits) - 1))
        self.writer.credit(*self.credits[place])
        if not keep:
            self.credits.pop(place)

    @rule()
    def ask_to_resume(self) -> None:
        self.resumes.append(self.reader.next_sequence)

    @precondition(lambda self: self.resumes)
    @rule(data=st.data(), keep=st.booleans())
    def deliver_resume(self, data: st.DataObject, keep: bool) -> None:
        place = data.draw(st.integers(0, len(self.resumes) - 1))
        # A late one may name a unit that the reader has acknowledged since.
        assert self.writer.resume(self.resumes[place])
        if not keep:
            self.resumes.pop(place)

    def arrive(self, frame: Items | Part | Terminal) -> None:
        ended = self.reader.terminal is not None
        self.reader.receive(frame)
        self.terminals += not ended and self.reader.terminal is not None
        self.drained += self.reader.drain()

    @invariant()
    def what_was_delivered_is_a_prefix_of_what_was_pushed(self) -> None:
        delivered = self.delivered + self.drained
        assert delivered == self.pushed[: len(delivered)]

    @invariant()
    def the_reader_never_holds_more_than_its_window_and_one_item(self) -> None:
        assert sum(map(len, self.drained)) <= WINDOW + MAX_ITEM

    @invariant()
    def the_writer_never_keeps_more_than_the_window_and_one_item(self) -> None:
        assert held_bytes(self.writer) <= WINDOW + MAX_ITEM

    @invariant()
    def the_end_comes_after_everything_that_was_pushed(self) -> None:
        if self.reader.terminal is not None:
            assert self.delivered + self.drained == self.pushed

    def teardown(self) -> None:
        """The channel heals: everything arrives, with exactly one terminal."""
        self.cut()
        self.writer.end()
        if self.reader.terminal is None:
            assert self.writer.resume(self.reader.next_sequence)
        while self.writer.has_fresh:
            self.forward += self.writer.take_frames(150)
        self.deliver_all_in_order()
        self.consume(len(self.drained))
        self.writer.credit(self.reader.granted, self.reader.next_sequence)

        assert self.delivered == self.pushed
        assert self.terminals == 1
        assert not self.reader.behind
        assert self.writer.ended
        assert held_bytes(self.writer) == 0
        assert repr(self.writer).endswith("+0, fresh: 0]>")


TestStreamOverABadChannel = StreamOverABadChannel.TestCase
TestStreamOverABadChannel.settings = settings(max_examples=300, stateful_step_count=60)


def test_a_result_that_is_alone_and_fits_is_taken_at_once_and_once() -> None:
    writer = make_writer()
    writer.end(b"result")

    too_small = writer.take_result(6)
    frame = writer.take_result(1000)

    assert too_small is None
    assert frame == End(7, SECRET, 1, 0, b"result")
    assert writer.take_result(1000) is None
    assert not writer.has_fresh


def test_items_failures_and_split_results_are_not_taken_as_a_result() -> None:
    with_item, failed, split = make_writer(), make_writer(), make_writer()
    with_item.push(b"a")
    with_item.end()
    failed.fail(PayloadTooLarge("too large"))
    split.end(bytes(150))

    assert [writer.take_result(1000) for writer in (with_item, failed, split)] == [None] * 3
    assert [len(writer.take_frames(1000)) for writer in (with_item, failed, split)] == [2, 1, 3]


def test_items_of_one_turn_travel_in_one_frame() -> None:
    writer = make_writer()

    for item in (b"a", b"b", b"c"):
        writer.push(item)
    writer.end()

    assert writer.take_frames(1000) == [
        Items(7, SECRET, 1, 0, [b"a", b"b", b"c"]),
        End(7, SECRET, 1, 3, None),
    ]


def test_an_item_larger_than_a_unit_is_split_and_joined_again() -> None:
    writer, reader = make_writer(), make_reader()
    item = bytes(range(150))

    writer.push(b"first")
    writer.push(item)
    writer.push(b"last")
    frames = writer.take_frames(1000)
    receive_all(reader, frames)

    assert [type(frame) for frame in frames] == [Items, Part, Part, Items]
    assert reader.drain() == [b"first", item, b"last"]


def test_a_unary_result_larger_than_a_unit_is_split_and_joined_again() -> None:
    writer, reader = make_writer(), make_reader()

    writer.end(bytes(150))
    receive_all(reader, writer.take_frames(1000))

    assert reader.result() == bytes(150)
    assert reader.drain() == []


def test_take_keeps_to_its_limit_but_hands_out_one_unit_at_least() -> None:
    writer = make_writer(1000)
    for _ in range(4):
        writer.push(bytes(50))

    assert [len(writer.take_frames(120)), len(writer.take_frames(1))] == [1, 1]
    assert writer.take_frames(1000) == [Items(7, SECRET, 1, 3, [bytes(50)])]
    assert writer.take_frames(1000) == []


def test_an_item_over_the_limit_is_refused_and_changes_nothing() -> None:
    writer = make_writer()
    before = repr(writer)

    with pytest.raises(PayloadTooLarge, match="max_item_bytes = 240"):
        writer.push(bytes(MAX_ITEM + 1))

    assert repr(writer) == before
    assert writer.pushed_bytes == 0
    assert not writer.has_fresh


def test_the_item_limit_holds_also_where_it_is_smaller_than_a_unit() -> None:
    limit = 10
    writer = StreamWriter(7, SECRET, 1, granted=WINDOW, max_unit_bytes=100, max_item_bytes=limit)
    lenient, reader = make_writer(), StreamReader(window=WINDOW, max_item_bytes=limit)

    with pytest.raises(PayloadTooLarge, match="max_item_bytes = 10"):
        writer.push(bytes(limit + 1))
    with pytest.raises(PayloadTooLarge, match="max_item_bytes = 10"):
        writer.end(bytes(limit + 1))
    writer.push(bytes(limit))
    assert writer.take_frames(1000) == [Items(7, SECRET, 1, 0, [bytes(limit)])]

    lenient.push(bytes(limit + 1))
    frame = lenient.take_items(1000)
    assert frame is not None
    assert not reader.receive_next(frame)
    with pytest.raises(PayloadTooLarge, match="max_item_bytes = 10"):
        reader.receive(frame)


def test_a_result_over_the_limit_is_refused_and_the_call_may_still_fail() -> None:
    writer = make_writer()

    with pytest.raises(PayloadTooLarge):
        writer.end(bytes(MAX_ITEM + 1))
    writer.fail(PayloadTooLarge("too large"))

    [frame] = writer.take_frames(1000)
    assert isinstance(frame, Failed)
    assert frame.code == "PayloadTooLarge"


def test_one_item_may_exceed_the_credit_and_blocks_the_writer() -> None:
    writer, reader = make_writer(), make_reader()

    writer.push(bytes(WINDOW + 50))
    receive_all(reader, writer.take_frames(1000))
    [item] = reader.drain()
    blocked = writer.blocked
    granted = reader.consume(len(item))

    assert blocked
    assert granted == WINDOW + 50 + WINDOW
    writer.credit(granted, reader.next_sequence)
    assert not writer.blocked
    assert held_bytes(writer) == 0


def test_a_reader_that_takes_nothing_grants_nothing() -> None:
    writer, reader = make_writer(), make_reader()

    while not writer.blocked:
        writer.push(bytes(10))
    receive_all(reader, writer.take_frames(1000))

    assert reader.granted == WINDOW
    assert writer.pushed_bytes == WINDOW


def test_credit_for_units_that_were_not_sent_drops_none_of_them() -> None:
    writer, reader = make_writer(), make_reader()
    writer.push(b"a")
    writer.take_frames(1000)
    writer.push(b"b")

    writer.credit(WINDOW, 10**9)
    writer.credit(-5, -5)

    assert repr(writer) == "<StreamWriter 7 [open | next: 2, kept: 1+0, fresh: 1]>"
    reader.receive(Items(7, SECRET, 1, 0, [b"a"]))
    receive_all(reader, writer.take_frames(1000))
    assert reader.drain() == [b"a", b"b"]


@pytest.mark.parametrize("sequence", [-1, 4])
def test_resume_from_what_there_is_not_is_refused(sequence: int) -> None:
    writer = make_writer()
    for item in (b"a", b"b", b"c"):
        writer.push(item)
    writer.take_frames(1000)

    assert not writer.resume(sequence)
    assert not writer.has_fresh


def test_a_resume_from_before_what_was_acknowledged_since_changes_nothing() -> None:
    writer = make_writer()
    for item in (b"a", b"b", b"c"):
        writer.push(item)
    writer.take_frames(1000)
    writer.credit(WINDOW, 1)

    assert writer.resume(0)
    assert not writer.has_fresh


def test_resume_sends_again_what_the_reader_lacks() -> None:
    writer = make_writer()
    for item in (b"a", b"b", b"c"):
        writer.push(item)
    writer.end()
    writer.take_frames(1000)

    assert writer.resume(1)
    assert writer.take_frames(1000) == [
        Items(7, SECRET, 1, 1, [b"b", b"c"]),
        End(7, SECRET, 1, 3, None),
    ]


def test_what_arrived_before_a_resume_is_dropped_when_its_credit_comes_after() -> None:
    writer = make_writer()
    for item in (b"a", b"b", b"c"):
        writer.push(item)
    writer.take_frames(1000)
    writer.push(b"d")

    writer.resume(0)
    writer.credit(WINDOW, 10**9)

    assert writer.take_frames(1000) == [Items(7, SECRET, 1, 3, [b"d"])]


def test_only_the_first_terminal_counts() -> None:
    writer, reader = make_writer(), make_reader()

    writer.end()
    writer.fail(HandlerError("too late"))
    writer.end(b"too late")
    writer.push(b"too late")
    receive_all(reader, writer.take_frames(1000))
    reader.receive(End(7, SECRET, 1, 1, b"another"))

    assert reader.terminal == End(7, SECRET, 1, 0, None)
    assert reader.drain() == []


def test_what_does_not_fit_any_longer_and_all_after_it_gives_way_to_an_error() -> None:
    writer, reader = make_writer(1000), make_reader()
    for item in (b"a", bytes(50), b"c"):
        writer.push(item)
    frames = writer.take_frames(10)

    writer.give_up(PayloadTooLarge("the limit shrank"), 40)
    frames += writer.take_frames(1000)
    receive_all(reader, frames)

    assert reader.drain() == [b"a"]
    assert isinstance(reader.terminal, Failed)
    assert (reader.terminal.code, reader.terminal.sequence) == ("PayloadTooLarge", 1)
    assert writer.ended
    assert not writer.push(b"d")
    assert not writer.has_fresh


def test_a_call_that_had_ended_is_given_up_all_the_same() -> None:
    writer, reader = make_writer(1000), make_reader()
    writer.end(bytes(50))
    writer.take_frames(1000)
    writer.resume(0)

    writer.give_up(PayloadTooLarge("the limit shrank"), 40)
    receive_all(reader, writer.take_frames(1000))

    assert isinstance(reader.terminal, Failed)
    assert reader.terminal.code == "PayloadTooLarge"


@pytest.mark.parametrize("held", [2, 3, 7])
def test_a_reader_that_holds_more_than_was_given_up_is_still_told_the_error(held: int) -> None:
    writer, reader = make_writer(1000), make_reader()
    for item in (b"a", b"b", b"c"):
        writer.push(item)
    receive_all(reader, writer.take_frames(1000))
    writer.resume(1)

    writer.give_up(PayloadTooLarge("the limit shrank"), 40)
    writer.credit(1000, held)
    receive_all(reader, writer.take_frames(1000))

    assert reader.drain() == [b"a", b"b", b"c"]
    assert isinstance(reader.terminal, Failed)


def test_the_error_of_a_call_that_was_given_up_is_kept_until_the_call_is_over() -> None:
    writer, reader = make_writer(1000), make_reader()
    writer.push(b"a")
    writer.give_up(PayloadTooLarge("the limit shrank"), 40)
    writer.take_frames(1000)  # lost on the way

    writer.acknowledge(1)
    resumed = writer.resume(0)
    receive_all(reader, writer.take_frames(1000))

    assert resumed
    assert isinstance(reader.terminal, Failed)


def test_later_items_are_split_for_the_limit_that_holds_now() -> None:
    writer = make_writer(1000)
    writer.push(bytes(50))

    writer.limit_units(20)
    writer.push(bytes(50))

    sizes = [len(frame.data) for frame in writer.take_frames(1000) if isinstance(frame, Part)]
    assert sizes == [20, 20]


def test_repr_is_a_status_line() -> None:
    writer = make_writer()
    writer.push(bytes(WINDOW))
    blocked = repr(writer)
    writer.end()

    assert blocked == "<StreamWriter 7 [blocked | next: 2, kept: 0+0, fresh: 2]>"
    assert repr(writer) == "<StreamWriter 7 [ended | next: 3, kept: 0+0, fresh: 3]>"
