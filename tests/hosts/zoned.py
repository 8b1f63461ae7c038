"""Processes of a zone: `worker` serves until SIGTERM, `caller` measures calls and prints them."""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import time
from collections import Counter

import msgspec

from dynbus import Actor, Runtime, call_options, handler
from dynbus.bus.lane import new_event_loop
from dynbus.bus.protocol.names import InstanceName

PLACES = 4
"""Calls that a worker runs at a time."""
CALLS = 300
HELD = 1.0
"""Seconds of the calls that fill a zone."""


class Zoned(Actor, namespace="hosts"):
    @handler(concurrency=PLACES, queue=0, idempotent=True)
    async def where(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.instance_id


class Measured(msgspec.Struct, frozen=True):
    """What a caller saw, times in seconds.

    Attributes:
        own, other: median of calls of the instance of its zone, and of the other one, by name.
        local: median of calls by `local_first`.
        local_at: who answered those by `local_first`.
        way: to the other zone and back, as measured by heartbeats.
        spilled_at: who answered while the zone was full, of its own calls and one more.
        back_at: who answered after that.
    """

    own: float
    other: float
    local: float
    way: float | None
    local_at: dict[str, int]
    spilled_at: dict[str, int]
    back_at: dict[str, int]


class Calls:
    """Calls one after the other.

    Attributes:
        seconds: that each took.
        at: who answered.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.at = Counter[str]()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    async def make(self, client: Zoned, times: int = 1) -> None:
        for _ in range(times):
            began = time.perf_counter()
            self.at[await client.where(0.0)] += 1
            self.seconds.append(time.perf_counter() - began)


async def call(runtime: Runtime, zone: str) -> None:
    """Measure, then answer each line `again` with who answers a call."""
    client = runtime.client(Zoned, routing="local_first", wait=20.0)
    endpoint = await runtime.endpoint("hosts.Zoned.where").client()
    await endpoint.wait_for_instances(20.0, count=2)
    [there] = {*endpoint.instance_ids()} - {zone}
    own, other, local, back = Calls(), Calls(), Calls(), Calls()
    for _ in range(CALLS):
        # By turns, so that whatever else the machine does slows down both.
        with call_options(instance=zone):
            await own.make(client)
        await local.make(client)
    with call_options(instance=there):
        await other.make(client, CALLS // 10)
    held = [asyncio.ensure_future(client.where(HELD)) for _ in range(PLACES + 1)]
    spilled_at = Counter(await asyncio.gather(*held))
    await back.make(client, 20)
    way = runtime.caller.round_trip(InstanceName("hosts", "Zoned", there))
    told = Measured(own.median, other.median, local.median, way, local.at, spilled_at, back.at)
    print("measured", msgspec.json.encode(told).decode(), flush=True)
    while True:
        print("at", await client.where(0.0), flush=True)
        await asyncio.sleep(0.2)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["worker", "caller"])
    parser.add_argument("zone")
    parser.add_argument("url")
    given = parser.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Runtime.connect(given.url, zone=given.zone, drain_grace=5.0) as runtime:
        if given.role == "caller":
            calling = asyncio.ensure_future(call(runtime, given.zone))
            await asyncio.wait(
                {calling, asyncio.ensure_future(stop.wait())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if calling.done():
                await calling
            calling.cancel()
            return
        await runtime.start(Zoned, instance_id=given.zone)
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
