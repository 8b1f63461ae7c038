"""A process of a host that does the jobs of `job_shop` and hears the events of `event_shop`."""

from __future__ import annotations

import asyncio
import logging
import sys

from tests.scenarios.event_shop import GROUPS, member
from tests.scenarios.job_shop import Shop

from dynbus import Runtime
from dynbus.bus.lane import new_event_loop


async def main(url: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    async with Runtime.connect(url, wait=30.0) as runtime:
        await runtime.start(Shop)
        for group in GROUPS:
            await runtime.start(member(group))
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
