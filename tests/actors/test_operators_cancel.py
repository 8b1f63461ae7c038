"""An operator's cancel ends a request wherever it is, and nothing of it begins afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from dynbus import Actor, Cancelled, Overloaded, call_options, handler
from dynbus.actors.calling.client_side import ClientSide
from dynbus.bus.cancels import Holder
from dynbus.bus.drops import DropReason
from dynbus.testing import TestKit, run


class Inner(Actor, namespace="deep"):
    """Called by the others, in another namespace."""

    ended: list[str] = []

    @handler
    async def wait(self, tag: str) -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            self.ended.append(tag)
        return tag


class Outer(Actor, namespace="demo"):
    """Takes one call at a time, and has the inner one wait."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    async def on_start(self) -> None:
        self.inner = self.runtime.client(Inner)

    @handler(concurrency=1)
    async def wait(self, tag: str) -> str:
        self.begun.append(tag)
        return await self.inner.wait(tag)

    @handler
    async def count(self) -> AsyncIterator[int]:
        for number in range(10**9):
            yield number
            await asyncio.sleep(1.0)

    @handler(resume="replay")
    async def moving(self) -> AsyncIterator[int]:
        self.begun.append("moving")
        for number in range(10**9):
            yield number
            await asyncio.sleep(1.0)

    @handler(idempotent=True, concurrency=1, queue=0)
    async def refuse(self, tag: str) -> str:
        self.begun.append(tag)
        raise Overloaded("the test has no room", retry_after=600.0, started=False)


async def cancel(kit: TestKit, said: Any, namespace: str = "demo") -> list[Any]:
    """What the processes answer to a cancel."""
    operator = await kit.bus.connect()
    answers: list[Any] = []
    operator.subscribe("_INBOX.op", lambda message: answers.append(json.loads(message.data)))
    await operator.barrier()
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    operator.publish(f"{namespace}._cancel", data, reply="_INBOX.op")
    await asyncio.sleep(0.3)
    return answers


async def rest(stream: AsyncIterator[int]) -> list[int]:
    """What is left of a stream."""
    return [item async for item in stream]


def begin(kit: TestKit, request_id: str, tag: str) -> asyncio.Task[str]:
    with call_options(request_id=request_id, timeout=3600):
        return asyncio.ensure_future(kit.client(Outer).wait(tag))


def served(answers: list[Any], request_id: str) -> dict[str, int]:
    """The calls that were ended, by instance."""
    found: dict[str, int] = {}
    for answer in answers:
        found |= answer.get("found", {}).get(request_id, {}).get("served", {})
    return found


def made(answers: list[Any], request_id: str) -> int:
    """The callers that were."""
    return sum(answer.get("found", {}).get(request_id, {}).get("made", 0) for answer in answers)


def test_what_runs_ends_with_its_sub_calls_and_what_waits_never_starts() -> None:
    async def story() -> None:
        Inner.ended.clear()
        async with TestKit() as kit:
            await kit.start(Inner, instance_id="i")
            outer = await kit.start(Outer, instance_id="o")
            runs, waits = begin(kit, "one", "runs"), begin(kit, "two", "waits")
            last = begin(kit, "three", "last")
            await asyncio.sleep(1.0)

            queued = await cancel(kit, "two")
            running = await cancel(kit, "one")

            assert served(queued, "two") == served(running, "one") == {"demo.Outer@o": 1}
            assert (made(queued, "two"), made(running, "one")) == (1, 1)
            for call in (runs, waits):
                with pytest.raises(
                    Cancelled, match="an operator cancelled the requests of this id"
                ):
                    await call
            await asyncio.sleep(1.0)
            assert outer.actor.begun == ["runs", "last"]  # type: ignore[attr-defined]
            assert Inner.ended == ["runs"]
            last.cancel()

    run(story())


def test_one_that_arrives_within_a_minute_is_refused_and_later_the_id_may_be_used_again() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Inner)
            outer = await kit.start(Outer)
            stranger = await kit.bus.connect()
            replies: list[bytes] = []
            stranger.subscribe("_INBOX.s", lambda message: replies.append(message.headers))

            answers = await cancel(kit, {"request_ids": ["later"]})
            head = b"NATS/1.0\r\nDynbus-Request-Id: later\r\n\r\n"
            stranger.publish("demo.Outer.wait", b'"plain"', reply="_INBOX.s", headers=head)
            with pytest.raises(Cancelled):
                await begin(kit, "later", "framed")
            await asyncio.sleep(60.0)
            again = begin(kit, "later", "again")
            await asyncio.sleep(1.0)

            assert [answer.get("found") for answer in answers] == [None] * len(answers)
            assert outer.actor.begun == ["again"]  # type: ignore[attr-defined]
            assert b"Dynbus-Error: Cancelled" in replies[0]
            again.cancel()

    run(story())


def test_a_stream_ends_at_its_reader_although_its_instance_hears_nothing() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            outer = await kit.start(Outer)
            with call_options(request_id="s"):
                stream = kit.client(Outer).count()
            assert await anext(stream) == 0
            links: list[Any] = [outer.runtime.bus.data, outer.runtime.bus.lane.connection]
            with kit.bus.partition(*links):
                answers = await cancel(kit, "s")
                with pytest.raises(Cancelled, match="operator"):
                    async for _ in stream:
                        pass
            assert (made(answers, "s"), served(answers, "s")) == (1, {})

    run(story())


