"""A relay gets what a message brought for all its streams in one call, and every stream's end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from tests.story import on_a_kit

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    Instance,
    InvalidResponse,
    NoInstances,
    Overloaded,
    Reply,
    RouteRequest,
    StreamLost,
    Unavailable,
    call_options,
    handler,
)
from dynbus.actors.calling import relay as relay_module
from dynbus.actors.calling.relay import Arrival, Relay, RelayedStream
from dynbus.testing import TestKit, run

BOUND = 60.0
"""Virtual seconds within which everything here happens."""


class Prompt(BaseModel):
    count: int
    then: str = ""


class Token(BaseModel):
    index: int


class Engine(Actor, namespace="relay"):
    """Streams that go on together, a step at a time."""

    def __init__(self) -> None:
        self.step = asyncio.Event()
        self.begun = 0
        self.left = 0

    def next_step(self) -> None:
        step, self.step = self.step, asyncio.Event()
        step.set()

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[Token, None]:
        self.begun += 1
        try:
            for index in range(prompt.count):
                await self.step.wait()
                yield Token(index=index)
            if prompt.then == "fail":
                raise ValueError("it broke")
            if prompt.then == "hang":
                await asyncio.sleep(1e6)
        finally:
            self.left += 1

    @handler
    async def large(self, prompt: Prompt) -> AsyncGenerator[bytes, None]:
        for index in range(prompt.count):
            self.begun = index + 1
            yield bytes(1000)

    @handler
    async def odd(self) -> AsyncGenerator[Any, None]:
        yield {"index": 0}
        yield {"index": "none"}
        yield {"index": 2}
        try:
            await asyncio.sleep(1e6)
        finally:
            self.left += 1

    @handler(idempotent=True)
    async def busy(self, prompt: Prompt) -> AsyncGenerator[Token, None]:
        self.begun += 1
        if prompt.count:
            raise Overloaded("busy", retry_after=float(prompt.count))
        yield Token(index=0)

    @handler
    async def at_once(self, *, reply: Reply[Token]) -> None:
        reply.push(Token(index=0))


class Moody(BaseModel):
    index: int

    @field_validator("index")
    @classmethod
    def check(cls, index: int) -> int:
        if index == 1:
            raise LookupError("no such index")
        return index


class Mistaken(Actor, namespace="relay", component="Engine"):
    """What a caller takes the engine for whose validator raises what it should not."""

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[Moody, None]:
        yield Moody(index=0)


class Odd(Engine, namespace="relay", component="Engine"):
    """What a caller takes the engine for whose items do not fit."""

    @handler
    async def odd(self) -> AsyncGenerator[Token, None]:
        yield Token(index=0)


class Sink:
    """A relay that keeps what is delivered."""

    def __init__(self) -> None:
        self.calls: list[list[Arrival[Any, Any]]] = []
        self.relay: Relay[Any, Any] = Relay(self.deliver)
        self.then: Callable[[], object] = lambda: None
        self._arrived = asyncio.Event()

    def deliver(self, arrivals: list[Arrival[Any, Any]]) -> None:
        self.calls.append(arrivals)
        self._arrived.set()
        self.then()

    def items(self, key: object) -> list[Any]:
        return [
            item
            for call in self.calls
            for one in call
            if one.stream.key == key
            for item in one.items
        ]

    def ends(self) -> dict[Any, DynbusError | None]:
        return {one.stream.key: one.error for call in self.calls for one in call if one.ended}

    async def until(self, calls: int) -> None:
        async with asyncio.timeout(BOUND):
            while len(self.calls) < calls:
                self._arrived.clear()
                await self._arrived.wait()


@asynccontextmanager
async def relaying(**settings: Any) -> AsyncGenerator[tuple[TestKit, Engine, Sink]]:
    async with TestKit(**settings) as kit:
        instance = await kit.start(Engine)
        assert isinstance(instance.actor, Engine)
        sink = Sink()
        with sink.relay:
            yield kit, instance.actor, sink


async def settled(condition: Any) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.01)


def test_a_step_of_many_streams_is_a_call_for_each_64_with_all_their_items() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            client = kit.client(Engine)
            streams = [
                await sink.relay.open(client.generate(Prompt(count=2)), key) for key in range(100)
            ]
            await settled(lambda: engine.begun == 100)

            for step in (1, 2):
                engine.next_step()
                await sink.until(2 * step)
            for stream in streams:
                await stream.ended()

            assert [len(arrivals) for arrivals in sink.calls[:4]] == [64, 36, 64, 36]
            first, second = sink.calls[0] + sink.calls[1], sink.calls[2] + sink.calls[3]
            assert [one.stream.key for one in first] == list(range(100))
            assert [one.items for one in first] == [[Token(index=0)]] * 100
            assert [one.items for one in second] == [[Token(index=1)]] * 100
            assert sink.ends() == dict.fromkeys(range(100))
            assert all(stream.is_over for stream in streams)
            assert repr(sink.relay) == "<Relay [0 streams]>"

    run(story())


def test_a_step_that_takes_long_to_pass_on_lets_the_loop_do_what_else_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            client = kit.client(Engine)
            for key in range(200):
                await sink.relay.open(client.generate(Prompt(count=2)), key)
            await settled(lambda: engine.begun == 200)
            ticks = count()
            # Each look at the clock finds that more time has passed than a relay may take.
            monkeypatch.setattr(relay_module, "monotonic", lambda: float(next(ticks)))
            passed_on: list[int] = []
            sink.then = lambda: asyncio.get_running_loop().call_soon(
                lambda: passed_on.append(len(sink.calls))
            )

            for _ in range(2):
                engine.next_step()
                await sink.until(1)
            await settled(lambda: len(sink.ends()) == 200)

            assert passed_on[:3] == [1, 2, 3]
            for key in range(200):
                assert sink.items(key) == [Token(index=0), Token(index=1)]

    run(story())


def test_a_relayed_stream_knows_its_request_and_its_instance() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            with call_options(request_id="r1"):
                stream = await sink.relay.open(kit.client(Engine).generate(Prompt(count=1)), "a")

            assert (stream.id, stream.instance_id) == ("r1", engine.instance_id)
            assert repr(stream) == "<RelayedStream relay.Engine.generate r1 [open]>"

    run(story())


def test_an_untyped_call_is_relayed_with_its_items_as_they_come() -> None:
    async def story() -> list[Any]:
        async with relaying() as (kit, engine, sink):
            client = await kit.caller.endpoint("relay.Engine.generate").client()
            stream = await sink.relay.open(client.generate(b'{"count": 1}').raw(), "a")
            await settled(lambda: engine.begun)
            engine.next_step()
            await stream.ended()
            return sink.items("a")

    assert run(story()) == [b'{"index":0}']


def test_the_far_side_waits_while_a_stream_is_paused_and_goes_on_when_it_is_resumed() -> None:
    async def story() -> None:
        async with relaying(stream_window=16384) as (kit, engine, sink):
            streams: list[RelayedStream[str]] = []

            def pause(arrivals: list[Arrival[str, bytes]]) -> None:
                arrivals[0].stream.pause()
                streams.append(arrivals[0].stream)
                sink.deliver(arrivals)

            with Relay(pause) as relay:
                stream = await relay.open(kit.client(Engine).large(Prompt(count=100)), "a")
                await asyncio.sleep(5.0)
                waits_at = engine.begun
                while not stream.is_over:
                    stream.resume()
                    await asyncio.sleep(0.1)

            assert 10 <= waits_at < 40
            assert sum(map(len, sink.items("a"))) == 100_000
            assert sink.ends() == {"a": None}

    run(story())


def test_the_items_before_an_error_come_with_it_or_before() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            generate = kit.client(Engine).generate
            stream = await sink.relay.open(generate(Prompt(count=1, then="fail")), "a")
            await settled(lambda: engine.begun)
            engine.next_step()

            with pytest.raises(HandlerError, match="it broke"):
                await stream.ended()

            assert sink.items("a") == [Token(index=0)]
            assert isinstance(sink.ends()["a"], HandlerError)

    run(story())


def test_an_item_that_does_not_fit_ends_the_stream_after_those_that_do() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            stream = await sink.relay.open(kit.client(Odd).odd(), "a")

            with pytest.raises(InvalidResponse, match=r"an item of relay\.Engine\.odd: index"):
                await stream.ended()

            assert sink.items("a") == [Token(index=0)]
            await settled(lambda: engine.left == 1)

    run(story())


def test_a_validator_that_raises_ends_its_own_stream_and_loses_nothing_of_others() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            # The same type for all: one stream gets as far as the item at fault, one does not.
            generate = kit.client(Mistaken).generate
            fine = await sink.relay.open(kit.client(Engine).generate(Prompt(count=3)), "fine")
            moody = await sink.relay.open(generate(Prompt(count=3)), "moody")
            last = await sink.relay.open(kit.client(Engine).generate(Prompt(count=3)), "last")
            await settled(lambda: engine.begun == 3)
            for count in (1, 2, 3):
                engine.next_step()
                await settled(lambda count=count: len(sink.items("last")) == count)

            with pytest.raises(InvalidResponse, match="LookupError: no such index"):
                await moody.ended()
            await fine.ended()
            await last.ended()

            every = [Token(index=index) for index in range(3)]
            assert (sink.items("fine"), sink.items("last")) == (every, every)
            assert sink.items("moody") == [Moody(index=0)]

    run(story())


def test_a_last_item_that_was_not_delivered_is_told_to_whoever_waits() -> None:
    async def story() -> None:
        async with relaying() as (kit, _, _sink):

            def refuse(arrivals: list[Arrival[str, Token]]) -> None:
                raise LookupError("no reader")

            with Relay(refuse) as relay:
                stream = await relay.open(kit.client(Engine).at_once(), "a")

                with pytest.raises(LookupError, match="no reader"):
                    await stream.ended()

    run(story())


class CancelledRouter:
    """From the second call on it waits for what is cancelled."""

    def __init__(self) -> None:
        self.calls = 0

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        self.calls += 1
        if self.calls > 1:
            other = asyncio.ensure_future(asyncio.sleep(60))
            other.cancel()
            await other
        return instances[0].id


def test_a_router_that_is_cancelled_between_two_attempts_ends_this_stream_alone() -> None:
    async def story() -> None:
        async with relaying() as (kit, _, sink):
            busy = kit.client(Engine, routing=CancelledRouter()).busy
            stream = await sink.relay.open(busy(Prompt(count=1)), "a")

            with pytest.raises(Cancelled, match="not tried again"):
                async with asyncio.timeout(BOUND):
                    await stream.ended()

            assert isinstance(sink.ends()["a"], Cancelled)
            assert [item async for item in kit.client(Engine).busy(Prompt(count=0))]

    run(story())


def test_closing_the_runtime_ends_a_stream_that_pauses_between_two_attempts() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            busy = kit.client(Engine, timeout=1000.0).busy
            stream = await sink.relay.open(busy(Prompt(count=600)), "a")
            await settled(lambda: engine.begun)
            await asyncio.sleep(1.0)
            await kit.caller.close()

            with pytest.raises(DynbusError):
                async with asyncio.timeout(BOUND):
                    await stream.ended()

            assert list(sink.ends()) == ["a"]

    run(story())


def test_a_deadline_ends_a_relayed_stream_and_its_handler() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            with call_options(timeout=2.0):
                stream = await sink.relay.open(kit.client(Engine).generate(Prompt(count=1)), "a")

            with pytest.raises(DeadlineExceeded):
                await stream.ended()

            assert isinstance(sink.ends()["a"], DeadlineExceeded)
            await settled(lambda: engine.left == 1)

    run(story())


def test_an_instance_that_dies_ends_its_streams() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            generate = kit.client(Engine).generate
            stream = await sink.relay.open(generate(Prompt(count=1, then="hang")), "a")
            await settled(lambda: engine.begun)
            engine.next_step()
            await sink.until(1)
            (instance,) = kit.started.values()

            await kit.kill(instance)

            with pytest.raises(StreamLost):
                await stream.ended()
            assert sink.items("a") == [Token(index=0)]

    run(story())


def test_a_stream_that_did_not_begin_is_tried_on_another_instance() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            generate = kit.client(Engine).generate
            await kit.kill(await kit.start(Engine))

            streams = [await sink.relay.open(generate(Prompt(count=1)), key) for key in "abc"]
            await settled(lambda: engine.begun == 3)
            engine.next_step()
            for stream in streams:
                await stream.ended()

            assert {stream.instance_id for stream in streams} == {engine.instance_id}
            assert sink.ends() == dict.fromkeys("abc")

    run(story())


def test_a_stream_that_cannot_be_tried_again_ends_with_the_last_error() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            generate = kit.client(Engine).generate
            (instance,) = kit.started.values()
            await kit.kill(instance)

            stream = await sink.relay.open(generate(Prompt(count=1)), "a")
            with pytest.raises(Unavailable) as caught:
                await stream.ended()

            assert sink.ends() == {"a": caught.value}
            assert engine.begun == 0

    run(story())


def test_a_stream_that_is_cancelled_delivers_nothing_more_and_stops_the_handler() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            with await sink.relay.open(kit.client(Engine).generate(Prompt(count=9)), "a") as stream:
                await settled(lambda: engine.begun)

            engine.next_step()
            with pytest.raises(Cancelled, match="the relay left the stream"):
                await stream.ended()
            await settled(lambda: engine.left == 1)
            assert sink.calls == []
            assert kit.caller.caller.open_calls() == {}

    run(story())


def test_cancelling_whoever_waits_for_a_stream_in_its_block_stops_the_handler() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):

            async def serve() -> None:
                generate = kit.client(Engine).generate
                with await sink.relay.open(generate(Prompt(count=9)), "a") as stream:
                    await stream.ended()

            serving = asyncio.ensure_future(serve())
            await settled(lambda: engine.begun)
            serving.cancel()
            await asyncio.wait({serving})

            assert serving.cancelled()
            await settled(lambda: engine.left == 1)

    run(story())


def test_leaving_a_relay_cancels_its_streams_and_no_other_is_opened() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            generate = kit.client(Engine).generate
            stream = await sink.relay.open(generate(Prompt(count=9)), "a")
            await settled(lambda: engine.begun)

            sink.relay.close()

            assert stream.is_over
            await settled(lambda: engine.left == 1)
            with pytest.raises(Cancelled):
                await sink.relay.open(generate(Prompt(count=9)), "b")
            assert engine.begun == 1

    run(story())


def test_a_delivery_that_raises_cancels_the_streams_that_it_was_called_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, _):

            def refuse(arrivals: list[Arrival[str, Token]]) -> None:
                raise LookupError("no reader")

            with Relay(refuse) as relay:
                generate = kit.client(Engine).generate
                stream = await relay.open(generate(Prompt(count=9)), "a")
                await settled(lambda: engine.begun)
                other = await relay.open(generate(Prompt(count=0, then="hang")), "b")
                engine.next_step()

                with pytest.raises(LookupError, match="no reader"):
                    await stream.ended()
                assert not other.is_over
                await settled(lambda: engine.left == 1)

    run(story())
    assert "failed to deliver" in caplog.text


def test_a_request_that_cannot_be_sent_is_told_at_once() -> None:
    async def story(kit: TestKit) -> None:
        sink = Sink()
        with pytest.raises(NoInstances):
            await sink.relay.open(kit.client(Engine).generate(Prompt(count=1)), "a")
        assert repr(sink.relay) == "<Relay [0 streams]>"

    on_a_kit(story)


def test_what_is_read_already_or_is_no_stream_is_refused() -> None:
    async def story() -> None:
        async with relaying() as (kit, engine, sink):
            client = kit.client(Engine)
            odd = client.odd()
            await anext(odd)
            twice = client.generate(Prompt(count=1))
            await sink.relay.open(twice, "a")

            async def words() -> AsyncGenerator[str, None]:
                yield "a"

            for stream in (odd, twice):
                with pytest.raises(RuntimeError, match="is read already"):
                    await sink.relay.open(stream, "b")
            with pytest.raises(ConfigError, match="cannot be relayed"):
                await sink.relay.open(words(), "c")
            await odd.aclose()
            await settled(lambda: engine.begun)
            gc.collect()

    run(story())
