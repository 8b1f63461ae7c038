"""`dynbus kv`: what the engines' caches hold, now and before, as their events tell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

import click

from dynbus.spi import terminal

from .component_filter import parse_component

if TYPE_CHECKING:
    from .kv_access import Report

_HELP: Final = """Look into the index of KV-cache events.

    Every command reads the newest usable snapshot and the stream after it, as a router does
    that starts, and changes nothing. Hashes are decimal, or hexadecimal with 0x.

    \b
    dynbus kv top
    dynbus kv show --namespace llm 0x1f0a6c0d8a7e5b21 0x9c3d52aa01b7e644
    dynbus kv at --namespace llm --time 10m --to now
    """


@click.group(help=_HELP, epilog=terminal.EXIT_CODES)
def kv() -> None:
    pass


def _report(command: Callable[..., Report]) -> Callable[..., None]:
    """A command that prints the report it returns, with the options that say of which index."""

    @wraps(command)
    def print_report(
        *,
        namespace: str | None,
        component: str | None,
        timeout: float,
        as_json: bool,
        nats: str | None,
        **options: Any,
    ) -> None:
        from .kv_access import run

        report = command(**options)
        run(
            report,
            parse_component(namespace, component),
            timeout=timeout,
            as_json=as_json,
            nats=nats,
        )

    for option in (
        terminal.nats_option,
        terminal.json_option,
        click.option(
            "--timeout",
            type=terminal.number(0, min_open=True),
            default=60.0,
            show_default=True,
            metavar="SECONDS",
            help="For reading all of it.",
        ),
        click.option(
            "--component",
            metavar="NAME",
            help="Also as namespace.component. Default: the only one with events.",
        ),
        click.option(
            "--namespace",
            metavar="NAME",
            help="Whose events. Default: the only one with instances and events.",
        ),
    ):
        print_report = option(print_report)
    return print_report


_all_option = click.option(
    "--all", "with_dead", is_flag=True, help="Instances without a lease too."
)


@kv.command(short_help="Instances by blocks, and the prefixes that most of them hold.")
@click.option("--limit", type=click.IntRange(0), default=10, show_default=True, help="Prefixes.")
@_all_option
@_report
def top(limit: int, with_dead: bool) -> Report:
    """List the instances by the blocks that they hold, and the hottest prefixes.

    Instances without a lease are left out, since the events of one that died stay in the
    stream; with --all they are there, and LEASE says no. A prefix is hot when many instances
    hold all of it.
    """
    from .kv_reports import print_top

    return partial(print_top, limit=limit, with_dead=with_dead)


@kv.command(short_help="Who holds a prefix.")
@click.argument("prefix", nargs=-1, required=True)
@click.option("--block-size", type=click.IntRange(1), help="Default: what the instances say.")
@click.option("--lora", metavar="NAME", help="The adapter of the token ids.")
@click.option("--salt", metavar="TEXT", help="The cache salt of the token ids.")
@_all_option
@_report
def show(
    prefix: tuple[str, ...],
    block_size: int | None,
    lora: str | None,
    salt: str | None,
    with_dead: bool,
) -> Report:
    """Show who holds how many blocks of a prefix, from its first block on.

    PREFIX is the hashes of its blocks, one after the other, or the token ids as one JSON
    array. Instances without a lease are left out unless --all is given.

    \b
    dynbus kv show --namespace llm 0x1f0a6c0d8a7e5b21 0x9c3d52aa01b7e644
    dynbus kv show --namespace llm --block-size 16 "$(cat tokens.json)"
    """
    from .kv_arguments import Prefix, parse_prefix
    from .kv_reports import print_holders

    try:
        hashes, tokens = parse_prefix(prefix)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="PREFIX") from None
    asked = Prefix(hashes, tokens, block_size, lora, salt)
    return partial(print_holders, prefix=asked, with_dead=with_dead)


@kv.command(short_help="All of the index, as lines of JSON.")
@_report
def dump() -> Report:
    """Print the whole index as lines of JSON, whether --json is given or not.

    The first line is of `kind` index, then there is one of kind rank for each data-parallel
    rank, and one of kind run for each stretch of blocks without a branch, parents first.
    """
    from .kv_reports import print_dump

    return print_dump


@kv.command(short_help="The index as it was, or what changed since.")
@click.option("--time", "time_text", metavar="TIME", help="ISO 8601, Unix seconds, or 10m: ago.")
@click.option("--seq", "sequence", type=click.IntRange(0), metavar="N", help="Of the stream.")
@click.option("--to", "to_text", metavar="POINT", help="A later one of the same kind, or now.")
@_report
def at(time_text: str | None, sequence: int | None, to_text: str | None) -> Report:
    """Show what instances held at a point of the stream, or gained and lost from there to
    another one.

    \b
    dynbus kv at --namespace llm --time 2026-01-31T12:00:00Z
    dynbus kv at --namespace llm --time 10m --to 5m
    dynbus kv at --namespace llm --seq 1200 --to now --json
    """
    from .kv_arguments import parse_points
    from .kv_reports import print_changes, print_past

    try:
        before, after = parse_points(time_text, sequence, to_text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if after is None:
        return partial(print_past, point=before)
    return partial(print_changes, before=before, after=after)


@kv.command(short_help="The snapshots that routers have taken.")
@click.option("--check", is_flag=True, help="Read each of them whole.")
@_report
def snapshots(check: bool) -> Report:
    """List the snapshots, of all components unless one is named.

    \b
    STATE  usable   a new router can begin with it
           cut off  the stream has lost what follows it: ranks would be asked
           foreign  it is of a stream that was deleted
           torn     it cannot be read (with --check)
    """
    from .kv_reports import print_snapshots

    return partial(print_snapshots, check=check)
