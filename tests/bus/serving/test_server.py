"""A request runs once, when it is whole and was not given up before it came."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.bus.far_side import settle
from tests.bus.near_side import (
    ADDRESS,
    INCARNATION,
    INSTANCE,
    PlayedClient,
    Served,
    endpoint,
    secret_of,
    serving,
    until,
)
from tests.conditions import eventually

from dynbus.bus.context import context
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, PermissionDenied, Unavailable
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.liveness import SILENCE_LIMIT
from dynbus.bus.protocol.names import control_subject
from dynbus.bus.protocol.unread_bytes import LEAST_PER_STREAM
from dynbus.bus.protocol.wire import (
    Cancel,
    Credit,
    End,
    Failed,
    Frame,
    Heartbeat,
    Item,
    Items,
    Open,
    Resume,
    Unknown,
    encode_batch,
)
from dynbus.bus.serving.ledger import client_key
from dynbus.testing import run


class Handler:
    """A unary handler that keeps the requests that reached it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.requests: list[bytes] = []
        self.seconds = seconds

    async def __call__(self, data: bytes) -> bytes:
        self.requests.append(data)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return data.upper()

    @property
    def endpoint(self) -> Endpoint:
        return endpoint(self)


async def heard_failure(given: Served) -> Failed:
    (failed,) = await given.client.heard(Failed)
    return failed


# Where requests arrive --------------------------------------------------------------------


@pytest.mark.parametrize("subject", [str(ADDRESS), ADDRESS.at(INSTANCE)])
def test_a_request_arrives_by_the_instance_s_own_subject_and_by_the_shared_one(
    subject: str,
) -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            given.client.send(1, b"a", subject=subject)

            (end,) = await given.client.heard(End)

            assert end == End(1, secret_of(1), 1, 0, b"A")

    run(story())


def test_each_endpoint_has_its_handler() -> None:
    async def other(_: bytes) -> bytes:
        return b"other"

    async def story() -> bytes | None:
        async with serving(Handler().endpoint, endpoint(other, name="other")) as given:
            given.client.send(1, b"a", subject=f"near.Side.other.{INSTANCE}")
            return (await given.client.heard(End))[0].data

    assert run(story()) == b"other"


def test_a_stopped_instance_hears_nothing() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            await given.instance.stop()
            given.client.send(1, b"a")

            reply = await given.client.reply()

            assert headers.status(reply.headers) == headers.NO_RESPONDERS
            assert handler.requests == []
            assert given.instance.control.registry.remotes == {}

    run(story())


def test_it_says_how_many_calls_run_and_wait() -> None:
    async def story() -> None:
        handler = Handler(5.0)
        async with serving(endpoint(handler, concurrency=1)) as given:
            for number in range(3):
                given.client.send(number)
            await settle(given.client.connection)

            assert repr(given.instance) == (
                f"<InstanceServer near.Side@{INSTANCE} [serving | calls: 1 running, 2 waiting]>"
            )
            assert given.instance.execution.load == 3

    run(story())


def test_a_request_that_cannot_be_answered_does_not_run() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.connection.publish(str(ADDRESS), b"a")
            await settle(given.client.connection)

            assert handler.requests == []
            assert given.bus.drops == {DropReason.NO_REPLY: 1}

    run(story())


# Once -------------------------------------------------------------------------------------


def test_a_request_that_arrives_again_while_it_runs_does_not_run_again() -> None:
    async def story() -> None:
        handler = Handler(1.0)
        async with serving(handler.endpoint) as given:
            for _ in range(3):
                given.client.send(1, b"a")

            await given.client.heard(End)
            await settle(given.client.connection)

            assert handler.requests == [b"a"]
            assert len(given.client.all(End)) == 1

    run(story())


def test_a_request_that_arrives_again_after_its_end_does_not_run_again() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a")
            await given.client.heard(End)

            given.client.send(1, b"a")
            await settle(given.client.connection)

            assert handler.requests == [b"a"]

    run(story())


