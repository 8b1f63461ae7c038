"""Jobs and events run as code of the instance that has them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import anyio
import pytest
from tests.conditions import eventually
from tests.story import on_a_kit

from dynbus import (
    Actor,
    DeadlineExceeded,
    EndpointName,
    HandlerError,
    JobState,
    Migrate,
    NoJob,
    Topic,
    Unavailable,
    context,
    handler,
    sleep_until,
    step,
    subscribe,
)
from dynbus.bus.context import current_instance
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.protocol.names import work_stream
from dynbus.bus.transport import ConsumerInfo, JetStream, NoStream, StoredMessage
from dynbus.bus.work_queue import DeadLetters, JobLog, JobResult, Outcome
from dynbus.bus.work_queue.job_stream import JobStream
from dynbus.testing import TestKit

asked = Topic("asked", str, namespace="runners")
told = Topic("told", str, namespace="runners")


class Teller(Actor, namespace="runners"):
    @handler(durable=True)
    async def job(self, word: str) -> None:
        await self.tell(word)

    @subscribe(asked)
    async def heard(self, word: str) -> None:
        await self.tell(word)

    @subscribe(asked, group="tellers")
    async def taken(self, word: str) -> None:
        await self.tell(word)

    async def tell(self, word: str) -> None:
        await told.publish(f"{word} {context().hop.split('@')[0]} {current_instance()}")


class Ear(Actor, namespace="runners"):
    def __init__(self) -> None:
        self.heard: list[str] = []

    @subscribe(told)
    async def hear(self, word: str) -> None:
        self.heard.append(word)


@pytest.mark.parametrize(
    ("begin", "methods"), [("submit", ["job"]), ("publish", ["heard", "taken"])]
)
def test_a_job_and_an_event_publish_on_the_bus_of_their_instance(
    begin: str, methods: list[str]
) -> None:
    async def story(kit: TestKit) -> tuple[list[str], str]:
        ear = (await kit.start(Ear)).actor
        assert isinstance(ear, Ear)
        teller = await kit.start(Teller)
        if begin == "submit":
            await kit.client(Teller).job.submit("hello")
        else:
            await asked.publish("hello", runtime=kit.caller)
        await eventually(lambda: len(ear.heard) == len(methods))
        return sorted(ear.heard), str(teller.name)

    heard, teller = on_a_kit(story)

    assert heard == [f"hello runners.Teller.{method} {teller}" for method in methods]


def test_an_instance_starts_once_the_server_of_its_jobs_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ensure = JobLog.ensure

    async def story(kit: TestKit, seconds: float) -> str:
        there = kit.now() + timedelta(seconds=seconds)

        async def ensured(log: JobLog) -> None:
            if kit.now() < there:
                raise Unavailable("the stream has no leader")
            await ensure(log)

        monkeypatch.setattr(JobLog, "ensure", ensured)
        return str((await kit.start(Teller)).name)

    # Servers of a cluster elect a leader within 9 s.
    assert on_a_kit(partial(story, seconds=9.0)).startswith("runners.Teller@")
    with pytest.raises(Unavailable, match="no leader"):
        on_a_kit(partial(story, seconds=60.0))


def test_an_instance_starts_although_a_server_does_not_know_its_queue_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn = JobStream.learn

    async def story(kit: TestKit) -> str:
        there = kit.now() + timedelta(seconds=2.0)

        async def learned(jobs: JobStream) -> ConsumerInfo:
            if kit.now() < there:
                raise NoStream("consumer not found")
            return await learn(jobs)

        monkeypatch.setattr(JobStream, "learn", learned)
        return str((await kit.start(Teller)).name)

    assert on_a_kit(story).startswith("runners.Teller@")


def test_a_server_that_is_lost_while_an_instance_starts_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ensure = JobStream.ensure
    asked_for: list[JobStream] = []

    async def ensure_later(self: JobStream) -> None:
        if self.name.endpoint == "job":
            asked_for.append(self)
            if len(asked_for) in (2, 3):
                raise Unavailable("the connection to the server broke")
        await ensure(self)

    async def story(kit: TestKit) -> None:
        monkeypatch.setattr(JobStream, "ensure", ensure_later)
        await kit.start(Teller)
        await (await kit.client(Teller).job.submit("hello")).result(30.0)

    on_a_kit(story)

    assert caplog.text.count("takes nothing yet: the connection to the server broke") == 2


class Till(Actor, namespace="runners"):
    running = most = 0

    @handler(durable=True, concurrency=2)
    async def charge(self, cents: int) -> int:
        Till.running += 1
        Till.most = max(Till.most, Till.running)
        await anyio.sleep(0.01)
        Till.running -= 1
        return cents

    @handler(durable=True, timeout=0.5, tries=1)
    async def think(self) -> None:
        await anyio.sleep_forever()


def test_no_more_jobs_of_an_instance_run_at_a_time_than_its_concurrency() -> None:
    async def story(kit: TestKit) -> list[int]:
        charge = kit.client(Till).charge
        jobs = [await charge.submit(cents) for cents in range(12)]
        await kit.start(Till)
        return [await job.result() for job in jobs]

    results = on_a_kit(story)

    assert (results, Till.most) == (list(range(12)), 2)


def test_a_job_that_takes_longer_than_its_handler_may_fails() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Till)
        job = await kit.client(Till).think.submit()
        with pytest.raises(DeadlineExceeded, match=r"longer than its 0\.5 s"):
            await job.result()

    on_a_kit(story)


def test_an_untyped_call_that_times_out_names_its_job_which_goes_on() -> None:
    async def story(kit: TestKit) -> str:
        actor = (await kit.start(Hesitant)).actor
        assert isinstance(actor, Hesitant)
        sell = await kit.caller.endpoint("runners.Hesitant.sell").client(timeout=1.0)
        with pytest.raises(DeadlineExceeded) as caught:
            await sell.generate()
        named = re.match(r"job (\S+) has not ended within .* s, and goes on", str(caught.value))
        assert named, caught.value
        actor.go_on.set()
        return await kit.caller.job(named[1], Hesitant.sell).result(10.0)

    assert on_a_kit(story) == "here"


class Porter(Actor, namespace="runners"):
    """One whose first word each method waits for somebody who is cancelled."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    @handler(durable=True, tries=2, backoff=0.01)
    async def carry(self, word: str) -> None:
        await self.wait("carry", word)

    @subscribe(asked)
    async def hear(self, word: str) -> None:
        await self.wait("hear", word)

    @subscribe(asked, group="porters", tries=2, backoff=0.01)
    async def take(self, word: str) -> None:
        await self.wait("take", word)

    async def wait(self, method: str, word: str) -> None:
        self.heard.append(f"{method} {word}")
        assert len(self.heard) < 20, "it is handed out for ever"
        if word == "first":
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other


