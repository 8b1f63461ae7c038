"""`dynbus why`: how routers decided for a request, and what came of it."""

from __future__ import annotations

from typing import Final

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import json_option, nats_option

_HELP: Final = """Say why a request went where it went.

    Asks all routers, in front ends and Router actors alike, for what they decided: every
    candidate with its overlap by tier, its load and its cost, who was left out and why, what
    policies on trial would have chosen, and what happened after. The id of a request is what
    call_options(request_id=...) gave, or context().id in its handler.

    Routers of components that have an instance, or of which a Router actor runs, are found by
    themselves; --component asks those of others.

    \b
    dynbus why 8c1f0a7be2d94d63
    dynbus why 8c1f0a7be2d94d63 --component llm.Engine --json
    """


@click.command(
    help=_HELP, short_help="Say why a request went where it went.", epilog=exit_codes.GENERAL
)
@click.argument("request_id")
@click.option("--component", metavar="NAME", help="Only the routers to this namespace.component.")
@json_option
@nats_option
@click.pass_context
def why(
    ctx: click.Context,
    /,
    request_id: str,
    component: str | None,
    as_json: bool,
    nats: str | None,
) -> None:
    import asyncio

    from dynbus.bus.commands.terminal import notice, print_json
    from dynbus.bus.config import load_config
    from dynbus.bus.logs import configure_logging

    from .why_report import ask_routers, nobody_knows, print_answer

    configure_logging("console", "error")
    config = load_config({"servers": nats} if nats else {})
    answers = asyncio.run(ask_routers(config, request_id, component))
    knowing = [answer for answer in answers if answer.decisions]
    if as_json:
        print_json(knowing)
    else:
        for answer in knowing:
            print_answer(answer)
    if not knowing:
        notice(nobody_knows(request_id, answers))
        ctx.exit(exit_codes.FAILURE)
