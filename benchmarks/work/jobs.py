"""`python -m benchmarks.work.jobs`: jobs a second and how soon they begin, beside nats-py alone,
FastStream's pull subscriber and Taskiq, on the same nats-server.

One taker in a process of its own, which holds 16 jobs at a time, of 1 KiB each. First all jobs are
submitted by 64 submitters side by side, then the taker begins; then jobs are submitted one by one
every 10 ms to a taker that waits.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import click
import msgspec
import uvloop

from dynbus import Actor, Runtime, handler

from .comparing import PEERS, Child, compare
from .peers import HELD, SUBMITTERS, Tally, payload

TRICKLE = 300


class Task(msgspec.Struct):
    number: int
    at: float
    text: str


class Worker(Actor, namespace="bench"):
    tally: Tally

    @handler(durable=True, concurrency=HELD)
    async def work(self, job: Task) -> int:
        self.tally.begin(job.at)
        return job.number


async def take(url: str, jobs: int) -> None:
    """Be the taker, until all jobs have ended."""
    Worker.tally = tally = Tally(jobs)
    async with Runtime.connect(url) as runtime:
        await runtime.start(Worker)
        print("ready", flush=True)
        queue = runtime.jobs_of(runtime.address_of(Worker).endpoint("work")).queue
        # A question costs the taker time, too.
        while len(tally.waits) < jobs or (await queue.depth(max_age=0.0)).jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tally.finish()
        tally.tell()


async def put(url: str, jobs: int, pause: float) -> None:
    """Submit all jobs."""
    async with Runtime.connect(url) as runtime:
        client = runtime.client(Worker)
        numbers = iter(range(jobs))

        async def puts() -> None:
            for number in numbers:
                await client.work.submit(msgspec.json.decode(payload(number), type=Task))
                if pause:
                    await asyncio.sleep(pause)

        begun = time.time()
        await asyncio.gather(*(puts() for _ in range(1 if pause else SUBMITTERS)))
        print(json.dumps({"seconds": time.time() - begun}), flush=True)


def measure(system: str, python: str, url: str, jobs: int) -> dict[str, Any]:
    """Figures of one system."""

    def command(role: str, count: int) -> list[str]:
        if system == "dynbus":
            return [sys.executable, "-m", "benchmarks.work.jobs", "--role", role, url, str(count)]
        return [python, str(PEERS), system, url, str(count), role]

    if system != "dynbus":
        subprocess.run(command("make", 0), check=True, timeout=60)
    submitted = Child(command("put", jobs)).figures()
    taker = Child(command("take", jobs))
    taker.line()
    taken = taker.figures()
    taker = Child(command("take", TRICKLE))
    taker.line()
    Child(command("trickle", TRICKLE)).figures()
    trickled = taker.figures()
    return {
        "submitted_per_second": round(jobs / submitted["seconds"]),
        "done_per_second": round(jobs / taken["seconds"]),
        "cpu_us_per_job": round(taken["cpu"] / jobs * 1e6),
        "begin_p50_ms": round(trickled["wait_p50"] * 1000, 2),
    }


@click.command(help=__doc__)
@click.option("--jobs", default=5000)
@click.option("--runs", default=3)
@click.option(
    "--python-peers", default="", help="Python with nats-py, faststream[nats] and taskiq-nats."
)
@click.option("--role", default="", hidden=True)
@click.argument("rest", nargs=-1)
def main(jobs: int, runs: int, python_peers: str, role: str, rest: tuple[str, ...]) -> None:
    if role:
        url, count = rest[0], int(rest[1])
        uvloop.run(take(url, count) if role == "take" else put(url, count, 0.01 * (role != "put")))
        return
    compare(
        ["dynbus", *(("bare", "faststream", "taskiq") if python_peers else ())],
        runs,
        lambda system, url: measure(system, python_peers, url, jobs),
    )


if __name__ == "__main__":
    main()
