"""The ledger says what is to be done: what its clients are owed, and what may still begin."""

from __future__ import annotations

from typing import Any, Final, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.bus.near_side import ADDRESS, INSTANCE, endpoint, secret_of

from dynbus.bus.context import Context
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import DEFAULT_REPLY_PREFIXES
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.protocol.wire import (
    Cancel,
    Credit,
    Frame,
    Heartbeat,
    Open,
    Ping,
    Resume,
    Unknown,
)
from dynbus.bus.serving.calls import ServedEndpoint
from dynbus.bus.serving.ledger import (
    ARRIVAL_GRACE,
    KEPT_SECONDS,
    KILL_AFTER,
    LOST_CANCEL_BEATS,
    Abort,
    Action,
    Dropped,
    FramedCall,
    GoOn,
    Inquiry,
    Ledger,
    MakeSure,
    NothingHere,
    Refuse,
    RemoteClient,
    Send,
    Sender,
    SendFailed,
    Stop,
    Tell,
    client_key,
)
from dynbus.bus.serving.reply import CallReply

BASE: Final = "_R.ann.c1"
INCARNATION: Final = "of-the-client"
SENDER: Final = Sender(BASE, INCARNATION, client_key(BASE, INCARNATION))
WINDOW: Final = 1 << 20


async def stream(_: bytes) -> None:
    """Nobody runs it."""


SERVED: Final = ServedEndpoint(ADDRESS, endpoint(stream, streaming=True), INSTANCE)


class Port:
    """A reply of which nobody waits."""

    def __init__(self) -> None:
        self.ended = False
        self.paused = False
        self.error: DynbusError | None = None

    def pause(self) -> None:
        self.paused = True


class Box:
    """Collects writers that have something to send."""

    def __init__(self) -> None:
        self.dirty: list[StreamWriter] = []

    def note_dirty(self, writer: StreamWriter) -> None:
        self.dirty.append(writer)

    touch = touch_ended = note_dirty


class Books:
    """A ledger with a client; times are what the test says."""

    def __init__(self, window: int = WINDOW) -> None:
        self.ledger = Ledger(
            "near.Side@i1",
            max_request_bytes=100,
            instance_window=window,
            reply_prefixes=DEFAULT_REPLY_PREFIXES,
            open_outbox=lambda key, base: cast("Any", Box()),
        )
        self.ledger.note_subscribed(0.0)

    def client(self, now: float = 1.0) -> RemoteClient:
        client = self.ledger.clients.get(SENDER.key) or self.find(0, now)
        assert isinstance(client, RemoteClient)
        return client

    def find(self, number: int, now: float = 1.0, base: str = BASE) -> Any:
        """What a request belongs to."""
        return self.ledger.find(base, INCARNATION, number, secret_of(number), now)

    def call(self, number: int, now: float = 1.0, granted: int = 100_000) -> FramedCall:
        """The call of a request; the ledger does not know it yet."""
        client = self.client(now)
        writer = StreamWriter(
            number,
            secret_of(number),
            1,
            granted=granted,
            max_unit_bytes=100_000,
            max_item_bytes=1 << 30,
            unread=client.unread,
            on_dirty=client.outbox.note_dirty,
            on_blocked=client.note_blocked,
        )
        reply = cast("CallReply", Port())
        return FramedCall(SERVED, Context("r1"), reply, now, client, writer)

    def begin(self, number: int, now: float = 1.0, granted: int = 100_000) -> FramedCall:
        call = self.call(number, now, granted)
        assert self.ledger.begin(call) == []
        return call

    def end(self, call: FramedCall, now: float = 1.0) -> None:
        """Its handler has come to its end."""
        call.writer.end(b"result")
        call.writer.take_frames(1 << 30)
        cast("Port", call.reply).ended = True
        self.ledger.finish(call, now)

    def hear(self, frame: Any, now: float = 1.0) -> list[Action]:
        return self.ledger.hear(SENDER, frame, at=now, now=now)


def resume(number: int, position: int = 0, age: float | None = 0.1) -> Resume:
    return Resume(number, secret_of(number), 1, position, age)


# Clients ----------------------------------------------------------------------------------


def test_a_client_s_subjects_follow_from_its_base() -> None:
    client = Books().client()

    assert (client.key, client.control_subject) == (SENDER.key, "_R.ann.c1.ctl.f")
    assert client.label == "client c1 of ann"
    assert repr(client) == "<RemoteClient _R.ann.c1 [0 calls, 0 kept]>"


