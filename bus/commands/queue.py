"""`dynbus queue`: queues of jobs, and the jobs that failed for good."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from dynbus.bus import exit_codes

from .listing import API_SECONDS, pages
from .terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.nats.jetstream import NatsJetStream
    from dynbus.bus.transport import ConsumerInfo
    from dynbus.bus.work_queue import DeadLetter, DeadLetters

T = TypeVar("T")

NEVER: Final = "2200-01-01T00:00:00Z"
"""The time until which the server pauses a queue that nobody resumes."""


class QueueFilter(NamedTuple):
    """The queues that a command is about; `*` for all."""

    namespace: str
    component: str = "*"
    endpoint: str = "*"

    @classmethod
    def parse(cls, text: str) -> QueueFilter:
        """Read NAMESPACE[.COMPONENT[.ENDPOINT]].

        Raises:
            ConfigError: it names no queues.
        """
        from dynbus.bus.errors import ConfigError
        from dynbus.bus.protocol.names import check_token

        names = text.split(".")
        if len(names) > 3:
            raise ConfigError(f"{text!r} is not a queue: write namespace.component.endpoint")
        for kind, name in zip(cls._fields, names, strict=False):
            check_token(kind, name)
        return cls(*names)


class QueueRow(NamedTuple):
    """One queue.

    Attributes:
        waiting, held: see `QueueDepth`.
        dead: jobs of it that failed for good.
    """

    queue: str
    waiting: int
    held: int
    dead: int


place_argument = click.argument("where", metavar="NAMESPACE[.COMPONENT[.ENDPOINT]]")
queue_argument = click.argument("name", metavar="QUEUE")
namespace_argument = click.argument("namespace")
letters_argument = click.argument("letters", metavar="[LETTER]...", nargs=-1)
all_option = click.option("--all", "take_all", is_flag=True, help="All of the namespace.")


@click.group(epilog=exit_codes.GENERAL)
def queue() -> None:
    """Look after queues of jobs.

    A job that failed five times, or that its taker refused, is a dead letter. It is kept for 14
    days:

    \b
    dynbus queue ls demo
    dynbus queue dead demo
    dynbus queue dead demo 0123456789abcdef
    dynbus queue redrive demo 0123456789abcdef
    dynbus queue discard demo --all
    """


@queue.command()
@place_argument
@terminal.json_option
@terminal.nats_option
def ls(where: str, as_json: bool, nats: str | None) -> None:
    """List queues, with how many jobs they hold.

    \b
    WAITING  jobs that nobody has yet
    HELD     jobs with a taker, or given back and to be tried again
    DEAD     jobs that failed for good
    """
    wanted = QueueFilter.parse(where)
    queues = _run(nats, lambda jetstream: list_queues(jetstream, wanted))
    if as_json:
        terminal.print_json([row._asdict() for row in queues])
    elif not queues:
        terminal.notice(f"{where} has no queue")
    else:
        terminal.print_table(
            ("QUEUE", "WAITING", "HELD", "DEAD"),
            [
                (terminal.plain(row.queue), str(row.waiting), str(row.held), str(row.dead))
                for row in queues
            ],
        )


async def list_queues(jetstream: NatsJetStream, wanted: QueueFilter) -> list[QueueRow]:
    """The queues that are meant, by name, those too of which only dead letters are left.

    Raises:
        PermissionDenied, Unavailable: the server does not tell.
    """
    from dynbus.bus.protocol.names import (
        EndpointName,
        dead_letter_stream,
        dead_letter_subject,
        queue_of_stream,
        work_subject,
    )
    from dynbus.bus.transport import NoStream

    rows: dict[EndpointName, QueueRow] = {}
    asked = {"subject": work_subject(EndpointName(*wanted), lane="*")}
    async for page in pages(jetstream, "STREAM.NAMES", asked):
        for stream in page["streams"] or ():
            name = queue_of_stream(stream)
            if name is None:
                continue
            with suppress(NoStream):  # deleted meanwhile
                lanes = await list_lanes(jetstream, stream)
                waiting = sum(lane.pending for lane in lanes.values())
                held = sum(lane.ack_pending for lane in lanes.values())
                rows[name] = QueueRow(str(name), waiting, held, 0)
    asked = {"subjects_filter": dead_letter_subject(*wanted)}
    with suppress(NoStream):
        call = f"STREAM.INFO.{dead_letter_stream(wanted.namespace)}"
        async for page in pages(jetstream, call, asked):
            counts: dict[str, int] = page["state"].get("subjects") or {}
            for subject, count in counts.items():
                namespace, component, _, endpoint, _ = subject.split(".")
                name = EndpointName(namespace, component, endpoint)
                row = rows.get(name, QueueRow(str(name), 0, 0, 0))
                rows[name] = row._replace(dead=row.dead + count)
    return [rows[name] for name in sorted(rows)]


async def list_lanes(jetstream: NatsJetStream, stream: str) -> dict[str, ConsumerInfo]:
    """The progress of the takers of each lane of a queue, by the name of its consumer.

    Raises:
        NoStream: the queue is gone.
        PermissionDenied, Unavailable: the server does not tell.
    """
    names: list[str] = []
    async for page in pages(jetstream, f"CONSUMER.NAMES.{stream}", {}):
        names += page["consumers"] or ()
    return {
        name: await jetstream.consumer_info(stream, name, timeout=API_SECONDS) for name in names
    }


@queue.command()
@queue_argument
@terminal.nats_option
def pause(name: str, nats: str | None) -> None:
    """Hand out no more jobs of a queue.

    The server keeps it, in the consumers of the queue: takers that begin later get none either.
    Jobs that run go on, and jobs may be put.
    """
    _run(nats, lambda jetstream: _pause(jetstream, name, NEVER))
    click.echo(f"paused: {name}")


@queue.command()
@queue_argument
@terminal.nats_option
def resume(name: str, nats: str | None) -> None:
    """Hand out jobs of a queue again."""
    _run(nats, lambda jetstream: _pause(jetstream, name, None))
    click.echo(f"resumed: {name}")


async def _pause(jetstream: NatsJetStream, name: str, until: str | None) -> None:
    stream = _stream_of(name)
    asked = {} if until is None else {"pause_until": until}
    for consumer in await list_lanes(jetstream, stream):
        await jetstream.api(f"CONSUMER.PAUSE.{stream}.{consumer}", asked, timeout=API_SECONDS)


@queue.command()
@queue_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@terminal.nats_option
def purge(name: str, yes: bool, nats: str | None) -> None:
    """Drop all jobs of a queue, those too that are held.

    A job that runs goes on, and whatever becomes of it, it is not begun again.
    """
    stream = _stream_of(name)
    if not yes:
        click.confirm(f"Drop all jobs of {name}?", abort=True)
    count = _run(nats, lambda jetstream: jetstream.purge(stream))
    click.echo(f"dropped: {count} jobs of {name}")


def _stream_of(name: str) -> str:
    from dynbus.bus.protocol.names import EndpointName, work_stream

    return work_stream(EndpointName.parse(name))


@queue.command()
@place_argument
@click.argument("letter", required=False)
@terminal.json_option
@terminal.nats_option
def dead(where: str, letter: str | None, as_json: bool, nats: str | None) -> None:
    """List dead letters, or show one.

    The oldest come first. LETTER is the id of one, which is shown with what its job says.
    """
    wanted = QueueFilter.parse(where)
    if letter is None:
        _list_dead(_letters(wanted, nats, lambda at: at.find(*wanted[1:])), where, as_json)
        return
    dead_letter = _letters(wanted, nats, lambda at: at.get(letter))
    data = dead_letter.data.decode("utf-8", "replace")
    if as_json:
        terminal.print_json({**_json(dead_letter), "data": data})
        return
    for name, value in _json(dead_letter).items():
        click.echo(f"{name}: {terminal.printable(str(value))}")
    click.echo(f"\n{terminal.printable(data)}")


def _list_dead(letters: Sequence[DeadLetter], where: str, as_json: bool) -> None:
    from dynbus.bus.clock import unix_time

    if as_json:
        terminal.print_json([_json(letter) for letter in letters])
    elif not letters:
        terminal.notice(f"{where} has no dead letters")
    else:
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
                for letter in letters
            ],
        )


@queue.command()
@namespace_argument
@letters_argument
@all_option
@terminal.nats_option
def redrive(namespace: str, letters: Sequence[str], take_all: bool, nats: str | None) -> None:
    """Put dead letters into their queues again.

    They have all their tries, and no deadline. A letter whose job was too large to keep is refused;
    with --all the others are redriven.
    """
    _each(namespace, letters, take_all, nats, "redriven", lambda at, one: at.redrive(one))


@queue.command()
@namespace_argument
@letters_argument
@all_option
@terminal.nats_option
def discard(namespace: str, letters: Sequence[str], take_all: bool, nats: str | None) -> None:
    """Discard dead letters."""
    _each(namespace, letters, take_all, nats, "discarded", lambda at, one: at.discard(one))


def _each(
    namespace: str,
    named: Sequence[str],
    take_all: bool,
    nats: str | None,
    done: str,
    act: Callable[[DeadLetters, DeadLetter], Awaitable[None]],
) -> None:
    from dynbus.bus.errors import PayloadTooLarge
    from dynbus.bus.protocol.names import check_token

    if take_all == bool(named):
        raise click.UsageError("name dead letters, or give --all")

    async def work(letters: DeadLetters) -> int:
        chosen = await letters.find() if take_all else [await letters.get(one) for one in named]
        refused: PayloadTooLarge | None = None
        for letter in chosen:
            try:
                await act(letters, letter)
            except PayloadTooLarge as error:
                refused = refused or error
                continue
            click.echo(f"{done}: {letter.letter_id} {terminal.printable(letter.job_id)}")
        if refused is not None:
            raise refused
        return len(chosen)

    check_token("namespace", namespace)
    if not _letters(QueueFilter(namespace), nats, work):
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


def _letters(
    wanted: QueueFilter, nats: str | None, work: Callable[[DeadLetters], Awaitable[T]]
) -> T:
    from dynbus.bus.work_queue import DeadLetters

    return _run(nats, lambda jetstream: work(DeadLetters(jetstream, wanted.namespace)))


def _run(nats: str | None, work: Callable[[NatsJetStream], Awaitable[T]]) -> T:
    import asyncio

    config = terminal.settings(nats)

    async def ask() -> T:
        async with terminal.server(config, "dynbus-queue") as server:
            return await work(server.connection.jetstream)

    return asyncio.run(ask())
