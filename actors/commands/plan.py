"""What a run would start: it checks the command line of `dynbus run` and loads its targets.

It starts nothing; `--dry-run` prints the plan and ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from dynbus.actors.declaring.arguments import build_arguments, defaults
from dynbus.actors.declaring.redaction import shown
from dynbus.actors.running.configuration import (
    BusSettings,
    ConfigFile,
    NodeOption,
    bus_settings,
    declared_nodes,
    misspelt_variables,
    node_settings,
    read_file,
)
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.loader import load_targets
from dynbus.bus.commands.terminal import plain, print_json, print_table
from dynbus.bus.config import BusConfig, is_loopback, load_config
from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import has_extra, how_to_install
from dynbus.bus.telemetry.health import parse_address
from dynbus.bus.telemetry.logs import LogFormat, redact_url


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `dynbus run`.

    Attributes:
        node_options: `--Actor.key=value`.
        arguments: all of it as it was written, for `--reload`.
        parent_fd: a descriptor whose end means that the `--reload` process is dead.
    """

    targets: Sequence[str]
    config_file: str | None
    nats: str | None
    in_process: bool
    reload: bool
    fresh: bool
    dry_run: bool
    as_json: bool
    log_format: LogFormat | None
    log_level: str
    otlp_endpoint: str | None
    health: str | None
    health_public: bool
    parent_fd: int | None
    node_options: Sequence[NodeOption]
    arguments: Sequence[str]

    @property
    def tells_drain(self) -> bool:
        """Whether the log tells of a drain: a process that reloads knows why, and tells it."""
        return self.parent_fd is None


@dataclass(frozen=True)
class Plan:
    """What a run starts, checked.

    Attributes:
        assignments: dependencies first.
        bus: fields of `BusConfig` for every process.
        warnings: what is probably a mistake and does not keep the run from starting.
    """

    assignments: list[Assignment]
    bus: dict[str, Any]
    config: BusConfig
    warnings: list[str]


def make_plan(options: RunOptions, environment: Mapping[str, str]) -> Plan:
    """Load the targets and check every setting.

    Raises:
        ConfigError: something is not usable; nothing has been started.
    """
    if options.health is not None:
        health_address(options.health, public=options.health_public)
    check_otlp_endpoint(options.otlp_endpoint)
    if options.otlp_endpoint is not None and not has_extra("otlp"):
        raise ConfigError(f"--otlp-endpoint needs an extra: {how_to_install('otlp')}")
    file = _file(options)
    bus, config = _bus(file, options, environment)
    nodes = load_targets(options.targets, declared_nodes(file))
    settings = node_settings(
        nodes, file=file, options=options.node_options, environment=environment
    )
    assignments = [Assignment(node.actor, *settings[node], node=node.name) for node in nodes]
    if not any(assignment.workers for assignment in assignments):
        names = ", ".join(node.name for node in nodes)
        raise ConfigError(f"nothing to run: workers = 0 for {names}; set one of them to 1 or more")
    return Plan(assignments, bus.values, config, misspelt_variables(nodes, environment))


def load_bus_config(options: RunOptions, environment: Mapping[str, str]) -> BusConfig:
    """The bus as a run sees it, without loading its targets.

    Raises:
        ConfigError: a setting is not usable.
    """
    return _bus(_file(options), options, environment)[1]


def _file(options: RunOptions) -> ConfigFile:
    return read_file(Path(options.config_file)) if options.config_file else ConfigFile()


def _bus(
    file: ConfigFile, options: RunOptions, environment: Mapping[str, str]
) -> tuple[BusSettings, BusConfig]:
    settings = bus_settings(file, environment, nats=options.nats)
    return settings, load_config(settings.values, environment, sources=settings.sources)


def health_address(text: str, *, public: bool) -> tuple[str, int]:
    """The address of `--health`.

    Raises:
        ConfigError: it is none, or one that other machines can reach and `public` is not set.
    """
    try:
        host, port = parse_address(text)
    except ConfigError as error:
        raise ConfigError(f"--health: {error}") from None
    if not public and not is_loopback(host):
        raise ConfigError(
            f"--health {text} would be open to other machines, and has no credentials: use "
            f"127.0.0.1:{port}, or add --health-public"
        )
    return host, port


def check_otlp_endpoint(url: str | None) -> None:
    """Check the form of `--otlp-endpoint`.

    Raises:
        ConfigError: it is no HTTP URL.
    """
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint {url} is not the URL of a collector: write http://HOST:PORT, for "
            "example http://localhost:4317"
        )


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print what would be started, with every value as it would be used, defaults included."""
    rows = [
        {
            "address": str(a.address),
            "class": f"{a.actor.__module__}:{a.actor.__qualname__}",
            "instances": a.workers,
            "on_crash": a.on_crash,
            "endpoints": {
                spec.name: "stream" if spec.streaming else "unary"
                for spec in a.actor.__dynbus_handlers__.values()
            },
            "arguments": {name: shown(name, value) for name, value in _effective(a).items()},
        }
        for a in plan.assignments
    ]
    bus = {name: getattr(plan.config, name) for name in plan.config.__struct_fields__}
    bus["servers"] = tuple(map(redact_url, plan.config.servers))
    if as_json:
        print_json({"servers": bus["servers"], "actors": rows, "bus": bus})
        return
    print_table(
        ("ADDRESS", "CLASS", "INSTANCES", "ON CRASH", "ENDPOINTS", "ARGUMENTS"),
        [
            (
                plain(str(row["address"])),
                plain(str(row["class"])),
                str(row["instances"]),
                plain(str(row["on_crash"])),
                plain(", ".join(_pairs(row["endpoints"]))),
                plain(", ".join(_pairs(row["arguments"], quoted=True))),
            )
            for row in rows
        ],
    )
    click.echo("")
    print_table(("BUS", "VALUE"), [(name, plain(_text(value))) for name, value in bus.items()])


def _effective(assignment: Assignment) -> dict[str, Any]:
    """All constructor arguments, as the constructor gets them."""
    given = build_arguments(assignment.actor, assignment.arguments)
    return defaults(assignment.actor) | given


def _pairs(values: Any, *, quoted: bool = False) -> list[str]:
    return [
        f"{name}={msgspec.json.encode(value).decode() if quoted else value}"
        for name, value in values.items()
    ]


def _text(value: Any) -> str:
    """A bus setting for people; lists as they are written in a variable."""
    if isinstance(value, tuple):
        return ",".join(cast("tuple[str, ...]", value))
    return msgspec.json.encode(value).decode()
