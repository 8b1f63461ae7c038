"""Streams that go on at another instance when their own is lost: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from tests.conditions import eventually
from tests.story import on_a_kit

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    DynbusError,
    HandlerError,
    Migrate,
    ResumeMismatch,
    Route,
    RouteRequest,
    StreamLost,
    call_options,
    handler,
)
from dynbus.actors.calling import continuation
from dynbus.actors.calling.relay import Arrival, Relay
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import cancel_subject
from dynbus.bus.records.instance_view import Instance
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.testing import TestKit, run

NUMBERS = list(range(10))


class Count(BaseModel):
    """What to count, a number in each second.

    Attributes:
        then: what the first of the instances does at 3: `migrate`, `leave`, `drain` or `fail`.
        seed: added to each number by the second one.
    """

    start: int = 0
    end: int = 10
    then: str = ""
    seed: int = 0


class Counter(Actor, namespace="resumed"):
    def __init__(self) -> None:
        self.sent: list[int] = []

    async def _numbers(self, request: Count) -> AsyncGenerator[int, None]:
        for number in range(request.start, request.end):
            if number == 3 and self.instance_id == "a":
                self._act(request.then)
            self.sent.append(number)
            yield number + (request.seed if self.instance_id == "b" else 0)
            await asyncio.sleep(1.0)

    def _act(self, then: str) -> None:
        match then:
            case "migrate":
                raise Migrate("not here")
            case "leave":
                raise GeneratorExit
            case "drain":
                raise Draining("I go")
            case "fail":
                raise ValueError("no")
            case _:
                pass

    @handler(resume="go_on")
    async def count(self, request: Count) -> AsyncGenerator[int, None]:
        async for number in self._numbers(request):
            yield number

    @classmethod
    def go_on(cls, request: Count, items: list[int]) -> Count | None:
        left = request.model_copy(update={"start": request.start + len(items)})
        return left if left.start < left.end else None

    @handler(resume="replay")
    async def again(self, request: Count) -> AsyncGenerator[int, None]:
        async for number in self._numbers(request):
            yield number

    @handler(resume="replay")
    async def late(self, request: Count) -> AsyncGenerator[int, None]:
        await asyncio.sleep(5.0)
        async for number in self._numbers(request):
            yield number

    @handler
    async def once(self, request: Count) -> AsyncGenerator[int, None]:
        async for number in self._numbers(request):
            yield number

    @handler(resume="wrong")
    async def wrongly(self, request: Count) -> AsyncGenerator[int, None]:
        async for number in self._numbers(request):
            yield number

    @staticmethod
    def wrong(request: Count, items: list[int]) -> Any:
        return "no request" if items == [0, 1, 2, 3] else Count.model_validate({"end": "x"})

    @handler(resume="replay", migration_limit=1)
    async def hand_round(self) -> AsyncGenerator[str, None]:
        yield "first"
        raise Migrate("not here")

    @handler
    async def returned(self) -> AsyncGenerator[str, None]:
        yield "first"
        raise Migrate("not here")

    @handler
    async def drained(self) -> None:
        raise Draining("I go")

    @handler(resume="replay", concurrency=1, queue=0)
    async def alone(self, request: Count) -> AsyncGenerator[int, None]:
        async for number in self._numbers(request):
            yield number

    @handler
    async def continues(self, request: Count) -> str:
        return "unary"


class Above(Actor, namespace="resumed"):
    """Calls a `Counter`, and goes on elsewhere itself."""

    def __init__(self) -> None:
        self.begun = 0

    async def on_start(self) -> None:
        self.counter = self.runtime.client(Counter)

    @handler(resume="replay")
    async def of(self, endpoint: str) -> AsyncGenerator[Any, None]:
        self.begun += 1
        yield "above"
        if endpoint == "drained":
            await self.counter.drained()
            return
        stream = self.counter.hand_round() if endpoint == "hand_round" else self.counter.returned()
        async for item in stream:
            yield item


class First:
    """Prefers the instances in the order of their ids, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ends: list[str] = []

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        self.asked.append((request.request, [instance.id for instance in instances]))
        return Route(min(instance.id for instance in instances), self)

    def started(self) -> None: ...

    def first_item(self) -> None: ...

    def ended(self, error: DynbusError | None) -> None:
        self.ends.append(error.code if error else "well")


