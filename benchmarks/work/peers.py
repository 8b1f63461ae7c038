"""Jobs by others, run by path in an environment of their own: `peers.py SYSTEM URL JOBS ROLE`.

`bare` is nats-py alone with promises that dynbus gives: jobs are stored before they count, put once
under their id, and kept alive while they run; one that fails is tried again and then a dead letter;
how each ended is stored once and for a day, and its acknowledgement is confirmed. `faststream` is
FastStream's pull subscriber as its guide has it: acknowledgement after work, without a
confirmation, and no result. `taskiq` is Taskiq over `taskiq-nats`, likewise. Each holds up to 16
jobs at a time. All run on uvloop.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import nats
import nats.js.errors
import uvloop
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

HELD = 16
SUBMITTERS = 64
GROUPS = ("billing", "search", "audit", "mail")
TRIES = 5
ACK_WAIT = 30.0


def payload(number: int) -> bytes:
    """A job of about 1 KiB that says when it was submitted."""
    return json.dumps({"number": number, "at": time.time(), "text": "x" * 960}).encode()


class Tally:
    """What has begun and ended, and when."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.began = self.last = self.cpu = 0.0
        self.waits: list[float] = []
        self.done = 0
        self.ended = asyncio.Event()

    def begin(self, at: float) -> None:
        now = time.time()
        if not self.waits:
            self.began = now
            self.cpu = -time.process_time()
        self.waits.append(now - at)

    def end(self) -> None:
        self.done += 1
        if self.done >= self.jobs:
            self.finish()

    def finish(self) -> None:
        self.last = time.time()
        self.cpu += time.process_time()
        self.ended.set()

    def tell(self) -> None:
        waits = sorted(self.waits)
        figures = {
            "seconds": self.last - self.began,
            "cpu": self.cpu,
            "wait_p50": waits[len(waits) // 2],
        }
        print(json.dumps(figures), flush=True)


async def put(url: str, jobs: int, pause: float, subject: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    # Not those of who put before.
    first = time.time_ns()
    numbers = iter(range(first, first + jobs))

    async def puts() -> None:
        for number in numbers:
            await js.publish(subject, payload(number), headers={"Nats-Msg-Id": str(number)})
            if pause:
                await asyncio.sleep(pause)

    begun = time.time()
    await asyncio.gather(*(puts() for _ in range(1 if pause else SUBMITTERS)))
    print(json.dumps({"seconds": time.time() - begun}), flush=True)
    await client.close()


async def take_bare(url: str, tally: Tally) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    subscription = await js.pull_subscribe("bare.jobs", "takers", stream="BARE")
    held: dict[int, Any] = {}
    print("ready", flush=True)

    async def keep() -> None:
        while not tally.ended.is_set():
            await asyncio.sleep(ACK_WAIT / 4)
            for message in list(held.values()):
                await message.in_progress()

    async def store(outcome: str, name: str, result: bytes) -> None:
        fields = {"Outcome": outcome, "Nats-Expected-Last-Subject-Sequence": "0"}
        try:
            await js.publish(f"bare.results.{name}", result, headers=fields)
        except nats.js.errors.APIError as error:
            if error.err_code != 10071:
                raise
            # It had ended before, and what is stored stays.

    async def handle(job: dict[str, Any]) -> bytes:
        tally.begin(job["at"])
        return json.dumps(job["number"]).encode()

    async def work(message: Any) -> None:
        name = message.headers["Nats-Msg-Id"]
        tries = message.metadata.num_delivered
        held[message.metadata.sequence.stream] = message
        try:
            if tries > 1 and await is_stored(name):
                await message.ack_sync()
                return
            result = await handle(json.loads(message.data))
            await store("done", name, result)
            await message.ack_sync()
        except Exception as error:  # noqa: BLE001 - what handlers raise
            if tries < TRIES:
                await message.nak(delay=0.5 * 2 ** (tries - 1))
                return
            await js.publish("bare.dead", message.data, headers={"Error": repr(error)})
            await store("failed", name, repr(error).encode())
            await message.ack_sync()
        finally:
            del held[message.metadata.sequence.stream]
        tally.end()

    async def is_stored(name: str) -> bool:
        try:
            await js.get_last_msg("BARERESULTS", f"bare.results.{name}")
        except nats.js.errors.NotFoundError:
            return False
        return True

    async def works() -> None:
        while not tally.ended.is_set():
            try:
                (message,) = await subscription.fetch(1, timeout=1.0)
            except TimeoutError:
                continue
            await work(message)

    keeping = asyncio.create_task(keep())
    await asyncio.gather(*(works() for _ in range(HELD)))
    keeping.cancel()
    tally.tell()
    await client.close()


async def make_bare(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    await js.add_stream(
        StreamConfig("BARE", subjects=["bare.jobs"], retention=RetentionPolicy.WORK_QUEUE)
    )
    await js.add_stream(StreamConfig("BARERESULTS", subjects=["bare.results.*"], max_age=86400))
    await js.add_stream(StreamConfig("BAREDEAD", subjects=["bare.dead"]))
    await js.add_consumer(
        "BARE",
        ConsumerConfig(durable_name="takers", ack_wait=ACK_WAIT, max_ack_pending=65536),
    )
    await client.close()


async def take_faststream(url: str, tally: Tally) -> None:
    from faststream.nats import JStream, NatsBroker, PullSub
    from pydantic import BaseModel

    class Job(BaseModel):
        number: int
        at: float
        text: str

    broker: Any = NatsBroker(url, logger=None)

    async def work(job: Job) -> None:
        tally.begin(job.at)
        tally.end()

    broker.subscriber(
        "fast.jobs",
        stream=JStream("FAST", retention=RetentionPolicy.WORK_QUEUE),
        durable="takers",
        pull_sub=PullSub(batch_size=HELD, timeout=1.0),
        max_workers=HELD,
    )(work)

    await broker.start()
    print("ready", flush=True)
    await tally.ended.wait()
    tally.tell()
    await broker.stop()


async def make_faststream(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(
        StreamConfig("FAST", subjects=["fast.jobs"], retention=RetentionPolicy.WORK_QUEUE)
    )
    await client.close()


def taskiq_work(url: str, tally: Tally | None) -> tuple[Any, Any]:
    """Taskiq's broker, and its task."""
    from taskiq_nats import PullBasedJetStreamBroker

    broker: Any = PullBasedJetStreamBroker(
        [url],
        subject="taskiq.jobs",
        stream_name="TASKIQ",
        durable="takers",
        stream_config=StreamConfig("TASKIQ", retention=RetentionPolicy.WORK_QUEUE),
        consumer_config=ConsumerConfig(durable_name="takers", max_ack_pending=65536),
        pull_consume_batch=HELD,
        pull_consume_timeout=1.0,
    )

    async def work(job: dict[str, Any]) -> None:
        assert tally is not None
        tally.begin(job["at"])
        tally.end()

    return broker, broker.register_task(work, task_name="work")


async def take_taskiq(url: str, tally: Tally) -> None:
    from taskiq.acks import AcknowledgeType
    from taskiq.api import run_receiver_task

    broker, _ = taskiq_work(url, tally)
    broker.is_worker_process = True
    await broker.startup()
    receiving = asyncio.create_task(
        run_receiver_task(
            broker,
            max_async_tasks=HELD,
            max_prefetch=HELD,
            ack_time=AcknowledgeType.WHEN_EXECUTED,
        )
    )
    print("ready", flush=True)
    await tally.ended.wait()
    tally.tell()
    receiving.cancel()
    # It goes on for a moment, and its broker must be there.
    await asyncio.wait([receiving])
    await broker.shutdown()


async def put_taskiq(url: str, jobs: int, pause: float) -> None:
    broker, task = taskiq_work(url, None)
    await broker.startup()
    numbers = iter(range(jobs))

    async def puts() -> None:
        for number in numbers:
            await task.kiq(json.loads(payload(number)))
            if pause:
                await asyncio.sleep(pause)

    begun = time.time()
    await asyncio.gather(*(puts() for _ in range(1 if pause else SUBMITTERS)))
    print(json.dumps({"seconds": time.time() - begun}), flush=True)
    await broker.shutdown()


async def make_taskiq(url: str) -> None:
    """Nothing: its broker makes its stream."""


async def take_faststream_events(url: str, tally: Tally) -> None:
    from faststream.nats import JStream, NatsBroker, PullSub
    from pydantic import BaseModel

    class Event(BaseModel):
        number: int
        at: float
        text: str

    broker: Any = NatsBroker(url, logger=None)

    async def hear(event: Event) -> None:
        tally.begin(event.at)
        tally.end()

    for group in GROUPS:
        broker.subscriber(
            "fast.events",
            stream=JStream("FASTEVENTS", declare=False),
            durable=group,
            pull_sub=PullSub(batch_size=HELD, timeout=1.0),
            max_workers=HELD,
        )(hear)
    await broker.start()
    print("ready", flush=True)
    await tally.ended.wait()
    tally.tell()
    await broker.stop()


async def make_faststream_events(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(StreamConfig("FASTEVENTS", subjects=["fast.events"]))
    await client.close()


async def main(system: str, url: str, jobs: int, role: str) -> None:
    takes = {
        "bare": take_bare,
        "faststream": take_faststream,
        "taskiq": take_taskiq,
        "faststream-events": take_faststream_events,
    }
    makes = {
        "bare": make_bare,
        "faststream": make_faststream,
        "taskiq": make_taskiq,
        "faststream-events": make_faststream_events,
    }
    subjects = {
        "bare": "bare.jobs",
        "faststream": "fast.jobs",
        "faststream-events": "fast.events",
    }
    if role == "make":
        await makes[system](url)
    elif role == "take":
        count = jobs * len(GROUPS) if system == "faststream-events" else jobs
        await takes[system](url, Tally(count))
    elif system == "taskiq":
        await put_taskiq(url, jobs, 0.01 if role == "trickle" else 0.0)
    else:
        await put(url, jobs, 0.01 if role == "trickle" else 0.0, subjects[system])


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
