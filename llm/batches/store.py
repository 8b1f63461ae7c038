"""Files and batches on the bus: their records in a stream, and what files hold in an object bucket.

A file is there when its record is, which is written when all of its parts are stored.
"""

from __future__ import annotations

import base64
import logging
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Sequence,
)
from contextlib import contextmanager
from typing import Final, TypeVar, get_args

import anyio
import msgspec

from dynbus import ConfigError, DynbusError, Unavailable
from dynbus.kvrouter import fairness
from dynbus.llm.openai.errors import BadRequest
from dynbus.spi import (
    Grant,
    JetStream,
    NoStream,
    ObjectBucket,
    ObjectStore,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
    check_token,
    monotonic,
    random_id,
    read_latest,
    unix_time,
)

from .lines import Part, PartSplitter, lines_of
from .records import KEPT, OUTPUT, PURPOSE, Batch, StoredFile, StoredPart, Written

logger = logging.getLogger(__name__)

MAX_STORED: Final = 2 * 1024 * 1024 * 1024
"""Bytes of all files, those that batches write included."""
MAX_UPLOADED: Final = MAX_STORED // 2
"""Bytes of all files that clients have sent: the rest is left to what batches write."""
MAX_RECORDS: Final = 16 * 1024 * 1024
"""Bytes of the records of a tenant's files, and of its batches: others need room for theirs."""
SLACK: Final = 24 * 3600.0
"""Seconds for which the server keeps what is no longer told."""
SUBJECTS: Final = "_batches"
FILE: Final = "file"
BATCH: Final = "batch"
CACHED_PARTS: Final = 16
TRY_TIMEOUT: Final = 5.0
RETRY_FOR: Final = 60.0
"""Seconds for which work that nobody waits for asks a server that is away again."""
RETRY_DELAY: Final = 0.25
CLEANUP_TIMEOUT: Final = 10.0
ABANDONED_AFTER: Final = 24 * 3600.0
DROPPING_TIMEOUT: Final = 60.0

FILES: Final = ObjectBucket(
    "dynbus_files",
    max_bytes=MAX_STORED,
    max_age=KEPT + SLACK,
    description="dynbus: files of batches",
)

RECORDS_STREAM: Final = StreamConfig(
    "DYNBUS_BATCHES",
    (f"{SUBJECTS}.*.*.*",),
    StreamLimits(
        max_messages_per_subject=1,
        max_bytes=128 * 1024 * 1024,
        max_age=KEPT + SLACK,
        discard_new=True,
    ),
    description="dynbus: batches, and records of their files",
)

_FULL: Final = "StreamFull"
"""The code of the error of a bucket that is full."""

T = TypeVar("T")
R = TypeVar("R", StoredFile, Batch)


class StorageFull(BadRequest):
    """Raised when there is no room for what a file is to hold."""

    def __init__(self, why: str, param: str = "file") -> None:
        super().__init__(
            f"there is no room for this {'batch' if param == 'input_file_id' else 'file'}: {why}; "
            "delete files that are no longer needed",
            param=param,
            reason="storage_full",
            status=413,
        )


def tenant_token(tenant: str) -> str:
    """A tenant as a token of a subject; `-` where there are no tenants."""
    return base64.urlsafe_b64encode(tenant.encode()).decode().rstrip("=") if tenant else "-"


def subject_of(tenant: str, kind: str, name: str) -> str:
    """The subject of a record; the name may be `*`."""
    return f"{SUBJECTS}.{tenant_token(tenant)}.{kind}.{name}"


def batch_grants() -> list[Grant]:
    """The grants of who keeps batches and does them."""
    bucket = FILES.stream
    return [
        Grant(
            "keeps files and batches",
            (
                f"{SUBJECTS}.*.*.*",
                *RECORDS_STREAM.to_follow,
                f"$JS.API.STREAM.PURGE.{RECORDS_STREAM.name}",
                f"$O.{FILES.name}.>",
                *bucket.to_follow,
                f"$JS.API.STREAM.PURGE.{bucket.name}",
            ),
        )
    ]


@contextmanager
def reaching() -> Generator[None]:
    """Say of what fails for want of the server what clients understand."""
    try:
        yield
    except Unavailable as error:
        logger.debug("files and batches cannot be reached: %s", error)
        raise Unavailable("the bus cannot be reached", started=False) from error


