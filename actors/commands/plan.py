"""The command line of `dynbus run`, checked, and what `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import click
import msgspec

from dynbus.actors.declaring.arguments import build_arguments, defaults
from dynbus.actors.declaring.redaction import shown
from dynbus.actors.running.configuration import NodeOption, split_options
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import LoadedRun
from dynbus.bus.commands.terminal import plain, print_json, print_table
from dynbus.bus.config import is_loopback
from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import has_extra, how_to_install
from dynbus.bus.telemetry.health import parse_address
from dynbus.bus.telemetry.logs import LogFormat, redact_url


class TargetsCommand(click.Command):
    """Takes `--Actor.key=value` out of the arguments before click sees them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["dynbus.arguments"] = list(args)
        try:
            options, rest = split_options(args)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None
        ctx.meta["dynbus.options"] = options
        return super().parse_args(ctx, rest)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] [--Actor.ARGUMENT=VALUE]... TARGET..."]


targets_argument = click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
file_option = click.option(
    "-f",
    "--file",
    "config_file",
    metavar="YAML",
    type=click.Path(dir_okay=False),
    help="Constructor arguments and bus settings.",
)
namespace_option = click.option(
    "--namespace",
    metavar="NAME",
    default="",
    help="Run all actors in this namespace, instead of those that their classes name.",
)


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
    namespace: str
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
    def request(self) -> PlanRequest:
        """What decides what is started."""
        return PlanRequest(
            targets=list(self.targets),
            config_file=self.config_file,
            options=list(self.node_options),
            nats=self.nats,
            namespace=self.namespace,
        )

    @property
    def tells_drain(self) -> bool:
        """Whether the log tells of a drain: a process that reloads knows why, and tells it."""
        return self.parent_fd is None


def check_options(options: RunOptions) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        ConfigError: an option is not usable.
    """
    if options.health is not None:
        health_address(options.health, public=options.health_public)
    check_otlp_endpoint(options.otlp_endpoint)
    if options.otlp_endpoint is not None and not has_extra("otlp"):
        raise ConfigError(f"--otlp-endpoint needs an extra: {how_to_install('otlp')}")


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


def print_plan(run: LoadedRun, *, as_json: bool) -> None:
    """Print what would be started, with every value as it would be used, defaults included."""
    rows = [
        {
            "address": str(a.address),
            "class": f"{a.actor.__module__}:{a.actor.__qualname__}",
            "instances": a.service.workers,
            "on_crash": a.service.on_crash,
            "endpoints": {spec.name: spec.kind for spec in a.actor.__dynbus_handlers__.values()},
            "arguments": {name: shown(name, value) for name, value in _effective(a).items()},
        }
        for a in run.assignments
    ]
    bus = {name: getattr(run.config, name) for name in run.config.__struct_fields__}
    bus["servers"] = tuple(map(redact_url, run.config.servers))
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
