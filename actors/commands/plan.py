"""The output of `dynbus run --dry-run`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import click
import msgspec

from dynbus.actors.declaring.actor import full_name
from dynbus.actors.declaring.arguments import (
    build_arguments,
    defaults,
    extra_keys,
    is_from_file,
    secret_arguments,
)
from dynbus.actors.declaring.redaction import shown
from dynbus.actors.declaring.service_args import SERVICE_KEY, ServiceArgs
from dynbus.actors.placing.allotment import Place
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.planning import LoadedRun
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import variable
from dynbus.bus.telemetry.logs import HIDDEN, redact_url

_NOWHERE: Final[Mapping[str, Place]] = MappingProxyType({})


class _Setting(NamedTuple):
    """A value that a run would use, by its dotted key, and where it came from."""

    key: str
    value: Any
    origin: str


def print_plan(
    run: LoadedRun,
    environment: Mapping[str, str],
    *,
    as_json: bool,
    places: Mapping[str, Place] = _NOWHERE,
    refused: str = "",
) -> None:
    """Print what would be started, with every value as it would be used, defaults included, and
    where it came from.

    Args:
        places: of the instances, by label.
        refused: why this machine would not start it; empty where it would.
    """
    rows: list[dict[str, Any]] = [
        {
            "address": str(a.address),
            "class": full_name(a.actor),
            "instances": a.service.workers,
            "on_crash": a.service.on_crash,
            "endpoints": {spec.name: spec.kind for spec in a.actor.__dynbus_handlers__.values()},
            "service": _shown_service(a.service),
            "arguments": _shown(_effective(a), origins, secret_arguments(a.actor)),
            "extra": _shown(
                {name: a.arguments[name] for name in extra_keys(a.actor, a.arguments)}, origins
            ),
        }
        for a, origins in zip(run.assignments, run.origins, strict=True)
    ]
    settings = [list(_settings(*each)) for each in zip(rows, run.origins, strict=True)]
    placed = {label: place for label, place in places.items() if str(place)}
    for label, place in placed.items():
        for row in rows:
            if row["address"] == label.rpartition("/")[0]:
                row.setdefault("placement", {})[label] = place
    bus = {name: getattr(run.config, name) for name in run.config.__struct_fields__}
    bus["servers"] = tuple(map(redact_url, run.config.servers))
    bus_origins = {name: _bus_origin(name, run, environment) for name in bus}
    if as_json:
        terminal.print_json(
            {
                "servers": bus["servers"],
                "actors": [
                    row | {"origins": {setting.key: setting.origin for setting in each}}
                    for row, each in zip(rows, settings, strict=True)
                ],
                "bus": bus,
                "bus_origins": bus_origins,
                **({"refused_here": refused} if refused else {}),
            }
        )
        return
    terminal.print_table(
        ("ADDRESS", "CLASS", "INSTANCES", "ON CRASH", "ENDPOINTS"),
        [
            (
                terminal.plain(str(row["address"])),
                terminal.plain(str(row["class"])),
                str(row["instances"]),
                terminal.plain(str(row["on_crash"])),
                terminal.plain(
                    ", ".join(f"{name}={kind}" for name, kind in row["endpoints"].items())
                ),
            )
            for row in rows
        ],
    )
    if placed:
        click.echo("")
        terminal.print_table(
            ("INSTANCE", "HAS"),
            [
                (terminal.plain(label), terminal.plain(str(place)))
                for label, place in placed.items()
            ],
        )
    click.echo("")
    terminal.print_table(
        ("ACTOR", "SETTING", "VALUE", "ORIGIN"),
        [
            (
                row["address"],
                terminal.plain(setting.key),
                terminal.plain(_text(setting.value)),
                terminal.plain(setting.origin),
            )
            for row, each in zip(rows, settings, strict=True)
            for setting in each
        ],
    )
    click.echo("")
    terminal.print_table(
        ("BUS", "VALUE", "ORIGIN"),
        [
            (name, terminal.plain(_text(value)), terminal.plain(bus_origins[name]))
            for name, value in bus.items()
        ],
    )


def _effective(assignment: Assignment) -> dict[str, Any]:
    """All constructor arguments, as the constructor gets them."""
    given = build_arguments(assignment.actor, assignment.arguments)
    return defaults(assignment.actor) | given


def _shown(
    values: Mapping[str, Any], origins: Mapping[str, str], secrets: Collection[str] = ()
) -> dict[str, Any]:
    return {
        name: HIDDEN
        if name in secrets or is_from_file(name, origins.get(name, ""))
        else shown(value)
        for name, value in values.items()
    }


def _shown_service(service: ServiceArgs) -> dict[str, Any]:
    """The settings by which it is served, with its variables by their names alone."""
    fields = cast("dict[str, Any]", shown(service))
    return fields | {"environment": dict.fromkeys(service.environment, HIDDEN)}


def _settings(row: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[_Setting]:
    """The settings of an actor, and the origin of each value."""
    for name, value in row["service"].items():
        yield from _parts(f"{SERVICE_KEY}.{name}", value, origins, "class")
    for name, value in (row["arguments"] | row["extra"]).items():
        yield from _parts(name, value, origins, "default")


def _parts(key: str, value: Any, origins: Mapping[str, str], otherwise: str) -> Iterator[_Setting]:
    """A value, or its parts where they have origins of their own."""
    if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in origins):
        for name, part in cast("dict[str, Any]", value).items():
            yield from _parts(f"{key}.{name}", part, origins, otherwise)
    else:
        yield _Setting(key, value, origins.get(key, otherwise))


def _bus_origin(name: str, run: LoadedRun, environment: Mapping[str, str]) -> str:
    if name in run.bus.sources:
        return run.bus.sources[name]
    if variable(name) in environment:
        return variable(name)
    return "NATS_URL" if name == "servers" and environment.get("NATS_URL") else "default"


def _text(value: Any) -> str:
    """A bus setting for people; lists as they are written in a variable."""
    if isinstance(value, tuple):
        return ",".join(cast("tuple[str, ...]", value))
    return msgspec.json.encode(value).decode()