@pytest.mark.parametrize("base", ["orders.created.x", "_R.ann", "_R.ann.c1.f"])
def test_a_client_that_may_not_be_answered_there_is_none(base: str) -> None:
    assert Books().find(1, base=base) == Dropped(DropReason.UNSAFE_REPLY)


def test_nobody_takes_the_id_of_another_with_another_principal() -> None:
    books = Books()
    books.client()

    taken = books.find(1, base="_R.bob.c1")

    assert taken == Dropped(DropReason.CLIENT_ID_TAKEN)


def test_it_owes_heartbeats_since_the_oldest_call_that_it_must_know_of() -> None:
    books = Books()
    calls = [books.begin(number, now=float(number)) for number in range(1, 5)]
    client = books.client()
    assert client.due_since == 1.0

    cast("Port", calls[0].reply).ended = True
    calls[1].released = True
    books.hear(Cancel(3, secret_of(3), 1, 1.0))

    assert client.due_since == 4.0


def test_it_owes_none_for_results_that_it_has_not_acknowledged() -> None:
    books = Books()
    books.end(books.begin(1))

    assert books.client().has_work()
    assert books.client().due_since is None


def test_a_heartbeat_tells_how_far_each_open_call_is() -> None:
    books = Books()
    books.begin(3).writer.push(b"x")
    books.begin(4)

    assert books.client().positions() == {3: 1, 4: 0}


def test_a_call_that_ended_is_told_of_from_the_second_heartbeat_on() -> None:
    books = Books()
    books.end(books.begin(3))

    assert [books.client().positions() for _ in range(3)] == [{}, {3: 1}, {3: 1}]


# Requests ---------------------------------------------------------------------------------


def test_a_request_is_taken_in_once_while_it_runs_and_while_its_result_is_kept() -> None:
    books = Books()
    call = books.begin(1)

    running = books.find(1)
    books.end(call)
    kept = books.find(1)

    assert running == kept == Dropped(DropReason.STALE)
    assert books.find(2) is books.client()


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        (Cancel(1, secret_of(1), 1, -1.0), True),
        (Cancel(1, secret_of(1), 1, 0.0), False),
        (Cancel(1, secret_of(1), 1, 1.0), False),
        (Open(1, [], [(1, secret_of(1))]), False),
    ],
)
def test_what_was_said_of_a_request_before_it_came_holds_when_it_comes(
    said: Frame, begins: bool
) -> None:
    books = Books()
    assert books.hear(said) == []

    call = books.call(1)
    actions = books.ledger.begin(call)

    if begins:
        assert actions == []
        assert call.context.is_stopped()
    else:
        drop, refuse = actions
        assert drop == Dropped(DropReason.REFUSED)
        assert isinstance(refuse, Refuse)
        assert (refuse.error.code, refuse.error.started) == ("Cancelled", False)


def test_a_request_in_parts_is_whole_when_all_are_there() -> None:
    books = Books()
    call = books.begin(1)

    assert books.ledger.part(call, 2, 2, b"b") == (None, [])
    assert books.find(1) is call
    other = books.ledger.find(BASE, INCARNATION, 1, secret_of(2), 1.0)
    assert other == Dropped(DropReason.STALE)
    assert books.ledger.part(call, 1, 2, b"a") == (b"ab", [])

    assert books.find(1) == Dropped(DropReason.STALE)
    assert len(books.ledger.partial) == 0


def test_a_client_with_more_results_than_there_is_room_for_begins_no_call() -> None:
    books = Books(window=1000)
    books.end(books.begin(1))
    books.begin(2).writer.push(bytes(50_000))

    (refuse,) = books.ledger.begin(books.call(3))

    assert isinstance(refuse, Refuse)
    assert refuse.error.code == "Overloaded"


# What clients say -------------------------------------------------------------------------


def test_a_result_is_kept_until_it_is_acknowledged() -> None:
    books = Books()
    books.end(books.begin(1))
    assert books.client().writer(1) is not None
    assert books.ledger.unread.held > 0

    assert books.hear(Open(1, [], [(1, secret_of(1))])) == []

    assert books.client().writer(1) is None
    assert books.ledger.unread.held == 0


def test_an_acknowledgement_with_another_secret_changes_nothing() -> None:
    books = Books()
    books.end(books.begin(1))

    books.hear(Open(1, [], [(1, secret_of(2))]))

    assert books.client().writer(1) is not None