# Given up before it came ------------------------------------------------------------------


def test_a_request_whose_cancel_came_first_never_begins() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            await given.client.say(Cancel(1, secret_of(1), 1, 1.0))

            given.client.send(1, b"a")
            failed = await heard_failure(given)

            assert (failed.code, failed.started) == ("Cancelled", False)
            assert handler.requests == []
            assert given.bus.drops == {DropReason.REFUSED: 1}

    run(story())


def test_the_cancel_of_another_s_request_changes_nothing() -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            await given.client.say(Cancel(1, secret_of(2), 1, 1.0))

            given.client.send(1, b"a")

            assert (await given.client.heard(End))[0].data == b"A"

    run(story())


def test_a_request_that_was_said_not_to_be_here_is_never_begun_later() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            await given.client.say(Resume(1, secret_of(1), 1, 0))
            await until(lambda: given.client.control == [Unknown(1, secret_of(1), 1)])

            given.client.send(1, b"a")
            failed = await heard_failure(given)

            assert (failed.code, failed.started, failed.retryable) == ("Unavailable", False, True)
            assert handler.requests == []

    run(story())


@pytest.mark.parametrize("parts", [1, 2])
def test_a_question_that_overtakes_its_request_is_answered_when_all_requests_are_read(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:

            async def read_what_waits(*, timeout: float) -> None:
                given.client.send(1, b"a", PART=f"{parts}/{parts}")
                await settle(given.client.connection)

            monkeypatch.setattr(given.bus.data, "barrier", read_what_waits)
            for part in range(1, parts):
                given.client.send(1, b"a", PART=f"{part}/{parts}")
            await settle(given.client.connection)
            await given.client.say(Resume(1, secret_of(1), 1, 0))

            await given.client.heard(End)

            assert len(handler.requests) == 1
            assert given.client.control == []

    run(story())


def test_an_instance_that_cannot_tell_what_has_arrived_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            asked = 0

            async def unanswered(*, timeout: float) -> None:
                nonlocal asked
                asked += 1
                raise Unavailable("the server did not answer a ping")

            monkeypatch.setattr(given.bus.data, "barrier", unanswered)
            await given.client.say(Resume(1, secret_of(1), 1, 0))
            await until(lambda: asked)
            monkeypatch.undo()
            given.client.send(1, b"a")

            await given.client.heard(End)

            assert given.client.control == []
            assert handler.requests == [b"a"]

    run(story())


def test_a_request_that_was_asked_to_stop_before_it_came_begins_stopped() -> None:
    async def handler(_: bytes) -> bytes:
        return b"stopped" if context().is_stopped() else b"not"

    async def story() -> bytes | None:
        async with serving(endpoint(handler)) as given:
            await given.client.say(Cancel(1, secret_of(1), 1, -1.0))

            given.client.send(1, b"a")

            return (await given.client.heard(End))[0].data

    assert run(story()) == b"stopped"


# What cannot be meant ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"framing": "7 what"},
        {"PART": "0/2"},
        {"PART": "3/2"},
        {"DEADLINE": "soon"},
    ],
)
def test_a_request_of_another_form_is_answered_at_once_and_counted(options: dict[str, Any]) -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a", **options)

            fields = headers.decode((await given.client.reply()).headers)

            assert fields[headers.ERROR] == "InvalidRequest"
            assert fields[headers.FRAMES]
            assert f"(at {ADDRESS}@{INSTANCE})" in fields[headers.SERVICE_ERROR]
            assert handler.requests == []
            assert given.bus.drops == {DropReason.MALFORMED: 1}
            assert given.instance.ledger.calls() == []

    run(story())


# Parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2], [2, 2, 1, 1, 3]])
def test_a_request_in_parts_runs_once_when_all_are_there(order: list[int]) -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            for index in order[:-1]:
                given.client.send(1, b"abc"[index - 1 : index], PART=f"{index}/3")
            await settle(given.client.connection)
            assert handler.requests == []

            given.client.send(1, b"abc"[order[-1] - 1 : order[-1]], PART=f"{order[-1]}/3")
            await given.client.heard(End)

            assert handler.requests == [b"abc"]
            assert len(given.instance.ledger.partial) == 0

    run(story())


