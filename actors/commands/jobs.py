"""`dynbus queue jobs|job|cancel|signal`: the jobs of a queue one by one, by their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

import click
import msgspec

from dynbus.actors.calling.jobs import JobId
from dynbus.actors.runtime import Runtime
from dynbus.actors.serving.step_history import FinishedStep, step_label
from dynbus.bus.commands.queue import if_there, queue
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import (
    EndpointName,
    job_of_record,
    job_of_subject,
    job_token,
    lane_of_subject,
    work_stream,
)
from dynbus.bus.transport import JetStream, NoStream, StoredMessage
from dynbus.bus.work_queue import (
    END_RECORD,
    RUN_RECORD,
    JobLog,
    RunPhase,
    RunState,
    holders_of,
    put_at,
)

__all__ = ["queue"]

T = TypeVar("T")

MOST: Final = 1_000_000
ASKED_TOGETHER: Final = 400
"""Jobs whose records are asked for in one question, two of each: the server answers 1,024."""

id_argument = click.argument("job_id", metavar="ID")


class JobRow(NamedTuple):
    """A job that is in its queue.

    Attributes:
        job: its id.
        age: seconds since it was put, by the server's clock.
        tries: how often it was handed out to the taker that holds it; 0 where none is known to.
        begins: seconds from now before which it does not begin; 0 for none.
        size: bytes of its request.
        waits: what it waits for outside of its process; empty for nothing.
        has_ended: whether it is there alone until a taker finds that it has ended.
    """

    job: str
    lane: str
    age: float
    tries: int
    begins: float
    size: int
    waits: str = ""
    has_ended: bool = False

    @property
    def state(self) -> str:
        """Its state in words."""
        if self.has_ended:
            return "has ended"
        if self.waits:
            return f"waits for {self.waits}"
        if self.tries:
            return f"in try {self.tries}"
        return f"begins in {terminal.duration(self.begins)}" if self.begins else "waits"


@queue.command()
@click.argument("name", metavar="QUEUE")
@click.option(
    "--limit",
    type=click.IntRange(1, MOST),
    default=100,
    show_default=True,
    help="The number of jobs that are listed, those that were stored first.",
)
@terminal.json_option
@terminal.nats_option
def jobs(name: str, limit: int, as_json: bool, nats: str | None) -> None:
    """List the jobs that are in a queue, by their ids.

    \b
    dynbus queue jobs demo.Printer.print

    A job is in its queue until it has ended, and one that was cancelled while it waits for a time
    or a signal until then. STATE is `in try N` once its taker has had it for a quarter of a second;
    `dynbus queue job ID` knows more of one.
    """
    endpoint = EndpointName.parse(name)
    rows = _run(nats, lambda runtime: list_jobs(runtime.bus.data.jetstream, endpoint, limit))
    if as_json:
        terminal.print_json([{**row._asdict(), "state": row.state} for row in rows])
    elif not rows:
        terminal.notice(f"{name} has no job")
    else:
        terminal.print_table(
            ("JOB", "LANE", "AGE", "BYTES", "STATE"),
            [
                (
                    terminal.plain(row.job),
                    terminal.plain(row.lane),
                    terminal.duration(row.age),
                    str(row.size),
                    row.state,
                )
                for row in rows
            ],
        )


async def list_jobs(jetstream: JetStream, name: EndpointName, limit: int) -> list[JobRow]:
    """The jobs that are in a queue, the first `limit` in the order in which they were stored.

    Raises:
        ConfigError: there is no such queue.
        PermissionDenied, Unavailable: the server does not tell.
    """
    stream = work_stream(name)
    stored: list[StoredMessage] = []
    with if_there(str(name)):
        info = await jetstream.stream_info(stream)
        start = 1
        while len(stored) < limit and (page := await jetstream.read_page(stream, start=start)):
            stored += page
            start = page[-1].sequence + 1
    held = [job for one in await holders_of(jetstream, name) for job in one.jobs]
    tries = {job.sequence: job.tries for job in held}
    rows = [_row(name, one, tries, info.now) for one in stored[:limit]]
    return await _with_records(jetstream, name, rows, info.now)


async def _with_records(
    jetstream: JetStream, queue: EndpointName, rows: list[JobRow], now: float
) -> list[JobRow]:
    """The rows with what the log of the queue's jobs says of them."""
    log = JobLog(jetstream, queue)
    names = [row.job.split(".", 3)[3] for row in rows]
    ended: set[str] = set()
    waits: dict[str, str] = {}
    for at in range(0, len(names), ASKED_TOGETHER):
        asked = [
            subject
            for one in names[at : at + ASKED_TOGETHER]
            for subject in (log.end_subject(one), log.subject(one, RUN_RECORD))
        ]
        try:
            records = await jetstream.read_last(log.stream, asked)
        except NoStream:  # of a work queue without durable handler
            return rows
        for record in records:
            token = job_of_record(record.subject)
            if record.subject.endswith(f".{END_RECORD}"):
                ended.add(token)
                continue
            run = msgspec.json.decode(record.data, type=RunState)
            if run.phase is RunPhase.WAITING:
                waits[token] = _wait_of(run, now)
    return [
        row._replace(waits=waits.get(token, ""), has_ended=token in ended)
        for row, token in zip(rows, map(job_token, names), strict=True)
    ]


