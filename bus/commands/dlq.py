"""`dynbus dlq`: jobs that nobody could do, shown, tried again or dropped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynbus.bus import exit_codes

from .terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.work_queue import DeadLetter, DeadLetters

T = TypeVar("T")


@click.group(epilog=exit_codes.GENERAL)
def dlq() -> None:
    """Look after jobs that failed for good.

    A job of a work queue that failed five times, or that its taker refused, is a dead letter. It is
    kept for 14 days:

    \b
    dynbus dlq list demo
    dynbus dlq show demo 0123456789abcdef
    dynbus dlq retry demo 0123456789abcdef
    dynbus dlq purge demo --all
    """


@dlq.command(name="list")
@click.argument("queue", metavar="NAMESPACE[.COMPONENT[.ENDPOINT]]")
@terminal.json_option
@terminal.nats_option
def list_(queue: str, as_json: bool, nats: str | None) -> None:
    """List the dead letters of a namespace, a component or one queue, oldest first."""
    from dynbus.bus.clock import unix_time

    found = _run(queue, nats, lambda letters, rest: letters.find(*rest))
    if as_json:
        terminal.print_json([_json(letter) for letter in found])
        return
    if not found:
        terminal.notice(f"{queue} has no dead letters")
        return
    terminal.print_table(
        ("LETTER", "QUEUE", "JOB", "TRIES", "REASON", "AGE", "ERROR"),
        [
            (
                letter.letter_id,
                f"{letter.queue.component}.{letter.queue.endpoint}",
                terminal.plain(letter.job_id),
                str(letter.tries),
                terminal.plain(letter.reason),
                terminal.duration(max(0.0, unix_time() - letter.died_at)),
                terminal.plain(letter.error),
            )
            for letter in found
        ],
    )


@dlq.command()
@click.argument("namespace")
@click.argument("letter")
@terminal.json_option
@terminal.nats_option
def show(namespace: str, letter: str, as_json: bool, nats: str | None) -> None:
    """Show a dead letter, with what the job says."""
    found = _run(namespace, nats, lambda letters, _: letters.get(letter))
    if as_json:
        terminal.print_json({**_json(found), "data": found.data.decode("utf-8", "replace")})
        return
    for name, value in _json(found).items():
        click.echo(f"{name}: {terminal.printable(str(value))}")
    click.echo(f"\n{terminal.printable(found.data.decode('utf-8', 'replace'))}")


@dlq.command()
@click.argument("namespace")
@click.argument("letters", metavar="[LETTER]...", nargs=-1)
@click.option("--all", "take_all", is_flag=True, help="All of the namespace.")
@terminal.nats_option
def retry(namespace: str, letters: Sequence[str], take_all: bool, nats: str | None) -> None:
    """Put jobs into their queues again, with all their tries and without a deadline.

    A letter whose job was too large to keep is refused; with --all the others are retried.
    """
    _each(namespace, letters, take_all, nats, "retried", lambda at, one: at.retry(one))


@dlq.command()
@click.argument("namespace")
@click.argument("letters", metavar="[LETTER]...", nargs=-1)
@click.option("--all", "take_all", is_flag=True, help="All of the namespace.")
@terminal.nats_option
def purge(namespace: str, letters: Sequence[str], take_all: bool, nats: str | None) -> None:
    """Drop dead letters for good."""
    _each(namespace, letters, take_all, nats, "dropped", lambda at, one: at.purge(one))


def _each(
    namespace: str,
    named: Sequence[str],
    take_all: bool,
    nats: str | None,
    done: str,
    act: Callable[[DeadLetters, DeadLetter], Awaitable[None]],
) -> None:
    from dynbus.bus.errors import PayloadTooLarge

    if take_all == bool(named):
        raise click.UsageError("name dead letters, or give --all")

    async def work(letters: DeadLetters, _: Sequence[str]) -> int:
        found = await letters.find() if take_all else [await letters.get(one) for one in named]
        refused: PayloadTooLarge | None = None
        for letter in found:
            try:
                await act(letters, letter)
            except PayloadTooLarge as error:
                refused = refused or error
                continue
            click.echo(f"{done}: {letter.letter_id} {terminal.printable(letter.job_id)}")
        if refused is not None:
            raise refused
        return len(found)

    if not _run(namespace, nats, work):
        terminal.notice(f"{namespace} has no dead letters")


def _json(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter": letter.letter_id,
        "queue": str(letter.queue),
        "job": letter.job_id,
        "reason": letter.reason,
        "error": letter.error,
        "tries": letter.tries,
        "queued_at": letter.queued_at,
        "died_at": letter.died_at,
        "headers": dict(letter.headers),
        "bytes": len(letter.data),
        "lost_bytes": letter.lost_bytes,
    }


def _run(
    where: str, nats: str | None, work: Callable[[DeadLetters, Sequence[str]], Awaitable[T]]
) -> T:
    import asyncio

    from dynbus.bus.errors import ConfigError
    from dynbus.bus.protocol.names import check_token
    from dynbus.bus.work_queue import DeadLetters

    namespace, *rest = where.split(".")
    if len(rest) > 2:
        raise ConfigError(f"{where!r} is not a queue: write namespace.component.endpoint")
    for kind, name in zip(("component", "endpoint"), rest, strict=False):
        check_token(kind, name)
    check_token("namespace", namespace)
    config = terminal.settings(nats)

    async def ask() -> T:
        async with terminal.server(config, "dynbus-dlq") as server:
            return await work(DeadLetters(server.connection.jetstream, namespace), rest)

    return asyncio.run(ask())