async def started(kit: TestKit, names: str = "abc", routing: Any = None) -> Counter:
    for name in names:
        await kit.start(Counter, instance_id=name)
    return kit.client(Counter, routing=routing or First())


async def kill(kit: TestKit, name: str) -> None:
    await kit.kill(kit.started[name])


async def freeze(kit: TestKit, name: str) -> None:
    """Nothing comes of an instance for 3 s; then all that it had to say."""
    cut_off(kit, kit.started[name].actor.runtime.bus)


def cut_off(kit: TestKit, bus: Bus) -> None:
    cut = kit.bus.partition(bus.data, bus.lane.connection, notice_after=60.0)  # type: ignore[arg-type]
    asyncio.get_running_loop().call_later(3.0, cut.heal)


async def drain(kit: TestKit, name: str) -> None:
    kit.leaving = asyncio.ensure_future(kit.started[name].stop())  # type: ignore[attr-defined]
    await asyncio.sleep(0)


def endpoint_of(kit: TestKit, name: str) -> Any:
    return kit.caller.endpoint(f"resumed.Counter.{name}")


# However an instance goes ------------------------------------------------------------------

Read = Callable[[AsyncIterable[int], Callable[[int], Awaitable[None]]], Awaitable[list[int]]]


async def by_itself(stream: AsyncIterable[int], see: Callable[[int], Awaitable[None]]) -> list[int]:
    found: list[int] = []
    async for number in stream:
        found.append(number)
        await see(number)
    return found


async def relayed(stream: AsyncIterable[int], see: Callable[[int], Awaitable[None]]) -> list[int]:
    found: list[int] = []
    seeing: list[asyncio.Future[None]] = []

    def deliver(arrivals: list[Arrival[str, int]]) -> None:
        for arrival in arrivals:
            found.extend(arrival.items)
            seeing.extend(asyncio.ensure_future(see(number)) for number in arrival.items)

    with Relay(deliver) as relay:
        await (await relay.open(stream, "it")).ended()
    await asyncio.gather(*seeing)
    return found


@pytest.mark.parametrize("read", [by_itself, relayed])
@pytest.mark.parametrize("kind", ["count", "again"])
@pytest.mark.parametrize("lose", [kill, freeze, drain])
def test_a_stream_goes_on_elsewhere_when_its_instance_is_lost(
    lose: Callable[[TestKit, str], Awaitable[None]], kind: str, read: Read
) -> None:
    async def story(kit: TestKit) -> tuple[list[int], float]:
        client = await started(kit)

        async def see(number: int) -> None:
            if number in (3, 6):
                await lose(kit, "a" if number == 3 else "b")

        begun = monotonic()
        found = await read(getattr(client, kind)(Count()), see)
        return found, monotonic() - begun

    found, took = on_a_kit(story)

    assert found == NUMBERS
    # Ten seconds of counting, what is counted twice, and at most 1.5 s for each loss.
    assert took < 10.0 + 3.0 + (11.0 if kind == "again" else 0.0)


@pytest.mark.parametrize("read", [by_itself, relayed])
@pytest.mark.parametrize("kind", ["count", "again"])
@pytest.mark.parametrize("then", ["migrate", "leave", "drain"])
def test_a_stream_goes_on_elsewhere_when_its_handler_says_so(
    then: str, kind: str, read: Read
) -> None:
    async def story(kit: TestKit) -> tuple[list[int], list[int]]:
        client = await started(kit, "ab")

        async def see(number: int) -> None: ...

        found = await read(getattr(client, kind)(Count(then=then)), see)
        second: Any = kit.started["b"].actor
        return found, second.sent

    found, sent = on_a_kit(story)

    assert found == NUMBERS
    assert sent == (NUMBERS[3:] if kind == "count" else NUMBERS)