def test_a_part_with_another_secret_is_none_of_the_request() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a", PART="1/2")
            given.client.send(
                1, b"X", PART="2/2", framing=f"1 {secret_of(9).hex()} 1000 {INCARNATION}"
            )
            given.client.send(1, b"b", PART="2/2")

            await given.client.heard(End)

            assert handler.requests == [b"ab"]
            assert given.bus.drops == {DropReason.STALE: 1}

    run(story())


def test_a_request_whose_parts_are_too_large_together_is_refused() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint, max_request_bytes=100) as given:
            for index in (1, 2):
                given.client.send(1, b"x" * 60, PART=f"{index}/3")

            failed = await heard_failure(given)

            assert (failed.code, failed.started) == ("PayloadTooLarge", False)
            assert "max_request_bytes = 100" in failed.message
            assert handler.requests == []
            assert len(given.instance.ledger.partial) == 0

    run(story())


def test_a_request_whose_parts_do_not_come_is_given_up_before_it_begins() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a", PART="1/2")
            await settle(given.client.connection)
            for _ in range(30):
                # The client is there and waits.
                await given.client.say(Open(1, [(1, 0)], []))
                await asyncio.sleep(0.4)

            failed = await heard_failure(given)

            assert (failed.code, failed.started, failed.retryable) == ("Unavailable", False, True)
            assert "parts of the request were lost" in failed.message
            assert handler.requests == []
            assert len(given.instance.ledger.partial) == 0

    run(story())


def test_a_request_whose_time_is_over_before_it_is_whole_is_given_up() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a", PART="1/2", DEADLINE="1000")
            await settle(given.client.connection)
            for _ in range(5):
                await given.client.say(Open(1, [(1, 0)], []))
                await asyncio.sleep(0.4)

            failed = await heard_failure(given)

            assert (failed.code, failed.started) == ("DeadlineExceeded", False)
            assert len(given.instance.ledger.partial) == 0

    run(story())


def test_incomplete_requests_of_many_clients_give_way_to_a_new_one() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint, max_request_bytes=100) as given:
            mine = given.client.base
            for client in range(20):
                given.client.base = f"_R.-.other{client}"
                given.client.send(1, b"x" * 90, PART="1/2")
            await settle(given.client.connection)
            given.client.base = mine

            assert given.instance.ledger.partial.size <= 400
            for part in (1, 2):
                given.client.send(1, b"y" * 40, PART=f"{part}/2")
            await given.client.heard(End)

            assert handler.requests == [b"y" * 80]

    run(story())


def test_a_request_that_misses_a_part_is_to_be_sent_anew() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a", PART="1/2")
            await settle(given.client.connection)

            await given.client.say(Resume(1, secret_of(1), 1, 0))

            await until(lambda: given.client.control == [Unknown(1, secret_of(1), 1)])
            assert given.instance.ledger.calls() == []
            assert handler.requests == []

    run(story())


# Results ----------------------------------------------------------------------------------


async def count(_: bytes) -> AsyncGenerator[bytes, None]:
    for number in range(8):
        yield b"%d" % number


def items_of(given: Served) -> list[bytes]:
    items = [item.data for item in given.client.all(Item)]
    return items + [one for frame in given.client.all(Items) for one in frame.items]


@pytest.mark.parametrize(("asked", "most"), [(2, 2), (1 << 40, 4), (-5, 1)])
def test_a_stream_sends_what_its_reader_asked_for_and_no_more_than_the_instance_allows(
    asked: int, most: int
) -> None:
    async def story() -> None:
        async with serving(endpoint(count, streaming=True), stream_window=4) as given:
            given.client.send(1, window=asked)

            await asyncio.sleep(1.0)

            assert len(items_of(given)) == most
            assert given.client.all(End) == []

    run(story())


