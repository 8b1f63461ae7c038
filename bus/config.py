"""How this process uses the bus: limits, addresses, intervals.

Every field has a default, an environment variable `DYNBUS_<FIELD>` and a key in YAML; a value
that does not fit is refused with its name. `docs/configuration.md` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .endpoint import MAX_SECONDS
from .errors import ConfigError
from .names import ANONYMOUS, DEFAULT_REPLY_PREFIXES, check_token

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
_PREFIX: Final = "DYNBUS_"


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process tells the bus about itself and expects of it.

    Attributes:
        servers: NATS URLs, tried in random order.
        principal: the credential's name as permissions spell it in `_R.{principal}.>`.
        credentials: path of a NATS credentials file.
        connect_timeout: seconds for the first connection.
        max_request_bytes, max_item_bytes: larger requests and items are refused.
        stream_window: bytes that one stream may be ahead of its reader.
        connection_window: bytes that all streams together may be ahead of their readers.
        reader_stall_timeout: seconds without credit after which a stream is ended.
        lease_ttl: seconds after which an instance that does not renew is gone; at least 2.
        stall_limit: seconds for which a blocked main loop is tolerated.
        drain_grace: seconds that calls have to finish when an instance goes away.
        reply_prefixes: where plain NATS clients may ask to be answered.
        debug: send a handler's traceback to its caller.
    """

    servers: tuple[str, ...] = (DEFAULT_URL,)
    principal: str = ANONYMOUS
    credentials: str = ""
    connect_timeout: float = 5.0
    max_request_bytes: int = 32 * 1024 * 1024
    max_item_bytes: int = 32 * 1024 * 1024
    stream_window: int = 256 * 1024
    connection_window: int = 16 * 1024 * 1024
    reader_stall_timeout: float = 30.0
    lease_ttl: float = 10.0
    stall_limit: float = 10.0
    drain_grace: float = 30.0
    reply_prefixes: tuple[str, ...] = DEFAULT_REPLY_PREFIXES
    debug: bool = False

    def __post_init__(self) -> None:
        if not self.servers or not all(self.servers):
            raise ConfigError("servers is empty: give at least one NATS URL")
        if self.principal != ANONYMOUS:
            check_token("principal", self.principal)
        positive = {
            "connect_timeout": self.connect_timeout,
            "max_request_bytes": self.max_request_bytes,
            "max_item_bytes": self.max_item_bytes,
            "stream_window": self.stream_window,
            "connection_window": self.connection_window,
            "reader_stall_timeout": self.reader_stall_timeout,
            "stall_limit": self.stall_limit,
        }
        for name, value in positive.items():
            if not 0 < value <= MAX_SECONDS:
                raise ConfigError(
                    f"{name} is {value}; it must be greater than 0 and at most {MAX_SECONDS:g}"
                )
        if not 2 <= self.lease_ttl <= MAX_SECONDS:
            raise ConfigError(
                f"lease_ttl is {self.lease_ttl}; the server's granularity needs 2 or more"
            )
        if not 0 <= self.drain_grace <= MAX_SECONDS:
            raise ConfigError(
                f"drain_grace is {self.drain_grace}; it must be 0 to {MAX_SECONDS:g} seconds"
            )


def load_config(
    explicit: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> BusConfig:
    """The configuration out of arguments, then the environment, then the defaults.

    `NATS_URL` (commas between several) is understood as well as `DYNBUS_SERVERS`.

    Raises:
        ConfigError: an unknown field, or a value that does not fit its field.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    if url := environment.get("NATS_URL"):
        values["servers"] = _split(url)
    for name in BusConfig.__struct_fields__:
        text = environment.get(_PREFIX + name.upper())
        if text is not None:
            values[name] = _split(text) if name in ("servers", "reply_prefixes") else text
    values.update(explicit or {})
    servers = values.get("servers")
    if isinstance(servers, str):
        values["servers"] = _split(servers)
    try:
        return msgspec.convert(values, BusConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bus configuration: {error}") from None


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
