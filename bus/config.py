"""The settings of a process on the bus: limits, addresses, intervals.

Every field has a default, an environment variable `DYNBUS_<FIELD>` and a key in YAML; a value
that does not fit is refused with its name and where it came from. `docs/configuration.md` lists
them.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from .errors import ConfigError
from .protocol.endpoint import MAX_SECONDS
from .protocol.names import ANONYMOUS, DEFAULT_REPLY_PREFIXES, check_token
from .telemetry.logs import redact_url
from .transport import REPLICAS

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
MAX_BYTES: Final = 2**40
"""A terabyte: more than the memory of any machine that would hold it."""
MAX_SERVERS: Final = 5
SCHEMA_CHECKS: Final = ("warn", "off")
ROUTINGS: Final = ("round_robin", "random", "least_loaded", "power_of_two", "local_first")
"""The policies by which clients choose an instance; `actors/calling/routing.py` has them."""
Spill = Literal["never", "region"]
"""The choice for calls that nobody in their own region can take: to stay, or to go to another."""
_PREFIX: Final = "DYNBUS_"
GRAPH_VARIABLE: Final = f"{_PREFIX}CONFIG"
"""The variable that configures a graph, which `dynbus run` reads; no field of the bus."""
WORKER_INDEX: Final = f"{_PREFIX}WORKER_INDEX"
WORKER_CORES: Final = f"{_PREFIX}WORKER_CORES"
"""The variable by which `dynbus run` gives cores to the processes of its instances, and to those
that these start.
"""
_SCHEMES: Final = ("nats", "tls", "ws", "wss")
_LISTS: Final = ("servers", "reply_prefixes")
_BYTES: Final = (
    "max_request_bytes",
    "max_item_bytes",
    "stream_window",
    "connection_window",
    "instance_window",
)
_SECONDS: Final = ("connect_timeout", "reader_stall_timeout", "stall_limit", "mute_limit")
_ZONE: Final = re.compile(r"zone=[\w.-]+")
_NO_SOURCES: Final[Mapping[str, str]] = MappingProxyType({})

# Kubernetes gives every container the addresses of its namespace's services, and one of them
# may be called dynbus.
_SERVICE_LINK: Final = re.compile(
    r"DYNBUS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)

logger = logging.getLogger(__name__)

_warned_of: set[str] = set()


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a process on the bus.

    Attributes:
        servers: NATS URLs; commas between several, and `?zone=NAME` behind one says where it is.
            One on this machine is preferred, then those of our zone, then any. `NATS_URL` is
            understood too, and `HOST:PORT` or `USER:PASSWORD@HOST:PORT` without a scheme.
        zone: where this process is: servers of the same zone are preferred, and instances of it by
            the routing `local_first`; empty for nowhere.
        host: the machine that this process is on, as instances say; the host name unless given.
        principal: the credential's name as permissions spell it in `_R.{principal}.>`; of an NKEY
            the name of its file unless given.
        credentials: path of a file with an NKEY, `NAME.nk`, or of a NATS credentials file; for
            `dynbus run` also of a folder with a file for each component. Needs the extra `nkeys`.
        tls_ca: file of the authorities, PEM, that may have signed the certificates of the servers;
            the system's unless given. Where this or the next is set, nothing is said without TLS,
            as with `tls://` in a URL.
        tls_cert: file of this process's own certificate with its chain, PEM, for servers that want
            one. Files are read again for each new connection.
        tls_key: file of its key, PEM, without a password.
        tls_handshake_first: whether TLS begins before the server says anything, which it has as
            `handshake_first`.
        connect_timeout: seconds for the first connection.
        max_request_bytes: larger requests are refused.
        max_item_bytes: larger items and results are refused.
        stream_window: bytes that one stream may be ahead of its reader.
        connection_window: bytes that all streams together may be ahead of their readers.
        instance_window: bytes that one instance keeps for its clients: results that they do not
            have yet, and requests that wait; a client may hold a quarter of what is free, and each
            of its streams 16 KiB in any case.
        reader_stall_timeout: seconds without credit after which a stream ends with `ReaderStalled`.
        lease_ttl: seconds after which an instance that does not renew is gone; at least 2.
        stall_limit: seconds for which a blocked main loop is tolerated.
        mute_limit: seconds for which no thread of a process of `dynbus run` may get to answer it
            before the process is ended: one of them keeps the interpreter to itself.
        replicas: how many servers of a cluster keep each stream and bucket; 1 to 5, and no more
            than the cluster has.
        drain_grace: seconds that calls have to finish when an instance goes away.
        reply_prefixes: where plain NATS clients may ask to be answered.
        embedded_open: whether an embedded server that is started takes any program of this machine,
            and not those of its user alone.
        debug: send a handler's traceback to its caller.
        flight: record what happens, and what is decided and why, without prompts, in the stream
            `DYNBUS_FLIGHT_{namespace}`, of which `dynbus record` saves files.
        flight_records: records a second of a process beyond which a share of the requests alone is
            recorded; what else happens always is.
        schema_check: what a typed client does about an instance of another version of its class:
            `warn` of it in the log, or `off` for nothing.
        routing: how clients choose an instance that are given no `routing` of their own.
        spill: `region` where calls may go to another region while nobody in their own can take
            them, `never` where they stay.
    """

    servers: tuple[str, ...] = (DEFAULT_URL,)
    zone: str = ""
    host: str = ""
    principal: str = ANONYMOUS
    credentials: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_handshake_first: bool = False
    connect_timeout: float = 5.0
    max_request_bytes: int = 32 * 1024 * 1024
    max_item_bytes: int = 32 * 1024 * 1024
    stream_window: int = 512 * 1024
    connection_window: int = 32 * 1024 * 1024
    instance_window: int = 128 * 1024 * 1024
    reader_stall_timeout: float = 30.0
    lease_ttl: float = 10.0
    stall_limit: float = 10.0
    mute_limit: float = 60.0
    replicas: int = REPLICAS
    drain_grace: float = 30.0
    reply_prefixes: tuple[str, ...] = DEFAULT_REPLY_PREFIXES
    embedded_open: bool = False
    debug: bool = False
    flight: bool = False
    flight_records: int = 2000
    schema_check: str = SCHEMA_CHECKS[0]
    routing: str = ROUTINGS[0]
    spill: str = "never"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "servers", tuple(map(_with_scheme, self.servers)))
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if problem := _problem(name, value):
                raise _misfit(name, name, value, problem)
        self._check_tls()

    @property
    def demands_tls(self) -> bool:
        """True if nothing is said to any server without TLS, whatever its URL."""
        return bool(self.tls_ca or self.tls_cert or self.tls_handshake_first)

    def _check_tls(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("cert", "key") if self.tls_cert else ("key", "cert")
            raise ConfigError(
                f"tls_{given} = {self.tls_cert or self.tls_key!r} needs tls_{missing} as well: the "
                "same file where it has both"
            )
        for server in self.servers:
            if self.demands_tls and server.startswith("ws://"):
                raise ConfigError(
                    f"servers = {redact_url(server)} has no TLS, which tls_ca, tls_cert and "
                    "tls_handshake_first are for: write wss://"
                )

    @property
    def own_host(self) -> str:
        """The machine that this process is on, as its instances say."""
        return self.host or socket.gethostname()


class _Given(NamedTuple):
    """A value of a field, and where it came from as a user would name it."""

    source: str
    value: Any


def load_config(
    explicit: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    sources: Mapping[str, str] = _NO_SOURCES,
    unknown_variables: Literal["refuse", "warn"] = "refuse",
) -> BusConfig:
    """The configuration out of arguments, then the environment, then the defaults.

    `NATS_URL` (commas between several) is understood as well as `DYNBUS_SERVERS`.

    Args:
        sources: where explicit values came from, for messages; an argument unless said.
        unknown_variables: what is done about them. A program may meet the variables of a later
            version than its own, and should then go on; who types a command can mend them.

    Raises:
        ConfigError: an unknown field or variable, or a value that does not fit its field.
    """
    environment = os.environ if environment is None else environment
    if unknown_variables == "refuse":
        check_variables(environment)
    else:
        _warn_of_variables(environment)
    given: dict[str, _Given] = {}
    if url := environment.get("NATS_URL"):
        given["servers"] = _Given("NATS_URL", url)
    for name in BusConfig.__struct_fields__:
        text = environment.get(variable(name))
        if text is not None:
            given[name] = _Given(variable(name), text)
    for name, value in (explicit or {}).items():
        source = sources.get(name, f"the argument {name}")
        check_field(name, source)
        given[name] = _Given(source, value)
    return BusConfig(**{name: _convert(name, each) for name, each in given.items()})


def variable(name: str) -> str:
    """The environment variable of a field."""
    return _PREFIX + name.upper()


def check_field(name: str, source: str) -> None:
    """Check that a field exists.

    Raises:
        ConfigError: it does not; the message begins with `source`.
    """
    fields = BusConfig.__struct_fields__
    if name not in fields:
        raise ConfigError(
            f"{source} is no setting of the bus{suggestion(name, fields)}; there are: "
            f"{', '.join(fields)}"
        )


def check_variables(environment: Mapping[str, str]) -> None:
    """Check that every `DYNBUS_` variable means something.

    Arguments of actors (`DYNBUS_<Actor>__<argument>`) are left to those who know the actors,
    and what Kubernetes sets for a service that is called dynbus is nobody's mistake.

    Raises:
        ConfigError: one of them does not.
    """
    for problem in _unknown_variables(environment).values():
        raise ConfigError(f"{problem}: unset it, or correct its name")


def _warn_of_variables(environment: Mapping[str, str]) -> None:
    """The same, with a warning for each that does not, once in the life of the process."""
    for name, problem in _unknown_variables(environment).items():
        if name not in _warned_of:
            _warned_of.add(name)
            logger.warning("%s; it is not used", problem)


def _unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The remark on each `DYNBUS_` variable that means nothing, by its name."""
    known = [*(variable(name) for name in BusConfig.__struct_fields__), GRAPH_VARIABLE]
    return {
        name: f"the environment variable {name} is unknown{suggestion(name, known)}; there are: "
        f"{', '.join(known)}, and {_PREFIX}<Actor>__<argument>, with two underscores, "
        "for an actor's argument"
        for name in environment
        if name.startswith(_PREFIX)
        and name not in (*known, WORKER_INDEX, WORKER_CORES)
        and not _SERVICE_LINK.fullmatch(name)
        and ("__" not in name or name.replace("__", "_") in known)
    }


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` where one of the known names is near, else nothing."""
    from difflib import get_close_matches

    by_folded = {each.casefold(): each for each in known}
    nearest = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.75)
    return f" (did you mean {by_folded[nearest[0]]}?)" if nearest else ""


