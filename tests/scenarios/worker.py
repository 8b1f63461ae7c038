"""A worker process: serves actors of `workload` until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

from dynbus import Runtime
from dynbus.bus.lane import new_event_loop

from .workload import ACTORS


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("actors", nargs="+", choices=ACTORS)
    parser.add_argument("--id", default="")
    parser.add_argument("--ttl", type=float, default=10.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Runtime.connect(
        options.url, name="worker", lease_ttl=options.ttl, drain_grace=5.0
    ) as runtime:
        for name in options.actors:
            await runtime.start(ACTORS[name], instance_id=options.id)
        print("ready", flush=True)
        await stop.wait()
        print("stopping", flush=True)
    print("stopped", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
