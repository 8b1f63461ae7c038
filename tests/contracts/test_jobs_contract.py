"""What durable handlers promise, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

import anyio
import msgspec
import pytest
from tests.conditions import PATIENCE

from dynbus import (
    Actor,
    ActorInstance,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    HandlerError,
    InvalidRequest,
    JobHandle,
    Migrate,
    NoJob,
    Overloaded,
    PayloadTooLarge,
    Runtime,
    call_options,
    context,
    handler,
)
from dynbus.bus.bus import Bus as Presence
from dynbus.bus.clock import unix_time
from dynbus.bus.config import BusConfig
from dynbus.bus.protocol.names import (
    EndpointName,
    dead_letter_stream,
    job_log_stream,
    work_stream,
    work_subject,
)
from dynbus.bus.transport import NoStream
from dynbus.bus.work_queue import DeadLetters, WorkQueue, WorkQueueConfig

from .conftest import Bus

pytestmark = pytest.mark.anyio


class Order(msgspec.Struct):
    number: int
    fails: int = 0
    size: int = 0


class Receipt(msgspec.Struct):
    number: int
    tries: int
    key: str
    text: str = ""


class Till(Actor, abstract=True):
    """A till that counts what it has begun; `gate` lets orders above 1000 end."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = asyncio.Event()

    @handler(durable=True, tries=3, backoff=0.01)
    async def charge(self, order: Order) -> Receipt:
        self.begun.append(order.number)
        if context().attempt <= order.fails:
            raise LookupError(f"no card in try {context().attempt}")
        if order.number == 1000 and len(self.begun) < 6:
            raise Migrate("it is better off elsewhere")
        if order.number > 1000:
            await self.gate.wait()
        return Receipt(order.number, context().attempt, context().idempotency_key, "x" * order.size)

    @handler(durable=True, concurrency=1)
    async def refund(self, order: Order) -> int:
        self.begun.append(order.number)
        return order.number

    @handler(durable=True)
    async def close_day(self) -> int:
        return len(self.begun)


class Desk:
    """A till on the bus under test, and a client of it in a process of its own.

    Attributes:
        tills: the objects behind the instances, in the order of their starts.
    """

    def __init__(self, bus: Bus, runtime: Runtime, kind: type[Till]) -> None:
        self.bus = bus
        self.runtime = runtime
        self.kind = kind
        self.client = runtime.client(kind)
        self.runtimes = [runtime]
        self.tills: list[Till] = []

    @property
    def queue(self) -> EndpointName:
        return EndpointName(self.kind.__dynbus_service__.namespace, "Till", "charge")

    async def start(self) -> ActorInstance:
        runtime = await new_runtime(self.bus)
        self.runtimes.append(runtime)
        instance = await runtime.start(self.kind)
        assert isinstance(instance.actor, Till)
        self.tills.append(instance.actor)
        return instance


async def new_runtime(bus: Bus) -> Runtime:
    return await Runtime.over(
        await Presence.over(BusConfig(), await bus.connect(), await bus.connect())
    )


@pytest.fixture
async def desk(bus: Bus) -> AsyncIterator[Desk]:
    namespace = f"n{secrets.token_hex(6)}"

    class OwnTill(Till, namespace=namespace, component="Till"):
        pass

    made = Desk(bus, await new_runtime(bus), OwnTill)
    yield made
    js = made.runtime.bus.data.jetstream
    for name in ("charge", "refund", "close_day"):
        queue = EndpointName(namespace, "Till", name)
        await js.delete_stream(work_stream(queue))
        await js.delete_stream(job_log_stream(queue))
    await js.delete_stream(dead_letter_stream(namespace))
    for runtime in made.runtimes[::-1]:
        await runtime.close()


async def ended(job: JobHandle[Receipt]) -> Receipt:
    with anyio.fail_after(PATIENCE):
        return await job.result()


async def comes_to(job: JobHandle[Receipt], status: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await job.state()).status != status:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


class Line(msgspec.Struct):
    customer: Literal["ann", "bob"]


class Sale(msgspec.Struct):
    number: int
    line: Line
    fails: int = 0


class Shop(Till, abstract=True):
    """A shop that serves each customer in the order of the sales."""

    @handler(durable=True, ordered_by="line.customer", tries=3, backoff=0.02)
    async def sell(self, sale: Sale) -> int:
        if context().attempt <= sale.fails:
            raise LookupError("no bag")
        self.begun.append(sale.number)
        return sale.number


