"""A client's calls, what is kept for it, and when it is sent what it has to get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tests.bus.near_side import secret_of

from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.protocol.unread_bytes import UnreadBytes
from dynbus.bus.protocol.wire import Heartbeat
from dynbus.bus.serving.remote_client import EARLY_ENDS, RemoteClient


class RecordedOutbox:
    """An outbox that sends nothing.

    Attributes:
        scheduled: how often a flush at the end of the turn was asked for.
        flushed: how often one at once.
    """

    def __init__(self) -> None:
        self.scheduled = 0
        self.flushed = 0

    def schedule(self, client: RemoteClient) -> None:
        self.scheduled += 1

    def flush_client(self, client: RemoteClient) -> None:
        self.flushed += 1
        client.dirty = []
        client.ended = 0


class RecordedControl:
    """What a client needs of the control side.

    Attributes:
        gone: the clients that it was told are dead.
    """

    def __init__(self) -> None:
        self.gone: list[RemoteClient] = []

    def heartbeats(self, calls: Mapping[int, int]) -> list[Heartbeat]:
        return [Heartbeat(0.0, False, list(calls.items()))]

    def client_gone(self, client: RemoteClient) -> None:
        self.gone.append(client)


class Call:
    """A call as far as a client looks at it."""

    def __init__(self, writer: StreamWriter, started_at: float = 0.0) -> None:
        self.writer = writer
        self.started_at = started_at
        self.ended = False
        self.released = False
        self.kill_timer: object = None


def make_client() -> tuple[RemoteClient, RecordedOutbox, RecordedControl]:
    outbox, control = RecordedOutbox(), RecordedControl()
    client = RemoteClient(
        cast("Any", control),
        cast("Any", outbox),
        "_R.ann.c1",
        "i1",
        "_R.-.s1.b.c1",
        UnreadBytes(1 << 20),
    )
    return client, outbox, control


def add_call(client: RemoteClient, number: int) -> StreamWriter:
    writer = StreamWriter(
        number,
        secret_of(number),
        1,
        granted=1000,
        max_unit_bytes=1000,
        max_item_bytes=1000,
        on_dirty=client.note_dirty,
    )
    client.calls[number] = cast("Any", Call(writer))
    return writer


def keep(client: RemoteClient, number: int) -> None:
    """End a call whose results are not acknowledged."""
    client.kept[number] = client.calls.pop(number).writer


def calls_of(client: RemoteClient) -> list[tuple[int, int]]:
    (heartbeat,) = client.beat()
    assert isinstance(heartbeat, Heartbeat)
    return list(heartbeat.calls)


def test_its_subjects_follow_from_its_base() -> None:
    client, _, _ = make_client()

    assert (client.key, client.frames_subject) == ("c1-i1", "_R.ann.c1.f")
    assert client.label == "client c1 of ann"
    assert client.control_subject == "_R.ann.c1.ctl.f"
    assert repr(client) == "<RemoteClient _R.ann.c1 [0 calls, 0 kept]>"


def test_one_flush_is_asked_for_however_much_there_is_to_send() -> None:
    client, outbox, _ = make_client()
    first, second = add_call(client, 0), add_call(client, 1)

    for writer in (first, second, first):
        writer.push(b"x")
        client.touch(writer)

    assert outbox.scheduled == 1
    assert client.dirty == [first, second]


def test_many_ends_in_one_turn_do_not_wait_for_the_last_of_them() -> None:
    client, outbox, _ = make_client()

    for number in range(2 * EARLY_ENDS - 1):
        writer = add_call(client, number)
        writer.end()
        client.touch_ended(writer)

    assert outbox.flushed == 1
    assert len(client.dirty) == EARLY_ENDS - 1


def test_after_a_reconnect_what_was_not_sent_is_sent_and_the_last_that_was_once_more() -> None:
    client, _, _ = make_client()
    sent, fresh, kept, held = (add_call(client, number) for number in range(4))
    for writer in (sent, fresh, kept, held):
        writer.push(b"x")
        writer.push(b"y")
    sent.take(1000)
    held.take(1000)
    held.acknowledge(2)
    keep(client, 2)
    for writer in client.dirty:
        writer.dirty = False
    client.dirty = []

    client.touch_all()

    assert client.dirty == [sent, fresh, kept]
    assert [item.sequence for item in sent.take(1000)] == [1]
    assert [item.sequence for item in fresh.take(1000)] == [0]


def test_it_owes_heartbeats_since_the_oldest_call_that_it_must_know_of() -> None:
    client, _, _ = make_client()
    assert client.due_since is None

    for number, started_at in enumerate((1.0, 2.0, 3.0, 4.0)):
        writer = StreamWriter(number, bytes(16), 1, granted=1, max_unit_bytes=1, max_item_bytes=1)
        client.calls[number] = cast("Any", Call(writer, started_at))
    ended, released, cancelled, _ = (cast("Any", call) for call in client.calls.values())
    ended.ended = released.released = True
    cancelled.kill_timer = object()

    assert client.due_since == 4.0


def test_it_owes_none_for_results_that_it_has_not_acknowledged() -> None:
    client, _, _ = make_client()
    add_call(client, 1)
    keep(client, 1)

    assert client.has_work()
    assert client.due_since is None


def test_a_writer_is_found_while_its_call_runs_and_until_it_is_acknowledged() -> None:
    client, _, _ = make_client()
    running, ended = add_call(client, 1), add_call(client, 2)
    keep(client, 2)

    assert (client.writer(1), client.writer(2), client.writer(3)) == (running, ended, None)


def test_it_has_work_while_a_call_runs_or_is_not_acknowledged() -> None:
    client, _, _ = make_client()
    assert not client.has_work()

    add_call(client, 1)
    assert client.has_work()
    keep(client, 1)
    assert client.has_work()
    client.kept.clear()

    assert not client.has_work()


def test_a_heartbeat_tells_how_far_each_open_call_is() -> None:
    client, _, _ = make_client()
    add_call(client, 3).push(b"x")
    add_call(client, 4)

    assert calls_of(client) == [(3, 1), (4, 0)]


def test_a_call_that_ended_is_told_of_from_the_second_heartbeat_on() -> None:
    client, _, _ = make_client()
    add_call(client, 3).end()
    keep(client, 3)

    heartbeats = [calls_of(client) for _ in range(3)]

    assert heartbeats == [[], [(3, 1)], [(3, 1)]]


def test_its_death_is_told_to_the_control_side() -> None:
    client, _, control = make_client()

    client.gone()

    assert control.gone == [client]
