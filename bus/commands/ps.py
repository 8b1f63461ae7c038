"""`dynbus ps`: the instances that are there, by their records and by their own answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from dynbus.bus import exit_codes

from .terminal import duration, json_option, nats_option, notice, plain, print_json, print_table

_STYLES: Final = {"serving": "green", "draining": "yellow", "silent": "red", "unlisted": "yellow"}

_HELP: Final = """List the instances of all actors.

    \b
    STATE  serving   it is listed and answers
           draining  it takes no more calls and finishes those it has
           silent    it is listed and does not answer: frozen, cut off or just killed
           unlisted  it answers and has no record: just starting, or no JetStream
    LOAD   calls that run / that wait
    STATUS what the instance's process says of how it is, if any says something

    \b
    dynbus ps --namespace demo
    dynbus ps --json | jq '.[] | select(.state == "silent")'
    """


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@click.option("--namespace", metavar="NAME", help="Only instances of this namespace.")
@json_option
@nats_option
def ps(namespace: str | None, as_json: bool, nats: str | None) -> None:
    import asyncio

    from dynbus.bus.clock import unix_time

    from .server import connected, prepare
    from .survey import Survey, survey

    async def look() -> Survey:
        async with connected(config, "dynbus-ps") as server:
            return await survey(server)

    config = prepare(nats)
    found = asyncio.run(look())
    if found.notice:
        notice(found.notice)
    rows = [row for row in found.rows if namespace in (None, row.namespace)]
    now = unix_time()
    if as_json:
        print_json([row.to_json(now) for row in rows])
        return
    if not rows:
        notice("no instance" + (f" in {namespace}" if namespace else ""))
        return
    says = any(row.status for row in rows)
    columns = ("COMPONENT", "INSTANCE", "STATE", "AGE", "LOAD", "ENDPOINTS", "ADDRESS")
    print_table(
        (*columns, "STATUS") if says else columns,
        [
            (
                plain(f"{row.namespace}.{row.component}"),
                plain(row.instance_id),
                f"[{_STYLES[row.state]}]{row.state}[/]",
                duration(now - row.started) if row.started else "-",
                f"{row.running}/{row.waiting}" if row.answers else "-",
                plain(", ".join(sorted(row.endpoints))),
                plain(row.address or "-"),
                *([_status(row.status)] if says else []),
            )
            for row in rows
        ],
    )


def _status(status: Mapping[str, str]) -> str:
    return "\n".join(plain(f"{key}={text}") for key, text in status.items()) or "-"