def test_a_call_whose_reader_left_without_a_word_is_stopped_and_its_result_not_kept() -> None:
    books = Books()
    call = books.begin(1)

    assert books.hear(Open(1, [], [(1, secret_of(1))])) == [Stop(call, KILL_AFTER)]
    assert books.hear(Open(1, [], [(1, secret_of(1))])) == []
    books.end(call)

    assert not books.client().has_work()


def test_a_call_that_several_heartbeats_do_not_list_is_ended() -> None:
    books = Books()
    call = books.begin(1)
    late = 1.0 + ARRIVAL_GRACE

    for _ in range(LOST_CANCEL_BEATS - 1):
        assert books.hear(Open(1, [], []), now=late) == []
    (abort,) = books.hear(Open(1, [], []), now=late)

    assert isinstance(abort, Abort)
    assert abort.call is call
    # Should its reader be there after all, it goes on elsewhere where it can.
    assert abort.error.code == "StreamLost"
    assert call.released


def test_a_young_call_that_a_heartbeat_does_not_list_may_have_overtaken_it() -> None:
    books = Books()
    books.begin(1, now=1.0)

    for _ in range(2 * LOST_CANCEL_BEATS):
        assert books.hear(Open(1, [], []), now=1.0 + ARRIVAL_GRACE / 2) == []


def test_a_client_is_told_of_calls_that_are_not_here() -> None:
    books = Books()

    assert books.hear(Open(1, [(1, 0)], [], 1, 5)) == [NothingHere(SENDER, 1, 5)]


def test_credit_lets_a_paused_call_go_on() -> None:
    books = Books()
    call = books.begin(1, granted=1)
    assert not call.writer.push(b"x")
    assert call.reply.paused

    assert books.hear(Credit(1, secret_of(1), 1, 1, 0)) == []
    assert books.hear(Credit(1, secret_of(1), 1, 2, 1)) == [GoOn(call)]


def test_a_call_that_waits_for_room_goes_on_when_its_client_has_taken_something() -> None:
    books = Books(window=100_000)
    # A client takes a quarter of what is free, and each stream 16 KiB.
    waiting, other = books.begin(1), books.begin(2)
    other.writer.push(bytes(40_000))
    other.writer.take_frames(1 << 30)
    waiting.writer.push(bytes(17_000))
    assert waiting.reply.paused

    actions = books.hear(Credit(2, secret_of(2), 1, 100_000, 1))

    assert GoOn(waiting) in actions
    assert not books.client().short_of_room


@pytest.mark.parametrize("kill_after", [-1.0, 0.0, 1.0, 1e9])
def test_a_cancel_stops_its_call_within_bounds(kill_after: float) -> None:
    books = Books()
    call = books.begin(1)

    (stop,) = books.hear(Cancel(1, secret_of(1), 1, kill_after))

    assert stop == Stop(call, min(kill_after, 60.0))


@pytest.mark.parametrize(
    "frame",
    [
        Credit(1, secret_of(2), 1, 9, 0),
        Cancel(1, secret_of(2), 1, 0.0),
        Resume(1, secret_of(2), 1, 0),
        Resume(1, secret_of(1), 7, 0),
        Credit(9, secret_of(9), 1, 9, 0),
    ],
)
def test_a_frame_of_another_call_or_attempt_is_dropped(frame: Any) -> None:
    books = Books()
    books.begin(1)

    assert books.hear(frame) == [Dropped(DropReason.STALE)]


def test_a_frame_that_no_client_sends_is_dropped() -> None:
    books = Books()

    assert books.ledger.cost(Heartbeat(1, 0.0, False, []), None) is DropReason.UNEXPECTED
    assert books.hear(Ping(0)) == [Dropped(DropReason.UNEXPECTED)]


# Questions --------------------------------------------------------------------------------


def test_what_was_lost_is_sent_again_until_it_is_acknowledged() -> None:
    books = Books()
    call = books.begin(1)
    for item in (b"a", b"b", b"c"):
        call.writer.push(item)
    call.writer.take_frames(1 << 30)

    assert books.hear(resume(1, 1)) == [Send(call.client, call.writer)]

    assert [frame.sequence for frame in call.writer.take_frames(1 << 30)] == [1]


def test_a_reader_that_asks_for_more_than_there_is_is_told_that_it_is_not_kept() -> None:
    books = Books()
    call = books.begin(1)
    call.writer.push(b"a")
    call.writer.take_frames(1 << 30)

    (said,) = books.hear(resume(1, 2))

    assert isinstance(said, SendFailed)
    assert "is kept any longer" in said.frame.message


