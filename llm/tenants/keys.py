"""API keys in a file: each names a tenant, and states its limits."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from dynbus import ConfigError
from dynbus.spi import monotonic

from .limits import Limits, read_limits

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at whether the file has changed."""

MAX_BYTES: Final = 1024 * 1024

ID_DIGITS: Final = 12
"""Digits of the hash of a key by which it is called."""

NO_KEY: Final = "-"
"""The place of the key in a line that states limits alone."""

ALL_TENANTS: Final = "*"
"""The tenant whose limits those have for whom none are stated."""

_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_ROLE: Final = re.compile(r"(?:^|\s)role:\s*operator(?=\s|$)")
_KEY: Final = re.compile(r"[!-~]{8,512}")

_Identity = tuple[int, int, int]


class KeyHolder(NamedTuple):
    """The holder of a key.

    Attributes:
        is_operator: whether it may see what all tenants do.
        key: the id of the key.
        name: that somebody gave it; empty for none.
        expires: when it ends, in Unix seconds; 0 for never.
        limits: of this key alone, within those of its tenant; None for none.
        leeway: seconds for which it lets in beyond its end, since clocks differ.
    """

    tenant: str
    is_operator: bool = False
    key: str = ""
    name: str = ""
    expires: float = 0.0
    limits: Limits | None = None
    leeway: float = 0.0

    def has_expired(self, now: float) -> bool:
        """True if the key lets nobody in any more, in Unix seconds."""
        return self.expires > 0 and self.expires + self.leeway <= now


def is_tenant(name: str) -> bool:
    """True for the name of a tenant."""
    return _TENANT.fullmatch(name) is not None


def tenant_token(name: str) -> str:
    """The name of a tenant, which may have dots, as a token of a subject: in hexadecimal."""
    return name.encode().hex()


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key or a token, whatever a client has sent as one."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def key_id(hash: str) -> str:
    """The id by which a key is called, of its hash in hexadecimal."""
    return hash[:ID_DIGITS]


def time_text(unix: float) -> str:
    """A time as people read it, of Unix seconds."""
    return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"


class _Read(NamedTuple):
    """The content of a file.

    Attributes:
        lines: of keys, by their digests.
    """

    holders: list[tuple[bytes, KeyHolder]]
    limits: dict[str, Limits]
    lines: dict[bytes, tuple[int, KeyHolder]]

    @property
    def is_empty(self) -> bool:
        """True if it says nothing of anybody."""
        return not self.holders and not self.limits


class ApiKeys:
    """The keys in a file, which is read again when it has changed.

    Each line has a tenant and one of its keys, or `sha256:` and the key's hash in hexadecimal, and
    `role: operator` for one that may see what all tenants do; lines that begin with `#` are
    comments. One line of a tenant, with a key or with `-` in its place, may state its limits, as
    `Limits` has them; those of the tenant `*` are for all of whom none are stated.

    Only hashes of keys are kept. A file that cannot be read any longer, or has a mistake, leaves
    the keys in force that were there before; the log says so, and `problem`. One that has no keys
    any more is no mistake, once it is seen twice so.

    Args:
        now: seconds of a monotonic clock.

    Raises:
        ConfigError: the file cannot be read, or a line is not as above.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._now = now
        self._identity: _Identity | None = self._identify()
        read = self._read()
        if read.is_empty:
            raise ConfigError(f"{path} has no keys: write a tenant and a key in each line")
        self._holders, self._limits = read.holders, read.limits
        self._look_at = now() + LOOK_INTERVAL
        self._problem = ""
        self._was_empty = False

    def __repr__(self) -> str:
        return f"<ApiKeys {self._path} [{len(self._holders)} keys]>"

    @property
    def problem(self) -> str:
        """The reason for which the file as it is now cannot be used; empty where it is."""
        self._look()
        return self._problem

    def holder_of(self, key: str) -> KeyHolder | None:
        """The holder of this key; None for an unknown key. The time that it takes says nothing of
        the keys."""
        self._look()
        digest = digest_of(key)
        matching: KeyHolder | None = None
        for known, holder in self._holders:
            if hmac.compare_digest(known, digest):
                matching = holder
        return matching

    def limits_of(self, tenant: str) -> Limits | None:
        """The limits that are stated of a tenant; None where none are."""
        return self._limits.get(tenant)

    def _look(self) -> None:
        now = self._now()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_INTERVAL
        try:
            identity = self._identify()
            if identity == self._identity:
                return
            read = self._read()
        except ConfigError as error:
            # It is read again even if it comes back as it was.
            self._identity = None
            if self._problem != error.message:
                logger.error("the keys that were there before stay in force: %s", error)
            self._problem = error.message
            return
        if read.is_empty and not self._was_empty:
            # It may be about to be written: an editor empties it first.
            self._was_empty = True
            return
        self._was_empty = read.is_empty
        self._holders, self._limits = read.holders, read.limits
        self._identity, self._problem = identity, ""
        count = len(self._holders)
        logger.info("the keys in %s were read again: there are %d now", self._path, count)

    def _identify(self) -> _Identity:
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(
                f"the keys in {self._path} cannot be read: {error.strerror}"
            ) from None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> _Read:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"the keys in {self._path} cannot be read: {error.strerror}"
            ) from None
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{self._path} is larger than {MAX_BYTES} bytes")
        read = _Read([], {}, {})
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            words = line.split(maxsplit=2)
            if words and not words[0].startswith("#"):
                self._read_line(read, words, number)
        return read

    def _read_line(self, read: _Read, words: Sequence[str], number: int) -> None:
        # The line itself is told nowhere: it has a key.
        tenant, key = words[0], words[1] if len(words) > 1 else ""
        rest, roles = _ROLE.subn(" ", words[2] if len(words) > 2 else "")
        states = all("=" in word for word in rest.split())
        is_default = tenant == ALL_TENANTS and key == NO_KEY
        if not key or not (is_tenant(tenant) or is_default) or not states:
            raise ConfigError(
                f"{self._path}, line {number}: write a tenant and a key with a space between, "
                "and behind them role: operator for a key that may see what all tenants do, and "
                "limits as name=value; a tenant has letters, digits, '.', '_' and '-'"
            )
        if key != NO_KEY:
            digest = self._digest(key, number)
            holder = KeyHolder(tenant, is_operator=bool(roles), key=key_id(digest.hex()))
            line, before = read.lines.setdefault(digest, (number, holder))
            if holder != before:
                raise ConfigError(
                    f"{self._path}, line {number}: the key is that of line {line}, too, which has "
                    "another tenant or role: give each a key of its own"
                )
            read.holders.append((digest, holder))
        if not rest.split():
            return
        if tenant in read.limits:
            raise ConfigError(
                f"{self._path}, line {number}: the limits of {tenant} are stated before: state "
                "them in one line"
            )
        try:
            read.limits[tenant] = read_limits(rest.split())
        except ConfigError as error:
            raise ConfigError(f"{self._path}, line {number}: {error.message}") from None

    def _digest(self, word: str, number: int) -> bytes:
        hashed = _HASH.fullmatch(word)
        if hashed is not None:
            return bytes.fromhex(hashed[1])
        if word.startswith("sha256:") or _KEY.fullmatch(word) is None:
            raise ConfigError(
                f"{self._path}, line {number}: write a key of 8 to 512 printable characters, or "
                "sha256: and 64 hexadecimal digits"
            )
        return digest_of(word)