@pytest.fixture
async def shop(bus: Bus) -> AsyncIterator[tuple[Runtime, type[Shop]]]:
    class OwnShop(Shop, namespace=f"n{secrets.token_hex(6)}", component="Shop"):
        pass

    runtime = await new_runtime(bus)
    yield runtime, OwnShop
    await runtime.close()


async def test_jobs_are_done_in_the_order_of_a_field(shop: tuple[Runtime, type[Shop]]) -> None:
    runtime, kind = shop
    client = runtime.client(kind)
    jobs = [
        await client.sell.submit(Sale(number, Line("ann"), fails=number % 3)) for number in range(6)
    ]
    instances = [await runtime.start(kind) for _ in range(2)]

    with anyio.fail_after(PATIENCE):
        assert [await job.result() for job in jobs] == list(range(6))
    assert await client.sell(Sale(6, Line("bob"))) == 6
    generic = await runtime.endpoint(f"{kind.__dynbus_service__.namespace}.Shop.sell").client()
    await generic.wait_for_instances(PATIENCE)
    assert await generic.generate({"number": 7, "line": {"customer": "bob"}}) == 7

    begun = [cast("Shop", one.actor).begun for one in instances]
    assert all(numbers == sorted(numbers) for numbers in begun)
    assert sorted(number for numbers in begun for number in numbers) == list(range(8))
    with pytest.raises(InvalidRequest, match="go before others of its key"):
        await client.sell.submit(Sale(1, Line("ann")), priority=2)
    with pytest.raises(InvalidRequest, match="submit it when its time has come"):
        await client.sell.submit(Sale(1, Line("ann")), delay=2.0)


async def sell_once(shop: object, sale: Sale) -> int:
    return sale.number


async def sell_nothing(shop: object) -> int:
    return 1


def test_a_field_that_is_no_key_is_refused_where_the_class_is_defined() -> None:
    for path, said in (
        ("line.custommer", "Line has no 'custommer' (did you mean customer?)"),
        ("line", "is Line, which is no key"),
        ("number.of", "asks for 'of' of int, which has no declared fields"),
        ("line..x", "names no field of the request"),
    ):
        with pytest.raises(ConfigError) as caught:
            handler(durable=True, ordered_by=path)(sell_once)

        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="takes no request"):
        handler(durable=True, ordered_by="customer")(sell_nothing)


async def test_jobs_of_a_higher_priority_begin_first_and_are_stored_once_by_their_key(
    desk: Desk,
) -> None:
    jobs = [await desk.client.refund.submit(Order(number)) for number in (1, 2)]
    jobs.append(await desk.client.refund.submit(Order(3), priority=7, idempotency_key="third"))
    with call_options(priority=1):
        jobs.append(await desk.client.refund.submit(Order(4)))
        again = await desk.client.refund.submit(Order(5), priority=-1, idempotency_key="third")
    assert again.id == jobs[2].id

    await desk.start()
    with anyio.fail_after(PATIENCE):
        for job in jobs:
            await job.result()

    assert desk.tills[0].begun == [3, 4, 1, 2]


async def test_a_call_of_a_durable_handler_is_a_job_that_is_waited_for(desk: Desk) -> None:
    await desk.start()

    receipt = await desk.client.charge(Order(7))

    assert (receipt.number, receipt.tries) == (7, 1)
    assert await desk.client.close_day() == 1


async def test_a_job_is_done_though_nobody_was_there_when_it_was_submitted(desk: Desk) -> None:
    job = await desk.client.charge.submit(Order(1))
    assert (await job.state()).status == "waiting"

    await desk.start()

    assert (await ended(job)).number == 1
    assert (await job.state())[:2] == ("done", 1)


async def test_a_job_is_known_by_its_id_in_every_process(desk: Desk) -> None:
    await desk.start()
    job = await desk.client.charge.submit(Order(4))
    other = await new_runtime(desk.bus)

    typed = await ended(other.job(job.id, desk.kind.charge))
    untyped = await other.job(job.id).result(PATIENCE)
    await other.close()

    assert typed == Receipt(4, 1, typed.key)
    assert untyped == {"number": 4, "tries": 1, "key": typed.key, "text": ""}


