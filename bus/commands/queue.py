"""`dynbus queue`: queues of jobs, and the jobs that failed for good."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from dynbus.bus import exit_codes

from .listing import API_SECONDS, pages, subject_counts
from .terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.nats.connection import NatsConnection
    from dynbus.bus.nats.jetstream import NatsJetStream
    from dynbus.bus.work_queue import DeadLetter, DeadLetters, TakenOver

    from .queue_report import QueueReport, Rates

T = TypeVar("T")


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
        oldest: seconds since the oldest job was stored; None where there is none.
    """

    queue: str
    waiting: int
    held: int
    dead: int
    oldest: float | None = None


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
    dynbus queue show demo.Printer.print
    dynbus queue dead demo
    dynbus queue dead demo 0123456789abcdef
    dynbus queue redrive demo 0123456789abcdef
    dynbus queue discard demo --all
    dynbus queue take-over demo.Desk.summarise --from eu --lost
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
    OLDEST   how long ago the oldest job was stored

    A method that hears a topic in a group has a line once it has dead letters: what it waits for is
    in its topic, which `dynbus topic ls` lists.
    """
    wanted = QueueFilter.parse(where)
    queues = _run(nats, lambda jetstream: list_queues(jetstream, wanted))
    if as_json:
        terminal.print_json([row._asdict() for row in queues])
    elif not queues:
        terminal.notice(f"{where} has no queue")
    else:
        terminal.print_table(
            ("QUEUE", "WAITING", "HELD", "DEAD", "OLDEST"),
            [
                (
                    terminal.plain(row.queue),
                    *map(str, (row.waiting, row.held, row.dead)),
                    "-" if row.oldest is None else terminal.duration(row.oldest),
                )
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

    from .queue_report import consumers_of

    rows: dict[EndpointName, QueueRow] = {}
    asked = {"subject": work_subject(EndpointName(*wanted), lane="*")}
    async for page in pages(jetstream, "STREAM.NAMES", asked):
        for stream in page["streams"] or ():
            name = queue_of_stream(stream)
            if name is None:
                continue
            with suppress(NoStream):  # deleted meanwhile
                lanes = (await consumers_of(jetstream, stream)).values()
                waiting = sum(int(lane.get("num_pending") or 0) for lane in lanes)
                held = sum(int(lane.get("num_ack_pending") or 0) for lane in lanes)
                info = await jetstream.stream_info(stream, timeout=API_SECONDS)
                oldest = round(info.oldest_age, 3) if info.messages else None
                rows[name] = QueueRow(str(name), waiting, held, 0, oldest)
    dead = dead_letter_stream(wanted.namespace)
    with suppress(NoStream):
        letters = await subject_counts(jetstream, dead, dead_letter_subject(*wanted))
        for subject, count in letters.items():
            namespace, component, _, endpoint, _ = subject.split(".")
            name = EndpointName(namespace, component, endpoint)
            row = rows.get(name, QueueRow(str(name), 0, 0, 0))
            rows[name] = row._replace(dead=row.dead + count)
    return [rows[name] for name in sorted(rows)]


@queue.command()
@queue_argument
@click.option(
    "-n",
    "--interval",
    type=terminal.number(0.1, 3600),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Between the two looks of which the rates are.",
)
@terminal.json_option
@terminal.nats_option
def show(name: str, interval: float, as_json: bool, nats: str | None) -> None:
    """Show a queue: what it holds, how old and how often tried that is, and how fast it moves.

    \b
    waiting jobs that nobody has yet, by lanes: of priorities, or of keys where it is ordered
    held    jobs with a taker, or that wait for their next try
    takers  those that say which jobs they hold, as they do after a quarter of a second
    oldest  the job that was put first of those that are there
    tries   held jobs by the try that they are in, as far as their takers tell it: of those that
            they hold for longer than a quarter of a second
    rates   jobs a second that were put, handed out to takers, and that left the queue

    A job that waits outside of its process, or was given back at its last delivery, goes on as a
    copy, which counts as put again.
    """
    report, rates = _run(nats, lambda jetstream: _look(jetstream, name, interval))
    if as_json:
        terminal.print_json(report.to_json(rates))
        return
    lanes = ", ".join(
        f"{one.waiting} in lane {lane}" for lane, one in report.lanes.items() if one.waiting
    )
    tries = ", ".join(f"{count} in try {one}" for one, count in sorted(report.tries.items()))
    oldest = report.oldest
    lines = {
        "queue": str(report.queue),
        "state": "paused" if report.is_paused else "open",
        "waiting": f"{report.waiting}" + (f" ({lanes})" if lanes else ""),
        "held": f"{report.held} with a taker or to be tried again "
        f"({report.tried_before} tried before)",
        "tries": tries or "-",
        "takers": f"{report.takers} say that they hold jobs",
        "dead": f"{report.dead}",
        "oldest": f"{oldest.job}, {terminal.duration(oldest.age)}" if oldest else "-",
        "bytes": f"{report.size}",
        "rates": ", ".join(f"{what} {rate:.1f}/s" for what, rate in rates._asdict().items()),
    }
    for what, text in lines.items():
        click.echo(f"{what}: {terminal.printable(text)}")


async def _look(jetstream: NatsJetStream, name: str, interval: float) -> tuple[QueueReport, Rates]:
    """A queue as it is after so many seconds, and its rates meanwhile."""
    import anyio

    from dynbus.bus.protocol.names import EndpointName

    from .queue_report import Rates, read_queue

    queue = EndpointName.parse(name)
    before = await read_queue(jetstream, queue)
    await anyio.sleep(interval)
    after = await read_queue(jetstream, queue)
    return after, Rates.between(before.counts, after.counts)


@queue.command()
@queue_argument
@terminal.nats_option
def pause(name: str, nats: str | None) -> None:
    """Hand out no more jobs of a queue.

    The server keeps it, in the consumers of the queue: takers that begin later get none either.
    Jobs that run go on, and jobs may be put.
    """
    _run(nats, lambda jetstream: _pause(jetstream, name, True))
    click.echo(f"paused: {name}")


@queue.command()
@queue_argument
@terminal.nats_option
def resume(name: str, nats: str | None) -> None:
    """Hand out jobs of a queue again."""
    _run(nats, lambda jetstream: _pause(jetstream, name, False))
    click.echo(f"resumed: {name}")


async def _pause(jetstream: NatsJetStream, name: str, paused: bool) -> None:
    from .queue_report import consumers_of

    stream = _stream_of(name)
    with if_there(name):
        for consumer in await consumers_of(jetstream, stream):
            await jetstream.pause_consumer(stream, consumer, paused, timeout=API_SECONDS)


@queue.command("take-over", epilog=exit_codes.GENERAL)
@queue_argument
@click.option(
    "--from", "region", metavar="REGION", required=True, help="The region that has the jobs."
)
@click.option("--lost", is_flag=True, help="Take the region for lost where it does not answer.")
@click.option(
    "--wait",
    type=terminal.number(0, 3600),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="For how long jobs that run in a region which answers are waited for.",
)
@click.option(
    "--dry-run", is_flag=True, help="Move nothing: say which jobs would be, and prune the copies."
)
@terminal.json_option
@terminal.nats_option
def take_over(
    name: str,
    region: str,
    lost: bool,
    wait: float,
    dry_run: bool,
    as_json: bool,
    nats: str | None,
) -> None:
    """Have the jobs of a durable handler of another region go on in the server's own.

    The jobs are those of the copies that `dynbus setup --copies-of REGION` keeps. They have the
    same ids, keys, lanes and times, and go on after their finished steps. It may be run again, also
    after it was killed: no job is put twice. Each run prunes the copies of jobs that have ended.

    A region that answers hands out no jobs of the queue meanwhile, and has none left. One that does
    not has to be declared lost: what it had accepted and not copied yet is on its disks alone, and
    goes on there when it is back. What was taken over does not.
    """

    async def work(connection: NatsConnection) -> TakenOver:
        from dynbus.bus.protocol.names import EndpointName
        from dynbus.bus.work_queue import TakeOver

        taking = TakeOver(connection, EndpointName.parse(name), region)
        return await taking.run(lost=lost, wait=wait, dry=dry_run)

    taken = _connected(nats, work)
    if as_json:
        terminal.print_json(taken._asdict())
        return
    done = "to be taken over" if dry_run else "taken over"
    for job in taken.jobs:
        click.echo(f"{done}: {terminal.printable(job)}")
    click.echo(f"{len(taken.jobs)} jobs of {name} {done} from region {region}")
    for line in taken.remarks(region):
        terminal.notice(line)


@queue.command()
@queue_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@terminal.nats_option
def purge(name: str, yes: bool, nats: str | None) -> None:
    """Drop all jobs of a queue, those too that are held, and their steps and signals.

    A job that runs goes on, and whatever becomes of it, it is not begun again. Its key is free, but
    both would have one result and the same steps: submit another one when it has ended.
    """
    if not yes:
        click.confirm(f"Drop all jobs of {name}?", abort=True)
    count = _connected(nats, lambda connection: purge_queue(connection, name))
    click.echo(f"dropped: {count} jobs of {name}")


async def purge_queue(connection: NatsConnection, name: str) -> int:
    """Drop the jobs of a queue, and what their log has for their next tries; how many jobs.

    A region that copies the queue learns it from the log.
    """
    from dynbus.bus.protocol.names import (
        EndpointName,
        job_log_stream,
        job_log_subject,
        job_of_record,
        job_of_subject,
    )
    from dynbus.bus.transport import NoStream
    from dynbus.bus.work_queue import FAILURE_RECORD, JobLog, Moves

    queue = EndpointName.parse(name)
    jetstream, region = connection.jetstream, connection.region
    stream, log = _stream_of(name), job_log_stream(queue)
    with if_there(name):
        jobs = {job_of_subject(one) for one in await subject_counts(jetstream, stream, ">")}
        info = await jetstream.stream_info(stream, timeout=API_SECONDS)
        count = await jetstream.purge(stream, up_to=info.last_sequence)
    with suppress(NoStream):  # of a work queue without durable handler
        if region and info.last_sequence:
            await JobLog(jetstream, queue).note_moves(region, Moves(info.last_sequence, info.now))
        for record in ("log.>", FAILURE_RECORD):
            wanted = job_log_subject(queue, "*", record)
            kept = {job_of_record(one) for one in await subject_counts(jetstream, log, wanted)}
            for job in jobs & kept:
                await jetstream.purge(log, job_log_subject(queue, job, record))
    return count


@contextmanager
def if_there(name: str) -> Generator[None]:
    """The use of a queue.

    Raises:
        ConfigError: it is not there.
    """
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.transport import NoStream

    from .queue_report import absent_queue

    try:
        yield
    except NoStream:
        raise ConfigError(absent_queue(name)) from None


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

    They have all their tries, and no deadline. A letter whose job was too large to keep is refused,
    and one that cannot be put; with --all the others are redriven.
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
    from dynbus.bus.errors import ConfigError, DynbusError, PayloadTooLarge
    from dynbus.bus.protocol.names import check_token
    from dynbus.bus.transport import NoStream, StreamFull

    if take_all == bool(named):
        raise click.UsageError("name dead letters, or give --all")

    async def work(letters: DeadLetters) -> int:
        chosen = await letters.find() if take_all else [await letters.get(one) for one in named]
        refused: DynbusError | None = None
        for letter in chosen:
            try:
                await act(letters, letter)
            except (PayloadTooLarge, ConfigError, NoStream, StreamFull) as error:
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
    return _connected(nats, lambda connection: work(connection.jetstream))


def _connected(nats: str | None, work: Callable[[NatsConnection], Awaitable[T]]) -> T:
    return terminal.at_server(nats, "dynbus-queue", work)
