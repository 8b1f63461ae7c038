"""`dynbus usage`: what tenants have used."""

from __future__ import annotations

import csv
import sys
from math import inf
from typing import TYPE_CHECKING, Any, Final

import click

from dynbus.spi import terminal

if TYPE_CHECKING:
    from dynbus.llm.tenants.usage_sums import UsageSum
    from dynbus.spi import Connection

_AMOUNTS: Final = ("requests", "prompt", "cached", "completion", "total")

_HELP: Final = """Say what tenants have used: tokens of prompts and answers, by the hour.

    Front ends with keys write it as requests end, and each second of those that run.

    \b
    REQUESTS    that engines were given
    PROMPT      tokens of prompts, cached or not
    CACHED      of those, the ones that a cache had
    COMPLETION  tokens of answers
    SAVED       the part of the prompts that nobody had to compute

    \b
    dynbus usage
    dynbus usage --tenant ada --since 2026-11-01 --by model,day
    dynbus usage --since 30d --by tenant,month --csv
    """


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.option("--tenant", metavar="NAME", help="Of this tenant alone. Default: all.")
@click.option(
    "--since",
    metavar="TIME",
    default="24h",
    show_default=True,
    help=f"From the hour of this time on: {terminal.TIMES}",
)
@click.option("--until", metavar="TIME", help="Before this time. Default: now.")
@click.option(
    "--by",
    default="tenant,model",
    show_default=True,
    metavar="GROUPS",
    help="tenant, model, key, instance, hour, day or month, with commas between several.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with a head.")
@terminal.json_option
@terminal.nats_option
def usage(
    tenant: str | None,
    since: str,
    until: str | None,
    by: str,
    as_csv: bool,
    as_json: bool,
    nats: str | None,
) -> None:
    from dynbus import ConfigError
    from dynbus.llm.tenants.records import check_tenant
    from dynbus.llm.tenants.usage_sums import GROUPS, HourOfUsage, read_usage, sum_up
    from dynbus.spi import suggestion, unix_time

    if as_csv and as_json:
        raise ConfigError("--csv and --json are two forms of the same: give one of them")
    groups = tuple(dict.fromkeys(by.split(",")))
    for name in groups:
        if name not in GROUPS:
            raise ConfigError(
                f"--by {name[:80]!r} is no group{suggestion(name, GROUPS)}; there are: "
                f"{', '.join(GROUPS)}"
            )
    now = unix_time()
    first = terminal.parse_time(since, "--since")(now)
    last = now if until is None else terminal.parse_time(until, "--until")(now)
    if last <= first:
        end = "now" if until is None else "--until"
        raise ConfigError(f"--since is not before {end}: there is nothing between")
    of = "" if tenant is None else check_tenant(tenant)

    async def read(one: Connection) -> tuple[list[HourOfUsage], list[HourOfUsage]]:
        """The hours asked for; where that tenant never used anything, those of the others too."""
        hours = await read_usage(one.jetstream, first, last, tenant=of)
        if hours or not of or await read_usage(one.jetstream, -inf, last, tenant=of):
            return hours, []
        return [], await read_usage(one.jetstream, first, last)

    hours, others = terminal.at_server(nats, "dynbus-usage", read)
    sums = sum_up(hours, groups)
    if as_json:
        terminal.print_json([_row(one) for one in sums])
        return
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*groups, *_AMOUNTS])
        for one in sums:
            writer.writerow(_row(one).values())
        return
    if not sums and others:
        known = [one.group["tenant"] for one in sum_up(others, ("tenant",))]
        terminal.notice(
            f"no use of a tenant {of} is on record{suggestion(of, known)}: `dynbus usage` shows "
            "the others"
        )
        return
    if not sums:
        terminal.notice(
            "nothing was used then; front ends count where they have keys (`dynbus http` with "
            "--keys-from-bus, --api-keys or --oidc-issuer)"
        )
        return
    head = [name.upper() for name in (*groups, *_AMOUNTS, "saved")]
    rows = [_cells(one) for one in sums]
    if len(sums) > 1:
        [total] = sum_up(hours, ())
        rows.append(("all", *[""] * (len(groups) - 1), *_amounts(total)))
    terminal.print_table(head, rows)


def _row(one: UsageSum) -> dict[str, Any]:
    return {**one.group, **{name: getattr(one, name) for name in _AMOUNTS}}


def _cells(one: UsageSum) -> tuple[str, ...]:
    group = (terminal.plain(value) or "-" for value in one.group.values())
    return *group, *_amounts(one)


def _amounts(one: UsageSum) -> tuple[str, ...]:
    return *(f"{getattr(one, name):,}" for name in _AMOUNTS), f"{one.saved:.1%}"
