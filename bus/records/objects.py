"""Objects of any size under names, kept in a JetStream stream.

An object is its chunks, and a record that names them and their digest. The record is written
when all chunks are stored, so an object is there whole or not at all, and another one takes
its place in one step. Everything goes through `JetStream`, so it works over nats-server and
in memory alike.

What a bucket stores is that of ADR-20 of NATS, which the `nats object` command reads too: a stream
with two kinds of subjects. The chunks of an object are the messages of one subject, under a name
that no other object ever had. Its record is the last message of a subject made from its name.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import msgspec

from dynbus.bus.background import run_apart
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.names import check_token
from dynbus.bus.transport import (
    JetStream,
    StoredMessage,
    StreamConfig,
    StreamFull,
    StreamLimits,
    WrongLastSequence,
)

from .reading import read_latest, read_until

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_SIZE: Final = 128 * 1024
HEADER_BYTES: Final = 512
"""More than the headers of a chunk take of a message."""
TRY_TIMEOUT: Final = 5.0
RETRY_DELAY: Final = 0.25
RETRY_FOR: Final = 60.0
"""Seconds; below the stream's duplicate window, or a repeat could be stored twice."""
CLEANUP_TIMEOUT: Final = 5.0
ABANDONED_AFTER: Final = 3600.0

_DIGEST: Final = "SHA-256="


class ObjectBucket(NamedTuple):
    """A bucket of objects.

    Attributes:
        name: letters, digits, `_` and `-`.
        max_bytes: of all objects, chunks of replaced ones included until they are dropped.
            A put that does not fit raises `StreamFull`.
        max_age: seconds after which what is stored goes by itself, the chunks of an object before
            its record; None for no limit. Who reads objects that old is to know their age.
        replicas: as in `StreamConfig`.
    """

    name: str
    max_bytes: int | None = None
    in_memory: bool = False
    replicas: int | None = None
    description: str = ""
    max_age: float | None = None

    @property
    def stream(self) -> StreamConfig:
        """The stream that keeps the bucket.

        Raises:
            ConfigError: its name is not one.
        """
        check_token("object bucket", self.name)
        return StreamConfig(
            f"OBJ_{self.name}",
            (f"$O.{self.name}.C.>", f"$O.{self.name}.M.>"),
            # Dropping old messages instead would tear holes into objects.
            StreamLimits(max_bytes=self.max_bytes, max_age=self.max_age, discard_new=True),
            rollup=True,
            in_memory=self.in_memory,
            replicas=self.replicas,
            description=self.description,
        )


class ObjectInfo(NamedTuple):
    """The record of an object in its bucket.

    Attributes:
        size: bytes.
        digest: `SHA-256=` and the digest in URL-safe base 64.
        modified: Unix seconds at which the server took it.
        chunks: messages that it is made of.
        revision: the bucket's sequence of its record; greater for each later change.
    """

    name: str
    size: int
    digest: str
    modified: float
    headers: Mapping[str, str]
    chunks: int
    revision: int


class NoObject(DynbusError):
    """Raised when a bucket has no object of a name, or none that is whole."""

    code = "NoObject"


class ObjectDamaged(NoObject):
    """Raised when the chunks of an object are not what its record says."""

    code = "ObjectDamaged"


class Object(NamedTuple):
    """An object as read; its digest has been checked."""

    info: ObjectInfo
    data: bytes


class ObjectRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """ADR-20's record of an object, as far as it is used here."""

    name: str
    bucket: str = ""
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    deleted: bool = False
    headers: dict[str, list[str]] = {}
    options: dict[str, Any] = {}

    def fits(self, size: int, digest: bytes) -> bool:
        """True if chunks of this size and SHA-256 digest are what the record says."""
        # Other clients may leave out the padding.
        return size == self.size and self.digest.rstrip("=") == digest_text(digest).rstrip("=")