class BatchStore:
    """The files and batches of all tenants. A tenant's are asked for by its name, and others are
    not there for it.

    What fails for want of the server is tried again, then raises `Unavailable`.

    Args:
        patience: seconds for which it is; parts of files are put and read for a minute in any case.
    """

    def __init__(self, jetstream: JetStream, *, patience: float = RETRY_FOR) -> None:
        self._jetstream = jetstream
        self._patience = patience
        self._objects = ObjectStore(jetstream, FILES)
        self._is_ready = False
        self._uploads = fairness.Shares(MAX_UPLOADED, fairness.TIMES_FREE)
        # The files that come here: whose, and what of them is stored.
        self._coming: dict[str, tuple[str, int]] = {}
        self._cached: OrderedDict[str, list[bytes]] = OrderedDict()
        self._reading = anyio.Lock()

    def __repr__(self) -> str:
        return f"<BatchStore {RECORDS_STREAM.name}>"

    async def ensure(self) -> None:
        """Make the stream and the bucket where they are missing."""
        if not self._is_ready:
            with reaching():
                await self._jetstream.ensure_stream(RECORDS_STREAM)
                await self._objects.ensure()
            self._is_ready = True

    # Files -------------------------------------------------------------------------------------

    async def create_file(
        self,
        tenant: str,
        filename: str,
        pieces: AsyncIterator[bytes],
        *,
        limit: int,
        bound: str = "",
    ) -> StoredFile:
        """Store a file while it comes. What fails or is cancelled leaves nothing.

        Args:
            limit: bytes that it may have.
            bound: the setting that says so, for refusals; empty for none.

        Raises:
            BadRequest: it is too large, or there is no room for it (`StorageFull`).
        """
        await self.ensure()
        name, splitter, parts = f"file-{random_id()}", PartSplitter(), list[StoredPart]()
        size = 0
        await self._count_uploads(tenant)

        async def store(cut: Sequence[Part]) -> None:
            for data, lines in cut:
                # Files that come at the same time share what is left.
                shares = self._uploads
                if not shares.reserve(tenant, len(data)):
                    raise StorageFull(f"{shares.taken} of {shares.limit} bytes are taken")
                _, before = self._coming.get(name, (tenant, 0))
                self._coming[name] = tenant, before + len(data)
                parts.append(StoredPart(len(parts), len(data), lines))
                await self.put_part(name, len(parts) - 1, data)

        try:
            async for piece in pieces:
                size += len(piece)
                if size > limit:
                    by = f" ({bound})" if bound else ""
                    raise BadRequest(
                        f"file: it has more than {limit} bytes{by}", param="file", status=413
                    )
                await store(splitter.add(piece))
            await store(splitter.end())
            now = int(unix_time())
            file = StoredFile(
                id=name,
                tenant=tenant,
                filename=filename,
                purpose=PURPOSE,
                created_at=now,
                expires_at=now + KEPT,
                parts=parts,
            )
            await self.put_file(file)
        except BaseException:
            self._uploads.give_back(*self._coming.get(name, (tenant, 0)))
            with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True):
                await self._drop_parts(name, [part.number for part in parts])
            raise
        finally:
            self._coming.pop(name, None)
        return file

    async def check_room(self, tenant: str, size: int) -> None:
        """Look whether a tenant has room for what one more batch will write.

        Those that have not ended are taken to write as much as they read.

        Args:
            size: bytes of the file that it reads.

        Raises:
            StorageFull: it has not.
        """
        files = await self._all(f"{SUBJECTS}.*.{FILE}.*", StoredFile)
        sizes = {file.id: file.size for file in files}
        shares = fairness.Shares(MAX_STORED - MAX_UPLOADED, fairness.TIMES_FREE)
        for file in files:
            if file.purpose == OUTPUT:
                shares.take(file.tenant, file.size)
        for batch in await self._all(f"{SUBJECTS}.*.{BATCH}.*", Batch):
            if not batch.has_ended:
                shares.take(batch.tenant, sizes.get(batch.input_file_id, 0))
        if not shares.reserve(tenant, size):
            why = f"what batches have written and will takes {shares.taken} of {shares.limit} bytes"
            raise StorageFull(why, "input_file_id")

    async def _count_uploads(self, tenant: str) -> None:
        """Look at what tenants have taken of the room of uploads.

        Raises:
            StorageFull: this one has too many files.
        """
        coming = dict(self._coming)
        files = await self._all(f"{SUBJECTS}.*.{FILE}.*", StoredFile)
        shares = fairness.Shares(MAX_UPLOADED, fairness.TIMES_FREE)
        for file in files:
            if file.purpose != OUTPUT:
                # What is there stays there, whatever the share of its tenant is by now.
                shares.take(file.tenant, file.size)
        # One that has come to its end meanwhile may be in neither.
        stored = {file.id for file in files}
        for name, (owner, size) in ({**coming, **self._coming}).items():
            if name not in stored:
                shares.take(owner, size)
        self._uploads = shares
        own = [file for file in files if file.tenant == tenant]
        if _bytes_of(own) > MAX_RECORDS:
            raise StorageFull(f"there are {len(own)} files of yours")

    async def put_part(self, name: str, number: int, data: bytes) -> None:
        """Store a part of a file, in place of one of this number.

        Raises:
            StorageFull: there is no room for it.
        """
        try:
            await self._objects.put(f"{name}.{number}", data)
        except DynbusError as error:
            if error.code != _FULL:
                raise
            raise StorageFull(f"{FILES.name} is full") from None

    async def put_file(self, file: StoredFile) -> None:
        """Have a file be there, whose parts are stored."""
        await self._put(subject_of(file.tenant, FILE, file.id), file)

    async def file(self, tenant: str, name: str) -> StoredFile | None:
        """A file of a tenant; None where there is none of this id, or none any more."""
        stored = await self._last(tenant, FILE, name)
        if stored is None:
            return None
        file = msgspec.json.decode(stored.data, type=StoredFile)
        return file if file.expires_at > unix_time() else None

    async def files(self, tenant: str) -> list[StoredFile]:
        """The files of a tenant."""
        files = await self._all(subject_of(tenant, FILE, "*"), StoredFile)
        now = unix_time()
        return [file for file in files if file.expires_at > now]

    async def delete_file(self, file: StoredFile) -> None:
        """Have a file be gone."""
        await self._drop(subject_of(file.tenant, FILE, file.id))
        await self._drop_parts(file.id, [part.number for part in file.parts])

    async def drop_abandoned(self, *, older_than: float = ABANDONED_AFTER) -> int:
        """Drop the parts of files that never came to be there, as their process was killed; returns
        how many files.

        Args:
            older_than: seconds since their last part; longer than any upload takes.
        """
        await self._objects.drop_abandoned(timeout=DROPPING_TIMEOUT)
        objects = await self._objects.list_objects(timeout=DROPPING_TIMEOUT)
        # Only then the records: what ends after its parts were listed has one.
        batches = await self._all(f"{SUBJECTS}.*.{BATCH}.*", Batch)
        files = await self._all(f"{SUBJECTS}.*.{FILE}.*", StoredFile)
        kept = {file.id for file in files}
        kept.update(
            batch.written(kind)
            for batch in batches
            if not batch.has_ended
            for kind in get_args(Written)
        )
        left: dict[str, list[int]] = {}
        last: dict[str, float] = {}
        for one in objects:
            name, _, number = one.name.rpartition(".")
            # What is no part was put there by hand.
            if number.isdecimal() and name not in kept:
                left.setdefault(name, []).append(int(number))
                last[name] = max(one.modified, last.get(name, 0.0))
        old = [name for name, at in last.items() if at <= unix_time() - older_than]
        for name in old:
            await self._drop_parts(name, left[name])
        return len(old)

    async def _drop_parts(self, name: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            try:
                await self._objects.delete(f"{name}.{number}")
            except DynbusError as error:
                logger.warning("part %d of %s stays until its age is over: %s", number, name, error)
                return

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes]:
        """The bytes of a file, part by part.

        Raises:
            NoObject: it was deleted meanwhile.
        """
        for part in file.parts:
            yield (await self._objects.get(f"{file.id}.{part.number}")).data

    async def lines(self, name: str, number: int) -> list[bytes]:
        """The lines of a part of a file. Those of the last parts that were asked for are kept.

        Raises:
            NoObject: there is no such part any more.
        """
        key = f"{name}.{number}"
        if key not in self._cached:
            async with self._reading:
                if key not in self._cached:
                    self._cached[key] = lines_of((await self._objects.get(key)).data)
                    while len(self._cached) > CACHED_PARTS:
                        self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        return self._cached[key]

    # Batches -----------------------------------------------------------------------------------

    async def create_batch(self, batch: Batch) -> None:
        """Store a new batch. Where its tenant has too many, the oldest that have ended go."""
        await self.ensure()
        known = sorted(await self.batches(batch.tenant), key=lambda one: (one.created_at, one.id))
        size = _bytes_of(known)
        for one in known:
            if size <= MAX_RECORDS:
                break
            if one.has_ended:
                await self.delete_batch(one)
                size -= _bytes_of([one])
        await self._put(subject_of(batch.tenant, BATCH, batch.id), batch)

    async def batch(self, tenant: str, name: str) -> Batch | None:
        """A batch of a tenant; None where there is none of this id, or none any more."""
        stored = await self._last(tenant, BATCH, name)
        return None if stored is None else msgspec.json.decode(stored.data, type=Batch)

    async def batches(self, tenant: str) -> list[Batch]:
        """The batches of a tenant."""
        return await self._all(subject_of(tenant, BATCH, "*"), Batch)

    async def change_batch(
        self, tenant: str, name: str, change: Callable[[Batch], Batch], /
    ) -> Batch | None:
        """Store what becomes of a batch, though others change it too; the batch as it is then, None
        where there is none.

        Args:
            change: gives the batch as it is to be; it may be called several times.
        """
        subject = subject_of(tenant, BATCH, name)
        while True:
            stored = await self._last(tenant, BATCH, name)
            if stored is None:
                return None
            batch = msgspec.json.decode(stored.data, type=Batch)
            changed = change(batch)
            if changed == batch:
                return batch
            try:
                await self._put(subject, changed, stored.sequence)
            except WrongLastSequence:
                # Or a try of ours was stored, and its answer lost: then nothing is left to change.
                continue
            return changed

    async def delete_batch(self, batch: Batch) -> None:
        """Have a batch be gone."""
        await self._drop(subject_of(batch.tenant, BATCH, batch.id))

    # Requests ----------------------------------------------------------------------------------

    async def _put(
        self, subject: str, record: StoredFile | Batch, expected: int | None = None
    ) -> None:
        """Store a record; with `expected`, only in place of the one of that sequence."""
        data = msgspec.json.encode(record)
        await self._try(
            lambda left: self._jetstream.publish(
                subject, data, expected_last_subject_sequence=expected, timeout=left
            )
        )

    async def _drop(self, subject: str) -> None:
        """Have a record be gone."""
        await self._try(
            lambda left: self._jetstream.purge(RECORDS_STREAM.name, subject, timeout=left)
        )

    async def _last(self, tenant: str, kind: str, name: str) -> StoredMessage | None:
        try:
            check_token("id", name)
        except ConfigError:
            # As a client has sent it.
            return None
        subject = subject_of(tenant, kind, name)

        async def last(left: float) -> StoredMessage | None:
            try:
                return await self._jetstream.last(RECORDS_STREAM.name, subject, timeout=left)
            except NoStream:
                return None

        stored = await self._try(last)
        return None if stored is None or stored.is_marker else stored

    async def _all(self, subject: str, kind: type[R]) -> list[R]:
        try:
            with reaching():
                latest = await read_latest(
                    self._jetstream,
                    RECORDS_STREAM.name,
                    subject,
                    timeout=self._patience,
                    retry=True,
                )
        except NoStream:
            return []
        return [msgspec.json.decode(one.data, type=kind) for one in latest.values()]

    async def _try(self, request: Callable[[float], Awaitable[T]]) -> T:
        """The answer to a request, made again while the server is away."""
        end = monotonic() + self._patience
        with reaching():
            while True:
                try:
                    return await request(min(TRY_TIMEOUT, end - monotonic()))
                except Unavailable:
                    if monotonic() + RETRY_DELAY >= end:
                        raise
                    await anyio.sleep(RETRY_DELAY)


def _bytes_of(records: Sequence[StoredFile] | Sequence[Batch]) -> int:
    return sum(len(msgspec.json.encode(one)) for one in records)