def test_credit_lets_a_stream_go_on() -> None:
    async def story() -> None:
        async with serving(endpoint(count, streaming=True), stream_window=4) as given:
            given.client.send(1)
            await asyncio.sleep(0.5)

            await given.client.say(Credit(1, secret_of(1), 1, 6, 4))
            assert sorted(items_of(given)) == [b"%d" % number for number in range(6)]
            await given.client.say(Credit(1, secret_of(1), 1, 10, 6))
            await given.client.heard(End)

            assert sorted(items_of(given)) == [b"%d" % number for number in range(8)]

    run(story())


async def many(request: bytes) -> AsyncGenerator[bytes, None]:
    for _ in range(300):
        yield bytes(1000)


async def client_of(given: Served, name: str) -> PlayedClient:
    client = PlayedClient(await given.server.connect(), name)
    await client.start()
    return client


def test_clients_that_never_read_are_bounded_together_and_do_not_stop_one_that_does() -> None:
    async def story() -> None:
        window = 1 << 20
        async with serving(endpoint(many, streaming=True), instance_window=window) as given:
            lazy = [await client_of(given, f"lazy{number}") for number in range(8)]
            for client in lazy:
                for number in range(4):
                    client.send(number)
            await asyncio.sleep(0.2)
            unread = given.instance.ledger.unread
            held = unread.held

            given.client.send(1)
            while not given.client.all(End):
                received = len(items_of(given))
                credit = Credit(1, secret_of(1), 1, 1000 * received + window, received)
                await given.client.say(credit)

            assert window / 2 < held < window + 32 * (LEAST_PER_STREAM + 1064)
            assert len(items_of(given)) == 300
            for client in lazy:
                await client.connection.close()

    run(story())


def test_a_stream_that_gets_credit_while_there_is_no_room_goes_on_when_there_is() -> None:
    async def story() -> int:
        async with serving(endpoint(many, streaming=True), instance_window=1 << 20) as given:
            given.client.send(1, window=100_000)
            await settle(given.client.connection)
            lazy = [await client_of(given, f"lazy{number}") for number in range(12)]
            for client in lazy:
                for number in range(4):
                    client.send(number)
            await asyncio.sleep(0.2)
            received = len(items_of(given))

            await given.client.say(Credit(1, secret_of(1), 1, 1_000_000, received - 40))
            assert len(items_of(given)) == received
            await given.client.say(Open(1, [(1, received)], []))
            await settle(given.client.connection)

            for client in lazy:
                await client.connection.close()
            return len(items_of(given)) - received

    assert run(story()) > 0


def test_a_client_that_never_takes_its_results_is_refused_while_others_are_served() -> None:
    async def large(_: bytes) -> bytes:
        return bytes(200_000)

    async def story() -> None:
        async with serving(endpoint(large), instance_window=1 << 20) as given:
            lazy = await client_of(given, "lazy")
            for number in range(8):
                lazy.send(number)
                await settle(lazy.connection)
                await asyncio.sleep(0)
            given.client.send(1)
            await given.client.heard(End)

            refused = lazy.all(Failed)
            assert {frame.code for frame in refused} == {"Overloaded"}
            assert "bytes of results wait for this client" in refused[0].message
            assert 1 <= len(refused) < 8
            # Once it has them it is served again.
            done = [(number, secret_of(number)) for number in range(8)]
            await lazy.say(Open(1, [], done))
            assert given.instance.ledger.unread.held < 300_000
            lazy.send(9)
            await lazy.heard(End, 8 - len(refused) + 1)
            await lazy.connection.close()

    run(story())


def test_calls_that_waited_do_not_begin_when_their_client_takes_no_results() -> None:
    size, window = 200_000, 1 << 20

    async def large(_: bytes) -> bytes:
        return bytes(size)

    async def story() -> None:
        async with serving(endpoint(large, concurrency=1), instance_window=window) as given:
            for number in range(20):
                given.client.send(number)
            await until(lambda: len(given.client.all(Failed) + given.client.all(End)) == 20)

            refused = given.client.all(Failed)
            assert {(frame.code, frame.started) for frame in refused} == {("Overloaded", False)}
            assert len(given.client.all(End)) >= window // size
            assert given.instance.ledger.unread.held < window + 2 * size
            assert given.instance.execution.load == 0

    run(story())