@pytest.mark.parametrize("read", [by_itself, relayed])
@pytest.mark.parametrize("kind", ["count", "again", "late"])
def test_a_stream_goes_on_elsewhere_when_its_caller_was_cut_off_and_its_instance_keeps_nothing(
    kind: str, read: Read
) -> None:
    async def story(kit: TestKit) -> tuple[list[int], list[int]]:
        client = await started(kit, "ab")
        bus: Any = kit.caller.bus

        async def cut() -> None:
            await asyncio.sleep(2.5)
            # What the instance says when it gives its caller up is lost with the link.
            with kit.bus.partition(bus.data, bus.lane.connection, notice_after=1.0):
                await asyncio.sleep(10.0)

        async def see(number: int) -> None: ...

        cutting = asyncio.ensure_future(cut())
        found = await read(getattr(client, kind)(Count(end=20)), see)
        await cutting
        second: Any = kit.started["b"].actor
        return found, second.sent

    found, sent = on_a_kit(story)

    assert found == list(range(20))
    assert sent, "it went on where it was"


def test_what_an_instance_says_that_was_given_up_reaches_nobody() -> None:
    async def story(kit: TestKit) -> tuple[list[int], list[int]]:
        client = await started(kit, "ab")

        async def see(number: int) -> None:
            if number == 2:
                await freeze(kit, "a")

        found = await by_itself(client.count(Count(end=20, seed=100)), see)
        zombie: Any = kit.started["a"].actor
        return found, zombie.sent

    found, sent = on_a_kit(story)

    assert found == [0, 1, 2, *range(103, 120)]
    assert sent[3:], "it said no more"
    assert len(sent) < 10, "it was not told to stop"


@pytest.mark.parametrize("raw", [False, True])
def test_an_untyped_stream_goes_on_as_its_client_says(raw: bool) -> None:
    def go_on(request: Any, items: list[Any]) -> Any:
        return {**request, "start": len(items)}

    async def story(kit: TestKit) -> list[Any]:
        await started(kit, "ab")
        client = await endpoint_of(kit, "count").client(resume=go_on, routing=First())
        call = client.generate({"then": "migrate"})
        return [item async for item in (call.raw() if raw else call)]

    assert on_a_kit(story) == ([str(n).encode() for n in NUMBERS] if raw else NUMBERS)


def test_an_untyped_stream_is_replayed_where_its_client_says_so() -> None:
    async def story(kit: TestKit) -> tuple[list[Any], str]:
        await started(kit, "ab")
        client = await endpoint_of(kit, "count").client(resume="replay", routing=First())
        unary = await endpoint_of(kit, "continues").client(resume="replay")
        found = [item async for item in client.generate({"then": "migrate"})]
        return found, await unary.generate({})

    assert on_a_kit(story) == (NUMBERS, "unary")


def _forget(request: Any) -> Any:
    return request


def _start_at(request: Any, items: list[Any]) -> Any:
    return {**request, "start": len(items)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume": "again"}, 'must be "replay", or a function of the request'),
        ({"resume": _forget}, "it must take the request and the accepted items"),
        ({"migration_limit": -1}, "migration_limit=-1 must be 0 or more"),
    ],
)
def test_an_untyped_client_is_refused_what_no_stream_goes_on_by(
    options: dict[str, Any], text: str
) -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match="client of resumed.Counter.count: .*" + text):
            await endpoint_of(kit, "count").client(**options)

    on_a_kit(story)


# Where it goes -----------------------------------------------------------------------------


