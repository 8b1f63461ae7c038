"""Jobs by others, run by path in an environment of their own: `peers.py SYSTEM URL JOBS ROLE`.

`bare` is nats-py alone with the promises that dynbus gives: jobs are stored before they count, put
once under their id, their results are stored once, and their acknowledgement is confirmed.
`faststream` is FastStream's pull subscriber as its guide has it: acknowledgement after work, and no
result. Each holds up to 16 jobs at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import nats
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

HELD = 16
SUBMITTERS = 64


def payload(number: int) -> bytes:
    """A job of about 1 KiB that says when it was submitted."""
    return json.dumps({"number": number, "at": time.time(), "text": "x" * 960}).encode()


class Tally:
    """What has begun and ended, and when."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.began = self.last = 0.0
        self.waits: list[float] = []
        self.done = 0
        self.ended = asyncio.Event()

    def begin(self, at: float) -> None:
        now = time.time()
        self.began = self.began or now
        self.waits.append(now - at)

    def end(self) -> None:
        self.done += 1
        self.last = time.time()
        if self.done >= self.jobs:
            self.ended.set()

    def tell(self) -> None:
        seconds = self.last - self.began
        waits = sorted(self.waits)
        figures = {"seconds": seconds, "wait_p50": waits[len(waits) // 2]}
        print(json.dumps(figures), flush=True)


async def put(url: str, jobs: int, pause: float, subject: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    numbers = iter(range(jobs))

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
    print("ready", flush=True)

    async def work(message: Any) -> None:
        job = json.loads(message.data)
        tally.begin(job["at"])
        await js.publish(
            f"bare.results.{job['number']}",
            str(job["number"]).encode(),
            headers={"Nats-Expected-Last-Subject-Sequence": "0"},
        )
        await message.ack_sync()
        tally.end()

    async def works() -> None:
        while not tally.ended.is_set():
            try:
                (message,) = await subscription.fetch(1, timeout=1.0)
            except TimeoutError:
                continue
            await work(message)

    await asyncio.gather(*(works() for _ in range(HELD)))
    tally.tell()
    await client.close()


async def make_bare(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    await js.add_stream(
        StreamConfig("BARE", subjects=["bare.jobs"], retention=RetentionPolicy.WORK_QUEUE)
    )
    await js.add_stream(StreamConfig("BARERESULTS", subjects=["bare.results.*"]))
    await js.add_consumer("BARE", ConsumerConfig(durable_name="takers", max_ack_pending=65536))
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


async def main(system: str, url: str, jobs: int, role: str) -> None:
    if role == "make":
        await (make_bare if system == "bare" else make_faststream)(url)
    elif role == "take":
        await (take_bare if system == "bare" else take_faststream)(url, Tally(jobs))
    else:
        subject = "bare.jobs" if system == "bare" else "fast.jobs"
        await put(url, jobs, 0.01 if role == "trickle" else 0.0, subject)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
