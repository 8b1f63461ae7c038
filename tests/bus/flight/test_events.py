"""What happens to instances and calls is on record, with no id of a request and no text."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest
from tests.flights import events_on

from dynbus import Actor, DeadlineExceeded, Overloaded, Unavailable, call_options, handler
from dynbus.bus.flight import digest_of_request, flight_stream
from dynbus.bus.flight.records import Event
from dynbus.testing import TestKit, run


class Echo(Actor, namespace="flown"):
    refuses = False

    @handler(idempotent=True)
    async def say(self, text: str) -> str:
        if type(self).refuses:
            type(self).refuses = False
            raise Unavailable("not just now")
        return text


def test_the_life_of_an_instance_and_a_call_that_is_tried_again_are_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> list[Event]:
        async with TestKit(flight=True) as kit:
            first = await kit.start(Echo)
            await anyio.sleep(1.0)
            monkeypatch.setattr(Echo, "refuses", True)
            with call_options(request_id="secret"):
                assert await kit.client(Echo).say("hidden") == "hidden"
            await anyio.sleep(1.0)
            await first.stop()
            await anyio.sleep(1.0)
            return await events_on(kit.bus, "flown")

    happened = run(story())

    whats = [one.what for one in happened]
    assert whats == ["instance.ready", "call.retried", "instance.draining", "instance.stopped"]
    retried = happened[1]
    assert (retried.who, retried.request) == ("flown.Echo.say", digest_of_request("secret"))
    assert (retried.details["error"], retried.details["attempt"]) == ("Unavailable", 1)
    assert "secret" not in repr(happened)
    assert "hidden" not in repr(happened)


def test_nothing_is_on_record_unless_it_is_asked_for() -> None:
    async def story() -> set[str]:
        async with TestKit() as kit:
            await kit.start(Echo)
            await anyio.sleep(1.0)
            return set(kit.bus.jetstream.streams)

    assert flight_stream("flown").name not in run(story())


def test_what_happens_after_the_end_is_not_recorded_and_disturbs_nothing() -> None:
    async def story() -> list[str]:
        async with TestKit(flight=True) as kit:
            runtime = await kit.runtime()
            flight = runtime.bus.flight
            assert flight is not None
            flight.note("flown", "before", "a")
            await anyio.sleep(1.0)
            await runtime.close()
            flight.note("flown", "after", "a")
            flight.note("other", "after", "a")
            await anyio.sleep(1.0)
            return [one.what for one in await events_on(kit.bus, "flown")]

    assert run(story()) == ["before"]


class Mailbox(Actor, namespace="flown"):
    @handler(concurrency=1, queue=1)
    async def take(self, text: str) -> str:
        await anyio.sleep(2.0)
        return text


def test_calls_that_wait_or_find_no_place_are_on_record_with_the_reason() -> None:
    async def story() -> list[Event]:
        async with TestKit(flight=True) as kit:
            await kit.start(Mailbox)
            mailbox = kit.client(Mailbox, retries=0)

            async def call(number: int, timeout: float = 30.0) -> None:
                metadata = {"tenant": "ada"}
                options = call_options(
                    request_id=f"secret-{number}", metadata=metadata, timeout=timeout
                )
                with options, suppress(Overloaded, DeadlineExceeded):
                    await mailbox.take("hidden")

            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(call, number)
                    await anyio.sleep(0.1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, 3)
                await anyio.sleep(0.1)
                # What it would take is known: it is too late when it comes.
                tasks.start_soon(call, 4, 1.0)
            await anyio.sleep(1.0)
            return await events_on(kit.bus, "flown")

    happened = [one for one in run(story()) if one.what.startswith("call.")]

    assert [(one.what, one.request) for one in happened] == [
        ("call.refused", digest_of_request("secret-2")),
        ("call.waited", digest_of_request("secret-1")),
        ("call.refused", digest_of_request("secret-4")),
    ]
    full, waited, late = (one.details for one in happened)
    assert {one.who.partition("@")[0] for one in happened} == {"flown.Mailbox.take"}
    assert (full["error"], full["why"], full["running"], full["waiting"]) == (
        *("Overloaded", "full", 1, 1),
    )
    assert float(waited["waited"]) == pytest.approx(1.9, abs=0.2)
    assert (late["error"], late["why"]) == ("Overloaded", "late")
    assert float(late["retry_after"]) > 0
    assert full["tenant"] == late["tenant"] != "ada"
    assert "secret" not in repr(happened)