def _convert(name: str, given: _Given) -> Any:
    value = given.value
    if name in _LISTS and isinstance(value, str):
        value = tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        value = msgspec.convert(value, _TYPES[name], strict=False)
        problem = _problem(name, value)
    except msgspec.ValidationError:
        problem = _expected(name)
    if problem:
        raise _misfit(name, given.source, given.value, problem)
    return value


def _misfit(name: str, source: str, value: Any, problem: str) -> ConfigError:
    shown = repr(value)
    if name == "servers" and isinstance(value, str) and "://" not in value:
        # Whatever stands before an @ is a credential here, a lone token too.
        shown = repr(redact_url(f"nats://{value}").removeprefix("nats://"))
    return ConfigError(f"{source} = {redact_url(shown)}: {problem}")


def _with_scheme(server: str) -> str:
    """The URL with its scheme, by which credentials are known as such wherever it is shown."""
    return server if "://" in server or not _is_nats_url(server) else f"nats://{server}"


def _expected(name: str) -> str:
    default = _DEFAULTS[name]
    if isinstance(default, tuple):
        return f"write a list of texts, or one text with commas, for example {default[0]}"
    if isinstance(default, bool):
        return "write true or false"
    if isinstance(default, str):
        return "write a text"
    kind = "whole number" if isinstance(default, int) else "number"
    return f"write a {kind}, for example {default}"


