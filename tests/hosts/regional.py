"""A caller whose streams go to other regions: it prints what it read, how long it waited, and when
u2 is there, which is the worker of the region whose power is back."""

from __future__ import annotations

import argparse
import asyncio
import time

import anyio
import msgspec

from dynbus import DynbusError, Runtime, call_options
from dynbus.bus.lane import new_event_loop
from dynbus.bus.protocol.names import InstanceName

from .workload import Count, Counter

ITEMS = 80
PAUSE = 0.1
"""Seconds before each item."""


class Read(msgspec.Struct, frozen=True):
    """What was read of all streams.

    Attributes:
        whole: streams whose items were each read once, in order.
        failed: the errors of those that ended by one.
        stalls: of each stream the longest time between two items, in seconds.
    """

    whole: int
    failed: list[str]
    stalls: list[float]


async def call(url: str, streams: int, known: set[str]) -> None:
    """Read all streams, from when both of the other regions are known."""
    async with Runtime.connect(url, spill="region") as runtime:
        counter = runtime.client(Counter)
        answered: set[str] = set()
        while not answered >= known:
            with call_options(wait=60.0):
                instances = await counter.repeatable(Count("who", 0, 0.0))
            assert instances == 0
            answered = {one.id for one in runtime.abroad.view.everything()}
        whole, failed = 0, list[str]()
        stalls: list[float] = []
        begun = 0

        async def read(number: int) -> None:
            nonlocal whole, begun
            numbers: list[int] = []
            last = time.monotonic()
            longest = 0.0
            try:
                async for item in counter.resumed(Count(str(number), ITEMS, PAUSE)):
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
                    numbers.append(item)
                    begun += len(numbers) == 5
                    if begun == streams and len(numbers) == 5:
                        print("all streams have begun", flush=True)
            except DynbusError as error:
                failed.append(f"{type(error).__name__}: {error}")
            whole += numbers == list(range(ITEMS))
            stalls.append(longest)

        async with anyio.create_task_group() as reading:
            for number in range(streams):
                reading.start_soon(read, number)
        seen = Read(whole, failed, sorted(stalls))
        print("read", msgspec.json.encode(seen).decode(), flush=True)
        back = InstanceName("hosts", "Counter", "u2")
        await runtime.abroad.wait_for_instance(back, timeout=60.0)
        print("knows u2", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("known", nargs="+")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(call(given.url, given.streams, set(given.known)))


if __name__ == "__main__":
    main()
