"""What topics promise, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from tests.conditions import PATIENCE

from dynbus import (
    Actor,
    ActorInstance,
    ConfigError,
    InvalidRequest,
    Middleware,
    MiddlewareCall,
    Overloaded,
    PayloadTooLarge,
    Runtime,
    Topic,
    context,
    handler,
    subscribe,
)
from dynbus.actors.declaring.actor import check_servable
from dynbus.actors.serving import topic_runner
from dynbus.bus.bus import Bus as Presence
from dynbus.bus.config import BusConfig
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import (
    dead_letter_stream,
    dead_letter_subject,
    group_at,
    topic_stream,
    topic_subject,
)
from dynbus.bus.topics import forget_group, topic_config
from dynbus.bus.transport import Message, PullConsumerConfig
from dynbus.bus.work_queue import DeadLetter, DeadLetters

from .conftest import Bus, eventually

pytestmark = pytest.mark.anyio


class Numbered(msgspec.Struct):
    number: int


class Closed(Numbered):
    fails: int = 0


class Hall:
    """Processes on the bus under test, and what their actors have heard.

    Attributes:
        heard: by each name, the numbers of its events in the order of their begin.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.namespace = f"n{secrets.token_hex(6)}"
        self.heard: dict[str, list[int]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.runtimes: list[Runtime] = []
        self.topics: list[Topic[Any]] = []

    def topic(self, name: str = "conversation.closed", **options: Any) -> Topic[Closed]:
        topic = Topic(name, Closed, namespace=self.namespace, **options)
        self.topics.append(topic)
        return topic

    async def runtime(self) -> Runtime:
        runtime = await Runtime.over(
            await Presence.over(BusConfig(), await self.bus.connect(), await self.bus.connect())
        )
        self.runtimes.append(runtime)
        return runtime

    def member(self, topic: Topic[Closed], name: str, **options: Any) -> type[Actor]:
        hall = self

        class Member(Actor, namespace=self.namespace, component=name):
            @subscribe(topic, **options)
            async def on_closed(self, event: Closed) -> None:
                hall.heard.setdefault(name, []).append(event.number)
                if context().attempt <= event.fails:
                    raise LookupError(f"no books in try {context().attempt}")
                await hall.gate.wait()

        return Member

    async def start(self, kind: type[Actor]) -> ActorInstance:
        return await (await self.runtime()).start(kind)

    async def hear(self, name: str, count: int) -> list[int]:
        await eventually(lambda: len(self.heard.get(name, [])) >= count)
        return self.heard[name]


@pytest.fixture
async def hall(bus: Bus) -> AsyncIterator[Hall]:
    made = Hall(bus)
    yield made
    made.gate.set()
    js = (await made.runtime()).bus.data.jetstream
    for topic in made.topics:
        await js.delete_stream(topic_stream(made.namespace, topic.name))
    await js.delete_stream(dead_letter_stream(made.namespace))
    for runtime in made.runtimes[::-1]:
        await runtime.close()


async def test_an_event_under_the_key_of_an_earlier_one_is_left_out(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Every"))
    runtime = await hall.runtime()

    for number, key in ((1, "a"), (2, "a"), (3, "b")):
        await closed.publish(Closed(number), idempotency_key=key, runtime=runtime)

    assert await hall.hear("Every", 2) == [1, 3]
    with pytest.raises(ConfigError, match="idempotency_key='' names no event"):
        await closed.publish(Closed(4), idempotency_key="", runtime=runtime)


async def test_instances_and_each_of_two_groups_hear_an_event_once(hall: Hall) -> None:
    closed = hall.topic()
    every = hall.member(closed, "Every")
    billing = hall.member(closed, "Billing", group="billing")
    search = hall.member(closed, "Search", group="search")
    for kind in (every, every, billing, billing, search):
        await hall.start(kind)
    runtime = await hall.runtime()

    for number in range(20):
        await closed.publish(Closed(number), key=f"c{number % 3}", runtime=runtime)

    assert sorted(await hall.hear("Every", 40)) == sorted([*range(20), *range(20)])
    assert sorted(await hall.hear("Billing", 20)) == list(range(20))
    assert sorted(await hall.hear("Search", 20)) == list(range(20))


async def test_an_actor_publishes_where_it_runs(hall: Hall) -> None:
    closed = hall.topic()

    class Desk(Actor, namespace=hall.namespace):
        @handler
        async def close(self, number: int) -> None:
            await closed.publish(Closed(number))

    await hall.start(Desk)
    await hall.start(hall.member(closed, "Billing", group="billing"))
    runtime = await hall.runtime()
    await runtime.client(Desk).close(7)

    assert await hall.hear("Billing", 1) == [7]


async def test_without_retention_those_hear_it_who_listen(hall: Hall) -> None:
    tick = hall.topic("tick", retain=None)
    runtime = await hall.runtime()
    await tick.publish(Closed(1), runtime=runtime)
    await hall.start(hall.member(tick, "Every"))
    await tick.publish(Closed(2), runtime=runtime)

    assert await hall.hear("Every", 1) == [2]
    assert not await runtime.bus.data.jetstream.has_stream(topic_config(tick.config()))


async def test_an_instance_that_falls_behind_misses_events_and_says_how_many(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topic_runner, "MOST_WAITING", 2)
    closed = hall.topic()
    runtime = await hall.runtime()
    await runtime.start(hall.member(closed, "Slow"))
    hall.gate.clear()
    await closed.publish(Closed(1), runtime=runtime)
    await hall.hear("Slow", 1)
    for number in (2, 3, 4, 5):
        await closed.publish(Closed(number), runtime=runtime)
    await eventually(lambda: "is 2 events behind" in caplog.text)
    hall.gate.set()
    await eventually(lambda: "has caught up, and missed" in caplog.text)
    await closed.publish(Closed(6), runtime=runtime)
    await eventually(lambda: 6 in hall.heard["Slow"])

    heard = hall.heard["Slow"]
    [missed] = re.findall("missed ([0-9]+) events", caplog.text)
    # The server may have handed out event 5 only after the gate was opened.
    assert heard in ([1, 2, 3, 6], [1, 2, 3, 5, 6])
    assert int(missed) == 6 - len(heard)


async def test_a_group_keeps_its_place_while_nobody_of_it_runs(hall: Hall) -> None:
    closed = hall.topic()
    billing = hall.member(closed, "Billing", group="billing")
    first = await hall.start(billing)
    runtime = await hall.runtime()
    await closed.publish(Closed(1), runtime=runtime)
    await hall.hear("Billing", 1)
    await first.stop()
    await closed.publish(Closed(2), runtime=runtime)

    await hall.start(billing)

    assert await hall.hear("Billing", 2) == [1, 2]


@pytest.mark.parametrize(("start", "wanted"), [("all", [1, 2, 3]), ("new", [3]), ("time", [2, 3])])
async def test_a_new_group_begins_where_it_says(hall: Hall, start: str, wanted: list[int]) -> None:
    closed = hall.topic()
    runtime = await hall.runtime()
    await closed.publish(Closed(1), runtime=runtime)
    js = runtime.bus.data.jetstream
    await asyncio.sleep(0.01)  # their times are told apart
    await closed.publish(Closed(2), runtime=runtime)
    stored = await js.read(closed.config().stream)
    from_ = datetime.fromtimestamp(stored[1].time, UTC) if start == "time" else start
    await hall.start(hall.member(closed, "Late", group="late", from_=from_, ordered=True))
    await closed.publish(Closed(3), runtime=runtime)

    await eventually(lambda: hall.heard.get("Late", [])[-1:] == [3])
    assert hall.heard["Late"] == wanted


async def test_an_event_that_fails_is_tried_again_and_at_last_a_dead_letter(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Billing", group="billing", tries=3, backoff=0.01))
    await hall.start(hall.member(closed, "Search", group="search", backoff=0.01))
    runtime = await hall.runtime()
    letters = DeadLetters(runtime.bus.data.jetstream, hall.namespace)
    await closed.publish(Closed(1, fails=2), runtime=runtime)
    assert await hall.hear("Billing", 3) == [1, 1, 1]
    assert await hall.hear("Search", 3) == [1, 1, 1]
    assert await letters.find() == []

    hall.heard.clear()
    await closed.publish(Closed(2, fails=3), runtime=runtime)
    letter = await first_letter(letters, "Billing")
    assert "no books in try 3" in letter.error
    assert await hall.hear("Search", 4) == [2, 2, 2, 2]
    hall.heard.clear()

    # It goes to its group again, and to no other.
    await letters.redrive(letter)
    await closed.publish(Closed(3), runtime=runtime)
    assert (await hall.hear("Billing", 4)).count(2) == 3
    assert await hall.hear("Search", 1) == [3]


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_forged_letter_gives_its_event_to_no_group_of_another_handler(
    hall: Hall, ordered: bool
) -> None:
    closed = hall.topic()
    options: dict[str, Any] = {"group": "billing", "ordered": ordered, "tries": 1}
    await hall.start(hall.member(closed, "Billing", **options))
    runtime = await hall.runtime()
    jetstream = runtime.bus.data.jetstream
    letters = DeadLetters(jetstream, hall.namespace)
    await closed.publish(Closed(1, fails=1), runtime=runtime)
    letter = await first_letter(letters, "Billing")
    # Who takes jobs of another component writes its letters as it likes.
    fields = {headers.JOB: "forged", headers.DEAD_GROUP: letter.group}
    forged_at = dead_letter_subject(hall.namespace, "Other", "take", "0" * 16)
    await jetstream.publish(forged_at, letter.data, headers=fields)
    forged = await first_letter(letters, "Other")
    # It makes a consumer, too, which is called as one of the group would be.
    at = group_at(letter.group)
    assert at is not None
    beside = at.group if ordered else f"{at.group}+{at.lane}"
    consumer = PullConsumerConfig(beside, description=str(forged.queue))
    await jetstream.ensure_pull_consumer(topic_stream(at.namespace, at.topic), consumer)

    for one in (forged, letter):
        with pytest.raises(ConfigError, match=r"delete the one that is none of the group's"):
            await letters.redrive(one)
    await jetstream.delete_consumer(topic_stream(at.namespace, at.topic), beside)
    with pytest.raises(ConfigError, match="is not in the group that it names"):
        await letters.redrive(forged)
    await letters.redrive(letter)

    assert await hall.hear("Billing", 2) == [1, 1]
    assert [one.letter_id for one in await letters.find("Other")] == ["0" * 16]


async def test_an_ordered_group_has_the_events_of_a_key_one_at_a_time_in_their_order(
    hall: Hall,
) -> None:
    closed = hall.topic()
    kind = hall.member(closed, "Billing", group="billing", ordered=True, backoff=0.01)
    await hall.start(kind)
    await hall.start(kind)
    runtime = await hall.runtime()
    await closed.publish(Closed(0, fails=1), key="a", runtime=runtime)
    for number in range(1, 30):
        await closed.publish(Closed(number), key="ab"[number % 2], runtime=runtime)

    heard = await hall.hear("Billing", 31)
    assert [one for one in heard if one % 2 == 0] == [0, *range(0, 30, 2)]
    assert [one for one in heard if one % 2] == [*range(1, 30, 2)]


async def test_the_keys_of_an_ordered_group_do_not_wait_for_one_another(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Billing", group="billing", ordered=True))
    runtime = await hall.runtime()
    hall.gate.clear()
    for number, key in enumerate(["a", "a", "b", "c", "b"]):
        await closed.publish(Closed(number), key=key, runtime=runtime)
    assert sorted(await hall.hear("Billing", 3)) == [0, 2, 3]

    hall.gate.set()
    assert sorted(await hall.hear("Billing", 5)) == [*range(5)]


async def test_without_keys_an_ordered_group_has_the_order_of_the_topic(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Billing", group="billing", ordered=True))
    runtime = await hall.runtime()
    for number in range(10):
        await closed.publish(Closed(number), runtime=runtime)

    assert await hall.hear("Billing", 10) == [*range(10)]


async def test_a_dead_letter_of_an_ordered_group_goes_to_it_again(hall: Hall) -> None:
    closed = hall.topic("a.b.c")
    options: dict[str, Any] = {"group": "billing", "ordered": True, "tries": 1}
    await hall.start(hall.member(closed, "Billing", **options))
    await hall.start(hall.member(closed, "Search", group="search"))
    runtime = await hall.runtime()
    await closed.publish(Closed(1, fails=1), key="k", runtime=runtime)
    letters = DeadLetters(runtime.bus.data.jetstream, hall.namespace)
    letter = await first_letter(letters, "Billing")
    await hall.hear("Search", 2)

    await letters.redrive(letter)

    assert await hall.hear("Billing", 2) == [1, 1]
    assert hall.heard["Search"] == [1, 1]


async def test_a_group_that_is_to_be_ordered_from_now_on_is_refused_with_the_remedy(
    hall: Hall,
) -> None:
    closed = hall.topic()
    first = await hall.start(hall.member(closed, "Billing", group="billing"))
    await first.stop()
    ordered = hall.member(closed, "Billing", group="billing", ordered=True)
    with pytest.raises(ConfigError, match=r"without ordered=True.*dynbus topic forget .* billing"):
        await hall.start(ordered)

    js = (await hall.runtime()).bus.data.jetstream
    await forget_group(js, closed.config(), "billing")
    await hall.start(ordered)
    with pytest.raises(ConfigError, match="with ordered=True"):
        await hall.start(hall.member(closed, "Billing", group="billing"))


async def first_letter(letters: DeadLetters, component: str) -> DeadLetter:
    async with asyncio.timeout(PATIENCE):
        while not (found := await letters.find(component)):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    return found[0]


async def test_events_pass_the_middleware_of_their_actor(hall: Hall) -> None:
    passed: list[str] = []

    class Noting(Middleware):
        async def around(self, call: MiddlewareCall, proceed: Callable[[], Awaitable[Any]]) -> Any:
            passed.append(f"{call.kind} {call.endpoint.endpoint} {call.request.number}")
            return await proceed()

    closed = hall.topic()
    for name, options in (("Every", {}), ("Billing", {"group": "billing"})):
        kind = hall.member(closed, name, **options)
        kind.middleware = (Noting(),)
        await hall.start(kind)
    await closed.publish(Closed(7), runtime=await hall.runtime())

    await hall.hear("Every", 1)
    await hall.hear("Billing", 1)
    assert passed == ["event on_closed 7"] * 2


async def test_plain_clients_publish_and_read_plain_json(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Billing", group="billing"))
    plain = await hall.bus.connect()
    read: list[Message] = []
    plain.subscribe(topic_subject(hall.namespace, closed.name), read.append)
    await plain.barrier()
    plain.publish(topic_subject(hall.namespace, closed.name, "c1"), b'{"number": 7}')
    assert await hall.hear("Billing", 1) == [7]
    await closed.publish(Closed(8), runtime=await hall.runtime())

    await eventually(lambda: len(read) == 2)
    assert msgspec.json.decode(read[1].data) == {"number": 8, "fails": 0}


async def test_what_is_no_event_is_a_dead_letter(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Billing", group="billing"))
    plain = await hall.bus.connect()
    plain.publish(topic_subject(hall.namespace, closed.name, "c1"), b'{"number": "seven"}')
    letters = DeadLetters(plain.jetstream, hall.namespace)
    letter = await first_letter(letters, "Billing")

    assert letter.tries == 1
    assert "number" in letter.error


async def test_a_full_topic_refuses_and_keeps_what_it_has(hall: Hall) -> None:
    closed = hall.topic(max_bytes=2000)
    runtime = await hall.runtime()

    async def fill() -> None:
        for number in range(100):
            await closed.publish(Closed(number), runtime=runtime)

    with pytest.raises(Overloaded) as refused:
        await fill()
    assert refused.value.retry_after is not None
    stored = await runtime.bus.data.jetstream.read(closed.config().stream)
    assert msgspec.json.decode(stored[0].data, type=Closed).number == 0


async def test_a_group_that_another_method_has_is_refused(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Billing", group="billing"))
    with pytest.raises(ConfigError, match=r"that of .*Billing\.on_closed, and .* claims it too"):
        await hall.start(hall.member(closed, "Other", group="billing"))


class Renamed(msgspec.Struct):
    name: str


class Grown(msgspec.Struct):
    number: int
    fails: int = 0
    note: str = ""


async def test_events_of_another_type_are_refused_and_of_a_grown_one_taken(hall: Hall) -> None:
    closed = hall.topic()
    runtime = await hall.runtime()
    await closed.publish(Closed(1), runtime=runtime)

    renamed = Topic(closed.name, Renamed, namespace=hall.namespace)
    with pytest.raises(ConfigError, match="has events of another type"):
        await renamed.publish(Renamed("x"), runtime=runtime)
    grown = Topic(closed.name, Grown, namespace=hall.namespace)
    await grown.publish(Grown(2), runtime=runtime)


async def test_bad_events_are_refused_where_they_enter(hall: Hall) -> None:
    closed = hall.topic()
    text = Topic("texts", str, namespace=hall.namespace)
    hall.topics.append(text)
    runtime = await hall.runtime()
    bad: Any = "no event"
    with pytest.raises(InvalidRequest, match="an event of conversation.closed"):
        await closed.publish(bad, runtime=runtime)
    with pytest.raises(InvalidRequest, match="128 characters"):
        await closed.publish(Closed(1), key="k" * 129, runtime=runtime)
    with pytest.raises(PayloadTooLarge, match="an event of"):
        await text.publish("x" * runtime.bus.data.max_payload, runtime=runtime)
    with pytest.raises(ConfigError, match="publish\\(event, runtime=runtime\\)"):
        await closed.publish(Closed(1))


async def test_a_publisher_that_is_cancelled_reaches_all_or_nobody(hall: Hall) -> None:
    closed = hall.topic()
    await hall.start(hall.member(closed, "Every"))
    await hall.start(hall.member(closed, "Billing", group="billing"))
    runtime = await hall.runtime()
    for number in range(20):
        publishing = asyncio.create_task(closed.publish(Closed(number), runtime=runtime))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait([publishing])
    await closed.publish(Closed(100), runtime=runtime)

    await eventually(lambda: all(100 in hall.heard.get(one, []) for one in ("Every", "Billing")))
    stored = await runtime.bus.data.jetstream.read(closed.config().stream)
    numbers = [msgspec.json.decode(one.data, type=Closed).number for one in stored]
    await eventually(lambda: len(hall.heard["Billing"]) >= len(numbers))
    assert sorted(hall.heard["Every"]) == sorted(hall.heard["Billing"]) == sorted(numbers)


async def test_the_events_of_a_member_that_drains_go_to_another(hall: Hall) -> None:
    closed = hall.topic()
    kind = hall.member(closed, "Billing", group="billing", concurrency=1)
    first = await hall.start(kind)
    runtime = await hall.runtime()
    hall.gate.clear()
    await closed.publish(Closed(1), runtime=runtime)
    await hall.hear("Billing", 1)
    await hall.start(kind)

    await first.stop(grace=0.0)

    assert await hall.hear("Billing", 2) == [1, 1]


async def test_the_events_of_a_member_that_is_killed_go_to_another(hall: Hall) -> None:
    closed = hall.topic()
    kind = hall.member(closed, "Billing", group="billing", ack_wait=1.0)
    first = await hall.start(kind)
    runtime = await hall.runtime()
    hall.gate.clear()
    await closed.publish(Closed(1), runtime=runtime)
    await hall.hear("Billing", 1)
    await hall.start(kind)

    # As kill -9 does: nothing is given back.
    await first.runtime.bus.data.close()
    await first.runtime.bus.lane.connection.close()

    assert await hall.hear("Billing", 2) == [1, 1]


async def test_groups_go_on_after_a_restart_of_the_server(own_hall: Hall) -> None:
    hall = own_hall
    closed = hall.topic()
    await hall.start(hall.member(closed, "Every"))
    await hall.start(hall.member(closed, "Billing", group="billing"))
    runtime = await hall.runtime()
    await closed.publish(Closed(1), runtime=runtime)
    await hall.hear("Billing", 1)
    await hall.hear("Every", 1)

    await hall.bus.restart_server()
    await eventually(lambda: runtime.bus.data.is_connected)
    await closed.publish(Closed(2), runtime=runtime)

    assert 2 in await hall.hear("Billing", 2)
    assert await hall.hear("Every", 2) == [1, 2]


@pytest.fixture
async def own_hall(own_bus: Bus) -> AsyncIterator[Hall]:
    made = Hall(own_bus)
    yield made
    for runtime in made.runtimes[::-1]:
        await runtime.close()


def test_what_is_declared_is_checked() -> None:
    closed = Topic("conversation.closed", Closed)
    tick = Topic("tick", Closed, retain=None)

    def declared(**options: Any) -> Callable[[], object]:
        def make() -> object:
            @subscribe(closed, **options)
            async def hear(self: object, event: Closed) -> None: ...

            return hear

        return make

    for bad, text in (
        (lambda: Topic("conversation..closed", Closed), "is not a valid name"),
        (lambda: Topic("x", Closed, retain="soon"), "retain"),
        (lambda: Topic("x", Closed, retain=0.5), "less than a second"),
        (declared(ordered=True), "are for a group"),
        (declared(group="a b"), "not a valid name"),
        (declared(group="a", from_="old"), 'give "new", "all" or a datetime'),
        (declared(group="a", from_=datetime(2027, 1, 1)), "no time zone"),
        (lambda: subscribe(tick, group="a")(declared()()), "retains nothing"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=text):
            bad()


def hearing(type_of_event: Any) -> Any:
    async def hear(self: object, event: object) -> None: ...

    hear.__annotations__["event"] = type_of_event
    return hear


def test_a_method_that_reads_no_event_of_its_topic_is_refused() -> None:
    closed = Topic("conversation.closed", Closed)

    for wrong in (int, list[Closed], int | None):
        with pytest.raises(ConfigError, match="write `event: Closed`"):
            subscribe(closed)(hearing(wrong))
    for reading in (Closed, Numbered, Closed | int, Any, dict[str, Any], msgspec.Raw):
        subscribe(closed)(hearing(reading))


def test_a_type_of_events_that_is_defined_later_is_checked_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = Topic("conversation.closed", Closed)

    class Hearing(Actor, namespace="n"):
        hear = subscribe(closed)(hearing("Later"))

    monkeypatch.setitem(globals(), "Later", int)

    with pytest.raises(ConfigError, match="write `event: Closed`"):
        check_servable(Hearing)


def test_two_methods_of_a_class_cannot_claim_a_group() -> None:
    closed = Topic("conversation.closed", Closed)
    with pytest.raises(ConfigError, match="one and two claim the group 'billing'"):

        class Twice(Actor, namespace="n"):  # pyright: ignore[reportUnusedClass]
            @subscribe(closed, group="billing")
            async def one(self, event: Closed) -> None: ...

            @subscribe(closed, group="billing")
            async def two(self, event: Closed) -> None: ...
