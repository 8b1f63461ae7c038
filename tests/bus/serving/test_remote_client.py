"""A client's calls, what is kept for it, and when it is sent what it has to get."""

from __future__ import annotations

from typing import Any, cast

from tests.bus.near_side import secret_of

from dynbus.bus.serving.remote_client import EARLY_ENDS, ClientPeer
from dynbus.bus.streams import StreamWriter
from dynbus.bus.wire import Heartbeat


class RecordedOutbox:
    """An outbox that sends nothing.

    Attributes:
        scheduled: how often a flush at the end of the turn was asked for.
        flushed: how often one at once.
    """

    def __init__(self) -> None:
        self.scheduled = 0
        self.flushed = 0

    def schedule(self, peer: ClientPeer) -> None:
        self.scheduled += 1

    def flush_peer(self, peer: ClientPeer) -> None:
        self.flushed += 1
        peer.dirty = []
        peer.ended = 0


class RecordedControl:
    """What a peer needs of the control side.

    Attributes:
        gone: the peers that it was told are dead.
    """

    def __init__(self) -> None:
        self.gone: list[ClientPeer] = []

    def heartbeat(self, calls: list[tuple[int, int]]) -> Heartbeat:
        return Heartbeat(0.0, False, calls)

    def client_gone(self, peer: ClientPeer) -> None:
        self.gone.append(peer)


class Call:
    """A call as far as a peer looks at it."""

    def __init__(self, writer: StreamWriter) -> None:
        self.writer = writer


def make_peer() -> tuple[ClientPeer, RecordedOutbox, RecordedControl]:
    outbox, control = RecordedOutbox(), RecordedControl()
    peer = ClientPeer(cast("Any", control), cast("Any", outbox), "_R.ann.c1", "_R.-.s1.b.c1")
    return peer, outbox, control


def add_call(peer: ClientPeer, number: int) -> StreamWriter:
    writer = StreamWriter(
        number,
        secret_of(number),
        1,
        granted=1000,
        max_unit_bytes=1000,
        max_item_bytes=1000,
        on_dirty=peer.note_dirty,
    )
    peer.calls[number] = cast("Any", Call(writer))
    return writer


def keep(peer: ClientPeer, number: int) -> None:
    """End a call whose results are not acknowledged."""
    peer.kept[number] = peer.calls.pop(number).writer


def calls_of(peer: ClientPeer) -> list[tuple[int, int]]:
    (heartbeat,) = peer.beat()
    assert isinstance(heartbeat, Heartbeat)
    return list(heartbeat.calls)


def test_its_subjects_follow_from_its_base() -> None:
    peer, _, _ = make_peer()

    assert (peer.client_id, peer.frames_subject) == ("c1", "_R.ann.c1.f")
    assert peer.control_subject == "_R.ann.c1.ctl.f"
    assert repr(peer) == "<ClientPeer _R.ann.c1 [0 calls, 0 kept]>"


def test_one_flush_is_asked_for_however_much_there_is_to_send() -> None:
    peer, outbox, _ = make_peer()
    first, second = add_call(peer, 0), add_call(peer, 1)

    for writer in (first, second, first):
        writer.push(b"x")
        peer.touch(writer)

    assert outbox.scheduled == 1
    assert peer.dirty == [first, second]


def test_many_ends_in_one_turn_do_not_wait_for_the_last_of_them() -> None:
    peer, outbox, _ = make_peer()

    for number in range(2 * EARLY_ENDS - 1):
        writer = add_call(peer, number)
        writer.end()
        peer.touch_ended(writer)

    assert outbox.flushed == 1
    assert len(peer.dirty) == EARLY_ENDS - 1


def test_after_a_reconnect_only_what_was_not_sent_is_sent() -> None:
    peer, _, _ = make_peer()
    sent, fresh, kept = (add_call(peer, number) for number in range(3))
    for writer in (sent, fresh, kept):
        writer.push(b"x")
    sent.take(1000)
    keep(peer, 2)
    for writer in peer.dirty:
        writer.dirty = False
    peer.dirty = []

    peer.touch_fresh()

    assert peer.dirty == [fresh, kept]


def test_a_writer_is_found_while_its_call_runs_and_until_it_is_acknowledged() -> None:
    peer, _, _ = make_peer()
    running, ended = add_call(peer, 1), add_call(peer, 2)
    keep(peer, 2)

    assert (peer.writer(1), peer.writer(2), peer.writer(3)) == (running, ended, None)


def test_it_has_work_while_a_call_runs_or_is_not_acknowledged() -> None:
    peer, _, _ = make_peer()
    assert not peer.has_work()

    add_call(peer, 1)
    assert peer.has_work()
    keep(peer, 1)
    assert peer.has_work()
    peer.kept.clear()

    assert not peer.has_work()


def test_a_heartbeat_tells_how_far_each_open_call_is() -> None:
    peer, _, _ = make_peer()
    add_call(peer, 3).push(b"x")
    add_call(peer, 4)

    assert calls_of(peer) == [(3, 1), (4, 0)]


def test_a_call_that_ended_is_told_of_from_the_second_heartbeat_on() -> None:
    peer, _, _ = make_peer()
    add_call(peer, 3).end()
    keep(peer, 3)

    heartbeats = [calls_of(peer) for _ in range(3)]

    assert heartbeats == [[], [(3, 1)], [(3, 1)]]


def test_its_death_is_told_to_the_control_side() -> None:
    peer, _, control = make_peer()

    peer.gone()

    assert control.gone == [peer]
