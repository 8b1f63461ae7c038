"""The configuration of nats-servers, each on a host of its own, and a unit of systemd for them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import REGIONAL, check_token

CLUSTER: Final = "dynbus"
"""The name of the servers of a bus, and of a backbone, that are given no other."""

CLIENTS: Final = 4222
ROUTES: Final = 6222
LEAFS: Final = 7422
MONITOR: Final = 8222
USERS: Final = "nats-users.conf"
UNIT: Final = "nats-server.service"
STOP_SECONDS: Final = 45
"""Seconds that a server has to end: the lame-duck mode, in which its clients leave one by one."""

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9a-fA-F:]{2,39}")
_SIZE: Final = re.compile(r"[1-9][0-9]{0,5}[KMGT]B")


class ServerPlace(NamedTuple):
    """A server and its host.

    Attributes:
        address: of its host, where processes and the other servers reach it.
        zone: empty for none.
    """

    name: str
    address: str
    zone: str = ""

    @classmethod
    def parse(cls, text: str) -> ServerPlace:
        """Read NAME=ADDRESS[,ZONE].

        Raises:
            ConfigError: it is none.
        """
        name, equals, rest = text.partition("=")
        address, _, zone = rest.partition(",")
        if not equals or not _HOST.fullmatch(address):
            raise ConfigError(
                f"{text!r} is no server: write NAME=ADDRESS[,ZONE], as in a=10.0.0.1,east"
            )
        check_token("server", name)
        if zone:
            check_token("zone", zone)
        return cls(name, address, zone)

    @property
    def host(self) -> str:
        """Its address as a URL has it."""
        return _in_url(self.address)


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class RouteTls(NamedTuple):
    """The files with which servers know each other, on the machine of each."""

    cert: str
    key: str
    ca: str


class ServerChoices(NamedTuple):
    """The choices for all servers.

    Attributes:
        cluster: its name. Servers that are joined as leaf nodes take those for their own whose
            cluster has the same name.
        store: the folder where each keeps its streams.
        max_store: the most that it keeps there, such as `100GB`.
        has_users: whether the file of users lies beside each configuration.
        routes: the files of mutual TLS between servers; None for none.
        region: the JetStream domain of the servers; empty for none.
        backbone: the addresses of the servers that join the regions, the nearest first.
        is_backbone: whether these are those servers.
    """

    cluster: str
    store: str
    max_store: str
    has_users: bool
    routes: RouteTls | None = None
    region: str = ""
    backbone: tuple[str, ...] = ()
    is_backbone: bool = False


def server_files(
    places: Sequence[ServerPlace], choices: ServerChoices, heading: str
) -> dict[str, str]:
    """The configuration of each server by its file, and the unit that all of them have.

    Raises:
        ConfigError: two have one name or address, there are two in all, a size is none, or a region
            has the name of what joins it.
    """
    for what, values in (
        ("names", [place.name for place in places]),
        ("addresses", [place.address for place in places]),
    ):
        if len(set(values)) < len(values):
            raise ConfigError(f"the servers have the {what} {', '.join(values)}: give each its own")
    if len(places) == 2 and not choices.is_backbone:
        raise ConfigError(
            "two servers stop when one of them does, since neither is the majority: give one, or "
            "three"
        )
    if choices.region and len(places) > 1 and choices.cluster == CLUSTER:
        # A server takes no leaf node of a cluster that is called as its own.
        raise ConfigError(
            f"the servers of a region and those of the backbone cannot all be called {CLUSTER}: "
            "give --cluster another name"
        )
    for address in choices.backbone:
        if not _HOST.fullmatch(address):
            raise ConfigError(f"--backbone {address!r} is no address of a host")
    if not _SIZE.fullmatch(choices.max_store):
        raise ConfigError(f"--max-store {choices.max_store!r} is no size: write one as in 100GB")
    files = {f"{place.name}.conf": _config(place, places, choices, heading) for place in places}
    return {**files, UNIT: _unit(choices, heading)}


def server_urls(places: Sequence[ServerPlace], *, encrypted: bool) -> str:
    """The `NATS_URL` of the processes: each server with its zone."""
    scheme = "tls" if encrypted else "nats"
    return ",".join(
        f"{scheme}://{place.host}:{CLIENTS}" + (f"?zone={place.zone}" if place.zone else "")
        for place in places
    )


def _config(
    place: ServerPlace, places: Sequence[ServerPlace], choices: ServerChoices, heading: str
) -> str:
    lines = [
        f"# {heading}",
        f"server_name: {json.dumps(place.name)}",
        *_clients(place, choices),
        f'http: "127.0.0.1:{MONITOR}"',
        "max_payload: 1MB",
        "max_pending: 64MB",
        'write_deadline: "10s"',
        "# A client, or a server, that falls silent is noticed within seconds.",
        'ping_interval: "5s"',
        "ping_max: 2",
        "# Clients leave one by one when it is to end.",
        'lame_duck_duration: "30s"',
        'lame_duck_grace_period: "2s"',
        *_jetstream(choices),
        *_leaf_nodes(choices),
    ]
    others = [other for other in places if other is not place]
    if others:
        lines += [
            "cluster {",
            f"  name: {json.dumps(choices.cluster)}",
            f'  listen: "0.0.0.0:{ROUTES}"',
            f'  cluster_advertise: "{place.host}:{ROUTES}"',
            '  ping_interval: "1s"',
            "  ping_max: 2",
            "  routes: [",
            *(f'    "nats://{other.host}:{ROUTES}"' for other in others),
            "  ]",
        ]
        lines += [*_tls(choices, "  "), "}"]
    if choices.has_users:
        lines.append(f'include "{USERS}"')
    return "\n".join(lines) + "\n"


def _clients(place: ServerPlace, choices: ServerChoices) -> list[str]:
    if choices.is_backbone:
        return [
            "# Processes connect to the servers of their region.",
            f'listen: "127.0.0.1:{CLIENTS}"',
        ]
    return [
        f'listen: "0.0.0.0:{CLIENTS}"',
        f'client_advertise: "{place.host}:{CLIENTS}"',
    ]


def _jetstream(choices: ServerChoices) -> list[str]:
    if choices.is_backbone:
        return ["# Each region keeps its own streams: none are kept here."]
    return [
        "jetstream {",
        f"  store_dir: {json.dumps(choices.store)}",
        f"  max_file_store: {choices.max_store}",
        *([f"  domain: {json.dumps(choices.region)}"] if choices.region else []),
        "}",
    ]


def _leaf_nodes(choices: ServerChoices) -> list[str]:
    """The part by which servers of regions reach the backbone, and this hears them."""
    if choices.is_backbone:
        return ["leafnodes {", f'  listen: "0.0.0.0:{LEAFS}"', *_tls(choices, "  "), "}"]
    if not choices.backbone:
        return []
    urls = [f"nats-leaf://{_in_url(address)}:{LEAFS}" for address in choices.backbone]
    return [
        "# What a region stores stays in it, and calls go to the others.",
        "leafnodes {",
        '  reconnect: "1s"',
        "  remotes: [{",
        f"    urls: {json.dumps(urls)}",
        "    no_randomize: true",
        f"    deny_imports: {json.dumps(REGIONAL)}",
        f"    deny_exports: {json.dumps(REGIONAL)}",
        *_tls(choices, "    "),
        "  }]",
        "}",
    ]


def _tls(choices: ServerChoices, indent: str) -> list[str]:
    """Mutual TLS between servers, where there is any."""
    if choices.routes is None:
        return []
    return [
        f"{indent}tls {{",
        f"{indent}  cert_file: {json.dumps(choices.routes.cert)}",
        f"{indent}  key_file: {json.dumps(choices.routes.key)}",
        f"{indent}  ca_file: {json.dumps(choices.routes.ca)}",
        f"{indent}  verify: true",
        f"{indent}}}",
    ]


def _unit(choices: ServerChoices, heading: str) -> str:
    return f"""\
# {heading}
[Unit]
Description=nats-server
Wants=network-online.target
After=network-online.target time-sync.target

[Service]
Type=exec
User=nats
ExecStart=/usr/local/bin/nats-server --config /etc/nats/nats-server.conf
ExecReload=/bin/kill -HUP $MAINPID
# Lame duck: its clients leave one by one.
KillSignal=SIGUSR2
TimeoutStopSec={STOP_SECONDS}
Restart=on-failure
RestartSec=2
LimitNOFILE=200000
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={choices.store}
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
CapabilityBoundingSet=

[Install]
WantedBy=multi-user.target
"""