def test_each_attempt_is_routed_anew_with_its_own_request_and_without_who_was_tried() -> None:
    router = First()

    async def story(kit: TestKit) -> None:
        client = await started(kit, routing=router)
        stream = client.count(Count(end=5, then="migrate"))
        assert [number async for number in stream] == NUMBERS[:5]

    on_a_kit(story)

    assert router.asked == [
        (Count(end=5, then="migrate"), ["a", "b", "c"]),
        (Count(start=3, end=5, then="migrate"), ["b", "c"]),
    ]
    assert router.ends == ["Migrate", "well"]


def test_a_stream_that_is_routed_as_something_else_still_is_when_it_goes_on() -> None:
    router = First()

    async def story(kit: TestKit) -> None:
        await started(kit, routing=router)
        client = await endpoint_of(kit, "count").client(resume=_start_at, routing=router)
        call = client.generate({"then": "migrate"}, routed_as=[1, 2, 3])
        assert [number async for number in call] == NUMBERS

    on_a_kit(story)

    assert [request for request, _ in router.asked] == [[1, 2, 3]] * 2


def test_the_only_instance_is_waited_for_until_it_is_back() -> None:
    async def story(kit: TestKit) -> list[int]:
        client = await started(kit, "a")
        found: list[int] = []
        async for number in client.count(Count()):
            found.append(number)
            if number == 3:
                await kill(kit, "a")
                asyncio.get_running_loop().call_later(
                    8.0, lambda: asyncio.ensure_future(kit.start(Counter, instance_id="b"))
                )
        return found

    assert on_a_kit(story) == NUMBERS


@pytest.mark.parametrize("kind", ["count", "again"])
@pytest.mark.parametrize("frozen", ["instance", "caller"])
def test_the_only_instance_has_its_stream_again_when_it_or_its_caller_only_stood_still(
    frozen: str, kind: str
) -> None:
    async def story(kit: TestKit) -> list[int]:
        client = await started(kit, "a")

        async def see(number: int) -> None:
            if number == 3:
                of = kit.started["a"].actor.runtime if frozen == "instance" else kit.caller
                cut_off(kit, of.bus)

        return await by_itself(getattr(client, kind)(Count()), see)

    assert on_a_kit(story) == NUMBERS


def test_an_instance_that_was_started_anew_under_its_name_is_another_one() -> None:
    async def replace(kit: TestKit) -> None:
        await kit.started["a"].stop()
        await kit.start(Counter, instance_id="a")

    async def story(kit: TestKit) -> list[int]:
        client = await started(kit, "a")
        found: list[int] = []
        replacing: list[asyncio.Future[None]] = []
        async for number in client.count(Count()):
            found.append(number)
            if number == 3:
                replacing.append(asyncio.ensure_future(replace(kit)))
        await asyncio.gather(*replacing)
        return found

    assert on_a_kit(story) == NUMBERS


def test_a_full_instance_is_asked_again_while_a_stream_that_goes_on_may_wait() -> None:
    async def story(kit: TestKit) -> list[int]:
        client = await started(kit, "ab")
        with call_options(instance="b"):
            busy = asyncio.ensure_future(by_itself(client.alone(Count(end=5)), _look_away))
            await asyncio.sleep(0.1)
        found = await by_itself(client.alone(Count(then="migrate")), _look_away)
        await busy
        return found

    assert on_a_kit(story) == NUMBERS


async def _look_away(number: int) -> None: ...


# Where it cannot go on ---------------------------------------------------------------------


async def failure_of(stream: AsyncIterable[Any], *, relay: bool = False) -> tuple[int, DynbusError]:
    """How many items came, and what ended the stream."""
    found: list[Any] = []

    async def see(number: int) -> None:
        found.append(number)

    with pytest.raises(DynbusError) as caught:
        await (relayed if relay else by_itself)(stream, see)
    await asyncio.sleep(0)
    return len(found), caught.value


