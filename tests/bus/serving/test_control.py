"""What clients say of their calls: that a request never began is only said where it is so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from tests.bus.far_side import settle
from tests.bus.near_side import INCARNATION, PlayedClient, endpoint, secret_of, serving, until

from dynbus.bus.drops import DropReason
from dynbus.bus.protocol.wire import End, Failed, Item, Open, Resume, Unknown
from dynbus.bus.serving import ledger, request_digests
from dynbus.bus.serving.ledger import KEPT_SECONDS as KEPT_RESULT_SECONDS
from dynbus.bus.serving.ledger import client_key
from dynbus.bus.serving.request_digests import KEPT_SECONDS
from dynbus.testing import run

KEY = client_key("_R.-.c1", INCARNATION)
FLEET = 1100
"""Clients that die with an open call."""


async def stays(_: bytes) -> bytes:
    await asyncio.sleep(10_000.0)
    return b"done"


async def numbers(_: bytes) -> AsyncGenerator[bytes, None]:
    for number in range(4):
        yield b"%d" % number
    await asyncio.sleep(10_000.0)


async def echo(data: bytes) -> bytes:
    return data


def request(client: PlayedClient, base: str, number: int) -> None:
    """Send a request as if it came from `base`."""
    mine, client.base = client.base, base
    client.send(number, b"a")
    client.base = mine


def ask(number: int, age: float | None = None, resume_from: int = 0) -> Resume:
    return Resume(number, secret_of(number), 1, resume_from, age)


async def answer(client: PlayedClient) -> Failed | Unknown:
    """What a question after a request is answered with."""
    await until(lambda: client.control or client.all(Failed))
    said = [frame for frame in client.control if isinstance(frame, Unknown)]
    return said[0] if said else client.all(Failed)[0]


def test_a_call_of_a_client_taken_for_dead_is_known_however_many_others_died() -> None:
    async def story() -> Failed | Unknown:
        async with serving(endpoint(stays, concurrency=None)) as given:
            for index in range(FLEET):
                request(given.client, f"_R.-.dead{index}", 1)
            await asyncio.sleep(10.0)
            assert given.instance.control.registry.remotes == {}
            given.client.send(1, b"a")
            await settle(given.client.connection)
            assert given.instance.execution.load == 1
            await asyncio.sleep(10.0)
            assert given.instance.control.registry.remotes == {}
            given.client.batches.clear()
            given.client.control.clear()

            await given.client.say(ask(1, age=10.0))

            return await answer(given.client)

    said = run(story())

    assert isinstance(said, Failed), said
    assert (said.code, said.started) == ("UnknownOutcome", True)
    assert "is kept any longer" in said.message


def test_questions_in_the_name_of_others_do_not_keep_a_client_from_an_answer() -> None:
    async def story() -> Failed | Unknown:
        async with serving(endpoint(stays)) as given:
            attacker = PlayedClient(await given.server.connect(), "attacker")
            for index in range(FLEET):
                attacker.base = f"_R.-.forged{index}"
                await attacker.say(ask(index))
            await attacker.connection.close()
            await asyncio.sleep(1.0)

            await given.client.say(ask(1, age=0.5))

            return await answer(given.client)

    assert run(story()) == Unknown(1, secret_of(1), 1)


def test_an_instance_that_can_promise_no_more_says_that_the_outcome_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_digests, "REQUESTS", 1)

    async def story() -> tuple[Failed | Unknown, Failed | Unknown]:
        async with serving(endpoint(stays)) as given:
            await asyncio.sleep(1.0)
            await given.client.say(ask(1, age=0.5))
            first = await answer(given.client)
            given.client.control.clear()

            await given.client.say(ask(2, age=0.5))

            return first, await answer(given.client)

    first, second = run(story())

    assert isinstance(first, Unknown)
    assert isinstance(second, Failed)
    assert (second.code, second.started) == ("UnknownOutcome", True)


@pytest.mark.parametrize(
    ("age", "is_proven"), [(0.5, True), (1.9, True), (3.0, False), (None, True)]
)
def test_a_request_that_was_sent_before_the_instance_heard_any_may_have_begun_elsewhere(
    age: float | None, is_proven: bool
) -> None:
    # An instance of the same id may have carried it out, and died of it.
    async def story() -> Failed | Unknown:
        async with serving(endpoint(stays)) as given:
            await asyncio.sleep(2.0)

            await given.client.say(ask(1, age))

            return await answer(given.client)

    assert isinstance(run(story()), Unknown) is is_proven


@pytest.mark.parametrize(("age", "is_proven"), [(1.0, True), (2000.0, False), (None, False)])
def test_what_is_forgotten_may_have_begun(age: float | None, is_proven: bool) -> None:
    async def story() -> Failed | Unknown:
        async with serving(endpoint(stays)) as given:
            request(given.client, "_R.-.dead", 1)
            await asyncio.sleep(10.0 + 3 * KEPT_SECONDS)

            await given.client.say(ask(1, age))

            return await answer(given.client)

    assert isinstance(run(story()), Unknown) is is_proven


def test_a_call_that_ended_because_nobody_listed_it_did_begin() -> None:
    async def story() -> Failed | Unknown:
        async with serving(endpoint(stays)) as given:
            given.client.send(1, b"a")
            await settle(given.client.connection)
            for _ in range(8):
                # Written before the request, and kept back on the way.
                await given.client.say(Open(1, [], [], 0, None))
                await asyncio.sleep(0.5)
            assert given.instance.ledger.calls() == []
            given.client.batches.clear()
            given.client.control.clear()

            await given.client.say(ask(1, age=1.0))

            return await answer(given.client)

    said = run(story())

    assert isinstance(said, Failed), said
    assert said.code == "UnknownOutcome"


def test_a_stream_whose_reader_asks_for_more_than_there_is_did_begin() -> None:
    async def story() -> Failed | Unknown:
        async with serving(endpoint(numbers, streaming=True)) as given:
            given.client.send(1, b"a")
            await given.client.heard(Item)

            await given.client.say(ask(1, age=0.1, resume_from=1 << 20))

            return await answer(given.client)

    said = run(story())

    assert isinstance(said, Failed), said
    assert "is kept any longer" in said.message


@pytest.mark.parametrize("seconds", [KEPT_RESULT_SECONDS / 2, 3 * KEPT_RESULT_SECONDS])
def test_a_result_that_is_never_acknowledged_is_not_kept_for_ever(seconds: float) -> None:
    async def story() -> tuple[int, Failed | Unknown | None]:
        async with serving(endpoint(echo)) as given:
            given.client.send(1, b"a")
            await given.client.heard(End)
            for _ in range(int(seconds)):
                # It lives, and lists the call as one of which it has nothing.
                await given.client.say(Open(1, [(1, 0)], []))
                await asyncio.sleep(1.0)
            client = given.instance.control.registry.remotes.get(KEY)
            kept = len(client.kept) if client is not None else 0
            if kept:
                return kept, None
            given.client.control.clear()
            await given.client.say(ask(1, age=seconds))
            return kept, await answer(given.client)

    kept, said = run(story())

    if seconds < KEPT_RESULT_SECONDS:
        assert kept == 1
    else:
        assert kept == 0
        assert isinstance(said, Failed), said
        assert said.code == "UnknownOutcome"


def test_so_many_results_are_kept_of_a_client_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT", 10)

    async def story() -> list[int]:
        async with serving(endpoint(echo)) as given:
            for number in range(1, 15):
                given.client.send(number, b"a")
            await given.client.heard(End, 14)
            return list(given.instance.control.registry.remotes[KEY].kept)

    assert run(story()) == list(range(5, 15))


def test_so_many_clients_may_have_calls_here_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CLIENTS", 10)

    async def story() -> None:
        async with serving(endpoint(stays)) as given:
            for index in range(15):
                request(given.client, f"_R.-.other{index}", 1)
            await settle(given.client.connection)
            assert len(given.instance.control.registry.remotes) == 10
            assert given.bus.drops == {DropReason.EXCESS: 5}

            # They do not live, so there is room for others soon.
            await asyncio.sleep(10.0)
            given.client.send(1, b"a")
            await settle(given.client.connection)

            assert list(given.instance.control.registry.remotes) == [KEY]

    run(story())
