"""What every `Connection` promises, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import PayloadTooLarge, Unavailable
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.headers import encode, status
from dynbus.bus.transport import ConnectionState, Message

from .conftest import Bus, Received, settled

pytestmark = pytest.mark.anyio

ODD_BLOCKS = [
    b"NATS/1.0 \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\nk\xff\xfe: v\xc3\r\n\r\n",
    b"NATS/1.0\r\nno colon here\r\n: no key\r\n\r\n",
    b"xx",
    b"\x00\x01\x02\r\n\r\n",
    b"NATS/1.0 503",
    b"NATS/1.0\r\nA: unended",
]


async def test_a_new_connection_is_connected(bus: Bus) -> None:
    connection = await bus.connect()

    assert connection.state is ConnectionState.CONNECTED
    assert connection.server_name
    assert connection.backlog == 0


async def test_a_message_arrives_with_its_subject_reply_headers_and_data(
    bus: Bus, subject: str
) -> None:
    one, two = await bus.connect(), await bus.connect()
    received = Received()
    one.subscribe(subject, received)
    await one.barrier()

    block = encode({"Key": "value", "Empty": ""})
    two.publish(subject, b"\x00data\r\n", reply="_INBOX.x", headers=block)
    await received.wait(1)

    assert received == [Message(subject, "_INBOX.x", block, b"\x00data\r\n")]


async def test_a_message_without_reply_and_headers_has_them_empty(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(subject, received)

    connection.publish(subject, b"")
    await received.wait(1)

    assert received == [Message(subject, "", b"", b"")]


async def test_publish_never_calls_back_before_it_returns(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(subject, received)
    await connection.barrier()

    connection.publish(subject, b"x")
    during = list(received)
    await received.wait(1)

    assert during == []


@pytest.mark.parametrize("block", ODD_BLOCKS)
async def test_an_odd_header_block_arrives_as_it_is_and_the_next_message_too(
    bus: Bus, subject: str, block: bytes
) -> None:
    one, two = await bus.connect(), await bus.connect()
    received = Received()
    one.subscribe(subject, received)
    await one.barrier()

    two.publish(subject, b"odd", headers=block)
    two.publish(subject, b"next")
    await received.wait(2)

    assert [(m.headers, m.data) for m in received] == [(block, b"odd"), (b"", b"next")]


async def test_messages_of_one_connection_keep_their_order(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    received = Received()
    one.subscribe(f"{subject}.*", received)
    await one.barrier()

    for number in range(500):
        two.publish(f"{subject}.{number % 7}", b"%d" % number)
    await received.wait(500)

    assert [int(message.data) for message in received] == list(range(500))


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("a.b", ["a.b"]),
        ("a.*", ["a.b", "a.c"]),
        ("*.b", ["a.b"]),
        ("a.>", ["a.b", "a.c", "a.b.c"]),
        ("a.*.c", ["a.b.c"]),
        (">", ["a", "a.b", "a.c", "a.b.c"]),
        ("*", ["a"]),
    ],
)
async def test_a_wildcard_subscription_hears_its_subjects_only(
    bus: Bus, subject: str, pattern: str, heard: list[str]
) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(f"{subject}.{pattern}", received)

    for tail in ("a", "a.b", "a.c", "a.b.c"):
        connection.publish(f"{subject}.{tail}", b"")
    await settled(connection)

    assert [message.subject for message in received] == [f"{subject}.{tail}" for tail in heard]


async def test_each_of_overlapping_subscriptions_gets_a_copy(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    exact, wide = Received(), Received()
    connection.subscribe(f"{subject}.a", exact)
    connection.subscribe(f"{subject}.*", wide)

    connection.publish(f"{subject}.a", b"")
    await settled(connection)

    assert (len(exact), len(wide)) == (1, 1)


async def test_a_queue_group_shares_messages_and_others_get_all(bus: Bus, subject: str) -> None:
    workers = [await bus.connect() for _ in range(3)]
    members = [Received() for _ in workers]
    listener, others = Received(), Received()
    for worker, member in zip(workers, members, strict=True):
        worker.subscribe(subject, member, queue="workers")
    workers[0].subscribe(subject, listener)
    workers[1].subscribe(subject, others, queue="others")
    await settled(*workers)

    for number in range(300):
        workers[2].publish(subject, b"%d" % number)
    await settled(*workers)

    assert sorted(int(m.data) for member in members for m in member) == list(range(300))
    assert all(len(member) > 30 for member in members)
    assert (len(listener), len(others)) == (300, 300)


async def test_a_request_that_nobody_hears_bounces_to_its_own_reply_subscription(
    bus: Bus, subject: str
) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(f"{subject}.reply", received)
    await connection.barrier()

    connection.publish(f"{subject}.nobody", b"lost", reply=f"{subject}.reply")
    await received.wait(1)

    [bounced] = received
    assert bounced.subject == f"{subject}.reply"
    assert status(bounced.headers) == "503"
    assert bounced.headers == (f"NATS/1.0 503\r\nNats-Subject: {subject}.nobody\r\n\r\n".encode())
    assert (bounced.reply, bounced.data) == ("", b"")


async def test_a_request_bounces_once_to_overlapping_reply_subscriptions(
    bus: Bus, subject: str
) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(f"{subject}.reply", received)
    connection.subscribe(f"{subject}.*", received, queue="q")

    connection.publish("nobody.here", b"", reply=f"{subject}.reply")
    await settled(connection)

    assert len(received) == 1


async def test_a_request_never_bounces_to_another_connection(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    received = Received()
    one.subscribe(f"{subject}.reply", received)
    await one.barrier()

    two.publish(f"{subject}.nobody", b"", reply=f"{subject}.reply")
    await settled(two, one)

    assert received == []


async def test_a_message_that_is_heard_does_not_bounce(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    heard, bounced = Received(), Received()
    one.subscribe(f"{subject}.heard", heard, queue="q")
    two.subscribe(f"{subject}.reply", bounced)
    await settled(one, two)

    two.publish(f"{subject}.heard", b"", reply=f"{subject}.reply")
    await settled(two, one)

    assert (len(heard), len(bounced)) == (1, 0)


async def test_a_message_of_exactly_max_payload_arrives(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(subject, received)
    block = encode({"Key": "value"})

    connection.publish(subject, bytes(connection.max_payload - len(block)), headers=block)
    await received.wait(1)

    assert len(received[0].data) == connection.max_payload - len(block)


async def test_headers_count_against_max_payload(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    received = Received()
    connection.subscribe(subject, received)
    block = encode({"Key": "value"})

    with pytest.raises(PayloadTooLarge, match="max_payload"):
        connection.publish(subject, bytes(connection.max_payload - len(block) + 1), headers=block)
    connection.publish(subject, b"next")
    await received.wait(1)

    assert [message.data for message in received] == [b"next"]


async def test_a_callback_that_raises_stops_nobody(
    bus: Bus, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await bus.connect()
    received = Received()

    def fail(message: Message) -> None:
        raise ValueError("a bad callback")

    connection.subscribe(subject, fail)
    connection.subscribe(subject, received)

    with caplog.at_level(logging.ERROR):
        connection.publish(subject, b"1")
        connection.publish(subject, b"2")
        await received.wait(2)

    assert [message.data for message in received] == [b"1", b"2"]
    assert "a bad callback" in caplog.text


async def test_after_a_barrier_the_subscription_is_known(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    missed: list[int] = []
    for number in range(100):
        bounced = Received()
        reply = two.subscribe(f"{subject}.reply.{number}", bounced)
        subscription = one.subscribe(f"{subject}.{number}", Received())
        await one.barrier()
        two.publish(f"{subject}.{number}", b"", reply=f"{subject}.reply.{number}")
        await two.barrier()
        missed += [number] * len(bounced)
        subscription.unsubscribe()
        reply.unsubscribe()

    assert missed == []


async def test_unsubscribe_stops_delivery_at_once(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    received = Received()
    ended = connection.subscribe(subject, received)
    await connection.barrier()

    connection.publish(subject, b"under way")
    ended.unsubscribe()
    ended.unsubscribe()
    await settled(connection)

    assert received == []


async def test_unsubscribe_inside_the_callback_is_the_last_call(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    received = Received()

    def once(message: Message) -> None:
        received(message)
        subscription.unsubscribe()

    subscription = connection.subscribe(subject, once)
    for _ in range(3):
        connection.publish(subject, b"")
    await settled(connection)

    assert len(received) == 1


async def test_an_ended_subscription_no_longer_counts_as_a_listener(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    bounced = Received()
    connection.subscribe(f"{subject}.reply", bounced)
    connection.subscribe(f"{subject}.gone", Received()).unsubscribe()
    await connection.barrier()

    connection.publish(f"{subject}.gone", b"", reply=f"{subject}.reply")
    await bounced.wait(1)

    assert status(bounced[0].headers) == "503"


async def test_subscriptions_survive_a_reconnect(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    received = Received()
    one.subscribe(subject, received)
    gone = one.subscribe(f"{subject}.gone", received)
    gone.unsubscribe()

    await bus.break_connection(one)
    await one.barrier()
    two.publish(subject, b"after")
    two.publish(f"{subject}.gone", b"")
    await settled(two, one)

    assert [message.data for message in received] == [b"after"]


async def test_a_reconnect_is_told_as_disconnected_then_connected(bus: Bus) -> None:
    connection = await bus.connect()
    states: list[ConnectionState] = []
    connection.on_state(states.append)

    await bus.break_connection(connection)

    assert states == [ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]
    assert connection.state is ConnectionState.CONNECTED


async def test_each_message_that_a_connection_drops_is_told_with_its_reason(
    bus: Bus, subject: str
) -> None:
    one, two = await bus.connect(), await bus.connect()
    dropped: list[DropReason] = []
    one.on_drop(dropped.append)
    received = Received()

    def hear_one(message: Message) -> None:
        received(message)
        subscription.unsubscribe()

    subscription = one.subscribe(subject, hear_one)
    await one.barrier()

    for _ in range(3):
        two.publish(subject, b"")
    await settled(two, one)
    late = list(dropped)
    await one.close()
    one.publish(subject, b"")

    assert len(received) == 1
    assert late == [DropReason.UNSUBSCRIBED] * 2
    assert dropped[2:] == [DropReason.DISCONNECTED]


async def test_what_is_published_before_close_still_arrives(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    received = Received()
    one.subscribe(subject, received)
    await one.barrier()

    for number in range(100):
        two.publish(subject, b"%d" % number)
    await two.close()
    await received.wait(100)

    assert len(received) == 100


async def test_a_closed_connection_says_so_and_stays_closed(bus: Bus, subject: str) -> None:
    connection = await bus.connect()
    states: list[ConnectionState] = []
    connection.on_state(states.append)

    await connection.close()
    await connection.close()
    connection.publish(subject, b"nobody gets this")

    assert states == [ConnectionState.CLOSED]
    assert connection.state is ConnectionState.CLOSED
    with pytest.raises(Unavailable):
        await connection.barrier(timeout=1.0)


async def test_a_closed_connections_subscriptions_are_gone(bus: Bus, subject: str) -> None:
    one, two = await bus.connect(), await bus.connect()
    bounced = Received()
    one.subscribe(subject, Received())
    two.subscribe(f"{subject}.reply", bounced)
    await settled(one, two)

    await one.close()
    async with asyncio.timeout(60):
        while not bounced:
            # The server learns of the close when it reads the end of the connection.
            two.publish(subject, b"", reply=f"{subject}.reply")
            await two.barrier()

    assert status(bounced[0].headers) == "503"


async def test_drained_leaves_a_small_backlog(
    own_bus: Bus, killable_server: RunningServer | None, subject: str
) -> None:
    connection = await own_bus.connect()

    # A server that is quick takes all of it as it comes.
    if killable_server is not None:
        killable_server.pause()
    for _ in range(200):
        connection.publish(subject, bytes(256 * 1024))
    before = connection.backlog
    if killable_server is not None:
        killable_server.resume()
    await connection.drained()

    assert before > 1024 * 1024
    assert connection.backlog <= 1024 * 1024
