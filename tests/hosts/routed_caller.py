"""A process of a host that has a KV router before the engines, and is on record, until SIGTERM.

Its conversations grow by what was answered, a dozen at a time; each request says how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from random import Random

from dynbus import DynbusError, Runtime
from dynbus.bus.lane import new_event_loop
from dynbus.kvrouter import open_router
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.worker import MockWorker

TALKS = 12
TURNS = 8


async def main(url: str, name: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with (
        Runtime.connect(url, name=name, wait=30.0, flight=True) as runtime,
        open_router(runtime, MockWorker) as router,
    ):
        client = runtime.client(MockWorker, routing=router)

        async def talk(number: int) -> None:
            random = Random(f"{name}-{number}")
            while not stop.is_set():
                shared = Random(number % 3)
                tokens = [shared.randrange(30_000) for _ in range(256)]
                for _ in range(TURNS):
                    tokens += [random.randrange(30_000) for _ in range(64)]
                    try:
                        answer: list[int] = []
                        async for item in client.generate(GenerateRequest(tokens, 16)):
                            answer += item.token_ids
                        tokens += answer
                        print("answered", flush=True)
                    except DynbusError as error:
                        print("failed", error.code, flush=True)
                    if stop.is_set():
                        return

        async with asyncio.TaskGroup() as talks:
            for number in range(TALKS):
                talks.create_task(talk(number))
    print("ended", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
