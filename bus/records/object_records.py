"""What an object bucket stores: ADR-20 of NATS, which the `nats object` command reads too.

A bucket is a stream with two kinds of subjects. The chunks of an object are the messages of
one subject, under a name that no other object ever had. Its record is the last message of a
subject made from the object's name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import check_token
from dynbus.bus.transport import REPLICAS, StoredMessage, StreamConfig, StreamLimits

_DIGEST: Final = "SHA-256="


class ObjectBucket(NamedTuple):
    """A bucket of objects.

    Attributes:
        name: letters, digits, `_` and `-`.
        max_bytes: of all objects, chunks of replaced ones included until they are dropped.
            A put that does not fit raises `StreamFull`.
        replicas: how many servers of a cluster keep it at most.
    """

    name: str
    max_bytes: int | None = None
    in_memory: bool = False
    replicas: int = REPLICAS
    description: str = ""


class ObjectInfo(NamedTuple):
    """What a bucket knows of an object.

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
    """Raised when a bucket has no object of a name."""

    code = "NoObject"


class ObjectDamaged(DynbusError):
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
        """Whether chunks of this size and SHA-256 digest are what the record says."""
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


def bucket_stream(bucket: ObjectBucket) -> StreamConfig:
    """The stream that keeps a bucket.

    Raises:
        ConfigError: its name is not one.
    """
    check_token("object bucket", bucket.name)
    return StreamConfig(
        f"OBJ_{bucket.name}",
        (f"$O.{bucket.name}.C.>", f"$O.{bucket.name}.M.>"),
        # Dropping old messages instead would tear holes into objects.
        StreamLimits(max_bytes=bucket.max_bytes, discard_new=True),
        in_memory=bucket.in_memory,
        replicas=bucket.replicas,
        description=bucket.description,
    )


def chunk_subject(bucket: str, nuid: str) -> str:
    """Where the chunks of one put are."""
    return f"$O.{bucket}.C.{nuid}"


def record_subject(bucket: str, name: str) -> str:
    """Where the record of an object is."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def digest_text(digest: bytes) -> str:
    """A SHA-256 digest as a record has it."""
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()
