"""`dynbus doctor`: is this machine and its server fit for dynbus, and what to do if not."""

from __future__ import annotations

from typing import Final

import click

from dynbus.bus import exit_codes

from .terminal import terminal

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "dim"}

_HELP: Final = """Check the server and this machine, and say what to do.

    Looks at: the server and its version, JetStream and its limits, message size, headers, round
    trip, clocks, the bucket of instances and records in it that nobody renews, whether each stream
    of dynbus takes writes and how many servers of a cluster keep it, file descriptors, extras. It
    makes one stream in the server's memory and deletes it again. What the credential may not look
    at is `unknown`, and the rest is looked at.

    With --all it asks each server alone, and the instances for the clocks of their hosts, their
    versions of dynbus, and whether those of a component have the same schemas.

    \b
    dynbus doctor
    dynbus doctor --nats nats://bus.example:4222 --json
    dynbus doctor --all
    """


@click.command(
    help=_HELP,
    epilog="Exit codes: 0 nothing failed, 1 a check failed, 2 wrong usage, 3 wrong configuration.",
)
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Check each server that is configured or told of, and each host by its instances.",
)
@terminal.json_option
@terminal.nats_option
@click.pass_context
def doctor(ctx: click.Context, /, whole: bool, as_json: bool, nats: str | None) -> None:
    import asyncio

    from .diagnosis import diagnose
    from .fleet_diagnosis import diagnose_fleet

    config = terminal.settings(nats, level="critical")
    checks = asyncio.run(diagnose(config))
    if whole:
        checks += asyncio.run(diagnose_fleet(config))
    if as_json:
        terminal.print_json([check._asdict() for check in checks])
    else:
        terminal.print_table(
            ("", "CHECK", "FOUND", "WHAT TO DO"),
            [
                (
                    f"[{_STYLES[check.status]}]{check.status}[/]",
                    terminal.plain(check.name),
                    terminal.plain(check.found),
                    terminal.plain(check.remedy),
                )
                for check in checks
            ],
        )
    failed = any(check.status == "fail" for check in checks)
    ctx.exit(exit_codes.FAILURE if failed else exit_codes.OK)