@pytest.mark.parametrize("relay", [False, True])
def test_without_resume_a_stream_that_is_lost_ends_so(relay: bool) -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError]:
        client = await started(kit)
        asyncio.get_running_loop().call_later(2.5, lambda: asyncio.ensure_future(kill(kit, "a")))
        return await failure_of(client.once(Count()), relay=relay)

    count, error = on_a_kit(story)

    assert (count, type(error)) == (3, StreamLost)
    assert error.message == (
        "the instance is gone; the stream cannot go on: its caller knows no resume"
    )
    assert not error.retryable


def test_a_stream_that_was_lost_before_its_first_item_may_be_asked_for_again() -> None:
    class Silent(Actor, namespace="resumed"):
        @handler
        async def wait(self) -> AsyncGenerator[int, None]:
            await asyncio.sleep(20.0)
            yield 1

    async def story(kit: TestKit) -> DynbusError:
        await kit.start(Silent, instance_id="a")
        asyncio.get_running_loop().call_later(2.5, lambda: asyncio.ensure_future(kill(kit, "a")))
        return (await failure_of(kit.client(Silent).wait()))[1]

    error = on_a_kit(story)

    assert isinstance(error, StreamLost)
    assert error.retryable


@pytest.mark.parametrize("relay", [False, True])
def test_a_replay_that_differs_ends_the_stream_before_anything_of_it_is_shown(relay: bool) -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError, list[int]]:
        client = await started(kit, "ab")
        count, error = await failure_of(client.again(Count(then="migrate", seed=1)), relay=relay)
        await asyncio.sleep(3.0)
        second: Any = kit.started["b"].actor
        return count, error, second.sent

    count, error, sent = on_a_kit(story)

    assert (count, type(error)) == (3, ResumeMismatch)
    assert str(error) == (
        "the stream began again with other items than were delivered: of 3, item 1 differs; "
        "a handler that is replayed gives the same items each time (at resumed.Counter.again@b)"
    )
    assert len(sent) <= 2, "the instance was not told to stop"


def test_a_stream_moves_as_often_as_it_may() -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError]:
        return await failure_of((await started(kit)).hand_round())

    count, error = on_a_kit(story)

    assert count == 1
    assert isinstance(error, StreamLost)
    assert str(error) == (
        "not here; the stream cannot go on: it moved once, which is its migration_limit "
        "(at resumed.Counter.hand_round@b)"
    )
    assert isinstance(error.__cause__, Migrate)
    assert not error.retryable


@pytest.mark.parametrize("relay", [False, True])
def test_a_stream_for_which_there_is_no_instance_ends_after_ten_seconds(relay: bool) -> None:
    async def story(kit: TestKit) -> tuple[DynbusError, float]:
        client = await started(kit, "a")
        begun = monotonic()
        _, error = await failure_of(client.count(Count(then="migrate")), relay=relay)
        return error, monotonic() - begun

    error, took = on_a_kit(story)

    assert isinstance(error, StreamLost)
    assert error.message == (
        "not here; the stream cannot go on: no instance serves resumed.Counter.count within 10 s"
    )
    assert took == pytest.approx(13.0, abs=0.1)


def test_a_stream_at_an_instance_that_the_caller_named_goes_to_no_other() -> None:
    async def story(kit: TestKit) -> DynbusError:
        client = await started(kit)
        with call_options(instance="a"):
            stream = client.count(Count(then="migrate"))
        return (await failure_of(stream))[1]

    error = on_a_kit(story)

    assert error.message == "not here; the stream cannot go on: the caller named the instance"


def test_a_stream_of_more_than_is_kept_ends_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "RESUME_BYTES", 10)

    async def story(kit: TestKit) -> DynbusError:
        return (await failure_of((await started(kit)).count(Count(then="migrate"))))[1]

    error = on_a_kit(story)

    assert error.message == (
        "not here; the stream cannot go on: its 3 items are more than the 0 MiB that are kept to "
        "go on with"
    )


