"""`dynbus run`: serve the actors of files and modules."""

from __future__ import annotations

from typing import Any, Final

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import json_option, nats_option

_HELP: Final = """Serve the actors of TARGETs, one process per instance.

    \b
    A TARGET is
      actors.py             the actors that the file defines
      actors.py:Shouter     one of them
      package.module:Name   one of an installed module

    All that they depend on is started with them. With no server at a loopback URL an embedded
    nats-server is started, with its data in .dynbus; it ends with the last run that uses it.
    The first Ctrl-C or SIGTERM drains: no more calls are taken, and those that run may finish.
    The second stops at once.

    \b
    dynbus run actors.py
    dynbus run actors.py --Splitter.separator=, --Splitter.workers=2
    dynbus run actors.py:Shouter other.py -f config.yaml
    dynbus run actors.py --Splitter.workers=0     it runs elsewhere
    dynbus run actors.py --reload --log-level debug
    dynbus run actors.py --dry-run

    \b
    config.yaml:
      Splitter:
        separator: ","
        ServiceArgs: {workers: 2}
      bus:
        drain_grace: 10

    The command line wins over the environment (DYNBUS_Splitter__separator), that over the file,
    that over the constructor's default.
    """


class _RunCommand(click.Command):
    """Takes `--Actor.key=value` out of the arguments before click sees them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from dynbus.actors.running.configuration import split_options
        from dynbus.bus.errors import ConfigError

        ctx.meta["dynbus.arguments"] = list(args)
        try:
            options, rest = split_options(args)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None
        ctx.meta["dynbus.options"] = options
        return super().parse_args(ctx, rest)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] [--Actor.ARGUMENT=VALUE]... TARGET..."]


@click.command(
    cls=_RunCommand,
    help=_HELP,
    short_help="Serve the actors of files and modules.",
    epilog=exit_codes.RUN,
)
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "-f",
    "--file",
    "config_file",
    metavar="YAML",
    type=click.Path(dir_okay=False),
    help="Constructor arguments and bus settings.",
)
@nats_option
@click.option("--in-process", is_flag=True, help="All instances in this one process.")
@click.option(
    "--reload", is_flag=True, help="Start anew whenever a Python file has changed and loads."
)
@click.option("--fresh", is_flag=True, help="Empty the embedded server's data first.")
@click.option("--dry-run", is_flag=True, help="Only print what would be started.")
@json_option
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    help="Default: console on a terminal, json elsewhere.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
    default="info",
    show_default=True,
)
@click.option("--otlp-endpoint", metavar="URL", help="Send traces and metrics to a collector.")
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /live, /ready and /metrics; with several processes, for all of them.",
)
@click.option(
    "--health-public", is_flag=True, help="Let --health listen beyond this machine, unprotected."
)
@click.option("--parent-fd", type=int, hidden=True)
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    from .plan import RunOptions
    from .running import execute

    options = RunOptions(
        actor_options=ctx.meta["dynbus.options"], arguments=ctx.meta["dynbus.arguments"], **given
    )
    ctx.exit(execute(options))
