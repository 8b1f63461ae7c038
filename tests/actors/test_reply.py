"""A handler's reply is a stream to its callers, whoever sends the items, and ends like any."""

# Annotations are objects here, as some of the methods are refused for theirs.

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from pydantic import BaseModel
from tests.story import on_a_kit

from dynbus import (
    Actor,
    Arrival,
    ConfigError,
    Context,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    InvalidResponse,
    Overloaded,
    PayloadTooLarge,
    Relay,
    Reply,
    call_options,
    handler,
    push_each,
)
from dynbus.actors.serving.endpoints import make_endpoint
from dynbus.testing import TestKit

BOUND = 60.0
"""Virtual seconds within which everything here happens."""


class Prompt(BaseModel):
    text: str = ""


class Token(BaseModel):
    text: str


class Engine(Actor, namespace="reply"):
    """Serves by its replies what the test sends."""

    def __init__(self) -> None:
        self.replies: list[Reply[Token]] = []
        self.left: list[type[BaseException] | None] = []

    @handler
    async def generate(self, prompt: Prompt, reply: Reply[Token]) -> None:
        self.replies.append(reply)
        try:
            await reply.ended()
        except BaseException as error:
            self.left.append(type(error))
            raise
        self.left.append(None)

    @handler
    async def spell(self, prompt: Prompt, *, reply: Reply[str]) -> None:
        for letter in prompt.text:
            if not reply.push(letter):
                await reply.writable()

    @handler
    async def broken(self, prompt: Prompt, reply: Reply[str]) -> None:
        reply.push(prompt.text)
        raise ValueError("it broke")

    @handler
    async def who(self, reply: Reply[str], context: Context | None = None) -> None:
        assert context is not None
        reply.push(context.id)

    @handler(name="by-name")
    async def by_name(self, *, prompt: Prompt, reply: Reply[bytes]) -> None:
        reply.push(prompt.text.encode())

    @handler
    async def answer(self, reply: Prompt) -> str:
        return reply.text


async def settled(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.01)


async def begin(kit: TestKit, count: int) -> tuple[Engine, list[asyncio.Task[list[Token]]]]:
    """An engine with so many calls, and what each of them will get."""
    instance = await kit.start(Engine)
    engine = instance.actor
    assert isinstance(engine, Engine)
    client = kit.client(Engine)

    async def read(number: int) -> list[Token]:
        return [token async for token in client.generate(Prompt(text=str(number)))]

    readers = [asyncio.create_task(read(number)) for number in range(count)]
    await settled(lambda: len(engine.replies) == count)
    return engine, readers


def test_a_step_of_many_calls_is_sent_at_once_and_wakes_no_handler() -> None:
    async def story(kit: TestKit) -> None:
        engine, readers = await begin(kit, 50)

        for word in ("a", "b"):
            step = [(reply, Token(text=f"{word}{n}")) for n, reply in enumerate(engine.replies)]
            assert push_each(step) == []
        for reply in engine.replies:
            reply.end()

        for number, reader in enumerate(readers):
            assert await reader == [Token(text=f"a{number}"), Token(text=f"b{number}")]
        assert engine.left == [None] * 50

    on_a_kit(story)


def test_a_handler_that_returns_ends_its_stream() -> None:
    async def story(kit: TestKit) -> list[Any]:
        await kit.start(Engine)
        client = kit.client(Engine)
        found: list[Any] = [letter async for letter in client.spell(Prompt(text="ada"))]
        by_name: Any = client.by_name
        found += [data async for data in by_name(prompt=Prompt(text="raw"))]
        with call_options(request_id="r1"):
            found += [name async for name in client.who()]
        return [*found, await client.answer(Prompt(text="a request named reply"))]

    assert on_a_kit(story) == ["a", "d", "a", b"raw", "r1", "a request named reply"]


