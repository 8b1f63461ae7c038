"""A call of an endpoint that is not for everybody begins once its client has proven whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.bus.far_side import settle
from tests.bus.near_side import INCARNATION, PlayedClient, Served, endpoint, secret_of, serving

from dynbus.bus.context import context
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.wire import Cancel, End, Failed, Open, Ping, Pong
from dynbus.bus.serving import proofs
from dynbus.bus.serving.server import SWEEP_INTERVAL
from dynbus.testing import run

ALLOWED = frozenset({"billing"})


async def whoami(_: bytes) -> bytes:
    return context().principal.encode()


@asynccontextmanager
async def guarded(**settings: Any) -> AsyncGenerator[Served, None]:
    """An instance with a user of the server, and a client of billing's.

    Args:
        settings: of the instance.
    """
    guard = endpoint(whoami, allow=ALLOWED)
    async with serving(guard, principal="desk", **settings) as given:
        given.client.base = "_R.billing.c1"
        await given.client.start()
        yield given


async def token_of(client: PlayedClient) -> int:
    """The token by which a client is asked."""
    return (await client.asked(Ping))[0].token


def pings(client: PlayedClient) -> list[Ping]:
    return [frame for frame in client.control if isinstance(frame, Ping)]


def test_a_call_waits_for_the_proof_and_later_ones_need_none() -> None:
    async def story() -> tuple[int, int, list[Failed]]:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            token = await token_of(client)
            before = given.instance.execution.load + len(client.all(End))
            await client.say(Pong(token))
            await client.heard(End)
            client.send(2, b"a")
            await client.heard(End, 2)
            return before, len(pings(client)), client.all(Failed)

    assert run(story()) == (0, 1, [])


def test_the_instance_that_asks_says_its_whole_name() -> None:
    async def story() -> str:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            token = await token_of(client)
            return client.askers[client.control.index(Ping(token))]

    assert run(story()) == "near.Side@i1"


def test_a_proof_counts_for_a_while_and_the_next_has_another_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Before the client is taken for dead, which sends no heartbeats here.
    monkeypatch.setattr(proofs, "PROVEN_SWEEPS", 1)

    async def story() -> tuple[list[int], list[int]]:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            first = await token_of(client)
            await client.say(Pong(first))
            await client.heard(End)
            await asyncio.sleep(2 * SWEEP_INTERVAL)
            client.send(2, b"a")
            second = (await client.asked(Ping, 2))[1].token
            await client.say(Pong(first))
            before = [frame.number for frame in client.all(End)]
            await client.say(Pong(second))
            return before, [frame.number for frame in await client.heard(End, 2)]

    assert run(story()) == ([1], [1, 2])


@pytest.mark.parametrize("root", ["_INBOX", "_R_", "_GR_"])
def test_a_subject_that_others_may_hear_names_no_principal(root: str) -> None:
    async def story() -> tuple[Failed, list[Ping]]:
        async with guarded() as given:
            client = given.client
            client.base = f"{root}.billing.c1"
            await client.start()
            client.send(1, b"a")
            [failed] = await client.heard(Failed)
            return failed, pings(client)

    failed, asked = run(story())

    assert (failed.code, asked) == ("PermissionDenied", [])
    assert "the caller has no user of the server" in failed.message


def test_who_does_not_know_the_token_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the client is taken for dead, which sends no heartbeats here.
    monkeypatch.setattr(proofs, "SWEEPS", 1)

    async def story() -> tuple[list[End], Failed]:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            token = await token_of(client)
            forger = PlayedClient(await given.server.connect())
            forger.base = client.base
            await forger.say(Pong(token + 1), Pong(0))
            [failed] = await client.heard(Failed)
            await forger.connection.close()
            return client.all(End), failed

    ended, failed = run(story())

    assert ended == []
    assert (failed.code, failed.started) == ("PermissionDenied", False)
    assert "nobody who hears the answers to billing made this call" in failed.message


def test_the_proof_of_one_incarnation_is_none_of_another() -> None:
    async def story() -> int:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            await client.say(Pong(await token_of(client)))
            await client.heard(End)
            client.send(2, b"a", framing=f"1 {secret_of(2).hex()} 100 {INCARNATION}x")
            await client.heard(Failed)
            return len(client.all(End))

    assert run(story()) == 1


def test_a_client_that_missed_the_question_is_asked_again() -> None:
    async def story() -> int:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            first, second = await client.asked(Ping, 2)
            assert first == second
            await client.say(Pong(second.token))
            await client.heard(End)
            return len(client.all(Failed))

    assert run(story()) == 0


def test_a_call_that_is_given_up_meanwhile_does_not_begin() -> None:
    async def story() -> tuple[int, list[End]]:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            token = await token_of(client)
            await client.say(Cancel(1, secret_of(1), 1, 0.0))
            await client.heard(Failed)
            await client.say(Pong(token))
            await settle(client.connection)
            return given.instance.execution.load, client.all(End)

    assert run(story()) == (0, [])


def test_the_oldest_makes_room_where_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "HELD", 2)

    async def story() -> tuple[list[int], list[str]]:
        async with guarded() as given:
            client = given.client
            for number in (1, 2, 3):
                client.send(number, b"a")
            token = await token_of(client)
            await client.heard(Failed)
            await client.say(Pong(token))
            await client.heard(End, 2)
            return [frame.number for frame in client.all(End)], [
                frame.code for frame in client.all(Failed)
            ]

    assert run(story()) == ([2, 3], ["Overloaded"])


def test_numbers_that_are_used_again_take_no_room_from_others() -> None:
    async def story() -> tuple[list[str], list[int]]:
        async with guarded(max_request_bytes=4096) as given:
            other = PlayedClient(await given.server.connect(), "c2")
            other.base = "_R.billing.c2"
            await other.start()
            for attempt in range(2 * proofs.HELD_SIZES):
                secret = secret_of(attempt)
                other.send(1, bytes(4096), framing=f"1 {secret.hex()} 100000 {INCARNATION}")
                await settle(other.connection)
                await other.say(Cancel(1, secret, 1, 0.0))
                await other.say(Open(attempt, [], [(1, secret)]))
            client = given.client
            client.send(1, b"a")
            await client.say(Pong(await token_of(client)))
            await client.heard(End)
            await other.connection.close()
            return [frame.code for frame in client.all(Failed)], [
                frame.number for frame in client.all(End)
            ]

    assert run(story()) == ([], [1])


def test_nobody_is_refused_while_the_instance_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "SWEEPS", 1)

    async def story() -> tuple[list[Failed], int]:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a")
            token = await token_of(client)
            lane = given.bus.lane.connection
            assert isinstance(lane, MemoryConnection)
            lane.disconnect()
            await asyncio.sleep(4 * SWEEP_INTERVAL)
            lane.reconnect()
            await client.say(Pong(token))
            await client.heard(End)
            return client.all(Failed), len(client.all(End))

    assert run(story()) == ([], 1)


def test_a_request_in_parts_waits_as_a_whole() -> None:
    async def story() -> int:
        async with guarded() as given:
            client = given.client
            client.send(1, b"a", PART="1/2")
            await settle(client.connection)
            asked_early = len(pings(client))
            client.send(1, b"b", PART="2/2")
            await client.say(Pong(await token_of(client)))
            await client.heard(End)
            return asked_early

    assert run(story()) == 0


def test_a_principal_that_is_not_allowed_is_refused_at_once() -> None:
    async def story() -> tuple[Failed, list[Ping]]:
        async with guarded() as given:
            client = given.client
            client.base = "_R.sales.c1"
            await client.start()
            client.send(1, b"a")
            [failed] = await client.heard(Failed)
            return failed, pings(client)

    failed, asked = run(story())

    assert (failed.code, failed.started, asked) == ("PermissionDenied", False, [])
    assert "sales may not call this: only billing may" in failed.message


def test_a_plain_client_is_refused() -> None:
    async def story() -> dict[str, str]:
        async with guarded() as given:
            client = given.client
            client.connection.publish(
                "near.Side.call.i1", b"a", reply=f"{client.base}.7", headers=b""
            )
            return headers.decode((await client.reply()).headers)

    assert run(story())[headers.ERROR] == "PermissionDenied"
