"""The bucket of keys and of limits of tenants on the bus.

A key is kept as its SHA-256, which is its name there. Who may write to the bucket may let anybody
in: operators alone may.
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple

import msgspec

from dynbus import ConfigError
from dynbus.spi import (
    Grant,
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    read_latest,
)

from .counting import COUNTS_STREAM
from .keys import ALL_TENANTS, KeyHolder, digest_of, is_tenant, key_id, tenant_token
from .limits import Limits
from .recording import USAGE_STREAM

KEYS_BUCKET: Final = "dynbus_tenants"

KEYS_STREAM: Final = StreamConfig(
    name=f"KV_{KEYS_BUCKET}",
    subjects=(f"$KV.{KEYS_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=64 * 1024 * 1024,
        max_message_size=64 * 1024,
        # No key goes for another one, nor has the server's answers take its place.
        discard_new=True,
        keep_first=True,
    ),
    description="dynbus: keys of front ends, and limits of tenants",
)

KEY_PREFIX: Final = "dk-"
"""The beginning of keys, by which scanners for secrets know them."""

KEY_BYTES: Final = 32
MAX_NAME: Final = 64
READ_TIMEOUT: Final = 10.0
_KEY: Final = f"$KV.{KEYS_BUCKET}.key."
_LIMITS: Final = f"$KV.{KEYS_BUCKET}.limits."
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key on the bus, as JSON.

    Attributes:
        created: Unix seconds.
        name: that somebody gave it; empty for none.
        expires: when it ends, in Unix seconds; 0 for never.
        limits: of this key alone, within those of its tenant; None for none.
    """

    tenant: str
    is_operator: bool = False
    created: float = 0.0
    name: str = ""
    expires: float = 0.0
    limits: Limits | None = None


class LimitsRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a tenant on the bus, as JSON."""

    tenant: str
    limits: Limits


class StoredKey(NamedTuple):
    """A key as it is stored, by its hash in hexadecimal."""

    hash: str
    record: KeyRecord


_key_decoder: Final = msgspec.json.Decoder(KeyRecord)
_limits_decoder: Final = msgspec.json.Decoder(LimitsRecord)


def check_tenant(name: str) -> str:
    """Return a name when it is one of a tenant.

    Raises:
        ConfigError: it is none.
    """
    if not is_tenant(name):
        raise ConfigError(
            f"{name[:80]!r} is no tenant: write up to 64 letters, digits, '.', '_' and '-', a "
            "letter or a digit first"
        )
    return name


def check_name(name: str) -> str:
    """Return a name when it may be one of a key.

    Raises:
        ConfigError: it may not.
    """
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"{name[:80]!r} is no name of a key: write 1 to {MAX_NAME} printable characters"
        )
    return name


def check_key_limits(limits: Limits) -> Limits:
    """Return limits when they may be those of one key.

    Raises:
        ConfigError: there is one that a tenant alone may have.
    """
    if limits.kept_answers is not None:
        raise ConfigError("kept_answers is a limit of a tenant, with all of its keys: use --limit")
    return limits


def hash_of(key: str) -> str:
    """The hash of a key, in hexadecimal."""
    return digest_of(key).hex()


def _limits_subject(tenant: str) -> str:
    return f"{_LIMITS}{tenant_token(tenant)}"


class TenantView:
    """The keys and limits on the bus that are known, without I/O."""

    def __init__(self) -> None:
        self._keys: dict[str, KeyRecord] = {}
        self._limits: dict[str, LimitsRecord] = {}
        self._limits_of: dict[str, Limits] = {}
        self._not_read_again: set[str] = set()

    def __repr__(self) -> str:
        return f"<TenantView of {len(self._keys)} keys>"

    @property
    def keys(self) -> list[StoredKey]:
        """The keys, by tenant and age."""
        known = [StoredKey(hash, record) for hash, record in self._keys.items()]
        return sorted(known, key=lambda one: (one.record.tenant, one.record.created, one.hash))

    @property
    def tenants(self) -> set[str]:
        """Those that have keys."""
        return {record.tenant for record in self._keys.values()}

    @property
    def limits(self) -> dict[str, Limits]:
        """The limits, by tenant."""
        return dict(sorted(self._limits_of.items()))

    def holder_of(self, key: str) -> KeyHolder | None:
        """The holder of a key; None for an unknown one."""
        hash = hash_of(key)
        record = self._keys.get(hash)
        if record is None:
            return None
        return KeyHolder(
            record.tenant,
            record.is_operator,
            key_id(hash),
            record.name,
            record.expires,
            record.limits,
        )

    def limits_of(self, tenant: str) -> Limits | None:
        """The limits that are stated of a tenant; None where none are."""
        return self._limits_of.get(tenant)

    def put(self, message: StoredMessage) -> None:
        """A record was written, or taken back; one that is none counts as taken back."""
        subject = message.subject
        self._drop(subject)
        if message.is_marker:
            return
        try:
            if subject.startswith(_KEY):
                self._put_key(subject.removeprefix(_KEY), _key_decoder.decode(message.data))
            elif subject.startswith(_LIMITS):
                self._put_limits(subject, _limits_decoder.decode(message.data))
        except msgspec.DecodeError:
            return

    def _put_key(self, hash: str, record: KeyRecord) -> None:
        if _HASH.fullmatch(hash) and is_tenant(record.tenant):
            self._keys[hash] = record

    def _put_limits(self, subject: str, record: LimitsRecord) -> None:
        if subject == _limits_subject(record.tenant):
            self._limits[subject] = record
            self._limits_of[record.tenant] = record.limits

    def begin_reading(self) -> None:
        """All records are about to be read; those that do not come again are gone."""
        self._not_read_again = {*(f"{_KEY}{hash}" for hash in self._keys), *self._limits}

    def end_reading(self) -> None:
        """All records were read."""
        for subject in list(self._not_read_again):
            self._drop(subject)
        self._not_read_again = set()

    def _drop(self, subject: str) -> None:
        self._not_read_again.discard(subject)
        self._keys.pop(subject.removeprefix(_KEY), None)
        record = self._limits.pop(subject, None)
        if record is not None:
            del self._limits_of[record.tenant]


class TenantBucket:
    """The bucket, as operators write it."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    def __repr__(self) -> str:
        return f"<TenantBucket {KEYS_STREAM.name}>"

    async def read(self) -> TenantView:
        """All that it holds.

        Raises:
            Unavailable: JetStream does not answer.
        """
        view = TenantView()
        try:
            stored = await read_latest(self._jetstream, KEYS_STREAM.name, timeout=READ_TIMEOUT)
        except NoStream:
            return view
        for message in stored.values():
            view.put(message)
        return view

    async def add_key(self, record: KeyRecord) -> str:
        """Make a key; it is nowhere but in what this returns.

        Raises:
            DynbusError: it cannot be stored.
        """
        check_tenant(record.tenant)
        key = f"{KEY_PREFIX}{secrets.token_urlsafe(KEY_BYTES)}"
        await self._write(f"{_KEY}{hash_of(key)}", msgspec.json.encode(record))
        return key

    async def revoke(self, hash: str) -> None:
        """Have a key be none any more.

        Raises:
            DynbusError: it cannot be stored.
        """
        await self._take_back(f"{_KEY}{hash}")

    async def set_limits(self, tenant: str, limits: Limits) -> None:
        """Have other limits for a tenant, in place of all that were stated.

        Args:
            tenant: or `ALL_TENANTS`.

        Raises:
            DynbusError: they cannot be stored.
        """
        if tenant != ALL_TENANTS:
            check_tenant(tenant)
        record = LimitsRecord(tenant=tenant, limits=limits)
        await self._write(_limits_subject(tenant), msgspec.json.encode(record))

    async def unset_limits(self, tenant: str) -> None:
        """State no limits of a tenant any more: it has those of `ALL_TENANTS`.

        Args:
            tenant: or `ALL_TENANTS`.

        Raises:
            DynbusError: that cannot be stored.
        """
        if tenant != ALL_TENANTS:
            check_tenant(tenant)
        await self._jetstream.ensure_stream(KEYS_STREAM)
        await self._take_back(_limits_subject(tenant))

    async def _take_back(self, subject: str) -> None:
        await self._jetstream.purge(KEYS_STREAM.name, subject)
        # Who follows the bucket hears of no purge.
        await self._jetstream.publish(subject, b"", deleted=True)

    async def _write(self, subject: str, data: bytes) -> None:
        await self._jetstream.ensure_stream(KEYS_STREAM)
        await self._jetstream.purge(KEYS_STREAM.name, subject)
        await self._jetstream.publish(subject, data)


def tenant_grants() -> list[Grant]:
    """The uses that a front end makes of the bus, for `dynbus auth`, which has keys from it and
    counts what tenants use."""
    return [Grant("knows keys and limits of tenants", KEYS_STREAM.to_follow), *counting_grants()]


def counting_grants() -> list[Grant]:
    """The uses that a process makes of the bus which counts what tenants use."""
    counts = (*COUNTS_STREAM.subjects, *COUNTS_STREAM.to_look_up)
    usage = (*USAGE_STREAM.subjects, *USAGE_STREAM.to_read)
    return [
        Grant("counts what tenants use of their limits", counts),
        Grant("writes what tenants have used", usage),
    ]