def test_what_was_lost_is_sent_again_after_the_end_until_it_is_acknowledged() -> None:
    async def story() -> None:
        async with serving(endpoint(count, streaming=True)) as given:
            given.client.send(1)
            await given.client.heard(End)
            given.client.batches.clear()

            await given.client.say(Resume(1, secret_of(1), 1, 6))

            assert items_of(given) == [b"6", b"7"]
            assert len(given.client.all(End)) == 1

    run(story())


# Its end ----------------------------------------------------------------------------------


def test_what_still_runs_after_the_grace_ends_in_draining(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with serving(Handler(5.0).endpoint) as given:
            given.client.send(1, b"a")
            await settle(given.client.connection)

            await given.instance.drain(0.2)
            failed = await heard_failure(given)

            assert (failed.code, failed.retryable) == ("Draining", True)
            assert given.instance.execution.draining

    run(story())

    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == [
        "near.Side@i1: 1 call runs and 0 wait after 0.2 s of draining; they are ended"
    ]


async def three_and_no_more(_: bytes) -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield b"%d" % number
    await asyncio.sleep(600.0)


def test_a_drain_without_grace_says_nothing_where_nothing_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with serving(endpoint(Handler())) as given:
            await given.instance.drain(0.0, lambda _: False)

    run(story())
    assert "draining" not in caplog.text


def test_a_drain_hands_on_streams_that_go_on_elsewhere_and_lets_the_others_finish() -> None:
    async def story() -> float:
        loop = asyncio.get_running_loop()
        async with serving(endpoint(three_and_no_more, streaming=True)) as given:
            for number in range(40):
                given.client.send(number, CONTINUES=str(number % 2))
            given.client.send(99)
            await given.client.heard(Items, 41)

            draining = asyncio.create_task(given.instance.drain(1.2, lambda _: True))
            begun = loop.time()
            handed_on = await given.client.heard(Failed, 40)
            took = loop.time() - begun

            assert {(one.code, one.started) for one in handed_on} == {("Draining", True)}
            assert sorted(one.number for one in handed_on) == list(range(40))
            # After all that was yielded.
            assert {one.sequence for one in handed_on} == {3}
            await draining
            assert loop.time() - begun >= 1.2
            (*_, last) = await given.client.heard(Failed, 41)
            assert (last.number, last.code) == (99, "Draining")
        return took

    assert run(story()) < 0.6


def test_a_drain_keeps_streams_for_as_long_as_no_other_instance_takes_calls() -> None:
    async def story() -> None:
        others: list[str] = []
        async with serving(endpoint(three_and_no_more, streaming=True)) as given:
            given.client.send(1, CONTINUES="0")
            await given.client.heard(Items)

            draining = asyncio.create_task(given.instance.drain(30.0, lambda _: bool(others)))
            # A client that is silent for longer is taken for dead.
            await asyncio.sleep(0.8)
            assert given.client.all(Failed) == []
            others.append("a new one")
            (failed,) = await given.client.heard(Failed)

            assert failed.code == "Draining"
            await asyncio.wait_for(draining, 1.0)

    run(story())


def test_a_drain_gives_back_streams_that_wait_as_not_started() -> None:
    async def story() -> None:
        async with serving(
            endpoint(three_and_no_more, streaming=True, concurrency=1, queue=4)
        ) as given:
            for number in (1, 2):
                given.client.send(number, CONTINUES="0")
            await given.client.heard(Items)

            await given.instance.drain(30.0, lambda _: True)
            failed = await given.client.heard(Failed, 2)

            assert {(one.number, one.started) for one in failed} == {(1, True), (2, False)}

    run(story())


def test_what_continues_a_stream_is_taken_in_beside_a_full_queue() -> None:
    async def story() -> None:
        async with serving(
            endpoint(three_and_no_more, streaming=True, concurrency=1, queue=0)
        ) as given:
            given.client.send(1)
            given.client.send(2)
            given.client.send(3, CONTINUES="0")
            given.client.send(4, CONTINUES="7")
            refused = await given.client.heard(Failed, 2)

            assert {(one.number, one.code) for one in refused} == {
                (2, "Overloaded"),
                (3, "Overloaded"),
            }
            assert given.instance.execution.load == 2

    run(story())


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "٣", "1" * 16])
def test_what_says_no_number_of_items_is_refused(text: str) -> None:
    async def story() -> None:
        async with serving(endpoint(count, streaming=True)) as given:
            block = headers.encode({headers.FRAMES: f"1 {'0' * 32} 1 {INCARNATION}"})
            block = block[:-2] + f"{headers.CONTINUES}: {text}\r\n\r\n".encode()
            given.client.connection.publish(
                ADDRESS.at(INSTANCE), b"", reply=f"{given.client.base}.1", headers=block
            )

            reply = await given.client.reply()

            assert headers.decode(reply.headers)[headers.ERROR] == "InvalidRequest"
            assert given.instance.execution.load == 0

    run(story())


