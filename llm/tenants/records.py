"""The bucket of keys and of limits of tenants on the bus.

A key is kept as its SHA-256, which is its name there. Who may write to the bucket may let anybody
in: operators alone may.
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple

import msgspec

from dynbus import ConfigError, DynbusError
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
_PLACE: Final = re.compile(
    rf"\$KV\.{KEYS_BUCKET}\.(?P<kind>key|limits)\.(?P<name>[^.]+)(?:\.[^.]+)?"
)
_FULL: Final = "StreamFull"
_REVOKED: Final = b"null"
"""The record of a key that is none any more."""


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
    """The limits of a tenant on the bus, as JSON.

    Attributes:
        limits: None where they are stated no more.
    """

    tenant: str
    limits: Limits | None


class StoredKey(NamedTuple):
    """A key as it is stored, by its hash in hexadecimal."""

    hash: str
    record: KeyRecord


_key_decoder: Final = msgspec.json.Decoder(KeyRecord | None)
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


class _Records:
    """Records in the order in which they were stored, of which the last of each key and of each
    tenant counts."""

    def __init__(self) -> None:
        self.keys: dict[str, KeyRecord] = {}
        self.limits: dict[str, Limits] = {}

    def put(self, message: StoredMessage) -> None:
        """A record was stored. One that is none says nothing: the server stores its answers, which
        are empty, under any subject that is free."""
        place = _PLACE.fullmatch(message.subject)
        if place is None:
            return
        try:
            if place["kind"] == "key":
                self._put_key(place["name"], _key_decoder.decode(message.data))
            else:
                self._put_limits(place["name"], _limits_decoder.decode(message.data))
        except msgspec.DecodeError:
            return

    def _put_key(self, hash: str, record: KeyRecord | None) -> None:
        if record is None:
            self.keys.pop(hash, None)
        elif _HASH.fullmatch(hash) and is_tenant(record.tenant):
            self.keys[hash] = record

    def _put_limits(self, token: str, record: LimitsRecord) -> None:
        if token != tenant_token(record.tenant):
            return
        if record.limits is None:
            self.limits.pop(record.tenant, None)
        else:
            self.limits[record.tenant] = record.limits


class TenantView:
    """The keys and limits on the bus that are known, without I/O."""

    def __init__(self) -> None:
        self._records = _Records()
        self._read_anew: _Records | None = None

    def __repr__(self) -> str:
        return f"<TenantView of {len(self._records.keys)} keys>"

    @property
    def keys(self) -> list[StoredKey]:
        """The keys, by tenant and age."""
        known = [StoredKey(hash, record) for hash, record in self._records.keys.items()]
        return sorted(known, key=lambda one: (one.record.tenant, one.record.created, one.hash))

    @property
    def tenants(self) -> set[str]:
        """Those that have keys."""
        return {record.tenant for record in self._records.keys.values()}

    @property
    def limits(self) -> dict[str, Limits]:
        """The limits, by tenant."""
        return dict(sorted(self._records.limits.items()))

    def holder_of(self, key: str) -> KeyHolder | None:
        """The holder of a key; None for an unknown one."""
        hash = hash_of(key)
        record = self._records.keys.get(hash)
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
        return self._records.limits.get(tenant)

    def put(self, message: StoredMessage) -> None:
        """A record was stored, or is read again."""
        records = self._records if self._read_anew is None else self._read_anew
        records.put(message)

    def begin_reading(self) -> None:
        """All records are about to be read: what is known counts until they are."""
        self._read_anew = _Records()

    def end_reading(self) -> None:
        """All records were read."""
        if self._read_anew is not None:
            self._records, self._read_anew = self._read_anew, None


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
        for message in sorted(stored.values(), key=lambda one: one.sequence):
            view.put(message)
        return view

    async def add_key(self, record: KeyRecord) -> str:
        """Make a key; it is nowhere but in what this returns.

        Raises:
            DynbusError: it cannot be stored.
        """
        check_tenant(record.tenant)
        key = f"{KEY_PREFIX}{secrets.token_urlsafe(KEY_BYTES)}"
        await self._jetstream.ensure_stream(KEYS_STREAM)
        await self._jetstream.publish(f"{_KEY}{hash_of(key)}", msgspec.json.encode(record))
        return key

    async def revoke(self, hash: str) -> None:
        """Have a key be none any more.

        Raises:
            DynbusError: it cannot be stored.
        """
        await self._replace(f"{_KEY}{hash}", _REVOKED)

    async def set_limits(self, tenant: str, limits: Limits) -> None:
        """Have other limits for a tenant, in place of all that were stated.

        Args:
            tenant: or `ALL_TENANTS`.

        Raises:
            DynbusError: they cannot be stored.
        """
        if tenant != ALL_TENANTS:
            check_tenant(tenant)
        await self._state(LimitsRecord(tenant=tenant, limits=limits))

    async def unset_limits(self, tenant: str) -> None:
        """State no limits of a tenant any more: it has those of `ALL_TENANTS`.

        Args:
            tenant: or `ALL_TENANTS`.

        Raises:
            DynbusError: that cannot be stored.
        """
        if tenant != ALL_TENANTS:
            check_tenant(tenant)
        await self._state(LimitsRecord(tenant=tenant, limits=None))

    async def _state(self, record: LimitsRecord) -> None:
        await self._jetstream.ensure_stream(KEYS_STREAM)
        await self._replace(f"{_LIMITS}{tenant_token(record.tenant)}", msgspec.json.encode(record))

    async def _replace(self, place: str, data: bytes) -> None:
        """Store a record that counts from then on, and drop those before it.

        It has a subject of its own, since the bucket replaces none: were the one before purged
        first, a process that dies behind that would leave neither.
        """
        subject = f"{place}.{secrets.token_hex(8)}"
        try:
            stored = await self._jetstream.publish(subject, data)
        except DynbusError as error:
            if error.code != _FULL:
                raise
            # A full bucket must not keep a key in force: here room has to be made first.
            await self._drop(place)
            stored = await self._jetstream.publish(subject, data)
        if stored > 1:
            await self._drop(place, up_to=stored - 1)

    async def _drop(self, place: str, *, up_to: int = 0) -> None:
        for subject in (place, f"{place}.*"):
            await self._jetstream.purge(KEYS_STREAM.name, subject, up_to=up_to)


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
