"""Processes of the fleet: runtimes with instances, or callers of them."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack
from time import perf_counter

import msgspec

from dynbus import Actor, DynbusError, Runtime, handler, with_options
from dynbus.bus.lane import new_event_loop

AT_A_TIME = 50
"""Runtimes of the fleet that start at a time: the processors are those of all of them."""
TIMEOUT = 15.0
HUNG = 5.0
"""Seconds after its timeout at which a call that has not ended counts as hung."""


class Echo(Actor, namespace="storm"):
    """The actor of each instance."""

    @handler(idempotent=True)
    async def echo(self, number: int) -> int:
        return number


class Outcomes(msgspec.Struct):
    """The calls of a process: their ends, and the longest that one took.

    Attributes:
        ends: "ok", "hung", or the code of the error.
        slowest: seconds.
    """

    ends: dict[str, int]
    slowest: float


def _say_ready() -> None:
    # Hundreds of runtimes are more objects than any process has: to go through all of them, again
    # and again, takes more of the processors than what is measured here.
    gc.collect()
    gc.freeze()
    # In one write: others write to the same pipe.
    os.write(1, b"ready\n")


def fork(processes: int) -> int:
    """The number of this process among so many, all forked from what was imported once."""
    gc.collect()
    gc.freeze()
    for number in range(1, processes):
        if os.fork() == 0:
            return number
    return 0


async def serve(url: str, count: int, together: int, at_a_time: int) -> None:
    """Serve with so many instances, of which so many together have the connections of a runtime."""
    async with AsyncExitStack() as runtimes:

        async def start(instances: int) -> None:
            runtime = await runtimes.enter_async_context(Runtime.connect(url, wait=60.0))
            for _ in range(instances):
                await runtime.start(Echo)

        shares = [min(together, count - begun) for begun in range(0, count, together)]
        for begun in range(0, len(shares), at_a_time):
            await asyncio.gather(*map(start, shares[begun : begun + at_a_time]))
        _say_ready()
        await asyncio.Event().wait()


async def call(url: str, calls: int, rate: float, instances: int) -> None:
    """Make so many calls, so many a second, to any instance; prints `Outcomes`."""
    outcomes = Outcomes({}, 0.0)
    ends: Counter[str] = Counter()

    async with Runtime.connect(url, wait=60.0) as runtime:
        echo = with_options(runtime.client(Echo, routing="random"), timeout=TIMEOUT)
        await runtime.discovery.wait_synchronized(60.0)
        while len(await instances_of(runtime)) < instances:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.2)
        _say_ready()

        async def one(number: int) -> None:
            begun = perf_counter()
            try:
                async with asyncio.timeout(TIMEOUT + HUNG):
                    assert await echo.echo(number) == number
                ends["ok"] += 1
            except DynbusError as error:
                ends[error.code] += 1
            except TimeoutError:
                ends["hung"] += 1
            outcomes.slowest = max(outcomes.slowest, perf_counter() - begun)

        begun = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(calls):
                await asyncio.sleep(max(0.0, begun + number / rate - perf_counter()))
                tasks.create_task(one(number))
        outcomes.ends = dict(ends)
        print(msgspec.json.encode(outcomes).decode(), flush=True)
        # What it holds is counted.
        await asyncio.Event().wait()


async def instances_of(runtime: Runtime) -> list[object]:
    client = await runtime.namespace("storm").component("Echo").endpoint("echo").client()
    return list(client.instance_ids())


if __name__ == "__main__":
    role, url, *numbers = sys.argv[1:]
    share = at_a_time = 0
    if role == "serve":
        instances, processes = int(numbers[0]), int(numbers[2])
        number = fork(processes)
        share = instances // processes + (number < instances % processes)
        at_a_time = max(1, AT_A_TIME // processes)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if role == "serve":
            runner.run(serve(url, share, int(numbers[1]), at_a_time))
        else:
            runner.run(call(url, int(numbers[0]), float(numbers[1]), int(numbers[2])))
