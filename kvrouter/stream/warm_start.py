"""An index that is warm at once: from the newest snapshot, and the stream from there."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio

from dynbus import DynbusError, Runtime
from dynbus.kvrouter.radix.index import DEFAULT_MAX_BLOCKS, RadixIndex
from dynbus.spi import JetStream, NoStream, unix_time

from .event_stream import EventStream
from .follower import IndexFollower, Position
from .membership import UNKNOWN_GRACE, Group, Instances, live_instances
from .snapshot_writer import SnapshotPlan, SnapshotWriter
from .snapshots import SnapshotInfo, SnapshotStore

logger = logging.getLogger(__name__)

LEASES_TIMEOUT: Final = 2.0
"""Seconds that a router waits for the leases before it serves from a snapshot: without them it
counts who is dead as well."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The index that a new router begins with.

    Attributes:
        index: empty where there was no snapshot to begin with.
        position: from which the stream goes on.
        snapshot: None for none.
    """

    index: RadixIndex
    position: Position
    snapshot: SnapshotInfo | None


async def warm_index(
    jetstream: JetStream,
    component: str,
    store: SnapshotStore,
    stream_name: str,
    *,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
) -> WarmStart:
    """The index of the newest snapshot that can be used, or an empty one.

    Where the stream does not hold all that comes after it, numberings will show gaps, and the ranks
    concerned are asked.

    Raises:
        NoStream: there is no stream of events.
        Unavailable: JetStream does not answer.
    """
    stream = await jetstream.stream_info(stream_name)
    info, index = await store.read_newest(component, stream, max_blocks=max_blocks)
    if info is None:
        return WarmStart(index, Position(0, stream.created), None)
    if not info.is_connected(stream):
        logger.warning(
            "snapshot %s: the stream begins at %d; ranks are asked for what lies between",
            info.name,
            stream.first_sequence,
        )
    return WarmStart(index, Position(info.coverage.sequence, stream.created), info)


def forget_dead(start: WarmStart, known: Collection[str] | None, now: float) -> list[str]:
    """Take out of a warm index who died before the router came; returns who.

    An instance that was in a snapshot that is older than the grace for a lease, and has none, had
    time enough to get one: the follower need not wait for it once more.

    Args:
        known: instances that have a lease; None while that is not known.
        now: Unix seconds.
    """
    if known is None or start.snapshot is None or now - start.snapshot.written <= UNKNOWN_GRACE:
        return []
    dead = sorted({rank.instance for rank in start.index.ranks}.difference(known))
    for instance in dead:
        start.index.remove_instance(instance)
    return dead


@asynccontextmanager
async def warm_follower(
    runtime: Runtime,
    namespace: str,
    component: str,
    *,
    stream: EventStream | None = None,
    instances: Instances | None = None,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    store: SnapshotStore | None = None,
    plan: SnapshotPlan | None = None,
    group: Group | None = None,
) -> AsyncGenerator[IndexFollower]:
    """A follower that starts from the newest snapshot and takes its turn in writing them.

    One of a group starts from what a snapshot has of it, and writes none, since a snapshot is of
    all instances.

    Args:
        instances: those that discovery knows unless given.
        stream, max_blocks: see `IndexFollower`.
        store, plan: see `SnapshotWriter`.

    Raises:
        ConfigError: the stream is there with other settings.
        Unavailable: JetStream does not answer.
    """
    jetstream = runtime.bus.data.jetstream
    stream = stream or EventStream(namespace)
    store = store or SnapshotStore(
        jetstream, namespace, in_memory=stream.in_memory, replicas=stream.replicas
    )
    of_discovery = instances is None
    if instances is None:
        runtime.discovery.begin()
        instances = partial(live_instances, runtime, namespace, component, group)
    start = WarmStart(RadixIndex(max_blocks=max_blocks), Position(), None)
    try:
        start = await warm_index(jetstream, component, store, stream.name, max_blocks=max_blocks)
    except NoStream:
        pass  # Nothing was ever published.
    except DynbusError as error:
        logger.warning(
            "no snapshot of %s could be read, so the whole stream is: %s", component, error
        )
    if start.snapshot is not None:
        if of_discovery:
            with anyio.move_on_after(LEASES_TIMEOUT):
                await runtime.discovery.synchronized.wait()
        forget_dead(start, instances(), unix_time())
    if group is not None:
        for instance in {rank.instance for rank in start.index.ranks}:
            if not group.has(instance):
                start.index.remove_instance(instance)
    background = runtime.bus.background
    follower = IndexFollower(
        runtime.bus.data,
        namespace,
        component,
        instances=instances,
        stream=stream,
        index=start.index,
        position=start.position,
        max_blocks=max_blocks,
        group=group,
        background=background,
    )
    if group is not None:
        async with follower:
            yield follower
        return
    writer = SnapshotWriter(
        jetstream,
        follower,
        store=store,
        plan=plan,
        bus=runtime.bus,
        background=background,
    )
    async with follower, writer:
        yield follower
