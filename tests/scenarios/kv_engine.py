"""An engine process: publishes the events of a random cache, then says what the cache holds."""

from __future__ import annotations

import asyncio
import random
import signal
import sys

from dynbus.bus.errors import Unavailable
from dynbus.bus.lane import new_event_loop
from dynbus.bus.nats.connection import connect
from dynbus.kvrouter.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.kvrouter.stream.publisher import KvEventPublisher


class RandomCache:
    """A cache that stores, removes and clears at random."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._held: list[int] = []

    def step(self) -> list[KvEvent]:
        chance, held = self._chance, self._held
        draw = chance.random()
        if draw < 0.002:
            held.clear()
            return [AllBlocksCleared()]
        if len(held) > 50 and draw < 0.4:
            gone = set(chance.sample(held, 4))
            self._held = [one for one in held if one not in gone]
            return [BlockRemoved(list(gone))]
        parent = chance.choice(held) if held and draw < 0.9 else None
        chain = [chance.randrange(1, 1 << 63) for _ in range(4)]
        held += chain
        return [BlockStored(parent, chain, [one ^ 1 for one in chain])]


async def main() -> None:
    url, instance_id, seed, steps, pause = sys.argv[1:]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connection = await connect([url], name="engine")
    cache, truth = RandomCache(int(seed)), CacheMirror()
    async with KvEventPublisher(connection, "scenario", "Engine", instance_id) as publisher:
        print("publishing", flush=True)
        for _ in range(int(steps)):
            events = cache.step()
            truth.apply(events)
            publisher.publish(events)
            await asyncio.sleep(float(pause))
        while True:
            try:
                await publisher.flush(1.0)
                break
            except Unavailable as error:
                print(error, flush=True)
        held = truth.digest()
        print(f"holds {held.blocks} {held.digest} .", flush=True)
        await stop.wait()
    await connection.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
