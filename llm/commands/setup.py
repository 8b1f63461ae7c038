"""`dynbus setup`: the streams and buckets of a namespace, made by an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from dynbus.spi import terminal

_STYLES: Final = {
    "made": "green",
    "there": "green",
    "missing": "yellow",
    "differs": "yellow",
    "refused": "red",
}

_HELP: Final = """Make the streams and buckets of a namespace.

    Where processes have credentials of their own, these may make none: an operator does, before
    the first of them starts. What is there already is left as it is, except that it gets the
    replicas that it lacks; what differs is told, and what dynbus refuses to use. Name each durable
    handler, each other queue of jobs, each topic, and each group of one:

    \b
    dynbus setup demo
    dynbus setup demo --durable Desk.summarise --durable Billing.charge,ordered=true
    dynbus setup demo --queue Printer.print --queue Mailer.send,ack_wait=120,max_jobs=500
    dynbus setup demo --topic closed,retain=30d --group Billing.bill,topic=closed,group=billing
    dynbus setup demo --durable Desk.summarise --topic closed --copies-of eu
    dynbus setup demo --replicas 5 --nats nats://operator:secret@bus.example:4222
    dynbus setup demo --dry-run --json
    """


@click.command(
    help=_HELP,
    epilog="Exit codes: 0 all is there, 1 something is refused, or missing in a dry run, 2 wrong "
    "usage, 3 wrong configuration, 4 the server cannot be reached.",
)
@click.argument("namespace")
@click.option(
    "--queue",
    "queues",
    metavar="COMPONENT.ENDPOINT[,SETTING=VALUE]...",
    multiple=True,
    help="A queue of jobs; settings: ack_wait, max_jobs, max_bytes, ordered. May be repeated.",
)
@click.option(
    "--durable",
    metavar="COMPONENT.ENDPOINT[,SETTING=VALUE]...",
    multiple=True,
    help="A durable handler: its queue, with these settings, and the log of its jobs. "
    "May be repeated.",
)
@click.option(
    "--topic",
    "topics",
    metavar="NAME[,SETTING=VALUE]...",
    multiple=True,
    help="A topic whose events are kept; settings: retain (7d), max_bytes. May be repeated.",
)
@click.option(
    "--group",
    "groups",
    metavar="COMPONENT.METHOD,topic=NAME,group=NAME[,SETTING=VALUE]...",
    multiple=True,
    help="A group of a topic, and its method; settings: from (new), ack_wait, ordered. "
    "May be repeated.",
)
@click.option(
    "--copies-of",
    "copied",
    metavar="REGION",
    multiple=True,
    help="Another region, whose jobs of the durable handlers and events of the topics are copied "
    "here: `dynbus queue take-over` and `dynbus topic replay --of` go on with them. "
    "May be repeated.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 5),
    help="How many servers of a cluster keep each; by default the setting `replicas`, 3.",
)
@click.option("--dry-run", is_flag=True, help="Only say what is there and what is missing.")
@terminal.json_option
@terminal.nats_option
@click.pass_context
def setup(
    ctx: click.Context,
    /,
    namespace: str,
    queues: Sequence[str],
    topics: Sequence[str],
    durable: Sequence[str],
    groups: Sequence[str],
    copied: Sequence[str],
    replicas: int | None,
    dry_run: bool,
    as_json: bool,
    nats: str | None,
) -> None:
    from .setting_up import Status, needed_in, run

    needed = needed_in(namespace, queues, topics, durable, groups, copied)
    outcomes = run(needed, nats=nats, replicas=replicas, dry_run=dry_run)
    if as_json:
        terminal.print_json([outcome._asdict() for outcome in outcomes])
    else:
        terminal.print_table(
            ("", "STREAM", "WHAT"),
            [
                (
                    f"[{_STYLES[outcome.status]}]{outcome.status}[/]",
                    terminal.plain(outcome.stream),
                    terminal.plain(outcome.text),
                )
                for outcome in outcomes
            ],
        )
    is_whole = all(outcome.status not in (Status.REFUSED, Status.MISSING) for outcome in outcomes)
    ctx.exit(terminal.OK if is_whole else terminal.FAILURE)