def test_a_job_that_waits_for_what_is_cancelled_is_tried_as_often_as_any_other() -> None:
    async def story(kit: TestKit) -> list[str]:
        porter = (await kit.start(Porter)).actor
        assert isinstance(porter, Porter)
        job = await kit.client(Porter).carry.submit("first")
        with pytest.raises(HandlerError, match=r"what runners\.Porter\.carry waited for was"):
            await job.result(10.0)
        return porter.heard

    assert on_a_kit(story) == ["carry first", "carry first"]


def test_events_are_heard_after_one_that_waited_for_what_is_cancelled() -> None:
    async def story(kit: TestKit) -> list[str]:
        porter = (await kit.start(Porter)).actor
        assert isinstance(porter, Porter)
        for word in ("first", "second"):
            await asked.publish(word, runtime=kit.caller)
        await eventually(lambda: len(porter.heard) == 5)
        return sorted(porter.heard)

    wanted = ["hear first", "hear second", "take first", "take first", "take second"]
    assert on_a_kit(story) == wanted


class Hesitant(Actor, namespace="runners"):
    """Has a job, and begins its step when it is let go."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.go_on = asyncio.Event()

    @handler(durable=True, ack_wait=2.0)
    async def sell(self) -> str:
        self.called.append("sell")
        await self.go_on.wait()
        return await step("charge", self.charge)

    async def charge(self) -> str:
        self.called.append("charge")
        return "here"


def test_what_ended_elsewhere_while_the_server_was_not_heard_is_left_when_it_is_heard() -> None:
    async def story(kit: TestKit) -> tuple[str, list[str]]:
        actor = (await kit.start(Hesitant)).actor
        assert isinstance(actor, Hesitant)
        # One that was put before its taker was there may have begun before.
        await anyio.sleep(1.0)
        job = await kit.client(Hesitant).sell.submit()
        await eventually(lambda: actor.called == ["sell"])
        queue, _, name = job.id.rpartition(".")
        log = JobLog(kit.caller.bus.data.jetstream, EndpointName.parse(queue))

        with kit.bus.drop("$JS.ACK.>"):
            await anyio.sleep(5.0)
        # As another instance does that was handed the job meanwhile: it has dropped its steps.
        await log.end(name, JobResult(Outcome.DONE, b'"elsewhere"'), 3600.0)
        await anyio.sleep(5.0)
        actor.go_on.set()
        await anyio.sleep(5.0)
        return await job.result(), actor.called

    assert on_a_kit(story) == ("elsewhere", ["sell"])


class Packer(Actor, namespace="runners"):
    packed = 0

    @handler(durable=True, ack_wait=2.0)
    async def pack(self) -> None:
        self.packed += 1


async def packs(kit: TestKit) -> tuple[Packer, Any]:
    """An instance of it, and the link to its server."""
    instance = await kit.start(Packer)
    assert isinstance(instance.actor, Packer)
    return instance.actor, instance.runtime.bus.data


def test_what_ended_elsewhere_while_it_was_on_its_way_to_a_host_that_was_cut_off_is_left() -> None:
    async def story(kit: TestKit) -> tuple[int, int]:
        cut, link = await packs(kit)
        # One that was put before its taker was there may have begun before.
        await anyio.sleep(1.0)
        with kit.bus.partition(link):
            job = await kit.client(Packer).pack.submit()
            other, _ = await packs(kit)
            await job.result(5.0)
        await anyio.sleep(5.0)
        return cut.packed, other.packed

    assert on_a_kit(story) == (0, 1)


def test_what_ended_elsewhere_while_its_instance_was_cut_off_that_had_looked_it_up_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = JobLog.known

    async def story(kit: TestKit) -> tuple[int, int]:
        cut, link = await packs(kit)
        await anyio.sleep(1.0)
        others: list[Packer] = []

        async def answer_late(log: JobLog, job_ids: Collection[str]) -> set[str]:
            those = await known(log, job_ids)
            if not others:
                with kit.bus.partition(link):
                    other, _ = await packs(kit)
                    others.append(other)
                    await eventually(lambda: other.packed)
                    # And stores how it ended.
                    await anyio.sleep(1.0)
            return those

        monkeypatch.setattr(JobLog, "known", answer_late)
        await kit.client(Packer).pack.submit(idempotency_key="one")
        await anyio.sleep(10.0)
        return cut.packed, others[0].packed

    assert on_a_kit(story) == (0, 1)


class Waiter(Actor, namespace="runners"):
    tries: list[int] = []

    @handler(durable=True, tries=3, backoff=0.1)
    async def fail(self, waits: int) -> None:
        for _ in range(waits):
            await sleep_until(timedelta(seconds=60))
        self.tries.append(context().attempt)
        raise RuntimeError("no")

    @handler(durable=True, tries=3)
    async def stay(self) -> int:
        await sleep_until(timedelta(seconds=60))
        self.tries.append(context().attempt)
        if len(self.tries) < 2:
            await anyio.sleep_forever()
        return len(self.tries)

    @handler(durable=True, tries=3)
    async def move(self) -> int:
        await sleep_until(timedelta(seconds=60))
        self.tries.append(context().attempt)
        if len(self.tries) < 3:
            raise Migrate("elsewhere")
        return len(self.tries)


def test_a_job_that_waited_and_whose_instance_leaves_has_failed_in_no_try() -> None:
    async def story(kit: TestKit) -> tuple[int, JobState]:
        Waiter.tries = []
        first = await kit.start(Waiter)
        job = await kit.client(Waiter).stay.submit()
        await eventually(lambda: bool(Waiter.tries))
        await first.stop(0.0)
        await kit.start(Waiter)
        return await job.result(), await job.state()

    result, state = on_a_kit(story)

    assert (result, state.failures, Waiter.tries) == (2, (), [1, 1])


@pytest.mark.parametrize("waits", [1, 2, 8])
def test_the_tries_of_a_job_that_waited_are_those_that_failed(waits: int) -> None:
    async def story(kit: TestKit) -> JobState:
        Waiter.tries = []
        await kit.start(Waiter)
        job = await kit.client(Waiter).fail.submit(waits)
        with pytest.raises(HandlerError, match="RuntimeError: no"):
            await job.result()
        return await job.state()

    state = on_a_kit(story)

    assert Waiter.tries == [1, 2, 3]
    assert state.tries == 3
    assert [one.error for one in state.failures] == ["RuntimeError: no"] * 2


def test_a_job_that_waited_and_asks_to_be_done_elsewhere_has_failed_in_no_try() -> None:
    async def story(kit: TestKit) -> tuple[int, JobState]:
        Waiter.tries = []
        await kit.start(Waiter)
        job = await kit.client(Waiter).move.submit()
        return await job.result(), await job.state()

    result, state = on_a_kit(story)

    assert (result, state.failures, Waiter.tries) == (3, (), [1, 1, 1])


@pytest.mark.parametrize("has_peers", [True, False])
def test_jobs_that_were_put_before_their_taker_are_looked_up_together_at_a_server_alone(
    monkeypatch: pytest.MonkeyPatch, has_peers: bool
) -> None:
    known, knows = JobLog.known, JobLog.knows
    questions: list[int] = []

    async def of_several(log: JobLog, job_ids: Collection[str]) -> set[str]:
        questions.append(len(job_ids))
        return await known(log, job_ids)

    async def of_one(log: JobLog, job_id: str) -> bool:
        questions.append(1)
        return await knows(log, job_id)

    async def story(kit: TestKit) -> list[int]:
        monkeypatch.setattr(MemoryConnection, "has_peers", has_peers)
        monkeypatch.setattr(JobLog, "known", of_several)
        monkeypatch.setattr(JobLog, "knows", of_one)
        charge = kit.client(Till).charge
        jobs = [await charge.submit(cents) for cents in range(12)]
        cancelled = await charge.submit(12)
        await cancelled.cancel()
        await kit.start(Till)
        return [await job.result() for job in jobs]

    Till.most = 0
    assert on_a_kit(story) == list(range(12))
    assert sum(questions) == 13
    assert (max(questions), len(questions) < 13) == ((1, False) if has_peers else (2, True))


@pytest.mark.parametrize("has_peers", [True, False])
def test_a_job_that_an_outdated_server_of_a_cluster_does_not_know_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, has_peers: bool
) -> None:
    find, outdated = JobStream.find, [True]

    async def answer(jobs: JobStream, job_id: str) -> list[StoredMessage]:
        return [] if outdated and outdated.pop() else await find(jobs, job_id)

    async def story(kit: TestKit) -> str:
        job = await kit.client(Till).charge.submit(7)
        monkeypatch.setattr(MemoryConnection, "has_peers", has_peers)
        monkeypatch.setattr(JobStream, "find", answer)
        return (await job.state()).status

    if has_peers:
        assert on_a_kit(story) == "waiting"
    else:
        with pytest.raises(NoJob, match="there is no job"):
            on_a_kit(story)


class Mill(Actor, namespace="runners"):
    """Fails after a step, until it is mended."""

    ground: ClassVar[list[str]]
    is_mended: ClassVar[bool]

    @handler(durable=True, tries=1)
    async def mill(self, corn: str) -> str:
        flour = await step("grind", self.grind, corn)
        if not self.is_mended:
            raise HandlerError("no sack")
        return flour

    async def grind(self, corn: str) -> str:
        self.ground.append(corn)
        return f"flour of {corn}"


def test_a_job_that_failed_for_good_keeps_its_steps_though_its_message_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drop = JobStream.drop
    ground = Mill.ground = list[str]()

    async def lost(jobs: JobStream, *_: object) -> bool:
        return True

    async def story(kit: TestKit) -> str:
        Mill.is_mended = False
        first = await kit.start(Mill)
        job = await kit.client(Mill).mill.submit("rye")
        monkeypatch.setattr(JobStream, "drop", lost)
        with pytest.raises(HandlerError, match="no sack"):
            await job.result()
        monkeypatch.setattr(JobStream, "drop", drop)
        await kit.kill(first)
        await kit.start(Mill)
        js = kit.caller.bus.data.jetstream
        queue = EndpointName("runners", "Mill", "mill")
        await eventually(partial(is_empty, js, work_stream(queue)))
        Mill.is_mended = True
        letters = DeadLetters(js, "runners")
        (letter,) = await letters.find()
        await letters.redrive(letter)
        return await job.result()

    assert on_a_kit(story) == "flour of rye"
    assert ground == ["rye"]


async def is_empty(js: JetStream, stream: str) -> bool:
    return (await js.stream_info(stream)).messages == 0