def test_a_stop_tells_every_caller_before_it_returns() -> None:
    async def story() -> None:
        async with serving(Handler(5.0).endpoint) as given:
            for number in range(3):
                given.client.send(number)
            await settle(given.client.connection)

            await given.instance.stop()
            await settle(given.client.connection)

            assert [failed.code for failed in given.client.all(Failed)] == ["Draining"] * 3
            assert given.instance.execution.load == 0

    run(story())


@pytest.mark.parametrize("turns", range(8))
def test_an_instance_that_stops_answers_questions_after_a_request_that_found_nobody(
    turns: int,
) -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            client = given.client
            stopping = asyncio.create_task(given.instance.stop())
            for _ in range(turns):
                await asyncio.sleep(0)
            number = 0
            while not client.replies:
                client.send(number := number + 1, b"a")
                await settle(client.connection)
            client.connection.publish(
                control_subject("near", "Side", INSTANCE),
                encode_batch(
                    client.base, INCARNATION, 0, [Resume(number, secret_of(number), 1, 0)]
                ),
                reply=f"{client.base}.asked",
            )

            await stopping
            await settle(client.connection)

            says = [type(frame) for frame in client.control]
            asked_nobody = client.replies[-1].subject == f"{client.base}.asked"
            assert says == [] if asked_nobody else says == [Unknown]

    run(story())


@pytest.mark.parametrize("error", [PermissionDenied("no"), Unavailable("away")])
def test_a_stop_that_the_server_does_not_confirm_ends_the_control_subject_too(
    error: DynbusError,
) -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:

            async def refuse(*, timeout: float = 5.0) -> None:
                raise error

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(given.bus.data, "barrier", refuse)
                await given.instance.stop()
            await settle(given.client.connection)
            given.client.connection.publish(
                control_subject("near", "Side", INSTANCE), b"", reply=f"{given.client.base}.1"
            )

            reply = await given.client.reply()
            assert headers.status(reply.headers) == headers.NO_RESPONDERS

    run(story())


def test_a_client_that_has_had_no_call_for_a_while_is_forgotten() -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            given.client.send(1, b"a")
            await given.client.heard(End)
            known = given.instance.control.registry.remotes
            assert list(known) == [client_key("c1", INCARNATION)]

            await given.client.say(Credit(1, secret_of(1), 1, 0, 1))
            await asyncio.sleep(40.0)

            assert known == {}

    run(story())