def test_a_question_after_a_request_that_is_not_here_waits_for_what_is_still_unread() -> None:
    books = Books()

    (ask,) = books.hear(resume(1))
    assert isinstance(ask, MakeSure)
    call = books.begin(1)
    call.writer.push(b"a")

    assert books.ledger.answer(ask.inquiry, 1.0) == [Send(call.client, call.writer)]


def test_a_question_that_is_answered_late_ends_nothing() -> None:
    """Its reader has acknowledged meanwhile what it asked for."""
    books = Books()
    (ask,) = books.hear(resume(1, 0))
    assert isinstance(ask, MakeSure)
    call = books.begin(1)
    call.writer.push(b"a")
    call.writer.push(b"b")
    call.writer.take_frames(1000)
    assert books.hear(Open(1, [(1, 1)], [])) == []

    assert books.ledger.answer(ask.inquiry, 1.0) == []


def test_a_request_that_is_said_not_to_be_here_never_begins() -> None:
    books = Books()
    inquiry = Inquiry(SENDER, resume(1), 1.0)

    assert books.ledger.answer(inquiry, 1.0) == [Tell(SENDER, Unknown(1, secret_of(1), 1))]

    drop, refuse = books.ledger.begin(books.call(1))
    assert drop == Dropped(DropReason.REFUSED)
    assert isinstance(refuse, Refuse)
    assert (refuse.error.code, refuse.error.started) == ("Unavailable", False)


def test_a_request_that_misses_a_part_is_to_be_sent_anew() -> None:
    books = Books()
    call = books.begin(1)
    books.ledger.part(call, 1, 2, b"a")
    (ask,) = books.hear(resume(1))
    assert isinstance(ask, MakeSure)

    assert books.ledger.answer(ask.inquiry, 1.0) == [Tell(SENDER, Unknown(1, secret_of(1), 1))]

    assert books.ledger.calls() == []
    assert len(books.ledger.partial) == 0


# Time and the connection ------------------------------------------------------------------


def test_after_a_reconnect_what_was_not_sent_is_sent_and_the_last_that_was_once_more() -> None:
    books = Books()
    sent, fresh, kept, held = (books.begin(number) for number in range(4))
    for call in (sent, fresh, kept, held):
        call.writer.push(b"x")
        call.writer.push(b"y")
    sent.writer.take_frames(1000)
    held.writer.take_frames(1000)
    held.writer.acknowledge(2)
    books.ledger.finish(kept, 1.0)

    actions = books.ledger.reconnected(500)

    assert [action.writer for action in actions if isinstance(action, Send)] == [
        sent.writer,
        fresh.writer,
        kept.writer,
    ]
    assert [item.sequence for item in sent.writer.take_frames(1000)] == [1]
    assert [item.sequence for item in fresh.writer.take_frames(1000)] == [0]
    assert sent.writer.max_unit_bytes == 500


def test_a_client_that_died_is_forgotten_and_its_calls_are_known_to_have_begun() -> None:
    books = Books()
    running, ended = books.begin(1), books.begin(2)
    books.end(ended)

    (abort,) = books.ledger.client_gone(books.client(), 1.0)

    assert isinstance(abort, Abort)
    assert abort.call is running
    assert books.ledger.clients == {}
    assert books.ledger.unread.held == 0
    for number in (1, 2):
        (said,) = books.ledger.answer(Inquiry(SENDER, resume(number), 1.1), 1.1)
        assert isinstance(said, SendFailed)


def test_while_we_are_cut_off_no_result_is_too_old() -> None:
    books = Books()
    books.end(books.begin(1))

    for now in range(1, 200):
        assert books.ledger.sweep(float(now), cut_off=True) == []

    assert books.client().has_work()


# Whatever comes in whatever order ---------------------------------------------------------

NUMBERS = st.integers(1, 4)


