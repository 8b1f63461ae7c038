"""A router in a process of its own, which takes snapshots in tiny chunks so that it takes long."""

from __future__ import annotations

import asyncio
import sys

from dynbus.bus.nats.connection import connect
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.snapshot_writer import SnapshotWriter
from dynbus.kvrouter.stream.snapshots import SnapshotStore


async def main(url: str, namespace: str, component: str, chunk_size: int) -> None:
    connection = await connect([url], name="router")
    store = SnapshotStore(connection.jetstream, namespace, chunk_size=chunk_size)
    async with (
        IndexFollower(connection, namespace, component) as follower,
        SnapshotWriter(connection.jetstream, follower, store=store, ttl=2.0),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
