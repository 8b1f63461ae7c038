"""`dynbus cancel`: ends requests by their ids, wherever they run or wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import click
import msgspec

from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError, DynbusError, NoInstances, PermissionDenied
from dynbus.bus.protocol.cancellation import (
    REQUEST_SECONDS,
    BadCancel,
    CancelAnswer,
    read_ids,
)
from dynbus.bus.protocol.names import cancel_subject, check_token
from dynbus.bus.transport import Message

from .server import Server
from .terminal import terminal

QUIET_SECONDS: Final = 0.5
"""Seconds without a further answer after which nobody else is expected."""

_HELP: Final = """End requests by their ids, wherever they run or wait.

    The calls with such an id end with Cancelled, at their instances and at their callers;
    sub-calls follow, and no retry and no other instance brings them back. For a minute a request
    with the id that arrives does not begin either, nor a job of a work queue that waits under it,
    as long as the process lives that would take it.

    The id is what a log, a trace or an error says: context().id, or the x-request-id of an
    answer of the front end.

    \b
    dynbus cancel 8c1f0a7be2d94d63
    dynbus cancel 8c1f0a7be2d94d63 71d20b3c55aa4e10 --namespace demo --json

    Ends with 1 where nothing was found of one of them.
    """


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@click.argument("request_ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--namespace",
    metavar="NAME",
    help="Only in this namespace; otherwise in all that have an instance.",
)
@click.option(
    "--wait",
    type=terminal.number(0.1, 60.0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to take answers at most.",
)
@terminal.json_option
@terminal.nats_option
@click.pass_context
def cancel(
    ctx: click.Context,
    /,
    request_ids: tuple[str, ...],
    namespace: str | None,
    wait: float,
    as_json: bool,
    nats: str | None,
) -> None:
    import asyncio

    ids = _checked(request_ids)
    if namespace is not None:
        check_token("namespace", namespace)

    async def ask() -> list[CancelAnswer]:
        async with terminal.server(config, "dynbus-cancel") as server:
            places = [namespace] if namespace is not None else await _namespaces(server)
            return await _cancel(server, places, ids, wait)

    config = terminal.settings(nats)
    answers = asyncio.run(ask())
    results = [_result(one, answers) for one in ids]
    if as_json:
        terminal.print_json(
            {"processes": len({one.client for one in answers}), "requests": results}
        )
    for result in results:
        if not as_json and result["found"]:
            click.echo(_line(result))
        if not result["found"]:
            terminal.notice(_nothing(result["request_id"], answers))
    if not all(result["found"] for result in results):
        ctx.exit(exit_codes.FAILURE)


def _checked(request_ids: Sequence[str]) -> list[str]:
    """The ids, each once.

    Raises:
        click.UsageError: one of them is none, or they are too many.
    """
    try:
        return read_ids(msgspec.json.encode(request_ids))
    except (BadCancel, UnicodeEncodeError) as error:
        raise click.UsageError(str(error)) from None


async def _namespaces(server: Server) -> list[str]:
    """The namespaces that have an instance.

    Raises:
        ConfigError: the records do not say.
        NoInstances: there is none.
    """
    from .survey import survey

    survey_result = await survey(server)
    names = sorted({row.namespace for row in survey_result.rows})
    if not names and survey_result.notice:
        raise ConfigError(f"{survey_result.notice}; name the namespace with --namespace")
    if not names:
        raise NoInstances("there is no instance, so no namespace; name one with --namespace")
    return names


async def _cancel(
    server: Server, namespaces: Iterable[str], ids: list[str], wait: float
) -> list[CancelAnswer]:
    """Cancel requests, and take the answers of all processes.

    Raises:
        PermissionDenied: the server does not let us.
        Unavailable: it is away.
    """
    subjects = [cancel_subject(namespace) for namespace in namespaces]
    refused: list[DynbusError] = []
    server.connection.on_error(
        lambda error, subject: refused.append(error) if subject in subjects else None
    )
    said = msgspec.json.encode({"request_ids": ids})
    answers = await server.ask(subjects, said, _read, seconds=wait, quiet=min(QUIET_SECONDS, wait))
    if refused:
        raise PermissionDenied(refused[0].message)
    return answers


def _read(message: Message) -> CancelAnswer | None:
    try:
        return msgspec.json.decode(message.data, type=CancelAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The server's own answer where nobody listens, which is empty.
        return None


def _result(request_id: str, answers: Iterable[CancelAnswer]) -> dict[str, Any]:
    """The answers of all processes about one request, for programs."""
    instances: dict[str, int] = {}
    callers = 0
    for answer in answers:
        ended = answer.found.get(request_id)
        if ended is not None:
            instances |= ended.served
            callers += ended.made
    return {
        "request_id": request_id,
        "found": bool(instances or callers),
        "calls": sum(instances.values()),
        "callers": callers,
        "instances": instances,
    }


def _line(result: dict[str, Any]) -> str:
    instances: dict[str, int] = result["instances"]
    if not instances:
        ended = f"{_count(result['callers'], 'call')} where it was made; no instance told of it"
    else:
        # Their callers end too; how many heard of it before their instance is chance.
        ended = f"{_count(result['calls'], 'call')} at {', '.join(sorted(instances))}"
    return f"{result['request_id']}: cancelled {ended}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _nothing(request_id: str, answers: Sequence[CancelAnswer]) -> str:
    processes = len({answer.client for answer in answers})
    if not processes:
        return f"{request_id}: nobody heard it; is the namespace right? `dynbus ps` lists all"
    heard = "1 process" if processes == 1 else f"{processes} processes"
    return (
        f"{request_id}: {heard} heard it, and nothing of it runs or waits; "
        f"what arrives of it within {REQUEST_SECONDS:g} s does not begin"
    )