class StoredRecord(NamedTuple):
    """A record and its sequence, by which it is replaced."""

    record: ObjectRecord
    revision: int
    time: float

    @classmethod
    def of(cls, message: StoredMessage) -> StoredRecord:
        """Read a record as it was stored.

        Raises:
            ObjectDamaged: it is none.
        """
        try:
            record = msgspec.json.decode(message.data, type=ObjectRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ObjectDamaged(
                f"{message.subject} is no record of an object: {error}; purge that subject"
            ) from None
        return cls(record, message.sequence, message.time)

    @property
    def info(self) -> ObjectInfo:
        record = self.record
        headers = {key: values[-1] for key, values in record.headers.items() if values}
        return ObjectInfo(
            record.name,
            record.size,
            record.digest,
            self.time,
            headers,
            record.chunks,
            self.revision,
        )


def chunk_subject(bucket: str, nuid: str) -> str:
    """The subject of the chunks of one put."""
    return f"$O.{bucket}.C.{nuid}"


def record_subject(bucket: str, name: str) -> str:
    """The subject of the record of an object."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def digest_text(digest: bytes) -> str:
    """A SHA-256 digest as a record has it."""
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


class _Chunks:
    """The chunks of an object as far as they are there; it has `size` bytes."""

    def __init__(self, size: int) -> None:
        self.pieces: list[bytes] = []
        # Digested as they come: all at once would block the loop.
        self.digest = hashlib.sha256()
        self.size = 0
        self._enough = size

    def add(self, message: StoredMessage) -> bool:
        """Take a delivery; returns whether it was the last."""
        self.pieces.append(message.data)
        self.digest.update(message.data)
        self.size += len(message.data)
        return self.size >= self._enough

    def take(self) -> bytes:
        """All of them as one, once.

        The consumer that called `add` goes with the garbage collector, and must not keep them.
        """
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data


class ObjectStore:
    """The objects of one bucket.

    What fails for want of the server is tried again until `timeout` seconds are over, then
    raises `Unavailable`. A missing bucket raises `NoStream`.
    """

    def __init__(
        self, jetstream: JetStream, bucket: ObjectBucket, *, chunk_size: int = CHUNK_SIZE
    ) -> None:
        self._jetstream = jetstream
        self._config = bucket.stream
        self._bucket = bucket.name
        self._chunk_size = chunk_size

    def __repr__(self) -> str:
        return f"<ObjectStore {self._bucket}>"

    async def ensure(self, *, timeout: float = 5.0) -> None:
        """Make the bucket, or leave one that exists as it is.

        Raises:
            ConfigError: a stream of its name exists that is no object bucket.
        """
        await self._jetstream.ensure_stream(self._config, timeout=timeout)

    async def put(
        self,
        name: str,
        data: bytes | bytearray | memoryview,
        *,
        headers: Mapping[str, str] | None = None,
        make_room: Callable[[], Awaitable[object]] | None = None,
        timeout: float = 60.0,
    ) -> ObjectInfo:
        """Store an object; one of this name is replaced when all of the new one is stored.

        When it fails or is cancelled the old object stays, unless the record of the new one
        was being written: then either may be there, and each is whole.

        Args:
            make_room: what is done when the bucket is full, before it is tried once more.

        Raises:
            ConfigError: the name is empty.
            StreamFull: the bucket has no room for it.
        """
        if not name:
            raise ConfigError("an object needs a name")
        try:
            return await self._put_apart(name, data, headers or {}, timeout)
        except StreamFull:
            if make_room is None:
                raise
        await make_room()
        return await self._put_apart(name, data, headers or {}, timeout)

    async def _put_apart(
        self,
        name: str,
        data: bytes | bytearray | memoryview,
        headers: Mapping[str, str],
        timeout: float,
    ) -> ObjectInfo:
        # What it leaves when it is cancelled must go, however impatient its canceller is.
        return await run_apart(
            self._put, name, data, headers, timeout, name=f"put {name} into {self._bucket}"
        )

    async def _put(
        self,
        name: str,
        data: bytes | bytearray | memoryview,
        headers: Mapping[str, str],
        timeout: float,
    ) -> ObjectInfo:
        end = monotonic() + timeout
        nuid = secrets.token_hex(11)
        view = memoryview(data).cast("B")
        chunk_size = min(self._chunk_size, self._jetstream.max_payload - HEADER_BYTES)
        starts = range(0, len(view), chunk_size)
        digest = hashlib.sha256()
        for number, start in enumerate(starts):
            chunk = bytes(view[start : start + chunk_size])
            digest.update(chunk)
            await self._put_chunk(end, nuid, number, chunk)
        record = ObjectRecord(
            name,
            self._bucket,
            nuid,
            len(view),
            len(starts),
            digest_text(digest.digest()),
            headers={key: [value] for key, value in headers.items()},
            options={"max_chunk_size": chunk_size},
        )
        replaced: set[str] = set()
        try:
            return (await self._replace(end, record, replaced)).info
        except StreamFull:
            await self._drop_chunks_shielded(nuid)
            raise
        except BaseException as error:
            if not replaced:
                await self._drop_chunks_shielded(nuid)
            elif isinstance(error, asyncio.CancelledError):
                # The record may be on its way: only its answer says whose chunks are to go.
                await self._settle_shielded(record, replaced)
            raise

    async def get(self, name: str, *, timeout: float = 60.0) -> Object:
        """The object of a name; if it is replaced meanwhile, one of those that it was.

        Raises:
            NoObject: there is none of this name.
            ObjectDamaged: its chunks do not have the size or the digest that it should have.
        """
        end = monotonic() + timeout
        stored = await self._present(end, name)
        while True:
            chunks = await self._chunks(end, stored.record)
            if stored.record.fits(chunks.size, chunks.digest.digest()):
                return Object(stored.info, chunks.take())
            now = await self._present(end, name)
            if now.revision == stored.revision:
                raise ObjectDamaged(
                    f"object {name} of bucket {self._bucket} is damaged: {chunks.size} of "
                    f"{stored.record.size} bytes are there, or they are not those of "
                    f"{stored.record.digest}; put it again or delete it"
                )
            stored = now

    async def info(self, name: str, *, timeout: float = 5.0) -> ObjectInfo:
        """The record of an object.

        Raises:
            NoObject: there is none of this name.
        """
        return (await self._present(monotonic() + timeout, name)).info

    async def delete(self, name: str, *, forget: bool = False, timeout: float = 5.0) -> None:
        """Delete an object; one that does not exist is no error.

        Args:
            forget: leave no record of it either. For buckets whose changes nobody follows.
        """
        end = monotonic() + timeout
        stored = await self._stored(end, name)
        if stored is None:
            return
        if not stored.record.deleted:
            deleted = ObjectRecord(name, self._bucket, secrets.token_hex(11), deleted=True)
            stored = await self._replace(end, deleted, set())
        if forget:
            subject, up_to = record_subject(self._bucket, name), stored.revision
            await self._try(
                end,
                lambda left: self._jetstream.purge(
                    self._config.name, subject, up_to=up_to, timeout=left
                ),
            )

    async def list_objects(self, *, timeout: float = 5.0) -> list[ObjectInfo]:
        """All objects, by name."""
        records = await self._records(monotonic() + timeout)
        return sorted(stored.info for stored in records if not stored.record.deleted)

    async def drop_abandoned(
        self, *, older_than: float = ABANDONED_AFTER, timeout: float = 60.0
    ) -> int:
        """Drop the chunks of puts that never came to their end; returns how many puts.

        Args:
            older_than: seconds since the last chunk; longer than any put takes.
        """
        end = monotonic() + timeout
        times: dict[str, float] = {}

        def note(chunk: StoredMessage) -> None:
            # Not the chunk itself: a bucket may have more of them than memory has room for.
            times[chunk.subject.rpartition(".")[2]] = chunk.time

        # Chunks first: a put that ends after this has its record in the second reading.
        await read_until(
            self._jetstream,
            self._config.name,
            note,
            subject=chunk_subject(self._bucket, "*"),
            last_per_subject=True,
            on_restart=times.clear,
            timeout=_left(end),
            retry=True,
        )
        alive = {stored.record.nuid for stored in await self._records(end)}
        old = unix_time() - older_than
        dead = {nuid for nuid, time in times.items() if time <= old} - alive
        for nuid in dead:
            await self._try(end, partial(self._drop_chunks, nuid))
        return len(dead)

    # Records --------------------------------------------------------------------------

    async def _present(self, end: float, name: str) -> StoredRecord:
        stored = await self._stored(end, name)
        if stored is None or stored.record.deleted:
            raise NoObject(f"bucket {self._bucket} has no object {name}")
        if "link" in stored.record.options:
            raise ObjectDamaged(
                f"object {name} of bucket {self._bucket} is a link; name its target"
            )
        return stored

    async def _stored(self, end: float, name: str) -> StoredRecord | None:
        subject = record_subject(self._bucket, name)
        message = await self._try(
            end, lambda left: self._jetstream.last(self._config.name, subject, timeout=left)
        )
        return None if message is None or message.is_marker else StoredRecord.of(message)

    async def _records(self, end: float) -> list[StoredRecord]:
        return [StoredRecord.of(one) for one in await self._latest(end, f"$O.{self._bucket}.M.>")]

    async def _replace(self, end: float, record: ObjectRecord, replaced: set[str]) -> StoredRecord:
        """Make `record` the one of its name, and drop the chunks of those that it follows.

        Args:
            replaced: gets the nuids of those before it is sent, "" for none.
        """
        subject = record_subject(self._bucket, record.name)
        data = msgspec.json.encode(record)
        end = min(end, monotonic() + RETRY_FOR)
        while True:
            known = await self._stored(end, record.name)
            if known is not None and known.record.nuid == record.nuid:
                # An earlier try was stored, and its acknowledgement was lost.
                stored = known
                break
            revision = 0 if known is None else known.revision
            replaced.add("" if known is None else known.record.nuid)
            try:
                sequence = await self._publish(
                    end, subject, data, f"{record.nuid}.record", revision=revision
                )
            except WrongLastSequence:
                continue
            stored = StoredRecord(record, sequence, unix_time())
            if known is not None and sequence <= revision:
                # An earlier try was stored, and `known` has replaced it since.
                replaced.discard(known.record.nuid)
            break
        for nuid in replaced - {""}:
            await self._drop_chunks_shielded(nuid)
        return stored

    async def _settle_shielded(self, record: ObjectRecord, replaced: set[str]) -> None:
        """Bring a record that was sent to its end, although its writer has left."""
        try:
            with anyio.CancelScope(shield=True):
                await self._replace(monotonic() + CLEANUP_TIMEOUT, record, replaced)
        except StreamFull:
            await self._drop_chunks_shielded(record.nuid)
        except DynbusError as error:
            logger.warning(
                "whether object %s of bucket %s is %s is not known; what is left over stays until "
                "drop_abandoned(): %s",
                record.name,
                self._bucket,
                record.nuid,
                error,
            )

    # Chunks ---------------------------------------------------------------------------

    async def _put_chunk(self, end: float, nuid: str, number: int, chunk: bytes) -> None:
        """Store one chunk, or drop all of this put."""
        subject, message_id = chunk_subject(self._bucket, nuid), f"{nuid}.{number}"
        try:
            await self._publish(end, subject, chunk, message_id)
        except asyncio.CancelledError:
            await self._withdraw_shielded(nuid, subject, chunk, message_id)
            raise
        except BaseException:
            await self._drop_chunks_shielded(nuid)
            raise

    async def _withdraw_shielded(
        self, nuid: str, subject: str, chunk: bytes, message_id: str
    ) -> None:
        """Drop the chunks of a put although the last of them may still be on its way.

        The server may purge before it stores what it was sent earlier. A duplicate is answered
        after that is stored.
        """

        async def withdraw() -> None:
            try:
                await self._publish(monotonic() + CLEANUP_TIMEOUT, subject, chunk, message_id)
            finally:
                await self._drop_chunks(nuid, CLEANUP_TIMEOUT)

        await self._clean_up(nuid, withdraw())

    async def _chunks(self, end: float, record: ObjectRecord) -> _Chunks:
        chunks = _Chunks(record.size)
        if record.size:
            # Of a bucket that is made again meanwhile there are as many as were read.
            await read_until(
                self._jetstream,
                self._config.name,
                chunks.add,
                subject=chunk_subject(self._bucket, record.nuid),
                timeout=_left(end),
                retry=True,
            )
        return chunks

    async def _latest(self, end: float, subject: str) -> list[StoredMessage]:
        latest = await read_latest(
            self._jetstream, self._config.name, subject, timeout=_left(end), retry=True
        )
        return list(latest.values())

    async def _drop_chunks(self, nuid: str, timeout: float) -> None:
        await self._jetstream.purge(
            self._config.name, chunk_subject(self._bucket, nuid), timeout=timeout
        )

    async def _drop_chunks_shielded(self, nuid: str) -> None:
        await self._clean_up(nuid, self._drop_chunks(nuid, CLEANUP_TIMEOUT))

    async def _clean_up(self, nuid: str, dropping: Coroutine[Any, Any, None]) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await dropping
        except DynbusError as error:
            logger.warning(
                "chunks of %s in bucket %s stay until drop_abandoned(): %s",
                nuid,
                self._bucket,
                error,
            )

    # Requests -------------------------------------------------------------------------

    async def _publish(
        self, end: float, subject: str, data: bytes, message_id: str, revision: int | None = None
    ) -> int:
        return await self._try(
            min(end, monotonic() + RETRY_FOR),
            lambda left: self._jetstream.publish(
                subject,
                data,
                message_id=message_id,
                expected_last_subject_sequence=revision,
                rollup=revision is not None,
                timeout=left,
            ),
        )

    async def _try(self, end: float, request: Callable[[float], Awaitable[T]]) -> T:
        """The answer to a request, made again while the server is away."""
        while True:
            try:
                return await request(min(_left(end), TRY_TIMEOUT))
            except Unavailable:
                if end - monotonic() <= RETRY_DELAY:
                    raise
                await anyio.sleep(RETRY_DELAY)


def _left(end: float) -> float:
    left = end - monotonic()
    if left <= 0:
        raise Unavailable("the time for this object is over")
    return left
