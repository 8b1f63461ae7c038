"""Taking the jobs of another region over, out of the copies of them that are kept in this one."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import anyio

from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.names import (
    TOKEN,
    EndpointName,
    job_log_subject,
    lane_of_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.transport import (
    Connection,
    NoStream,
    PublishOptions,
    StoredMessage,
    WrongLastSequence,
)

from .copied_jobs import CopiedJob, CopiedJobs, Leftover, copy_configs
from .holders import holders_of
from .job import COPIED_BY, Moves, copy_headers, put_at
from .job_log import END_RECORD, JobLog
from .job_stream import CONSUMER
from .storing import store

logger = logging.getLogger(__name__)

ANSWERS_WITHIN: Final = 3.0
"""Seconds within which a region answers that is not lost."""
PUT_SECONDS: Final = 30.0
STORED_EVERY: Final = 64
"""Jobs that are taken over, after which it is stored how far that is."""
AT_A_TIME: Final = 32
"""Requests to a region far away that are not answered yet."""
LOOK_PAUSE: Final = 0.25
QUIET: Final = 1.0
"""Seconds within which a taker says which jobs it holds, four times over."""
COPIED_WITHIN: Final = 30.0
FULL: Final = 0.9
"""The part of its bytes from which on a copy may have dropped what it had."""


class TakenOver(NamedTuple):
    """The jobs that were taken over from a region, and what the copies are worth.

    Attributes:
        jobs: their ids, in the order of their puts.
        answered: whether the region answered: nothing of it was lost then.
        silent: seconds since the copies heard of the region; None where not both have since their
            server began.
        full: copies that may have dropped what is needed, since they are full.
    """

    jobs: tuple[str, ...]
    answered: bool
    silent: float | None
    full: tuple[str, ...]

    def remarks(self, region: str) -> list[str]:
        """The words to an operator about what the copies are worth."""
        lines: list[str] = []
        if self.silent is None:
            lines.append(
                f"the servers here have not heard of region {region} since they began: how old the "
                "copies are is not known"
            )
        elif self.answered:
            lines.append(f"region {region} answers: the copies heard of it {self.silent:.0f} s ago")
        else:
            lines.append(
                f"the copies heard of region {region} {self.silent:.0f} s ago. What it accepted, "
                "did or noted in the moments before and had not sent is on its disks alone: such "
                "jobs go on there when it is back, or are lost with the disks, and a step of which "
                "no word came is done again here"
            )
        lines += [
            f"the copy {name} is nearly full, and drops the oldest that it has: ended jobs may "
            "begin again, and old ones be missing; raise it by `nats stream edit --max-bytes`, and "
            "prune it more often, by --dry-run"
            for name in self.full
        ]
        return lines


async def keep_copies(connection: Connection, queue: EndpointName, region: str) -> None:
    """Have takers of a region know that this one copies their queue: they ask it, before they begin
    jobs, which it has taken over.

    Raises:
        ConfigError: the connection is not to a region, or to that one, or that one has no such
            queue.
        Unavailable: the region does not answer.
    """
    _check_other(connection.region, region)
    there = connection.jetstream.of_region(region)
    try:
        await there.note(work_stream(queue), f"{COPIED_BY}{connection.region}", region)
    except NoStream:
        raise ConfigError(
            f"region {region} has no queue {queue} to be copied: run `dynbus setup` there first"
        ) from None
    except Unavailable as error:
        raise Unavailable(f"region {region} does not answer: {error}") from None


def _check_other(own: str, region: str) -> None:
    if TOKEN.fullmatch(region) is None:
        raise ConfigError(
            f"{region!r} is no region: give the name that the JetStream domain of its servers has"
        )
    if not own:
        raise ConfigError(
            f"jobs of region {region} go on in another region alone, and the server is in none: "
            "give it a JetStream domain, docs/guides/regions.md"
        )
    if own == region:
        raise ConfigError(
            f"the server is in region {region} itself: give --nats a server of the region that is "
            "to do its jobs"
        )


class TakeOver:
    """The taking over of the jobs of one queue of another region.

    It may be carried out again, and by several at once: a job that is here, or has ended here, is
    not put again, and how far it got is kept in the own log.

    Args:
        region: whose jobs they are.

    Raises:
        ConfigError: the connection is not to a region, or to that one.
    """

    def __init__(self, connection: Connection, queue: EndpointName, region: str) -> None:
        _check_other(connection.region, region)
        self.queue = queue
        self.region = region
        self._jetstream = connection.jetstream
        self._there = connection.jetstream.of_region(region)
        self._log = JobLog(self._jetstream, queue)
        self._copies = copy_configs(queue, region)

    def __repr__(self) -> str:
        return f"<TakeOver {self.queue} from {self.region}>"

    async def run(self, *, lost: bool, wait: float = 60.0, dry: bool = False) -> TakenOver:
        """Take the jobs over that have not ended, and drop from the copies what nobody needs.

        A region that answers hands out no jobs of the queue meanwhile, and has none of them left.

        Args:
            lost: whether the region is taken for lost where it does not answer.
            wait: seconds for which jobs that run there are waited for.
            dry: put nothing: only say which jobs would be taken over.

        Raises:
            ConfigError: there are no copies, or no queue here.
            Unavailable: the region does not answer and is not to be taken for lost, or jobs run
                there still, or the copies lack what it has, or the own servers do not answer.
            Overloaded: the own queue is full; what was taken over until then is.
        """
        await self._refuse_missing()
        answers = await self._answers()
        if not answers and not lost and not dry:
            raise Unavailable(
                f"region {self.region} does not answer: give --lost to have its jobs done here. If "
                "it is only cut off, its takers do them as well"
            )
        if not answers or dry:
            jobs = await self._take(dry=dry)
        else:
            async with self._halted():
                await self._let_end(wait)
                await self._catch_up()
                jobs = await self._take()
                await self._drop_there(jobs)
        infos = [await self._jetstream.stream_info(one.name) for one in self._copies]
        heard = [info.silent for info in infos if info.silent is not None]
        return TakenOver(
            tuple(job.job_id for job in jobs),
            answers,
            max(heard) if len(heard) == len(infos) else None,
            tuple(
                config.name
                for config, info in zip(self._copies, infos, strict=True)
                if info.size > FULL * (config.limits.max_bytes or info.size)
            ),
        )

    async def _refuse_missing(self) -> None:
        needed = (*(one.name for one in self._copies), work_stream(self.queue), self._log.stream)
        for name in needed:
            try:
                await self._jetstream.stream_info(name)
            except NoStream:
                raise ConfigError(
                    f"there is no stream {name} here: dynbus setup {self.queue.namespace} "
                    f"--durable {self.queue.component}.{self.queue.endpoint} --copies-of "
                    f"{self.region} makes it, while that region is there"
                ) from None

    async def _answers(self) -> bool:
        try:
            await self._there.stream_info(work_stream(self.queue), timeout=ANSWERS_WITHIN)
        except (NoStream, Unavailable):
            return False
        return True

    # There -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _halted(self) -> AsyncGenerator[None]:
        """Have the region hand out no jobs of the queue."""
        stream = work_stream(self.queue)
        subjects = (await self._there.stream_config(stream)).subjects
        consumers = [f"{CONSUMER}-{lane_of_subject(subject)}" for subject in subjects]
        try:
            for one in consumers:
                await self._there.pause_consumer(stream, one, True)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                for one in consumers:
                    await self._resume(stream, one)

    async def _resume(self, stream: str, consumer: str) -> None:
        try:
            await self._there.pause_consumer(stream, consumer, False)
        except DynbusError as error:
            logger.warning(
                "region %s may hand out no jobs of %s any more until `dynbus queue resume` is run "
                "there: %s",
                *(self.region, self.queue, error),
            )

    async def _let_end(self, wait: float) -> None:
        """Wait until no taker there holds a job."""
        await anyio.sleep(QUIET)
        until = monotonic() + wait
        while True:
            held = sum(len(one.jobs) for one in await holders_of(self._there, self.queue))
            if not held:
                return
            if monotonic() >= until:
                raise Unavailable(
                    f"{held} jobs of {self.queue} run in region {self.region} after {wait:g} s: "
                    "nothing was taken over; try again when they have ended"
                )
            await anyio.sleep(LOOK_PAUSE)

    async def _catch_up(self) -> None:
        """Wait until the copies have what the region has."""
        until = monotonic() + COPIED_WITHIN
        streams = (work_stream(self.queue), self._log.stream)
        for stream, config in zip(streams, self._copies, strict=True):
            # What is gone there is not copied: jobs that were done before they were.
            last = await self._there.last(stream, ">")
            wanted = 0 if last is None else last.sequence
            while (has := (await self._jetstream.stream_info(config.name)).last_sequence) < wanted:
                if monotonic() >= until:
                    raise Unavailable(
                        f"the copy {config.name} is at {has} of {wanted} after {COPIED_WITHIN:g} "
                        "s: nothing was taken over; try again later"
                    )
                await anyio.sleep(LOOK_PAUSE)

    async def _drop_there(self, jobs: list[CopiedJob]) -> None:
        """Drop what was taken over: takers there would drop it, too."""
        moves = await self._log.moves(self.region)
        if moves is None:
            return
        await self._there.purge(work_stream(self.queue), up_to=moves.up_to)
        limiter = anyio.CapacityLimiter(AT_A_TIME)

        async def forget(job: CopiedJob) -> None:
            async with limiter:
                subject = job_log_subject(self.queue, job.token, "log.>")
                with suppress(NoStream):
                    await self._there.purge(self._log.stream, subject)

        async with task_group() as tasks:
            for job in jobs:
                tasks.start_soon(forget, job)

    # Here ------------------------------------------------------------------------------

    async def _take(self, *, dry: bool = False) -> list[CopiedJob]:
        moves = await self._log.moves(self.region)
        copied = await self._read_copies()
        jobs, end = copied.unfinished(moves), copied.last
        if not dry and copied.last_firing:
            await self._log.adopt_firing(copied.last_firing)
        if not dry and end is not None:
            for number, job in enumerate(jobs):
                if number and number % STORED_EVERY == 0:
                    before = Moves(job.message.sequence - 1, end.time)
                    await self._log.note_moves(self.region, before)
                await self._move(job)
            moves = Moves(end.sequence, end.time)
            await self._log.note_moves(self.region, moves)
        await self._prune(copied, moves)
        return jobs

    async def _read_copies(self) -> CopiedJobs:
        copied = CopiedJobs(self.region)
        jobs, log = (one.name for one in self._copies)
        start = await self._read(log, 1, copied.add_record)
        await self._read(jobs, 1, copied.add_job)
        # The word that a job has ended comes before its message is gone, and may have come now.
        await self._read(log, start, copied.add_record)
        return copied

    async def _read(self, stream: str, start: int, take: Callable[[StoredMessage], None]) -> int:
        """Take in all messages from a sequence on; the next sequence."""
        while page := await self._jetstream.read_page(stream, start=start):
            for message in page:
                take(message)
            start = page[-1].sequence + 1
        return start

    async def _move(self, job: CopiedJob) -> None:
        """Put a job here, after what it goes on with."""
        if await self._is_here(job):
            return
        for record in dict.fromkeys(one.record for one in job.records):
            await self._write(job, record)
        lane, token = job.lane, job.token
        now = (await self._jetstream.stream_info(work_stream(self.queue))).now
        await store(
            self._jetstream,
            work_subject(self.queue, token, lane),
            job.message.data,
            # Of this put there: one that was moved back, and here again, is another one.
            message_id=f"{job.job_id} of {self.region} {job.message.sequence}",
            fields=copy_headers(job.message, job.job_id, now - put_at(job.message)),
            until=monotonic() + PUT_SECONDS,
            ensure=self._make_nothing,
            what=f"job {job.job_id}",
            where=f"the queue {self.queue}",
        )
        if job.records and await self._has_ended(token):
            # Another one was faster, and its steps were forgotten before ours came.
            await self._jetstream.purge(
                self._log.stream, job_log_subject(self.queue, token, "log.>")
            )

    async def _make_nothing(self) -> None:
        """The queue is an operator's to make."""

    async def _is_here(self, job: CopiedJob) -> bool:
        if await self._has_ended(job.token):
            return True
        stream = work_stream(self.queue)
        for subject in (job.token, f"{job.token}.*"):
            if await self._jetstream.last(stream, work_subject(self.queue, subject, "*")):
                return True
        return False

    async def _has_ended(self, token: str) -> bool:
        subject = job_log_subject(self.queue, token, END_RECORD)
        return await self._jetstream.last(self._log.stream, subject) is not None

    async def _write(self, job: CopiedJob, record: str) -> None:
        """Write the records of one subject into the own log, but for those that were written by an
        earlier take-over."""
        subject = job_log_subject(self.queue, job.token, record)
        records = [one for one in job.records if one.record == record]
        while len(have := await self._jetstream.read(self._log.stream, subject)) < len(records):
            one = records[len(have)]
            options: PublishOptions = {
                "headers": one.headers,
                "expected_last_subject_sequence": have[-1].sequence if have else 0,
            }
            if one.ttl is not None:
                options["ttl"] = one.ttl
            with suppress(WrongLastSequence):
                await self._jetstream.publish(subject, one.data, **options)

    async def _prune(self, copied: CopiedJobs, moves: Moves | None) -> None:
        jobs, log = (one.name for one in self._copies)
        await self._drop(
            jobs,
            copied.leftover_jobs(moves),
            lambda token: (
                work_subject(self.queue, token, "*"),
                work_subject(self.queue, f"{token}.*", "*"),
            ),
        )
        await self._drop(
            log, copied.leftover_records(), lambda token: (job_log_subject(self.queue, token),)
        )

    async def _drop(
        self, stream: str, leftover: Leftover, subjects: Callable[[str], tuple[str, ...]]
    ) -> None:
        if leftover.up_to:
            await self._jetstream.purge(stream, up_to=leftover.up_to)
        for token, up_to in leftover.tokens.items():
            for subject in subjects(token):
                await self._jetstream.purge(stream, subject, up_to=up_to)