def test_a_call_that_waits_for_an_instance_or_for_its_next_attempt_ends_too() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            with call_options(request_id="none", wait=600.0, timeout=3600):
                unserved = asyncio.ensure_future(kit.client(Outer).refuse("nobody"))
            await asyncio.sleep(1.0)
            first = await cancel(kit, "none")
            with pytest.raises(Cancelled), anyio.fail_after(0.1):
                await unserved
            outer = await kit.start(Outer)
            with call_options(request_id="pause", timeout=3600):
                paused = asyncio.ensure_future(kit.client(Outer).refuse("once"))
            await asyncio.sleep(1.0)
            second = await cancel(kit, "pause")
            with pytest.raises(Cancelled), anyio.fail_after(0.1):
                await paused

            assert (made(first, "none"), made(second, "pause")) == (1, 1)
            assert outer.actor.begun == ["once"]  # type: ignore[attr-defined]

    run(story())


def test_who_calls_no_more_is_told_of_no_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            bus = kit.caller.bus
            told: list[Holder] = []
            add, remove = bus.cancels.add, bus.cancels.remove

            def add_noted(holder: Holder) -> None:
                told.append(holder)
                add(holder)

            def remove_noted(holder: Holder) -> None:
                remove(holder)
                # Those of the kit were there before.
                if holder in told:
                    told.remove(holder)

            monkeypatch.setattr(bus.cancels, "add", add_noted)
            monkeypatch.setattr(bus.cancels, "remove", remove_noted)
            side = ClientSide(bus)
            await side.begin_calling()
            assert len(told) == 2

            await side.end_calling()

            assert told == []

    run(story())


def test_a_stream_that_lost_its_instance_goes_on_nowhere() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            first = await kit.start(Outer)
            with call_options(request_id="m"):
                stream = kit.client(Outer).moving()
            assert await anext(stream) == 0
            await kit.kill(first)
            reading = asyncio.ensure_future(rest(stream))
            await asyncio.sleep(5.0)
            assert not reading.done()

            await cancel(kit, "m")
            second = await kit.start(Outer)

            with pytest.raises(Cancelled, match="operator"):
                await reading
            assert second.actor.begun == []  # type: ignore[attr-defined]

    run(story())


def test_a_wait_before_any_call_ends_and_is_told_of_once_for_all_its_namespaces() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            spaces = {"demo", "deep"}

            async def wait(request_id: str) -> None:
                with kit.caller.unless_cancelled(spaces, request_id):
                    await anyio.sleep_forever()

            waits = asyncio.ensure_future(wait("one"))
            stays = asyncio.ensure_future(wait("two"))
            await asyncio.sleep(1.0)
            operator = await kit.bus.connect()
            answers: list[Any] = []
            operator.subscribe(
                "_INBOX.op", lambda message: answers.append(json.loads(message.data))
            )
            await operator.barrier()
            for namespace in spaces:
                operator.publish(f"{namespace}._cancel", b"one", reply="_INBOX.op")
            await asyncio.sleep(1.0)

            with pytest.raises(Cancelled, match="an operator cancelled"):
                await waits
            assert (len(answers), made(answers, "one")) == (2, 1)
            # What comes of it within a minute does not begin to wait.
            with pytest.raises(Cancelled):
                await wait("one")
            assert not stays.done()
            stays.cancel()

    run(story())


def test_a_wait_that_is_over_as_its_cancel_comes_ends_as_the_operator_was_told() -> None:
    async def story() -> None:
        async with TestKit() as kit:

            async def wait() -> None:
                with (
                    kit.caller.unless_cancelled({"demo"}, "one"),
                    anyio.CancelScope(shield=True),
                ):
                    await asyncio.sleep(1.0)
                    assert made(await cancel(kit, "one"), "one") == 1

            with pytest.raises(Cancelled, match="an operator cancelled"):
                await wait()

    run(story())


def test_cancels_of_unknown_requests_and_of_none_are_counted_and_harm_nothing() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Inner)
            outer = await kit.start(Outer)
            call = begin(kit, "mine", "stays")
            await asyncio.sleep(1.0)

            for said in (b"\xff\xfe", b"{", b"[]", b'{"request_id": 3}', b"x" * 1000):
                [*answers] = await cancel(kit, said)
                assert all(answer["error"] for answer in answers)
            await cancel(kit, ["nobody's", "nor this"])
            await cancel(kit, "mine", namespace="deep")  # the sub-call is another namespace's

            drops = outer.runtime.bus.drops
            assert drops[DropReason.MALFORMED] == 5
            assert drops[DropReason.UNKNOWN_REQUEST] == 2
            with pytest.raises(Cancelled):
                await call

    run(story())


def test_many_cancels_at_once_all_take_effect() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Inner)
            inner = kit.client(Inner)
            calls: list[asyncio.Task[str]] = []
            for number in range(300):
                with call_options(request_id=f"r{number}", timeout=3600):
                    calls.append(asyncio.ensure_future(inner.wait("many")))
            await asyncio.sleep(1.0)
            operator = await kit.bus.connect()
            for number in range(1000):
                operator.publish("deep._cancel", f"r{number}".encode())

            with anyio.fail_after(1.0):
                ended = await asyncio.gather(*calls, return_exceptions=True)

            assert {type(one) for one in ended} == {Cancelled}

    run(story())
