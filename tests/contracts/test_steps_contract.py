"""What steps of durable handlers promise, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import anyio
import msgspec
import pytest
from tests.conditions import PATIENCE

from dynbus import (
    Actor,
    ActorInstance,
    ConfigError,
    DeadlineExceeded,
    HandlerError,
    JobHandle,
    NoJob,
    PayloadTooLarge,
    Runtime,
    StepMismatch,
    Topic,
    Unavailable,
    context,
    depends,
    handler,
    signal,
    sleep_until,
    step,
)
from dynbus.actors.serving import steps
from dynbus.actors.serving.step_history import STEP, FinishedStep
from dynbus.bus.bus import Bus as Presence
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.config import BusConfig
from dynbus.bus.protocol.names import (
    EndpointName,
    dead_letter_stream,
    holder_subject,
    job_log_stream,
    job_log_subject,
    topic_stream,
    work_stream,
)
from dynbus.bus.transport import AckKind, StoredMessage
from dynbus.bus.work_queue import DeadLetters, Job, JobLog, JobResult, Outcome
from dynbus.bus.work_queue.holders import read_holders
from dynbus.bus.work_queue.job_log import RunPhase
from dynbus.bus.work_queue.job_stream import JobStream

from .conftest import Bus, eventually

pytestmark = pytest.mark.anyio


TOO_MANY = 2**20
"""Bytes over the limit of a message, with which parcel 9 is labelled."""


class Order(msgspec.Struct):
    number: int
    breaks_after: str = ""


class Paid(msgspec.Struct):
    number: int
    key: str


@dataclass
class Notes:
    """What was done of the orders of one test, by all instances.

    Attributes:
        renamed: whether a new version of the handler has another first step.
        broken: orders whose first try has failed.
        waiting: what stands still where, and at which instance.
        gates: of the instances that stand still, by their ids.
    """

    done: Counter[str] = field(default_factory=Counter[str])
    renamed: bool = False
    broken: set[int] = field(default_factory=set[int])
    waiting: Counter[str] = field(default_factory=Counter[str])
    gates: defaultdict[str, asyncio.Event] = field(
        default_factory=lambda: defaultdict(asyncio.Event)
    )


class Billing(Actor, abstract=True):
    notes: Notes

    @handler
    async def charge(self, order: Order) -> Paid:
        self.notes.done[f"charge {order.number}"] += 1
        return Paid(order.number, context().idempotency_key)


class Shop(Actor, abstract=True):
    """Two steps, one of them a call; orders above 1000 wait between them, those above 2000 before
    both, those above 3000 within the second."""

    notes: Notes
    billing = depends(Billing)

    @handler(durable=True, tries=4, backoff=0.01)
    async def sell(self, order: Order) -> list[str]:
        if 2000 < order.number <= 3000:
            await self._wait("before charge")
        paid = await step("refund" if self.notes.renamed else "charge", self.billing.charge, order)
        self._break_after("charge", order)
        if 1000 < order.number <= 2000:
            await self._wait("before send")
        sent = await step("send", self.send, order.number, express=True)
        self._break_after("send", order)
        return [paid.key, sent]

    async def _wait(self, where: str) -> None:
        self.notes.waiting[f"{where} at {self.instance_id}"] += 1
        await self.notes.gates[self.instance_id].wait()

    async def send(self, number: int, *, express: bool) -> str:
        if number > 3000:
            await self._wait("within send")
        self.notes.done[f"send {number}"] += 1
        return f"parcel {number}{'!' if express else ''}" + "x" * (number == 9) * TOO_MANY

    def _break_after(self, name: str, order: Order) -> None:
        if order.breaks_after == name and order.number not in self.notes.broken:
            self.notes.broken.add(order.number)
            raise OSError(f"broken after {name}")

    @handler(durable=True, tries=2, backoff=0.01)
    async def approve(self, seconds: float) -> str:
        await step("beg" if self.notes.renamed else "ask", self.send, 1, express=False)
        try:
            name = await signal("approved", str, timeout=seconds)
        except DeadlineExceeded:
            return "nobody"
        second = await signal("sealed", str)
        return f"{name} and {second}"

    @handler(durable=True)
    async def season(self) -> str:
        first = await signal("planted", str)
        await sleep_until(timedelta(seconds=0.3))
        return f"{first} and {await signal('reaped', str)}"

    @handler(durable=True, ordered_by="number")
    async def lend(self, order: Order) -> str:
        await step("hand", self.send, order.number, express=False)
        return await signal("returned", str)

    @handler(durable=True)
    async def remind(self, seconds: float) -> float:
        begun = datetime.fromtimestamp(unix_time(), UTC)
        await sleep_until(begun + timedelta(seconds=seconds))
        return await step("count", self.count)

    @handler(durable=True, tries=2)
    async def nap(self, seconds: float) -> int:
        for _ in range(5):
            await sleep_until(timedelta(seconds=seconds))
        return context().attempt

    @handler(durable=True)
    async def rest(self, seconds: float) -> float:
        begun = unix_time()
        await sleep_until(timedelta(seconds=seconds))
        return unix_time() - begun

    async def count(self) -> float:
        self.notes.done["remind"] += 1
        return float(self.notes.done["remind"])

    @handler
    async def plain(self) -> str:
        return await step("no", self.send, 1, express=False)


class Fleet:
    """Shops on the bus under test, and a client of them.

    Attributes:
        notes: of all that is done.
    """

    def __init__(self, bus: Bus, runtime: Runtime, shop: type[Shop], notes: Notes) -> None:
        self.bus = bus
        self.runtime = runtime
        self.shop = shop
        self.client = runtime.client(shop)
        self.notes = notes
        self.runtimes = [runtime]

    async def start(self, actor: type[Actor]) -> ActorInstance:
        runtime = await new_runtime(self.bus)
        self.runtimes.append(runtime)
        return await runtime.start(actor)


async def new_runtime(bus: Bus) -> Runtime:
    return await Runtime.over(
        await Presence.over(BusConfig(), await bus.connect(), await bus.connect())
    )


@pytest.fixture
async def fleet(bus: Bus) -> AsyncIterator[Fleet]:
    namespace = f"n{secrets.token_hex(6)}"
    kept = Notes()

    class OwnBilling(Billing, namespace=namespace, component="Billing"):
        notes = kept

    class OwnShop(Shop, namespace=namespace, component="Shop"):
        notes = kept
        billing = depends(OwnBilling)

    made = Fleet(bus, await new_runtime(bus), OwnShop, kept)
    await made.start(OwnBilling)
    yield made
    js = made.runtime.bus.data.jetstream
    for runtime in made.runtimes[:0:-1]:
        await runtime.stop(0.0)
    for name in ("sell", "approve", "season", "lend", "remind", "rest", "nap"):
        queue = EndpointName(namespace, "Shop", name)
        await js.delete_stream(work_stream(queue))
        await js.delete_stream(job_log_stream(queue))
    await js.delete_stream(dead_letter_stream(namespace))
    for runtime in made.runtimes[::-1]:
        await runtime.close()


async def comes_to(job: JobHandle[str], status: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await job.state()).status != status:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def waits_for(fleet: Fleet, job: JobHandle[str], awaited: str) -> None:
    """Wait until a job waits for a signal outside of its process."""
    namespace, component, handler_name, name = job.id.split(".", 3)
    queue = EndpointName(namespace, component, handler_name)
    log = JobLog(fleet.runtime.bus.data.jetstream, queue)
    async with asyncio.timeout(PATIENCE):
        while True:
            state, _ = await log.run_state(name)
            if state is not None and (state.phase, state.signal) == (RunPhase.WAITING, awaited):
                return
            # No event tells.
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("breaks_after", ["", "charge", "send"])
async def test_a_step_that_is_finished_is_not_called_again(fleet: Fleet, breaks_after: str) -> None:
    await fleet.start(fleet.shop)

    job = await fleet.client.sell.submit(Order(7, breaks_after))
    key, parcel = await job.result(PATIENCE)

    assert parcel == "parcel 7!"
    assert key == f"{job.id.rpartition('.')[2]}.0"
    assert fleet.notes.done == {"charge 7": 1, "send 7": 1}


async def test_another_instance_goes_on_after_the_last_finished_step(fleet: Fleet) -> None:
    first = await fleet.start(fleet.shop)
    job = await fleet.client.sell.submit(Order(1001))
    await eventually(lambda: fleet.notes.waiting[f"before send at {first.id}"])
    second = await fleet.start(fleet.shop)

    await first.stop(0.0)
    fleet.notes.gates[second.id].set()

    assert (await job.result(PATIENCE))[1] == "parcel 1001!"
    assert (await job.state()).tries == 1  # who leaves costs none
    assert fleet.notes.done == {"charge 1001": 1, "send 1001": 1}


async def handed_out_again(fleet: Fleet, runtime: Runtime, queue: EndpointName) -> None:
    """Have the server hand out once more what a process holds, as after an outage of its own."""
    js = fleet.runtime.bus.data.jetstream
    async with asyncio.timeout(PATIENCE):
        while not (told := await js.read("KV_dynbus_jobs", holder_subject(queue, "*"))):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    await fleet.bus.break_connection(runtime.bus.data)
    for one in read_holders(told, ""):
        for job in one.holder.jobs:
            await js.acknowledge(job.token, AckKind.NAK)


async def test_a_step_that_another_instance_has_finished_meanwhile_is_not_called(
    fleet: Fleet,
) -> None:
    first = await fleet.start(fleet.shop)
    cut_off = fleet.runtimes[-1]
    job = await fleet.client.sell.submit(Order(1003))
    await eventually(lambda: fleet.notes.waiting[f"before send at {first.id}"])
    second = await fleet.start(fleet.shop)
    fleet.notes.gates[second.id].set()

    await handed_out_again(fleet, cut_off, EndpointName.parse(job.id.rpartition(".")[0]))
    assert (await job.result(PATIENCE))[1] == "parcel 1003!"
    fleet.notes.gates[first.id].set()
    await first.stop(PATIENCE)

    (lost,) = (await job.state()).failures
    assert (lost.tries, lost.error) == (1, "its instance was lost")
    assert fleet.notes.waiting[f"before send at {second.id}"] == 1
    assert fleet.notes.done == {"charge 1003": 1, "send 1003": 1}


async def test_a_step_is_finished_by_the_last_instance_alone_that_has_taken_its_job_over(
    fleet: Fleet,
) -> None:
    first = await fleet.start(fleet.shop)
    cut_off = fleet.runtimes[-1]
    job = await fleet.client.sell.submit(Order(3001))
    await eventually(lambda: fleet.notes.waiting[f"within send at {first.id}"])
    second = await fleet.start(fleet.shop)
    queue, _, name = job.id.rpartition(".")
    log = JobLog(fleet.runtime.bus.data.jetstream, EndpointName.parse(queue))

    await handed_out_again(fleet, cut_off, EndpointName.parse(queue))
    await eventually(lambda: fleet.notes.waiting[f"within send at {second.id}"])
    fleet.notes.gates[first.id].set()
    await first.stop(PATIENCE)
    stored = await log.steps(name)
    fleet.notes.gates[second.id].set()

    assert (await job.result(PATIENCE))[1] == "parcel 3001!"
    assert fleet.notes.done == {"charge 3001": 1, "send 3001": 2}
    assert list(stored) == [0]


async def test_no_step_is_called_of_a_job_that_has_ended_elsewhere_meanwhile(fleet: Fleet) -> None:
    instance = await fleet.start(fleet.shop)
    job = await fleet.client.sell.submit(Order(2001))
    await eventually(lambda: fleet.notes.waiting[f"before charge at {instance.id}"])
    queue, _, name = job.id.rpartition(".")
    log = JobLog(fleet.runtime.bus.data.jetstream, EndpointName.parse(queue))
    await fleet.bus.break_connection(fleet.runtimes[-1].bus.data)

    # As another instance does: it has all steps, ends the job, and drops them.
    await log.end(name, JobResult(Outcome.DONE, b'["", "elsewhere"]'), 3600.0)
    fleet.notes.gates[instance.id].set()
    await instance.stop(PATIENCE)

    assert await job.result(PATIENCE) == ["", "elsewhere"]
    assert fleet.notes.done == {}
    assert not await fleet.runtime.bus.data.jetstream.read(log.stream, log.subject(name, "log.>"))


async def test_an_event_that_a_lost_try_published_is_not_published_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Topic("closed", int, namespace=f"n{secrets.token_hex(6)}")
    lost: set[str] = set()
    finish = steps.JobRun.finish

    async def lose_first(run: steps.JobRun, place: int, finished: FinishedStep) -> None:
        if run.tries == 1:
            lost.add(run.job_id)
            raise OSError("lost between the event and the record of its step")
        await finish(run, place, finished)

    monkeypatch.setattr(steps.JobRun, "finish", lose_first)

    class Teller(Actor, namespace=closed.namespace):
        @handler(durable=True, backoff=0.01)
        async def tell(self, number: int) -> None:
            await step("tell", closed.publish, number)

    await fleet.start(Teller)
    tell = fleet.runtime.client(Teller).tell

    for number in (1, 2):
        await (await tell.submit(number)).result(PATIENCE)

    js = fleet.runtime.bus.data.jetstream
    stream = topic_stream(closed.namespace, closed.name)
    stored = (await js.stream_info(stream)).last_sequence
    queue = EndpointName(closed.namespace, "Teller", "tell")
    for name in (stream, work_stream(queue), job_log_stream(queue)):
        await js.delete_stream(name)
    assert len(lost) == 2
    assert stored == 2


async def test_another_order_of_steps_is_refused_by_name(fleet: Fleet) -> None:
    instance = await fleet.start(fleet.shop)
    job = await fleet.client.sell.submit(Order(1002))
    await eventually(lambda: fleet.notes.waiting[f"before send at {instance.id}"])
    await instance.stop(0.0)
    fleet.notes.renamed = True

    await fleet.start(fleet.shop)

    with pytest.raises(StepMismatch, match="was step 'charge' when it ran before, and is step 'r"):
        await job.result(PATIENCE)
    assert fleet.notes.done["charge 1002"] == 1


async def test_a_step_whose_result_is_of_another_type_now_is_refused(fleet: Fleet) -> None:
    job = await fleet.client.sell.submit(Order(8))
    queue, _, name = job.id.rpartition(".")
    log = JobLog(fleet.runtime.bus.data.jetstream, EndpointName.parse(queue))
    await log.ensure()
    charged = FinishedStep(STEP, "charge", msgspec.Raw(b'"paid"'))
    await log.store_step(name, 0, msgspec.json.encode(charged), claim=0)

    await fleet.start(fleet.shop)

    with pytest.raises(StepMismatch, match="step 1 of this job, step 'charge', was finished with"):
        await job.result(PATIENCE)


async def test_a_step_whose_result_is_over_the_limit_of_a_message_is_an_error(
    fleet: Fleet,
) -> None:
    await fleet.start(fleet.shop)

    job = await fleet.client.sell.submit(Order(9))

    with pytest.raises(PayloadTooLarge, match=r"^step 'send' of job \w+ gave .* return its name$"):
        await job.result(PATIENCE)


async def test_a_signal_of_another_type_is_left_out(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(60.0)

    await job.signal("approved")
    await job.signal("approved", "the clerk")
    await job.signal("sealed", "the mayor")

    assert await job.result(PATIENCE) == "the clerk and the mayor"
    assert "leaves a signal 'approved' out, and waits for the next" in caplog.text


async def test_a_job_that_waits_without_a_place_is_woken_each_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0)
    await waits_for(fleet, job, "approved")
    # It is left out.
    await job.signal("approved")
    await waits_for(fleet, job, "approved")
    await job.signal("approved", "the clerk")
    await waits_for(fleet, job, "sealed")
    await job.signal("sealed", "the mayor")

    assert await job.result(PATIENCE) == "the clerk and the mayor"


async def test_a_signal_wakes_a_job_that_has_slept_since_the_last_one_woke_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.season.submit()
    for awaited, value in (("planted", "oats"), ("reaped", "straw")):
        await waits_for(fleet, job, awaited)
        await job.signal(awaited, value)

    assert await job.result(PATIENCE) == "oats and straw"


async def test_a_job_may_wait_more_often_than_it_has_tries(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.nap.submit(0.3)

    assert await job.result(PATIENCE) == 1
    queue = EndpointName.parse(job.id.rpartition(".")[0])
    js, returns = fleet.runtime.bus.data.jetstream, job_log_subject(queue, "*", "return")
    # Nothing is kept of each wait: a job may wait for years.
    assert await js.read(job_log_stream(queue), returns) == []


async def test_a_key_whose_last_job_was_claimed_has_its_steps_done_once(fleet: Fleet) -> None:
    await fleet.start(fleet.shop)
    queue = EndpointName(fleet.shop.__dynbus_service__.namespace, "Shop", "sell")
    await JobLog(fleet.runtime.bus.data.jetstream, queue).claim("seven")

    job = await fleet.client.sell.submit(Order(7), idempotency_key="seven")

    assert (await job.result(PATIENCE))[1] == "parcel 7!"
    assert fleet.notes.done == {"charge 7": 1, "send 7": 1}


async def test_a_job_takes_signals_in_turn(fleet: Fleet) -> None:
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(60.0)

    await job.signal("sealed", "the mayor")
    await job.signal("approved", "the clerk")

    assert await job.result(PATIENCE) == "the clerk and the mayor"
    with pytest.raises(NoJob, match="has ended"):
        await job.signal("approved", "late")


async def test_a_try_that_has_lost_its_job_drops_no_message_of_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    taken_over, given_up = False, asyncio.Event()
    read_signals = JobLog.signals
    lose = steps.JobRun._lose  # pyright: ignore[reportPrivateUsage]

    async def take_over(log: JobLog, job_id: str, name: str) -> list[StoredMessage]:
        """Have another message run the job, once it has waited."""
        nonlocal taken_over
        if name == "sealed" and not taken_over:
            state, last = await log.run_state(job_id)
            assert state is not None
            other = msgspec.structs.replace(state, sequence=99)
            assert await log.store_run_state(job_id, other, last)
            taken_over = True
        return await read_signals(log, job_id, name)

    async def give_up(run: steps.JobRun) -> None:
        given_up.set()
        await lose(run)

    dropped: list[str] = []

    async def drop(_: JobStream, job_id: str, but: int = 0) -> None:
        dropped.append(job_id)

    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0)
    await comes_to(job, "waiting")
    monkeypatch.setattr(JobLog, "signals", take_over)
    monkeypatch.setattr(steps.JobRun, "_lose", give_up)
    monkeypatch.setattr(JobStream, "forget", drop)
    await job.signal("approved", "the clerk")

    async with asyncio.timeout(PATIENCE):
        await given_up.wait()

    assert dropped == []


async def test_a_signal_that_is_sent_again_wakes_a_job_though_the_first_was_broken_off(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0)
    await comes_to(job, "waiting")

    async def cut_off(*_: object) -> None:
        raise Unavailable("cut off")

    with monkeypatch.context() as once:
        once.setattr(JobStream, "wake", cut_off)
        with pytest.raises(Unavailable, match="cut off"):
            await job.signal("approved", "the clerk")
    await job.signal("approved", "the clerk")
    await comes_to(job, "waiting")
    await job.signal("sealed", "the mayor")

    assert await job.result(PATIENCE) == "the clerk and the mayor"


async def test_a_job_that_waits_for_long_has_no_place_at_an_instance(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0)
    await comes_to(job, "waiting")

    await job.signal("approved", "the clerk")
    await comes_to(job, "waiting")
    await job.signal("sealed", "the mayor")

    assert await job.result(PATIENCE) == "the clerk and the mayor"
    assert fleet.notes.done == {"send 1": 1}
    queue = EndpointName.parse(job.id.rpartition(".")[0])
    js = fleet.runtime.bus.data.jetstream
    async with asyncio.timeout(PATIENCE):
        while (await js.stream_info(work_stream(queue))).messages:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_job_that_died_after_it_had_waited_goes_on_at_once_when_it_is_redriven(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0)
    await eventually(lambda: fleet.notes.done["send 1"])
    await comes_to(job, "waiting")
    fleet.notes.renamed = True
    await job.signal("approved", "the clerk")
    with pytest.raises(StepMismatch):
        await job.result(PATIENCE)
    queue = EndpointName.parse(job.id.rpartition(".")[0])
    js = fleet.runtime.bus.data.jetstream
    async with asyncio.timeout(PATIENCE):
        while (await js.stream_info(work_stream(queue))).messages:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    fleet.notes.renamed = False
    letters = DeadLetters(js, queue.namespace)
    (letter,) = await letters.find()

    await letters.redrive(letter)
    await job.signal("sealed", "the mayor")

    assert await job.result(PATIENCE) == "the clerk and the mayor"
    assert fleet.notes.done == {"send 1": 1}


async def test_a_job_that_has_begun_is_not_dropped_by_its_deadline(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0, deadline=1.5)
    begun = monotonic()
    await eventually(lambda: fleet.notes.done["send 1"])
    await comes_to(job, "waiting")
    await eventually(lambda: monotonic() > begun + 1.5)

    await job.signal("approved", "the clerk")
    await job.signal("sealed", "the mayor")

    assert await job.result(PATIENCE) == "the clerk and the mayor"


async def test_a_job_that_waits_for_a_signal_is_in_its_first_try(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(3600.0)

    async with asyncio.timeout(10.0):
        while (await job.state())[:2] != ("waiting", 1):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def lent_twice(fleet: Fleet) -> tuple[JobHandle[str], JobHandle[str]]:
    """Two jobs of one key, of which the first waits for a signal without a place."""
    await fleet.start(fleet.shop)
    first = await fleet.client.lend.submit(Order(1))
    second = await fleet.client.lend.submit(Order(1))
    await eventually(lambda: fleet.notes.done["send 1"])
    await comes_to(first, "waiting")
    return first, second


async def test_a_signal_has_a_job_of_an_ordered_queue_run_at_once_and_before_those_behind_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    first, second = await lent_twice(fleet)
    await second.signal("returned", "second")

    await first.signal("returned", "first")

    assert await first.result(PATIENCE) == "first"
    assert await second.result(PATIENCE) == "second"
    assert fleet.notes.done == {"send 1": 2}
    assert (await first.state()).failures == (await second.state()).failures == ()


async def test_a_signal_that_comes_while_a_job_goes_back_to_its_ordered_queue_is_noticed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    give_back = Job.give_back
    jobs: list[JobHandle[str]] = []

    async def with_signal(self: Job, *, delay: float = 0.0, waits: bool = False) -> None:
        await jobs.pop().signal("returned", "just now")
        await give_back(self, delay=delay, waits=waits)

    jobs.append(await fleet.client.lend.submit(Order(1)))
    (job,) = jobs
    monkeypatch.setattr(Job, "give_back", with_signal)
    await fleet.start(fleet.shop)

    assert await job.result(PATIENCE) == "just now"


async def test_a_job_that_is_cancelled_while_it_waits_makes_way_for_those_behind_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    first, second = await lent_twice(fleet)

    assert await first.cancel()
    await second.signal("returned", "second")

    assert await second.result(PATIENCE) == "second"


async def test_a_signal_that_does_not_come_times_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)
    job = await fleet.client.approve.submit(0.3)

    assert await job.result(PATIENCE) == "nobody"


async def test_a_sleep_survives_the_instance(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    instance = await fleet.start(fleet.shop)
    job = await fleet.client.remind.submit(0.5)
    async with asyncio.timeout(PATIENCE):
        while (await job.state()).status != "waiting":  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    await instance.stop(0.0)

    await fleet.start(fleet.shop)

    assert await job.result(PATIENCE) == 1.0


async def test_a_sleep_for_a_while_is_counted_from_the_first_try(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await fleet.start(fleet.shop)

    # The try that begins when it is over does not wait again.
    assert await (await fleet.client.rest.submit(1.0)).result(PATIENCE) < 1.0


async def test_steps_are_for_durable_handlers(fleet: Fleet) -> None:
    await fleet.start(fleet.shop)
    plain = await fleet.runtime.endpoint(
        f"{fleet.shop.__dynbus_service__.namespace}.Shop.plain"
    ).client()
    await plain.wait_for_instances(PATIENCE)

    with pytest.raises(ConfigError, match="is for durable handlers"):
        await plain.generate()
    with pytest.raises(ConfigError, match="is for durable handlers"):
        await sleep_until(datetime.now(UTC))
    with anyio.fail_after(PATIENCE), pytest.raises((ConfigError, HandlerError)):
        await signal("approved")