def test_a_request_that_cannot_be_made_ends_the_stream_and_is_told() -> None:
    async def story(kit: TestKit) -> tuple[DynbusError, DynbusError]:
        client = await started(kit, "ab")
        raised = (await failure_of(client.wrongly(Count(then="migrate"))))[1]
        stream = client.wrongly(Count())
        found: list[int] = []

        async def see(number: int) -> None:
            found.append(number)
            if number == 3:
                await kill(kit, "a")

        with pytest.raises(StreamLost) as misfit:
            await by_itself(stream, see)
        return raised, misfit.value

    raised, misfit = on_a_kit(story)

    assert "the stream cannot go on: Counter.wrong raised ValidationError" in raised.message
    assert "the stream cannot go on: Counter.wrong raised Misfit" in misfit.message


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize(
    "error",
    [ValueError("no"), GeneratorExit("no"), asyncio.CancelledError("no"), SystemExit("no")],
)
def test_whatever_is_raised_where_a_request_is_made_ends_the_stream_as_lost(
    error: BaseException, relay: bool
) -> None:
    def refuse(request: Any, items: list[Any]) -> Any:
        raise error

    async def story(kit: TestKit) -> DynbusError:
        await started(kit, "ab")
        client = await endpoint_of(kit, "count").client(resume=refuse, routing=First())
        async with asyncio.timeout(30.0):
            return (await failure_of(client.generate({"then": "migrate"}), relay=relay))[1]

    lost = on_a_kit(story)

    assert type(lost) is StreamLost
    assert f"raised {type(error).__name__}: no" in lost.message


def test_an_error_of_the_handler_ends_a_stream_that_could_go_on() -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError]:
        return await failure_of((await started(kit)).count(Count(then="fail")))

    count, error = on_a_kit(story)

    assert (count, type(error), error.message) == (3, HandlerError, "ValueError: no")


# While it moves ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (
            "hand_round",
            "not here; the stream cannot go on: it moved once, which is its migration_limit",
        ),
        ("returned", "not here; the stream cannot go on: its caller knows no resume"),
        ("drained", "I go; the stream cannot go on: a call that its handler made was given up"),
    ],
)
@pytest.mark.parametrize("relay", [False, True])
def test_what_a_handler_calls_moves_by_itself_and_its_loss_moves_nobody_above(
    endpoint: str, why: str, relay: bool
) -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError, int]:
        await started(kit)
        above = [await kit.start(Above) for _ in range(2)]
        _, error = await failure_of(kit.client(Above).of(endpoint), relay=relay)
        seen = kit.caller.discovery.view.instances("resumed", "Above", monotonic())
        begun = sum(one.actor.begun for one in above if isinstance(one.actor, Above))
        return begun, error, len(seen)

    begun, error, seen = on_a_kit(story)

    assert (begun, seen) == (1, 2)
    assert (type(error), error.message, error.retryable) == (StreamLost, why, False)
    assert error.hop.startswith("resumed.Counter.")


@pytest.mark.parametrize("ends_by", ["its deadline", "an operator"])
def test_what_ends_a_stream_between_two_attempts_does_not_say_that_it_never_began(
    ends_by: str,
) -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError]:
        await kit.start(Counter, instance_id="a")
        with call_options(request_id="r", timeout=8.0 if ends_by == "its deadline" else 60.0):
            stream = kit.client(Counter).again(Count(then="migrate"))
        if ends_by == "an operator":
            subject = cancel_subject("resumed")
            asyncio.get_running_loop().call_later(
                5.0, lambda: kit.caller.bus.data.publish(subject, b"r")
            )
        return await failure_of(stream)

    count, error = on_a_kit(story)

    assert count == 3
    assert type(error) is (DeadlineExceeded if ends_by == "its deadline" else Cancelled)
    assert error.started


