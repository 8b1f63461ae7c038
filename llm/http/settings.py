"""`HttpSettings`: where a front end listens, whom it answers, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynbus.bus.config import is_loopback
from dynbus.bus.errors import ConfigError


def _name_of(host: str) -> str:
    """A host without its port, and without the brackets of an IPv6 address."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The settings of a front end.

    Attributes:
        host: the address to listen at.
        port: 0 takes a free one.
        api_keys: a file of keys, see `ApiKeys`; None lets everybody in.
        insecure_public: allow a host that other machines can reach without keys.
        tls_cert, tls_key: PEM files; both or none.
        cors_origins: from which pages of other hosts may ask; `*` is all.
        allowed_hosts: names that a front end without keys at a loopback address is asked by, beside
            loopback's own.
        max_body_bytes: of a request; one with images may need more.
        max_header_bytes: of a request, with its first line.
        max_requests: that run at a time; further ones are answered 429.
        max_strangers: connections of one address (of IPv6: of a /64) that have shown no key, or,
            without keys, asked for nothing yet; the oldest one makes room for the next. Never more
            than a quarter of the descriptors.
        request_timeout: seconds for a request, from its engine's first token to its last too.
        body_timeout: seconds until a request's body must have arrived.
        header_timeout: seconds until a request's headers must have arrived.
        write_timeout: seconds that an answer waits for a client that does not read.
        stream_keep_alive: seconds for which a stream is silent at most, before its first token too:
            then a comment is told, or in Anthropic's interface a ping.
        log_content: tell in the log and in traces what requests and answers say, up to
            `MAX_CONTENT` characters of each.
        grace: seconds that requests have to finish when the front end stops.

    Raises:
        ConfigError: a value is not usable, or the host is public without keys.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Path | None = None
    insecure_public: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    max_requests: int = 8192
    max_strangers: int = 4096
    request_timeout: float = 3600.0
    body_timeout: float = 30.0
    header_timeout: float = 10.0
    write_timeout: float = 30.0
    grace: float = 30.0
    log_content: bool = False
    stream_keep_alive: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not usable: choose one from 1 to 65535")
        for name in ("max_body_bytes", "max_header_bytes", "max_requests", "max_strangers"):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number of at least 1")
        for name in (
            "request_timeout",
            "body_timeout",
            "header_timeout",
            "write_timeout",
            "grace",
            "stream_keep_alive",
        ):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{name}={value!r}: give a number of seconds above 0")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and a key: give tls_cert and tls_key")
        if self.api_keys is None and not self.insecure_public and not is_loopback(self.host):
            raise ConfigError(
                f"the front end would be open to other machines at {self.host!r} and asks for no "
                "keys: give a file with --api-keys, listen at 127.0.0.1, or allow it with "
                "--insecure-public"
            )

    def takes_host(self, host: str) -> bool:
        """Whether a request may name a host, with or without a port.

        Where nothing but the address says who may ask, a page of a browser could have its own
        name lead there.
        """
        if self.api_keys is not None or not is_loopback(self.host):
            return True
        name = _name_of(host)
        known = (one.lower() for one in self.allowed_hosts)
        return is_loopback(name) or name.endswith(".localhost") or name in known
