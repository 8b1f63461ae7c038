"""A process that serves mock engines, or a router in front of them, until it is killed."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dynbus import Runtime, handler
from dynbus.bus.lane import new_event_loop
from dynbus.kvrouter import KvEventPublisher, RouterActor
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.mock.worker import MockWorker

BLOCK_SIZE = 16
BLOCKS = 512


class Engine(MockWorker, namespace="scenario"):
    """An engine whose cache is soon full, and whose publisher can be killed alone."""

    publisher: KvEventPublisher

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK_SIZE, blocks=BLOCKS)

    def event_sink(self) -> AbstractAsyncContextManager[EventSink]:
        @asynccontextmanager
        async def sink() -> AsyncGenerator[EventSink]:
            async with KvEventPublisher.of(self) as self.publisher:
                yield self.publisher

        return sink()

    @handler
    async def kill_publisher(self) -> int:
        """Its events stop; returns how many messages it had published."""
        await self.publisher.close()
        return self.publisher.status().ranks[0].statistics.batches


class Front(RouterActor, namespace="scenario"):
    def __init__(self) -> None:
        super().__init__("scenario.Engine.generate")


ACTORS: dict[str, type[Engine] | type[Front]] = {"Engine": Engine, "Front": Front}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("actor", choices=ACTORS)
    parser.add_argument("id")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    async with Runtime.connect(options.url, name=options.id, lease_ttl=2.0) as runtime:
        await runtime.start(ACTORS[options.actor], instance_id=options.id)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