@pytest.mark.parametrize("relay", [False, True])
def test_the_deadline_of_a_call_holds_while_it_moves(relay: bool) -> None:
    async def story(kit: TestKit) -> tuple[DynbusError, float]:
        client = await started(kit, "a")
        begun = monotonic()
        with call_options(timeout=5.0):
            stream = client.count(Count(then="migrate"))
        _, error = await failure_of(stream, relay=relay)
        return error, monotonic() - begun

    error, took = on_a_kit(story)

    assert took == pytest.approx(5.0, abs=0.1)
    assert isinstance(error, DeadlineExceeded | StreamLost)


def test_the_deadline_of_a_call_is_that_of_its_later_attempts() -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError, float]:
        client = await started(kit, "ab")
        begun = monotonic()
        with call_options(timeout=6.5):
            stream = client.count(Count(then="migrate"))
        count, error = await failure_of(stream)
        return count, error, monotonic() - begun

    count, error, took = on_a_kit(story)

    assert (count, type(error)) == (7, DeadlineExceeded)
    assert took == pytest.approx(6.5, abs=0.1)


def test_a_reader_may_leave_while_its_stream_moves() -> None:
    async def story(kit: TestKit) -> None:
        client = await started(kit, "a")
        reading = asyncio.ensure_future(by_itself(client.count(Count(then="migrate")), _look_away))
        await asyncio.sleep(5.0)
        reading.cancel()
        await asyncio.wait({reading})
        await kit.start(Counter, instance_id="b")
        await asyncio.sleep(5.0)
        second: Any = kit.started["b"].actor
        assert second.sent == []

    on_a_kit(story)


def test_a_relay_may_leave_a_stream_that_moves() -> None:
    async def story(kit: TestKit) -> None:
        client = await started(kit, "a")
        with Relay[str, int](lambda arrivals: None) as relay:
            stream = await relay.open(client.count(Count(then="migrate")), "it")
            await asyncio.sleep(5.0)
            stream.cancel()
            begun = monotonic()
            work: Any = stream._work  # pyright: ignore[reportPrivateUsage]
            await eventually(lambda: work.ended)
            assert monotonic() - begun < 1.0
        await kit.start(Counter, instance_id="b")
        await asyncio.sleep(5.0)
        second: Any = kit.started["b"].actor
        assert second.sent == []

    on_a_kit(story)


def test_a_paused_relay_is_shown_all_of_a_stream_that_moves() -> None:
    async def story(kit: TestKit) -> list[int]:
        client = await started(kit, "ab")
        found: list[int] = []

        def deliver(arrivals: list[Arrival[str, int]]) -> None:
            for arrival in arrivals:
                found.extend(arrival.items)

        with Relay(deliver) as relay:
            stream = await relay.open(client.again(Count(then="migrate")), "it")
            stream.pause()
            await asyncio.sleep(5.0)
            stream.resume()
            await stream.ended()
        return found

    assert on_a_kit(story, stream_window=2) == NUMBERS


# What is seen of it ------------------------------------------------------------------------


def test_a_migration_is_an_event_of_the_callers_span_and_is_counted_by_its_reason() -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracers, MeterProvider([reader], shutdown_on_exit=False))

    async def story() -> None:
        async with TestKit(telemetry=telemetry) as kit:
            client = await started(kit, "ab")
            assert [one async for one in client.again(Count(then="leave"))] == NUMBERS

    run(story())

    (span,) = [span for span in exporter.get_finished_spans() if "send " in span.name]
    events = [(event.name, dict(event.attributes or {})) for event in span.events]
    assert events == [("first_item", {}), ("migrated", {"error.type": "Migrate"})]
    assert (span.attributes or {})["dynbus.stream.items"] == len(NUMBERS)
    found = reader.get_metrics_data()
    assert found is not None
    points: list[tuple[Any, Any]] = [
        (dict(point.attributes or {})["dynbus.reason"], point.value)
        for resource in found.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "dynbus.migrations"
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    ]
    assert points == [("Migrate", 1)]