def _row(name: EndpointName, stored: StoredMessage, tries: dict[int, int], now: float) -> JobRow:
    put = put_at(stored)
    begins = stored.headers.get(headers.JOB_BEGINS, "")
    delay = int(begins) / 1000 if begins.isascii() and begins.isdigit() else 0.0
    return JobRow(
        f"{name}.{stored.headers.get(headers.JOB) or job_of_subject(stored.subject)}",
        lane_of_subject(stored.subject),
        round(max(0.0, now - put), 3),
        tries.get(stored.sequence, 0),
        round(max(0.0, put + delay - now), 3),
        len(stored.data),
    )


class JobReport(NamedTuple):
    """The state of a job of a durable handler.

    Attributes:
        waits: what it waits for outside of its process; empty for nothing.
        steps: those that are finished, in their order.
        failures: of its tries, with the instance of each.
    """

    job: str
    status: str
    tries: int
    waits: str
    error: str
    steps: tuple[str, ...]
    failures: tuple[str, ...]


@queue.command()
@id_argument
@terminal.json_option
@terminal.nats_option
def job(job_id: str, as_json: bool, nats: str | None) -> None:
    """Show a job of a durable handler: its tries, its finished steps, and what it waits for.

    \b
    dynbus queue job shop.Desk.order.order-7

    Its request and results are not shown: `dynbus queue dead` shows the request of one that failed
    for good.
    """
    report = _run(nats, lambda runtime: look_at(runtime, JobId(job_id)))
    if as_json:
        terminal.print_json(report._asdict())
        return
    lines = {
        "job": report.job,
        "status": report.status,
        "tries": str(report.tries),
        "waits": report.waits or "-",
        "error": report.error or "-",
    }
    for what, text in lines.items():
        click.echo(f"{what}: {terminal.printable(text)}")
    for what, texts in (("step", report.steps), ("failure", report.failures)):
        for text in texts:
            click.echo(f"{what}: {terminal.printable(text)}")


async def look_at(runtime: Runtime, job_id: JobId) -> JobReport:
    """The state of a job, as the server tells it.

    Raises:
        ConfigError: it is no job's id.
        NoJob: there is no such job, or none any more.
        PermissionDenied, Unavailable: the server does not tell.
    """
    endpoint, name = job_id.split_name()
    queued = runtime.jobs_of(endpoint)
    state = await queued.state(name)
    run, _ = await queued.log.run_state(name)
    stored = await queued.log.steps(name)
    steps = [msgspec.json.decode(stored[at], type=FinishedStep) for at in sorted(stored)]
    is_away = run is not None and run.phase is RunPhase.WAITING and not state.has_ended
    return JobReport(
        str(job_id),
        "waiting" if is_away else state.status,
        state.tries,
        _wait_of(run, await queued.queue.now()) if run is not None and is_away else "",
        state.error,
        tuple(
            step_label(one.kind, one.name) + (" (timed out)" if one.timed_out else "")
            for one in steps
        ),
        tuple(f"try {one.tries} at {one.instance}: {one.error}" for one in state.failures),
    )


def _wait_of(run: RunState, now: float) -> str:
    """The words for what a job waits for outside of its process."""
    if run.signal:
        return f"signal {run.signal!r}"
    return f"its time, in {terminal.duration(max(0.0, run.until - now))}"


@queue.command()
@id_argument
@terminal.nats_option
def cancel(job_id: str, nats: str | None) -> None:
    """End a job of a durable handler as cancelled: it does not begin, or is dropped while it runs.

    Its record says so for a day, and who waits for its result gets Cancelled. Ends with 1 where the
    job had ended.
    """
    if not _run(nats, lambda runtime: runtime.job(job_id).cancel()):
        terminal.notice(f"{job_id} had ended before")
        raise SystemExit(terminal.FAILURE)
    click.echo(f"cancelled: {terminal.printable(job_id)}")


@queue.command()
@id_argument
@click.argument("name")
@click.argument("value", default="null")
@terminal.nats_option
def signal(job_id: str, name: str, value: str, nats: str | None) -> None:
    """Send a signal to a job of a durable handler, with VALUE, a JSON document.

    \b
    dynbus queue signal shop.Desk.order.order-7 approved '{"by": "Ada"}'
    """
    try:
        document: Any = msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{value[:80]!r} is not JSON: {error}") from None
    _run(nats, lambda runtime: runtime.job(job_id).signal(name, document))
    click.echo(f"sent: {terminal.printable(name)} to {terminal.printable(job_id)}")


def _run(nats: str | None, work: Callable[[Runtime], Awaitable[T]]) -> T:
    terminal.settings(nats)

    async def ask() -> T:
        async with Runtime.connect(nats, name="dynbus-queue") as runtime:
            return await work(runtime)

    return asyncio.run(ask())
