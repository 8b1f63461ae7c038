"""`dynbus why`: how routers decided for a request, and what came of it."""

from __future__ import annotations

from typing import Final

import click

from dynbus.spi import terminal

from .component_filter import parse_component

_HELP: Final = """Say why a request went where it went.

    Asks all routers, in front ends and RouterActors alike, for what they decided: every
    candidate with its overlap by tier, its load and its cost, who was left out and why, what
    policies on trial would have chosen, and what happened after. Instances whose KV cache was
    damaged say whose requests have used it. The id of a request is what
    call_options(request_id=...) gave, or context().id in its handler; without one the latest
    decisions are listed, newest first.

    Routers of components that have an instance, or of which a RouterActor runs, are found by
    themselves; --component asks those of others.

    \b
    dynbus why
    dynbus why --last
    dynbus why 8c1f0a7be2d94d63
    dynbus why 8c1f0a7be2d94d63 --component llm.Engine --json
    """


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.argument("request_id", required=False)
@click.option("--last", is_flag=True, help="The latest decision in full.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100),
    default=20,
    show_default=True,
    help="Decisions in the list.",
)
@click.option("--namespace", metavar="NAME", help="Only the routers to this namespace.")
@click.option(
    "--component",
    metavar="NAME",
    help="Only the routers to this component; also as namespace.component.",
)
@terminal.json_option
@terminal.nats_option
@click.pass_context
def why(
    ctx: click.Context,
    /,
    request_id: str | None,
    last: bool,
    limit: int,
    namespace: str | None,
    component: str | None,
    as_json: bool,
    nats: str | None,
) -> None:
    import asyncio

    from dynbus.kvrouter.routing.decision import Question

    from .why_report import (
        ask_routers,
        newest_alone,
        nobody_knows,
        print_answer,
        print_latest,
    )

    if last and request_id is not None:
        raise click.UsageError("give a request id, or --last for the latest decision")
    wanted = parse_component(namespace, component)
    if wanted.component is not None and wanted.namespace is None:
        raise click.UsageError("give --component as namespace.component, or --namespace beside it")
    question = Question(latest=1 if last else limit) if request_id is None else Question(request_id)
    config = terminal.settings(nats)
    answers = asyncio.run(ask_routers(config, question, *wanted))
    knowing = [answer for answer in answers if answer.decisions or answer.damages]
    if last:
        knowing = newest_alone(knowing)
    if as_json:
        terminal.print_json(knowing)
    elif request_id is None and not last:
        print_latest(knowing, limit)
    else:
        for answer in knowing:
            print_answer(answer)
    if not knowing:
        terminal.notice(nobody_knows(request_id or "", answers))
        ctx.exit(terminal.FAILURE)
