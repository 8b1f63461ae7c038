"""An engine of a host, which computes nothing and is on record, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from dynbus import Runtime
from dynbus.bus.lane import new_event_loop
from dynbus.llm.mock.worker import MockWorker


async def main(url: str, instance_id: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Runtime.connect(url, name=instance_id, wait=30.0, flight=True) as runtime:
        await runtime.start(MockWorker, instance_id=instance_id, blocks=600, speedup_ratio=2.0)
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
