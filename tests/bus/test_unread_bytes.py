"""What clients do not read is bounded for all of them, and leaves room to those that read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.protocol.stream_writer import UNCOUNTED_BYTES, UNCOUNTED_ITEMS, StreamWriter
from dynbus.bus.protocol.unread_bytes import (
    LEAST_PER_STREAM,
    UNIT_COST,
    ClientUnreadBytes,
    UnreadBytes,
)

LIMIT = 1 << 20
WINDOW = 1 << 19


def writer(unread: ClientUnreadBytes, number: int = 1) -> StreamWriter:
    return StreamWriter(
        number,
        bytes(16),
        1,
        granted=WINDOW,
        max_unit_bytes=4096,
        max_item_bytes=1 << 16,
        unread=unread,
    )


def fill(stream: StreamWriter, item: bytes = bytes(1000)) -> int:
    """Push until the stream must wait; returns how many items."""
    count = 1
    while stream.push(item):
        stream.count_pushed()
        count += 1
    stream.count_pushed()
    return count


def test_one_client_that_does_not_read_holds_a_fifth_of_all() -> None:
    whole = UnreadBytes(LIMIT)
    client = ClientUnreadBytes(whole)

    for number in range(100):
        fill(writer(client, number))

    most = LIMIT / 5 + 100 * (LEAST_PER_STREAM + 2000)
    assert LIMIT / 5 < client.held == whole.held < most
    assert repr(client) == f"<ClientUnreadBytes [{client.held} of {whole!r}]>"


def test_each_client_that_does_not_read_gets_less_and_all_of_them_stay_below_the_limit() -> None:
    whole = UnreadBytes(LIMIT)
    held: list[int] = []

    for _ in range(12):
        client = ClientUnreadBytes(whole)
        fill(writer(client))
        held.append(client.held)

    assert held == sorted(held, reverse=True)
    assert whole.held == sum(held) < LIMIT + 12 * (LEAST_PER_STREAM + 2000)


def test_a_stream_that_is_read_goes_on_beside_any_that_are_not() -> None:
    whole = UnreadBytes(LIMIT)
    for _ in range(50):
        fill(writer(ClientUnreadBytes(whole)))
    stream = writer(ClientUnreadBytes(whole))

    for _ in range(100):
        sent = fill(stream)
        assert sent * 1064 > LEAST_PER_STREAM
        stream.take_frames(1 << 20)
        stream.credit(stream.pushed_bytes + WINDOW, stream.next_sequence)
        assert not stream.blocked

    assert stream.held_bytes == 0


def test_a_stream_waits_for_room_and_goes_on_when_its_client_has_taken_some() -> None:
    whole = UnreadBytes(100 * 1024)
    stream = writer(ClientUnreadBytes(whole))
    fill(stream)
    assert stream.blocked
    assert stream.is_short_of_room

    stream.take_frames(1 << 20)
    stream.acknowledge(stream.next_sequence - 1)

    assert not stream.blocked


def test_small_items_count_with_the_memory_that_each_takes() -> None:
    unread = ClientUnreadBytes(UnreadBytes(LIMIT))
    stream = writer(unread)

    stream.push(b"1")
    stream.count_pushed()

    assert unread.held == 1 + UNIT_COST


def test_a_client_begins_no_call_while_nothing_is_free_and_it_holds_much() -> None:
    whole = UnreadBytes(LIMIT)
    lazy, new = ClientUnreadBytes(whole), ClientUnreadBytes(whole)

    lazy.add(LIMIT)

    assert (lazy.is_refused, new.is_refused) == (True, False)
    lazy.add(-1)
    assert not lazy.is_refused


def test_a_client_that_is_forgotten_holds_nothing_whatever_comes_later() -> None:
    whole = UnreadBytes(LIMIT)
    client = ClientUnreadBytes(whole)
    stream = writer(client)
    fill(stream)

    client.close()
    stream.end()
    stream.forget()

    assert whole.held == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["push", "big", "end", "take", "acknowledge", "resume", "forget"]),
            st.integers(0, 40),
        ),
        max_size=80,
    )
)
def test_the_count_is_always_that_of_what_is_kept(steps: list[tuple[int, str, int]]) -> None:
    whole = UnreadBytes(LIMIT)
    clients = [ClientUnreadBytes(whole), ClientUnreadBytes(whole)]
    streams = [writer(clients[number % 2], number) for number in range(3)]
    for number, step, size in steps:
        stream = streams[number]
        if step == "push":
            stream.push(bytes(size))
        elif step == "big" and not stream.ended:
            stream.push(bytes(1000 * size))
        elif step == "end":
            stream.end(bytes(1000 * size))
        elif step == "take":
            stream.take_frames(100 * size)
        elif step == "acknowledge":
            stream.acknowledge(size)
        elif step == "resume":
            stream.resume(size)
        elif step == "forget":
            stream.end()
            stream.forget()
            streams[number] = writer(clients[number % 2], number)

        for one in streams:
            one.count_pushed()
        assert whole.held == sum(client.held for client in clients)
        assert whole.held == sum(stream.held_bytes for stream in streams)
        assert all(stream.held_bytes >= 0 for stream in streams)
    for stream in streams:
        stream.end()
        stream.take_frames(1 << 30)
        stream.acknowledge(stream.next_sequence)
    assert whole.held == 0


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40)), max_size=120))
def test_items_sent_one_by_one_are_counted_sixteen_late_at_most(
    steps: list[tuple[int, int]],
) -> None:
    whole = UnreadBytes(LIMIT)
    stream = writer(ClientUnreadBytes(whole))
    kept: list[int] = []
    dropped = 0

    for size, acknowledged in steps:
        stream.push(bytes(size))
        stream.dirty = False
        assert stream.take_items(100_000) is not None
        kept.append(size)
        if acknowledged <= len(kept) and acknowledged:
            dropped += acknowledged
            stream.acknowledge(dropped)
            del kept[:acknowledged]
        missed = sum(kept) + UNIT_COST * len(kept) - whole.held
        assert 0 <= missed <= (UNCOUNTED_ITEMS - 1) * (UNCOUNTED_BYTES + UNIT_COST)

    stream.acknowledge(dropped + len(kept))
    assert whole.held == 0