def test_a_handler_that_raises_fails_its_stream_after_what_it_sent() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Engine)
        stream = kit.client(Engine).broken(Prompt(text="a"))

        assert await anext(stream) == "a"
        with pytest.raises(HandlerError, match="it broke") as caught:
            await anext(stream)
        assert caught.value.error_type == "ValueError"

    on_a_kit(story)


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [(Overloaded("later"), Overloaded, ""), (LookupError("no such"), HandlerError, "LookupError")],
)
def test_an_engine_fails_a_stream_with_an_error_of_any_kind(
    error: Exception, kind: type[DynbusError], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(kit: TestKit) -> None:
        engine, [reader] = await begin(kit, 1)
        [reply] = engine.replies

        reply.fail(error)
        reply.fail(Overloaded("too late"))

        with pytest.raises(kind) as caught:
            await reader
        assert caught.value.started
        assert getattr(caught.value, "error_type", "") == name
        assert not reply.push(Token(text="late"))
        await settled(lambda: engine.left == [None])

    caplog.set_level(logging.ERROR)
    on_a_kit(story)
    assert ("no such" in caplog.text) == bool(name)


def test_an_item_that_cannot_be_sent_ends_its_stream_and_no_other_of_the_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(kit: TestKit) -> None:
        engine, readers = await begin(kit, 3)
        odd, large, good = engine.replies
        wrong: Any = {"text": 7}

        paused = push_each([(odd, wrong), (large, Token(text="x" * 1001)), (good, Token(text="a"))])

        assert paused == [odd, large]
        assert [reply.has_ended for reply in (odd, large, good)] == [True, True, False]
        good.end()
        with pytest.raises(InvalidResponse):
            await readers[0]
        with pytest.raises(PayloadTooLarge):
            await readers[1]
        assert await readers[2] == [Token(text="a")]

    on_a_kit(story, max_item_bytes=1000)
    assert "max_item_bytes" in caplog.text


def test_an_item_that_does_not_fit_is_refused_where_it_is_sent() -> None:
    async def story(kit: TestKit) -> None:
        engine, [reader] = await begin(kit, 1)
        [reply] = engine.replies
        wrong: Any = "word"

        with pytest.raises(InvalidResponse):
            reply.push(wrong)

        assert reply.push(Token(text="a"))
        reply.end()
        assert await reader == [Token(text="a")]

    on_a_kit(story)


def test_a_reader_without_credit_is_told_and_when_it_has_some_again() -> None:
    async def story(kit: TestKit) -> None:
        instance = await kit.start(Engine)
        engine = instance.actor
        assert isinstance(engine, Engine)
        stream = kit.client(Engine).generate(Prompt())
        first = asyncio.create_task(anext(stream))
        await settled(lambda: engine.replies)
        [reply] = engine.replies
        told: list[bool] = []

        sent = 1
        while reply.push(Token(text="x" * 1000)):
            sent += 1
        assert reply.is_paused
        assert repr(reply) == "<Reply [paused]>"
        assert push_each([(reply, Token(text="held"))]) == [reply]
        reply.when_writable(lambda: told.append(reply.is_paused))
        await asyncio.sleep(1.0)
        assert told == []
        read = [await first] + [await anext(stream) for _ in range(sent)]
        following = asyncio.create_task(anext(stream, None))
        await reply.writable()
        await settled(lambda: told)

        assert told == [False]
        assert read[-1] == Token(text="held")
        reply.end()
        assert await following is None

    on_a_kit(story, stream_window=16384)


def test_a_cancelled_call_cancels_the_handler_and_takes_no_more() -> None:
    async def story(kit: TestKit) -> None:
        engine, [reader, other] = await begin(kit, 2)

        reader.cancel()
        await settled(lambda: engine.left)

        [ended] = [reply for reply in engine.replies if reply.has_ended]
        assert engine.left == [asyncio.CancelledError]
        assert push_each((reply, Token(text="a")) for reply in engine.replies) == [ended]
        for reply in engine.replies:
            reply.end()
        assert await other == [Token(text="a")]

    on_a_kit(story)


def test_a_deadline_ends_a_call_whose_engine_does_not() -> None:
    async def story(kit: TestKit) -> None:
        with call_options(timeout=2.0):
            _, [reader] = await begin(kit, 1)

        with pytest.raises(DeadlineExceeded):
            await reader

    on_a_kit(story)


class Gateway(Actor, namespace="reply"):
    """Passes on what it relays, without a task per item at either end."""

    async def on_start(self) -> None:
        self.engine = await self.runtime.endpoint("reply.Engine.spell").client()
        self.relay: Relay[Reply[bytes], bytes] = Relay(self.deliver)

    async def on_stop(self) -> None:
        self.relay.close()

    def deliver(self, arrivals: list[Arrival[Reply[bytes], bytes]]) -> None:
        for stream, items, _, _ in arrivals:
            for item in items:
                if not stream.key.push(item):
                    stream.pause()
                    stream.key.when_writable(stream.resume)

    @handler
    async def spell(self, prompt: bytes, reply: Reply[bytes]) -> None:
        call = self.engine.generate(prompt).raw()
        with await self.relay.open(call, key=reply) as stream:
            await stream.ended()


def test_a_relay_and_a_reply_pass_streams_on_in_order_and_as_fast_as_they_are_read() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Engine)
        await kit.start(Gateway)
        client = kit.client(Gateway)
        text = "abcdefghij" * 3000

        async def read(count: int) -> bytes:
            letters = b""
            async for letter in client.spell(b'{"text": "%s"}' % text[:count].encode()):
                letters += letter
            return letters

        found = await asyncio.gather(read(0), read(10), read(30_000))

        assert [data.replace(b'"', b"").decode() for data in found] == [
            "",
            text[:10],
            text,
        ]

    on_a_kit(story, stream_window=16384)


# Declaring --------------------------------------------------------------------------------


def declare(function: Any) -> None:
    class Declared(Actor, namespace="reply"):
        method: Any = handler(function)  # pyright: ignore[reportUnknownVariableType]

    make_endpoint(Declared().method, Declared.__dynbus_handlers__["method"])


async def unsent(self: Any, prompt: Prompt, reply: Any) -> None:
    pass


unsent.__annotations__["reply"] = Reply


async def returns(self: Any, prompt: Prompt, reply: Reply[Token]) -> Token:
    return Token(text="")


async def yields(self: Any, prompt: Prompt, reply: Reply[Token]) -> AsyncGenerator[Token, None]:
    yield Token(text="")


async def two(self: Any, prompt: Prompt, more: Prompt, reply: Reply[Token]) -> None:
    pass


async def misnamed(self: Any, prompt: Prompt, out: Reply[Token]) -> None:
    pass


async def misnamed_alone(self: Any, out: "Reply[Token]") -> None:
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unsent, r"annotate what it yields, for example reply: Reply\[Word\]"),
        (returns, "annotate -> None, since its items are sent by its reply"),
        (yields, "yields and takes a reply: send its items by one of the two"),
        (two, "takes 2 requests; a handler takes one"),
        (misnamed, "misnamed: its reply is called 'out': name it 'reply'"),
        (misnamed_alone, "misnamed_alone: its reply is called 'out': name it 'reply'"),
    ],
    ids=["unsent", "returns", "yields", "two", "misnamed", "misnamed_alone"],
)
def test_a_signature_that_makes_no_sense_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare(function)


def test_the_schema_of_the_result_is_that_of_an_item() -> None:
    endpoint = make_endpoint(Engine().spell, Engine.__dynbus_handlers__["spell"])

    assert endpoint.kind == "stream"
    assert endpoint.schemas["response"] == {"type": "string"}