async def test_a_try_that_fails_is_followed_by_another_and_its_cause_is_kept(desk: Desk) -> None:
    instance = await desk.start()
    job = await desk.client.charge.submit(Order(2, fails=2))

    assert (await ended(job)).tries == 3

    state = await job.state()
    hop = f"{desk.queue}@{instance.id}"
    assert (state.status, state.tries) == ("done", 3)
    assert [(one.tries, one.error, one.instance) for one in state.failures] == [
        (1, "LookupError: no card in try 1", hop),
        (2, "LookupError: no card in try 2", hop),
    ]


async def test_a_job_that_fails_for_good_says_why_and_may_be_put_back(desk: Desk) -> None:
    await desk.start()
    job = await desk.client.charge.submit(Order(3, fails=5))

    with pytest.raises(HandlerError, match="no card in try 3") as caught:
        await ended(job)

    assert caught.value.error_type == "LookupError"
    state = await job.state()
    assert (state.status, state.error) == ("failed", "LookupError: no card in try 3")
    letters = DeadLetters(desk.runtime.bus.data.jetstream, desk.queue.namespace)
    (letter,) = await letters.find()
    assert job.id == f"{desk.queue}.{letter.job_id}"

    await letters.redrive(letter)

    with pytest.raises(HandlerError, match="no card in try 3"):
        await ended(job)
    assert desk.tills[0].begun == [3] * 6


async def test_a_request_that_no_try_can_read_is_tried_once(desk: Desk) -> None:
    await desk.start()
    subject = work_subject(desk.queue, "odd")
    await desk.runtime.bus.data.jetstream.publish(subject, b'{"number": "many"}')
    job = desk.runtime.job(f"{desk.queue}.odd", desk.kind.charge)

    with pytest.raises(InvalidRequest, match="number"):
        await ended(job)

    assert desk.tills[0].begun == []


async def test_plain_nats_clients_submit_by_publishing_json(desk: Desk) -> None:
    await desk.start()
    js = desk.runtime.bus.data.jetstream

    await js.publish(work_subject(desk.queue, "mine"), b'{"number": 11}')

    assert await ended(desk.runtime.job(f"{desk.queue}.mine", desk.kind.charge)) == Receipt(
        11, 1, "mine"
    )


async def test_a_name_that_a_plain_client_uses_again_names_the_job_that_has_ended(
    desk: Desk,
) -> None:
    await desk.start()
    js = desk.runtime.bus.data.jetstream
    subject = work_subject(desk.queue, "mine")
    job = desk.runtime.job(f"{desk.queue}.mine", desk.kind.charge)
    await js.publish(subject, b'{"number": 11}')
    await ended(job)
    await empty(desk)

    await js.publish(subject, b'{"number": 12}')
    await empty(desk)

    assert (await ended(job)).number == 11
    assert desk.tills[0].begun == [11]


async def empty(desk: Desk) -> None:
    js = desk.runtime.bus.data.jetstream
    async with asyncio.timeout(PATIENCE):
        while (await js.stream_info(work_stream(desk.queue))).messages:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def test_untyped_calls_of_a_durable_handler_wait_for_the_job_too(desk: Desk) -> None:
    await desk.start()
    client = await desk.runtime.endpoint(str(desk.queue)).client()
    await client.wait_for_instances(PATIENCE)

    answer = await client.generate({"number": 12, "fails": 1})

    assert (answer["number"], answer["tries"]) == (12, 2)


async def test_a_queue_that_is_full_says_so_to_who_submits_and_to_who_calls(desk: Desk) -> None:
    await WorkQueue(desk.runtime.bus, desk.queue, WorkQueueConfig(max_jobs=1)).ensure()
    kept = await desk.client.charge.submit(Order(1))
    full = "^the queue .* is full: try again later, or raise its limits"

    for refused in (desk.client.charge.submit(Order(2)), desk.client.charge(Order(3))):
        with pytest.raises(Overloaded, match=full) as error:
            await refused
        assert error.value.retry_after > 0.0
        assert not error.value.started

    await desk.start()
    assert (await ended(kept)).number == 1
    assert desk.tills[0].begun == [1]


