"""Whoever makes results may send them, such as an engine those of all its calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import pytest
from tests.bus.far_side import settle
from tests.bus.near_side import (
    ADDRESS,
    INSTANCE,
    Served,
    endpoint,
    secret_of,
    serving,
    sizes,
    until,
)

from dynbus.bus.errors import HandlerError, Overloaded
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.reply_port import ReplyPort
from dynbus.bus.protocol.wire import Cancel, Credit, End, Failed, Item, Items, Open
from dynbus.testing import run

PLAIN = "_INBOX.plain"


class Engine:
    """Keeps the ports of its calls, and lets the test step.

    Attributes:
        left: how often a handler was left, and with what.
    """

    def __init__(self) -> None:
        self.ports: list[ReplyPort] = []
        self.left: list[type[BaseException] | None] = []

    async def serve(self, _: bytes, port: ReplyPort) -> None:
        self.ports.append(port)
        try:
            await port.closed()
        except asyncio.CancelledError as error:
            self.left.append(type(error))
            raise
        self.left.append(None)

    @property
    def endpoint(self) -> Endpoint:
        return endpoint(self.serve, streaming=True, by_port=True)

    async def begun(self, given: Served, *numbers: int, window: int = 1 << 20) -> None:
        for number in numbers:
            given.client.send(number, window=window)
        await until(lambda: len(self.ports) == len(numbers))


def items_of(given: Served, number: int) -> list[bytes]:
    found: list[bytes] = []
    for batch in given.client.batches:
        for frame in batch.frames:
            if isinstance(frame, Item) and frame.number == number:
                found.append(frame.data)
            elif isinstance(frame, Items) and frame.number == number:
                found += frame.items
    return found


def push_all(pairs: Iterable[tuple[ReplyPort, bytes]]) -> list[ReplyPort]:
    """Send the items of a step; the ports that take no more."""
    return [port for port, item in pairs if not port.push(item)]


async def deliver(given: Served) -> None:
    await asyncio.sleep(0)
    await settle(given.client.connection)


def test_the_items_of_a_step_leave_as_one_message_and_wake_no_handler() -> None:
    async def story() -> None:
        engine = Engine()
        async with serving(engine.endpoint) as given:
            await engine.begun(given, *range(20))
            tasks = len(asyncio.all_tasks())

            paused = push_all((port, b"%d" % index) for index, port in enumerate(engine.ports))

            assert paused == []
            assert len(asyncio.all_tasks()) == tasks
            await deliver(given)
            assert sizes(given.client.batches) == [20]
            assert [items_of(given, number) for number in range(20)] == [
                [b"%d" % number] for number in range(20)
            ]
            assert engine.left == []

    run(story())


def test_a_port_whose_reader_has_no_credit_says_so_and_when_it_has() -> None:
    async def story() -> None:
        engine = Engine()
        async with serving(engine.endpoint) as given:
            given.client.send(1, window=2)
            given.client.send(2)
            await until(lambda: len(engine.ports) == 2)
            slow, fast = engine.ports

            assert push_all([(slow, b"ab"), (fast, b"x")]) == [slow]
            assert (slow.paused, fast.paused) == (True, False)
            resumed: list[ReplyPort] = []
            for port in engine.ports:
                port.when_writable(partial(resumed.append, port))
            waiting = asyncio.create_task(slow.writable())
            await deliver(given)
            assert resumed == [fast]
            assert not waiting.done()

            await given.client.say(Credit(1, secret_of(1), 1, 4, 1))
            await waiting
            assert resumed == [fast, slow]
            assert push_all([(slow, b"cd"), (fast, b"y")]) == [slow]
            await deliver(given)

            assert items_of(given, 1) == [b"ab", b"cd"]
            assert items_of(given, 2) == [b"x", b"y"]

    run(story())


def test_what_waits_for_a_reader_is_told_when_its_call_ends() -> None:
    async def story() -> list[bool]:
        engine = Engine()
        async with serving(engine.endpoint) as given:
            await engine.begun(given, 1, window=1)
            (port,) = engine.ports
            port.push(b"ab")
            told: list[bool] = []
            port.when_writable(lambda: told.append(port.ended))

            port.fail(Overloaded("later"))
            await deliver(given)
            return told

    assert run(story()) == [True]


@pytest.mark.parametrize("error", [None, Overloaded("later")])
def test_an_engine_ends_a_call_and_its_handler_goes_on_from_there(error: Overloaded | None) -> None:
    async def story() -> None:
        engine = Engine()
        async with serving(engine.endpoint) as given:
            await engine.begun(given, 1)
            (port,) = engine.ports
            port.push(b"a")

            if error is None:
                port.end()
            else:
                port.fail(error)
            assert not port.push(b"late")
            await until(lambda: engine.left == [None])
            await deliver(given)

            assert items_of(given, 1) == [b"a"]
            assert (len(given.client.all(End)), len(given.client.all(Failed))) == (
                (1, 0) if error is None else (0, 1)
            )
            assert given.instance.execution.load == 0

    run(story())


def test_a_handler_that_returns_ends_its_call_and_one_that_raises_fails_it() -> None:
    async def handler(data: bytes, port: ReplyPort) -> None:
        port.push(data)
        if data == b"bad":
            raise ValueError("no")

    async def story() -> None:
        async with serving(endpoint(handler, streaming=True, by_port=True)) as given:
            given.client.send(1, b"good")
            given.client.send(2, b"bad")

            (end,) = await given.client.heard(End)
            (failed,) = await given.client.heard(Failed)

            assert (end.number, end.sequence) == (1, 1)
            assert (failed.number, failed.code, failed.message) == (
                2,
                HandlerError.code,
                "ValueError: no",
            )

    run(story())


def test_a_unary_call_is_answered_by_its_port() -> None:
    async def handler(data: bytes, port: ReplyPort) -> None:
        port.end(data.upper())

    async def story() -> bytes | None:
        async with serving(endpoint(handler, by_port=True)) as given:
            given.client.send(1, b"a")
            return (await given.client.heard(End))[0].data

    assert run(story()) == b"A"


def test_a_cancel_reaches_the_handler_and_what_is_pushed_later_is_left_out() -> None:
    async def story() -> None:
        engine = Engine()
        async with serving(engine.endpoint) as given:
            await engine.begun(given, 1, 2)
            await given.client.say(Cancel(1, secret_of(1), 1, 0.0))
            await until(lambda: engine.left == [asyncio.CancelledError])

            assert push_all((port, b"x") for port in engine.ports) == [engine.ports[0]]
            await deliver(given)

            assert engine.ports[0].ended
            assert items_of(given, 1) == []
            assert items_of(given, 2) == [b"x"]

    run(story())


def test_a_reader_that_grants_nothing_ends_a_stream_whose_engine_never_waits() -> None:
    async def story() -> None:
        engine = Engine()
        async with serving(engine.endpoint, reader_stall_timeout=2.0) as given:
            await engine.begun(given, 1, window=1)
            engine.ports[0].push(b"abc")
            for _ in range(10):
                await given.client.say(Open(1, [(1, 0)], []))
                await asyncio.sleep(0.4)

            (failed,) = await given.client.heard(Failed)

            assert failed.code == "ReaderStalled"
            assert engine.left == [asyncio.CancelledError]

    run(story())


def test_a_plain_client_reads_what_an_engine_sends() -> None:
    async def story() -> list[bytes]:
        engine = Engine()
        async with serving(engine.endpoint) as given:
            read: list[bytes] = []
            given.client.connection.subscribe(PLAIN, lambda message: read.append(message.data))
            given.client.connection.publish(ADDRESS.at(INSTANCE), b"", reply=PLAIN)
            await until(lambda: engine.ports)
            (port,) = engine.ports
            for _ in range(4):
                # More than the server is given at once.
                if not port.push(bytes(50_000)):
                    await port.writable()
            port.end()
            await deliver(given)
            return read

    assert [len(data) for data in run(story())] == [50_000] * 4 + [0]