def _problem(name: str, value: Any) -> str:
    """The fault of a value of the right type, and its remedy; empty for none."""
    if name == "servers":
        return _servers_problem(value)
    if name == "principal":
        return _principal_problem(value)
    if name in ("zone", "host") and value and not _ZONE.fullmatch(f"zone={value}"):
        return "write letters, digits, '-', '_' and '.'"
    if name in _BYTES and not 0 < value <= MAX_BYTES:
        return f"it must be greater than 0 and at most {MAX_BYTES} bytes"
    if name in _SECONDS and not 0 < value <= MAX_SECONDS:
        return f"it must be greater than 0 and at most {MAX_SECONDS:g}"
    if name == "lease_ttl" and not 2 <= value <= MAX_SECONDS:
        return f"the server's granularity needs 2 or more, and at most {MAX_SECONDS:g}"
    if name == "replicas" and not 1 <= value <= MAX_SERVERS:
        return f"it must be 1 to {MAX_SERVERS}, which is what JetStream takes"
    if name == "flight_records" and value < 1:
        return "it must be 1 or more"
    if name == "drain_grace" and not 0 <= value <= MAX_SECONDS:
        return f"it must be 0 to {MAX_SECONDS:g} seconds"
    if name == "schema_check" and value not in SCHEMA_CHECKS:
        return f"write one of {', '.join(SCHEMA_CHECKS)}"
    if name == "routing" and value not in ROUTINGS:
        return f"write one of {', '.join(ROUTINGS)}"
    if name == "spill" and value not in get_args(Spill):
        return f"write one of {', '.join(get_args(Spill))}"
    return ""


def _principal_problem(principal: str) -> str:
    if principal == ANONYMOUS:
        return ""
    try:
        check_token("principal", principal)
    except ConfigError as error:
        return str(error).partition(": ")[2]
    return ""


def _servers_problem(servers: tuple[str, ...]) -> str:
    if not servers:
        return f"give at least one NATS URL, for example {DEFAULT_URL}"
    for server in servers:
        if not _is_nats_url(server):
            return f"write NATS URLs, nats://HOST:PORT, for example {DEFAULT_URL}"
        query = urlsplit(server).query
        if "?" in server and not _ZONE.fullmatch(query):
            return (
                "of what follows a ? only zone=NAME, of letters, digits, '-', '_' and '.', is "
                f"understood, not {query!r}"
            )
    return ""


def _is_nats_url(text: str) -> bool:
    """True if it is a NATS URL; HOST:PORT alone is understood, a single word is not."""
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        has_port = parts.port is not None
    except ValueError:
        return False
    return parts.scheme in _SCHEMES and bool(parts.hostname) and ("://" in text or has_port)


_TYPES: Final[Mapping[str, Any]] = {
    field.name: field.type for field in msgspec.structs.fields(BusConfig)
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    field.name: field.default for field in msgspec.structs.fields(BusConfig)
}


# Front ends ask it of each request's Host.
@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """True if only programs on this machine can reach `host`; a name other than localhost is not
    looked up and counts as no.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