async def test_one_result_is_recorded_for_a_key(desk: Desk) -> None:
    await desk.start()

    first = await desk.client.charge.submit(Order(5), idempotency_key="order.5of=x")
    second = await desk.client.charge.submit(Order(6), idempotency_key="order.5of=x")
    one = await ended(first)
    third = await desk.client.charge.submit(Order(7), idempotency_key="order.5of=x")

    assert first.id == second.id == third.id
    assert one == await ended(second) == await ended(third) == Receipt(5, 1, "order.5of=x")
    assert desk.tills[0].begun == [5]


async def test_a_job_that_waits_is_not_begun_once_it_is_cancelled(desk: Desk) -> None:
    job = await desk.client.charge.submit(Order(8))

    assert await job.cancel()
    assert not await job.cancel()
    with pytest.raises(Cancelled):
        await ended(job)
    assert (await job.state())[:2] == ("cancelled", 0)

    await desk.start()
    assert (await ended(await desk.client.charge.submit(Order(9)))).number == 9
    assert desk.tills[0].begun == [9]


async def test_a_job_that_runs_is_dropped_when_it_is_cancelled(desk: Desk) -> None:
    await desk.start()
    job = await desk.client.charge.submit(Order(1001))
    await comes_to(job, "running")

    assert await job.cancel()

    with pytest.raises(Cancelled):
        await ended(job)
    assert (await ended(await desk.client.charge.submit(Order(10)))).number == 10
    # It is in no queue any more.
    js = desk.runtime.bus.data.jetstream
    async with asyncio.timeout(PATIENCE):
        while (await js.stream_info(work_stream(desk.queue))).messages:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_job_begins_after_its_delay(desk: Desk) -> None:
    await desk.start()
    began = unix_time()
    job = await desk.client.charge.submit(Order(1), delay=0.4)
    at = datetime.fromtimestamp(began + 0.8, UTC)
    other = await desk.client.charge.submit(Order(2), at=at)

    await ended(job)
    assert unix_time() - began >= 0.4
    await ended(other)
    assert unix_time() - began >= 0.7


async def test_times_that_are_none_are_refused(desk: Desk) -> None:
    await desk.start()
    await desk.client.charge(Order(1))
    charge = desk.client.charge
    past = datetime.now(UTC) - timedelta(days=4000)
    for wrong, said in (
        (charge.submit(Order(1), delay=-1), "delay=-1 is no number of seconds"),
        (charge.submit(Order(1), at=datetime.fromtimestamp(1)), "has no time zone"),
        (charge.submit(Order(1), at=past), "by the server's clock"),
        (charge.submit(Order(1), delay=1.0, at=past), "not both"),
        (charge.submit(Order(1), deadline=-2), "deadline=-2"),
        (charge.submit(Order(1), deadline=3, delay=10), "passes before the job may begin, in 10 s"),
        (charge.submit(Order(1), delay=cast("float", None)), "delay=None is no number"),
        (charge.submit(Order(1), delay=10**400), "is no number of seconds from 0 to 31622400"),
        (charge.submit(Order(1), at=cast("datetime", "2030-01-01")), "'2030-01-01' is no datetime"),
        (charge.submit(Order(1), at=datetime.max.replace(tzinfo=UTC)), "more than 366 days ahead"),
    ):
        with pytest.raises(InvalidRequest, match=said) as refused:
            await wrong
        assert not refused.value.started


async def test_names_and_options_that_are_none_are_refused_by_their_own_name(desk: Desk) -> None:
    charge = desk.client.charge

    for key in ("two words", "x" * 129, "a\nb", "ä", cast("str", 5)):
        with pytest.raises(ConfigError, match="^idempotency_key=.* must be at most 128 printable"):
            await charge.submit(Order(1), idempotency_key=key)
    with pytest.raises(InvalidRequest, match="^idempotency_key='' names no job: give a key"):
        await charge.submit(Order(1), idempotency_key="")
    for priority in (True, 1.5, 10**30):
        with pytest.raises(ConfigError, match="^priority=.* must be a whole number from -9999"):
            await charge.submit(Order(1), priority=cast("int", priority))
    with pytest.raises(TypeError, match=r"^submit\(\) has no option 'dely': there are delay, at, "):
        await cast("Any", charge).submit(Order(1), dely=1.0)
    with pytest.raises(NoStream):
        await desk.runtime.bus.data.jetstream.stream_info(work_stream(desk.queue))