def test_of_a_caller_that_is_gone_it_is_said_who_it_was_and_what_became_of_its_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with serving(Handler().endpoint, endpoint(Handler(60.0), name="slow")) as given:
            given.client.send(1, b"a")
            await given.client.heard(End)
            for number in (2, 3):
                given.client.send(number, b"b", subject=f"near.Side.slow.{INSTANCE}")

            await asyncio.sleep(2 * SILENCE_LIMIT)

            assert given.instance.execution.load == 0

    with caplog.at_level(logging.INFO):
        run(story())

    (record,) = [each for each in caplog.records if "is gone" in each.message]
    assert record.levelno == logging.INFO
    assert record.message == (
        "near.Side@i1: a caller is gone, client c1; its calls that are cancelled: 2, "
        "its results dropped: 1"
    )


def test_a_caller_that_is_gone_and_left_nothing_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            given.client.send(1, b"a")
            await given.client.heard(End)
            await given.client.say(Credit(1, secret_of(1), 1, 0, 1))
            registry = given.instance.control.registry
            (remote,) = registry.remotes.values()
            await eventually(lambda: not remote.kept)

            registry.side.gone(remote)

    with caplog.at_level(logging.INFO):
        run(story())

    assert not any("is gone" in text for text in caplog.messages)


def test_a_frame_that_no_client_sends_is_counted() -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            await given.client.say(Heartbeat(1, 0.0, False, []))

            assert given.bus.drops == {DropReason.UNEXPECTED: 1}

    run(story())


def test_a_request_that_is_known_is_not_begun_again_and_is_counted() -> None:
    async def story() -> None:
        handler = Handler(1.0)
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a")
            given.client.send(1, b"while it runs")
            await given.client.heard(End)
            given.client.send(1, b"when it is over")
            await settle(given.client.connection)

            assert handler.requests == [b"a"]
            assert given.bus.drops == {DropReason.STALE: 2}

    run(story())


def test_credit_for_a_call_that_is_not_here_is_counted() -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            await given.client.say(Credit(1, secret_of(1), 1, 6, 4))

            assert given.bus.drops == {DropReason.STALE: 1}

    run(story())


@pytest.mark.parametrize("frame", [Cancel(1, b"short", 1, 0.0), Resume(1, b"short", 1, 0)])
def test_a_secret_of_the_wrong_length_is_counted_and_not_answered(frame: Frame) -> None:
    async def story() -> None:
        async with serving(Handler().endpoint) as given:
            await given.client.say(frame)

            assert given.bus.drops == {DropReason.MALFORMED: 1}
            assert given.client.control == []

    run(story())


def test_large_requests_that_wait_are_bounded_and_leave_room_to_other_clients() -> None:
    async def story() -> tuple[int, list[str], int, int]:
        gate = asyncio.Event()

        async def wait(data: bytes) -> bytes:
            await gate.wait()
            return data[:1]

        async with serving(endpoint(wait, concurrency=1), instance_window=400_000) as given:
            other = await client_of(given, "c2")
            for number in range(20):
                given.client.send(number, bytes(40_000))
            other.send(1, bytes(40_000))
            await settle(given.client.connection)
            waiting = given.instance.ledger.unread.held

            gate.set()
            await other.heard(End)
            refused = [failed.code for failed in await given.client.heard(Failed)]
            await until(lambda: given.instance.execution.load == 0)
            requests = sum(call.waiting_bytes for call in given.instance.ledger.calls())
            return waiting, refused, len(given.client.all(End)), requests

    waiting, refused, done, left = run(story())

    assert 80_000 <= waiting < 400_000
    assert set(refused) == {"Overloaded"}
    assert done + len(refused) == 20
    assert done > 1
    assert left == 0


def test_a_request_in_parts_is_not_run_by_one_of_its_number_that_is_whole() -> None:
    async def story() -> None:
        handler = Handler()
        async with serving(handler.endpoint) as given:
            given.client.send(1, b"a", PART="1/2")
            for _ in range(5):
                given.client.send(1, b"whole")
            await settle(given.client.connection)
            assert handler.requests == []

            given.client.send(1, b"b", PART="2/2")
            await given.client.heard(End)

            assert handler.requests == [b"ab"]
            assert given.bus.drops == {DropReason.STALE: 5}

    run(story())
