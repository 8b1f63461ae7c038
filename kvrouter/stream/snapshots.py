"""Snapshots of a component's index in JetStream: what they are called, and what is in them.

A snapshot is an object `{component}/{sequence}`: whole, and never changed. Whatever router wrote
it, it holds what the stream says up to that sequence. It is of one making of the stream: a
stream that was deleted and made again has other sequences.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynbus import ConfigError, DynbusError
from dynbus.kvrouter.names import kv_event_stream, kv_snapshot_bucket
from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.kvrouter.radix.snapshot import TornSnapshot, load_index
from dynbus.spi import (
    JetStream,
    NoObject,
    NoStream,
    ObjectBucket,
    ObjectStore,
    StreamInfo,
    check_token,
    monotonic,
)

logger = logging.getLogger(__name__)

KEPT: Final = 3
CHUNK_BYTES: Final = 128 * 1024
DEFAULT_MAX_BYTES: Final = 1024 * 1024 * 1024
READ_TIMEOUT: Final = 30.0
WRITE_TIMEOUT: Final = 60.0
ABANDONED_AFTER: Final = 600.0
"""Seconds after its last chunk at which a snapshot that has no record counts as given up."""

STREAM_KEY: Final = "stream"
CREATED_KEY: Final = "stream-created"
BLOCKS_KEY: Final = "blocks"
INSTANCES_KEY: Final = "instances"


class UnusableSnapshot(DynbusError):
    """Raised when a snapshot is torn, gone, or not what its name says."""

    code = "UnusableSnapshot"


class Coverage(NamedTuple):
    """The part of a stream that an index stands for.

    Attributes:
        created: when the stream was made, Unix seconds.
        sequence: up to which the index holds what the stream says.
    """

    created: float
    sequence: int


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The record of a snapshot, known before it is read.

    Attributes:
        size: bytes.
        written: Unix seconds, by the server's clock; every message that it covers is older.
        blocks: held in it, counted once for each cache.
    """

    component: str
    coverage: Coverage
    size: int
    written: float
    blocks: int
    instances: int

    @property
    def name(self) -> str:
        return snapshot_name(self.component, self.coverage.sequence)

    def fits(self, stream: StreamInfo) -> bool:
        """True if it is of this stream, rather than of one of that name before it."""
        created, sequence = self.coverage
        return created == stream.created and sequence <= stream.last_sequence

    def is_connected(self, stream: StreamInfo) -> bool:
        """True if the stream still holds all messages that come after the snapshot."""
        return self.fits(stream) and stream.first_sequence <= self.coverage.sequence + 1


def snapshot_name(component: str, sequence: int) -> str:
    """The name of a snapshot's object."""
    return f"{component}/{sequence}"


def superseded(infos: Iterable[SnapshotInfo], created: float, keep: int) -> list[SnapshotInfo]:
    """Those of one component's snapshots that are to go: all of other streams, and of this one
    all but the newest."""
    ours = sorted(infos, key=lambda one: (one.coverage.created == created, one.coverage.sequence))
    kept = [one for one in ours if one.coverage.created == created][-keep:]
    return [one for one in ours if one not in kept]


def snapshot_bucket(namespace: str) -> ObjectBucket:
    """The bucket of the snapshots of a namespace."""
    return ObjectBucket(
        kv_snapshot_bucket(namespace),
        max_bytes=DEFAULT_MAX_BYTES,
        description="dynbus: snapshots of KV indexes",
    )