async def test_a_key_that_is_reused_for_another_request_is_told(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    first = await desk.client.charge.submit(Order(5), idempotency_key="five")
    again = await desk.client.charge.submit(Order(5), idempotency_key="five")
    quiet = caplog.text
    other = await desk.client.charge.submit(Order(6), idempotency_key="five")

    assert first.id == again.id == other.id
    assert "five" not in quiet
    assert f"job {first.id} waits with another request than the one that was" in caplog.text


async def test_a_job_that_was_not_begun_by_its_deadline_is_dropped(desk: Desk) -> None:
    job = await desk.client.charge.submit(Order(1), deadline=0.5)
    await anyio.sleep(0.6)

    await desk.start()

    with pytest.raises(DeadlineExceeded, match="not begun by its deadline"):
        await ended(job)
    assert desk.tills[0].begun == []
    assert (await job.state()).tries == 0


async def test_a_job_that_goes_elsewhere_has_all_its_tries(desk: Desk) -> None:
    await desk.start()

    job = await desk.client.charge.submit(Order(1000))

    assert (await ended(job)).tries == 1
    assert desk.tills[0].begun == [1000] * 6
    assert (await job.state())[1:3] == (1, ())


async def test_submits_of_one_key_at_once_are_one_job_whatever_their_priorities(
    desk: Desk,
) -> None:
    await desk.start()
    charge = desk.client.charge

    jobs = await asyncio.gather(
        *(charge.submit(Order(7), idempotency_key="seven", priority=one) for one in (5, 0, -5))
    )

    assert {(await ended(job)).number for job in jobs} == {7}
    await empty(desk)
    assert desk.tills[0].begun == [7]


async def test_a_key_is_free_again_once_its_queue_was_purged(desk: Desk) -> None:
    charge = desk.client.charge
    await charge.submit(Order(7), idempotency_key="seven")
    await desk.runtime.bus.data.jetstream.purge(work_stream(desk.queue))

    job = await charge.submit(Order(8), idempotency_key="seven")
    await desk.start()

    assert (await ended(job)).number == 8


async def test_waiting_for_a_result_does_not_end_the_job(desk: Desk) -> None:
    await desk.start()
    job = await desk.client.charge.submit(Order(1002))

    with pytest.raises(DeadlineExceeded, match="and goes on"):
        await job.result(0.1)

    desk.tills[0].gate.set()
    assert (await ended(job)).number == 1002


async def test_an_instance_that_drains_lets_its_jobs_end_or_hands_them_on(desk: Desk) -> None:
    first = await desk.start()
    ends = await desk.client.charge.submit(Order(1003))
    await comes_to(ends, "running")
    stopping = asyncio.ensure_future(first.stop(PATIENCE))
    await desk.start()
    moves = await desk.client.charge.submit(Order(1004))
    async with asyncio.timeout(PATIENCE):
        while not desk.tills[1].begun:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    desk.tills[0].gate.set()
    assert (await ended(ends)).tries == 1
    await stopping

    second = await desk.start()
    await desk.runtimes[2].stop(0.0)
    desk.tills[2].gate.set()

    assert (await ended(moves)).number == 1004
    assert [till.begun for till in desk.tills] == [[1003], [1004], [1004]]
    await second.stop()


async def test_a_result_over_the_limit_of_a_message_is_an_error(desk: Desk) -> None:
    await desk.start()
    size = desk.runtime.bus.data.jetstream.max_payload

    job = await desk.client.charge.submit(Order(1, size=size))

    with pytest.raises(PayloadTooLarge, match=r"^the result has \d+ bytes, .* return its name$"):
        await ended(job)


async def test_a_signal_over_the_limit_of_a_message_is_refused(desk: Desk) -> None:
    job = await desk.client.charge.submit(Order(1))
    size = desk.runtime.bus.data.jetstream.max_payload

    with pytest.raises(PayloadTooLarge, match="^the value of signal 'paid' has .* send its name$"):
        await job.signal("paid", "x" * size)


async def test_a_job_that_nobody_knows_is_told(desk: Desk) -> None:
    await desk.start()
    unknown = desk.runtime.job(f"{desk.queue}.never")

    with pytest.raises(NoJob, match="was not submitted"):
        await unknown.result(PATIENCE)
    with pytest.raises(NoJob):
        await unknown.state()
    with pytest.raises(NoJob):
        await unknown.cancel()
    with pytest.raises(ConfigError, match=r"write namespace.component.endpoint.name"):
        desk.runtime.job("never")