class AnyOrder(RuleBasedStateMachine):
    """One client, whose messages come, are lost, repeated and overtake each other."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(window=60_000)
        self.ledger = self.books.ledger
        self.now = 1.0
        self.running: list[FramedCall] = []
        self.begun: set[int] = set()
        self.unknown: set[int] = set()
        self.questions: list[Inquiry] = []

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Refuse | Abort):
                self._fail(cast("FramedCall", action.call), action.error)
            elif isinstance(action, Stop) and action.kill_after == 0.0:
                self._end(cast("FramedCall", action.call))
            elif isinstance(action, GoOn):
                assert not action.call.writer.blocked
                cast("Port", action.call.reply).paused = False
            elif isinstance(action, MakeSure):
                self.questions.append(action.inquiry)
            elif isinstance(action, Tell):
                assert isinstance(action.frame, Unknown)
                assert action.frame.number not in self.begun
                self.unknown.add(action.frame.number)

    def _fail(self, call: FramedCall, error: DynbusError) -> None:
        call.writer.fail(error)
        self._end(call)

    def _end(self, call: FramedCall) -> None:
        cast("Port", call.reply).ended = True
        call.writer.end()
        if call in self.running:
            self.running.remove(call)
        self.ledger.finish(call, self.now)

    @rule(number=NUMBERS)
    def request(self, number: int) -> None:
        if isinstance(self.books.find(number, self.now), Dropped):
            return
        call = self.books.call(number, self.now)
        self.running.append(call)
        self.carry_out(self.ledger.begin(call))
        if not call.ended:
            assert number not in self.unknown
            self.begun.add(number)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.sampled_from([1, 20_000]), taken=st.booleans())
    def push(self, data: st.DataObject, size: int, taken: bool) -> None:
        call = data.draw(st.sampled_from(self.running))
        if not call.reply.paused:
            call.writer.push(bytes(size))
        if taken:
            call.writer.take_frames(1 << 20)
            call.writer.count_pushed()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.running)))

    @rule(number=NUMBERS, kill_after=st.sampled_from([-1.0, 0.0, 1.0]))
    def cancel(self, number: int, kill_after: float) -> None:
        self.carry_out(self.books.hear(Cancel(number, secret_of(number), 1, kill_after), self.now))

    @rule(number=NUMBERS, granted=st.integers(0, 200_000), received=st.integers(0, 9))
    def credit(self, number: int, granted: int, received: int) -> None:
        frame = Credit(number, secret_of(number), 1, granted, received)
        self.carry_out(self.books.hear(frame, self.now))

    @rule(number=NUMBERS, position=st.integers(0, 5))
    def ask(self, number: int, position: int) -> None:
        self.carry_out(self.books.hear(resume(number, position, age=None), self.now))

    @precondition(lambda self: self.questions)
    @rule()
    def answer(self) -> None:
        questions, self.questions = self.questions, []
        for inquiry in questions:
            self.carry_out(self.ledger.answer(inquiry, self.now))

    @rule(listed=st.sets(NUMBERS), done=st.sets(NUMBERS), position=st.integers(0, 5))
    def beat(self, listed: set[int], done: set[int], position: int) -> None:
        frame = Open(
            1,
            [(number, position) for number in sorted(listed)],
            [(number, secret_of(number)) for number in sorted(done)],
        )
        self.carry_out(self.books.hear(frame, self.now))
        # Who has all that it wants of a call does not ask for it again.
        self.begun -= done

    @rule(seconds=st.sampled_from([0.4, 3.0, KEPT_SECONDS]), cut_off=st.booleans())
    def sweep(self, seconds: float, cut_off: bool) -> None:
        self.now += seconds
        self.carry_out(self.ledger.sweep(self.now, cut_off=cut_off))

    @rule()
    def gone(self) -> None:
        client = self.ledger.clients.get(SENDER.key)
        if client is not None:
            self.carry_out(self.ledger.client_gone(client, self.now))

    @invariant()
    def a_call_is_at_one_place(self) -> None:
        for client in self.ledger.clients.values():
            assert not client.calls.keys() & client.kept.keys()
            assert client.short_of_room <= {call for call in client.calls.values()}
            assert all(not call.ended for call in client.calls.values())

    @invariant()
    def what_is_held_is_what_is_kept(self) -> None:
        held = 0
        for client in self.ledger.clients.values():
            writers = [*(call.writer for call in client.calls.values()), *client.kept.values()]
            held += sum(writer.held_bytes for writer in writers)
        assert self.ledger.unread.held == held

    @invariant()
    def nobody_waits_who_may_send(self) -> None:
        for call in self.running:
            if call.client.key in self.ledger.clients and call.reply.paused:
                assert call.writer.blocked or call in call.client.short_of_room


AnyOrder.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_whatever_comes_in_whatever_order_the_books_agree = AnyOrder.TestCase