class SnapshotStore:
    """The snapshots of one namespace.

    Args:
        keep: how many of a component are kept, the latest.
        max_bytes: of all of them. At `max_blocks` of 10^7 one takes about 250 MB.
        chunk_size: bytes of one message.

    Raises:
        ConfigError: the namespace is no legal name.
    """

    def __init__(
        self,
        jetstream: JetStream,
        namespace: str,
        *,
        keep: int = KEPT,
        max_bytes: int = DEFAULT_MAX_BYTES,
        in_memory: bool = False,
        replicas: int | None = None,
        chunk_size: int = CHUNK_BYTES,
    ) -> None:
        self.namespace = check_token("namespace", namespace)
        self.keep = max(1, keep)
        self._stream = kv_event_stream(namespace)
        self._objects = ObjectStore(
            jetstream,
            snapshot_bucket(namespace)._replace(
                max_bytes=max_bytes, in_memory=in_memory, replicas=replicas
            ),
            chunk_size=chunk_size,
        )

    def __repr__(self) -> str:
        return f"<SnapshotStore {self.namespace}>"

    async def snapshots(
        self, component: str | None = None, *, timeout: float = 5.0
    ) -> list[SnapshotInfo]:
        """The snapshots of a component, or of all; the oldest sequence first.

        Raises:
            Unavailable: JetStream does not answer.
        """
        try:
            objects = await self._objects.list_objects(timeout=timeout)
        except NoStream:
            return []  # none was ever taken
        infos: list[SnapshotInfo] = []
        for one in objects:
            fields = one.headers
            of, _, sequence = one.name.partition("/")
            # Any other object is passed over.
            with suppress(ConfigError, KeyError, ValueError):
                info = SnapshotInfo(
                    check_token("component", of),
                    Coverage(float(fields[CREATED_KEY]), int(sequence)),
                    one.size,
                    one.modified,
                    int(fields[BLOCKS_KEY]),
                    int(fields[INSTANCES_KEY]),
                )
                if fields.get(STREAM_KEY) == self._stream:
                    infos.append(info)
        return sorted(
            (one for one in infos if component in (None, one.component)),
            key=lambda one: (one.component, one.coverage.sequence),
        )

    async def read(
        self, info: SnapshotInfo, *, max_blocks: int, timeout: float = READ_TIMEOUT
    ) -> RadixIndex:
        """The index of a snapshot. The loop goes on while it is decoded.

        Raises:
            UnusableSnapshot: it cannot be used, and why.
            Unavailable: JetStream does not answer.
        """
        try:
            stored = await self._objects.get(info.name, timeout=timeout)
            index, sequence = await asyncio.to_thread(
                load_index, stored.data, max_blocks=max_blocks
            )
        except (NoObject, NoStream, TornSnapshot) as error:
            raise UnusableSnapshot(f"snapshot {info.name}: {error}") from error
        if sequence != info.coverage.sequence:
            raise UnusableSnapshot(
                f"snapshot {info.name} holds the stream up to {sequence}, not what its name says"
            )
        return index

    async def read_newest(
        self,
        component: str,
        stream: StreamInfo,
        *,
        max_blocks: int,
        timeout: float = READ_TIMEOUT,
        counts: Callable[[SnapshotInfo], bool] = lambda _: True,
    ) -> tuple[SnapshotInfo | None, RadixIndex]:
        """The newest snapshot that can be used, with its index.

        Args:
            stream: of which it has to be.
            timeout: seconds for reading, those included that cannot be used.
            counts: whether a snapshot is looked at.

        Returns:
            What is known of it, and the index; None and an empty index where there is none.

        Raises:
            Unavailable: JetStream does not answer, or not in time.
        """
        end = monotonic() + timeout
        for info in reversed(await self.snapshots(component)):
            if not counts(info):
                continue
            if not info.fits(stream):
                logger.warning("snapshot %s is skipped: it is of another stream", info.name)
                continue
            try:
                left = max(0.1, end - monotonic())
                index = await self.read(info, max_blocks=max_blocks, timeout=left)
            except UnusableSnapshot as error:
                # The one before it leads to the same index, over more messages.
                logger.warning("%s: it is skipped", error)
            else:
                return info, index
        return None, RadixIndex(max_blocks=max_blocks)

    async def write(
        self,
        component: str,
        coverage: Coverage,
        data: bytes | bytearray,
        *,
        blocks: int,
        instances: int,
        timeout: float = WRITE_TIMEOUT,
    ) -> SnapshotInfo:
        """Store a snapshot, and drop those that it makes superfluous.

        Raises:
            StreamFull: there is no room for it, even without older ones.
            Unavailable: JetStream does not answer.
        """
        name = snapshot_name(component, coverage.sequence)
        fields = {
            STREAM_KEY: self._stream,
            CREATED_KEY: repr(coverage.created),
            BLOCKS_KEY: str(blocks),
            INSTANCES_KEY: str(instances),
        }
        await self._objects.ensure()

        async def make_room() -> None:
            # The newest one stays: a router that starts meanwhile needs it.
            logger.warning("%r is full: older snapshots of %s are deleted", self, component)
            await self._drop_superseded(component, coverage.created, keep=1)
            await self.drop_abandoned()

        stored = await self._objects.put(
            name, data, headers=fields, make_room=make_room, timeout=timeout
        )
        await self._drop_superseded(component, coverage.created, self.keep)
        return SnapshotInfo(component, coverage, len(data), stored.modified, blocks, instances)

    async def _drop_superseded(self, component: str, created: float, keep: int) -> None:
        snapshots = await self.snapshots(component)
        for one in superseded(snapshots, created, keep):
            await self._objects.delete(one.name)

    async def drop_abandoned(self, *, older_than: float = ABANDONED_AFTER) -> int:
        """Drop what is left of snapshots whose writer died; returns of how many."""
        with suppress(NoStream):
            return await self._objects.drop_abandoned(older_than=older_than)
        return 0
