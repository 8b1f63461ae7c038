"""A process that takes jobs until it is killed, and says what it begins and what it has done."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time

from dynbus.bus.background import task_group
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.work_queue import Job, WorkQueue, WorkQueueConfig

QUEUE = EndpointName("jobs", "Printer", "print")
CONFIG = WorkQueueConfig(ack_wait=1.0, tries=50, retry_delay=0.05)
LIMIT = 4


async def main(url: str, ledger: str, ack_wait: float, seconds: float) -> None:
    written = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(what: str, job: Job) -> None:
        # One write each: what a kill leaves is whole lines.
        os.write(written, f"{time.monotonic():.6f} {what} {job.job_id}\n".encode())

    async def work(job: Job) -> None:
        write("begun", job)
        await asyncio.sleep(random.uniform(0.0, seconds))
        # A kill may come between the server's confirmation and our writing it down.
        write("worked", job)
        try:
            await job.ack()
        except DynbusError as error:
            print(f"not confirmed: {error}", flush=True)
        else:
            write("done", job)

    bus = await Bus.connect(BusConfig(servers=(url,)), name="taker")
    queue = WorkQueue(bus, QUEUE, CONFIG._replace(ack_wait=ack_wait))
    async with queue.take(LIMIT) as taker, task_group() as tasks:
        print("taking", flush=True)
        async for job in taker:
            tasks.start_soon(work, job)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
