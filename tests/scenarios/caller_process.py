"""A caller process: keeps streams of `workload` open until it is killed."""

from __future__ import annotations

import asyncio
import logging
import sys

from dynbus import Runtime, call_options
from dynbus.bus.lane import new_event_loop

from .workload import Count, Relay, Source, Top

ACTORS: dict[str, type[Source] | type[Relay] | type[Top]] = {
    "Source": Source,
    "Relay": Relay,
    "Top": Top,
}


async def main(url: str, actor: str, streams: int, pause: float) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    async with Runtime.connect(url, name="caller") as runtime:
        client = runtime.client(ACTORS[actor])
        first = [asyncio.Event() for _ in range(streams)]

        async def read(number: int) -> None:
            with call_options(wait=60.0):
                stream = client.count(Count(items=10**9, pause=pause, tag=f"stream {number}"))
            async for _ in stream:
                first[number].set()

        async with asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(read(number))
            for event in first:
                await event.wait()
            print("streaming", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
