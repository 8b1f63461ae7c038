"""A worker process of a host: serves `Counter` until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from dynbus import Runtime
from dynbus.bus.lane import new_event_loop

from .workload import Counter


async def main(url: str, effects: str, instance_id: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Runtime.connect(url, name=instance_id, drain_grace=5.0) as runtime:
        await runtime.start(Counter, instance_id=instance_id, effects=effects)
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
