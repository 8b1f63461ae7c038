"""The command line of `dynbus run`, and what of it `schema` and `chaos` take, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from dynbus.actors.running.configuration import NodeOption, split_options
from dynbus.actors.running.plan import PlanRequest
from dynbus.bus.config import is_loopback
from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import has_extra, how_to_install
from dynbus.bus.telemetry.health import parse_address
from dynbus.bus.telemetry.logs import LogFormat


class TargetsCommand(click.Command):
    """Takes `--Actor.key=value` out of the arguments before click sees them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            options, rest = split_options(args)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None
        ctx.meta["dynbus.options"] = options
        try:
            return super().parse_args(ctx, rest)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} An argument of an actor is written with the actor's "
                f"name: --Actor.{error.option_name.lstrip('-')}=VALUE.",
                ctx,
            ) from None

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        options, *arguments = super().collect_usage_pieces(ctx)
        return [options, "[--Actor.ARGUMENT=VALUE]...", *arguments]


targets_argument = click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
file_option = click.option(
    "-f",
    "--file",
    "config_files",
    metavar="YAML",
    type=click.Path(dir_okay=False),
    multiple=True,
    help="Constructor arguments and bus settings; of several, the later ones win.",
)
namespace_option = click.option(
    "--namespace",
    metavar="NAME",
    help="Run all actors in this namespace, instead of those that their classes name.",
)


def plan_request(
    ctx: click.Context, targets: Sequence[str], config_files: Sequence[str], namespace: str | None
) -> PlanRequest:
    """The request that the arguments of a `TargetsCommand` make, which starts nothing."""
    return PlanRequest(
        targets=list(targets),
        config_files=list(config_files),
        options=ctx.meta["dynbus.options"],
        namespace=namespace,
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `dynbus run`.

    Attributes:
        graph: how the run is drawn, which starts nothing.
        node_options: `--Actor.key=value`.
    """

    targets: Sequence[str]
    config_files: Sequence[str]
    nats: str | None
    namespace: str | None
    in_process: bool
    reload: bool
    fresh: bool
    dry_run: bool
    graph: str | None
    as_json: bool
    log_format: LogFormat | None
    log_level: str
    otlp_endpoint: str | None
    health: str | None
    health_public: bool
    health_tls_cert: str | None
    health_tls_key: str | None
    health_tls_client_ca: str | None
    node_options: Sequence[NodeOption]

    @property
    def has_public_health(self) -> bool:
        """True if other machines may reach `--health`."""
        return self.health_public or self.health_tls_client_ca is not None

    @property
    def request(self) -> PlanRequest:
        """The choices from which the plan is made."""
        return PlanRequest(
            targets=list(self.targets),
            config_files=list(self.config_files),
            options=list(self.node_options),
            nats=self.nats,
            namespace=self.namespace,
        )


def check_options(options: RunOptions) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        ConfigError: an option is not usable.
    """
    if options.reload and options.in_process:
        raise ConfigError(
            "--reload replaces the processes of single instances, and --in-process has one for "
            "all: leave one of the two out"
        )
    if options.graph is not None and (options.dry_run or options.as_json):
        raise ConfigError(
            "--graph prints the drawing and nothing else: leave --dry-run and --json out, or write "
            "--graph json"
        )
    if options.health is not None:
        health_address(options.health, public=options.has_public_health)
    check_health_tls(options)
    check_otlp_endpoint(options.otlp_endpoint)
    if options.otlp_endpoint is not None and not has_extra("otlp"):
        raise ConfigError(f"--otlp-endpoint needs an extra: {how_to_install('otlp')}")


def check_health_tls(options: RunOptions) -> None:
    """Check that the options of TLS go together.

    Raises:
        ConfigError: they do not.
    """
    cert, key = options.health_tls_cert, options.health_tls_key
    given = (cert, key, options.health_tls_client_ca)
    if given != (None, None, None) and (options.health is None or cert is None or key is None):
        raise ConfigError(
            "TLS of the health port needs a port, a certificate and a key: give --health, "
            "--health-tls-cert and --health-tls-key"
        )


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
            f"127.0.0.1:{port}, want certificates with --health-tls-client-ca, or add "
            "--health-public"
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
