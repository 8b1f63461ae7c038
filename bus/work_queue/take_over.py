"""Taking the jobs of another region over, out of the copies of them that are kept in this one."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import anyio
from msgspec.structs import replace

from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.names import (
    EndpointName,
    check_other_region,
    job_log_subject,
    lane_of_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.transport import (
    Connection,
    JetStream,
    NoStream,
    PublishOptions,
    StoredMessage,
    WrongLastSequence,
)

from .copied_jobs import CopiedJob, CopiedJobs, Leftover, copy_configs
from .holders import holders_of
from .job import COPIED_BY, Moves, copy_headers, put_at
from .job_log import END_RECORD, JobLog
from .job_stream import CONSUMER, LETTER_ROOM
from .storing import store

logger = logging.getLogger(__name__)

ANSWERS_WITHIN: Final = 3.0
"""Seconds within which a region answers that is not lost."""
PUT_SECONDS: Final = 30.0
DROPPED_EVERY: Final = 64
"""Jobs that are put, after which they are dropped from the copy."""
MOST_LEFT: Final = 1000
"""Jobs that can be put into no queue here, of which each is named in the range of the others."""
CLOCKS_DIFFER: Final = 10.0
"""Seconds by which the clocks of a region's servers may differ."""
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
        left: the ids of those that can be put into no queue here, and why.
        answered: whether the region answered: nothing of it was lost then.
        silent: seconds since the copies heard of the region; None where not both have since their
            server began.
        full: copies that may have dropped what is needed, since they are full.
    """

    jobs: tuple[str, ...]
    left: dict[str, str]
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
            "begin again, and old ones be missing, which go on where they are; raise it by "
            "`nats stream edit --max-bytes`, and prune it more often, by --dry-run"
            for name in self.full
        ]
        lines += [
            f"job {job} is left in region {region}, and in the copy: {why}"
            for job, why in self.left.items()
        ]
        return lines


class _Plan(NamedTuple):
    """The jobs to take over, and those that cannot be put.

    Attributes:
        moves: the range of the queue that they are in; None where there are none to take over.
    """

    jobs: list[CopiedJob]
    left: dict[str, str]
    moves: Moves | None


async def keep_copies(connection: Connection, queue: EndpointName, region: str) -> None:
    """Have takers of a region know that this one copies their queue: they ask it, before they begin
    jobs, which it has taken over.

    Raises:
        ConfigError: the connection is not to a region, or to that one, or that one has no such
            queue.
        Unavailable: the region does not answer.
    """
    check_other_region(connection.region, region)
    there = connection.jetstream.of_region(region)
    try:
        await there.note(work_stream(queue), f"{COPIED_BY}{connection.region}", region)
    except NoStream:
        raise ConfigError(
            f"region {region} has no queue {queue} to be copied: run `dynbus setup` there first"
        ) from None
    except Unavailable as error:
        raise Unavailable(f"region {region} does not answer: {error}") from None


class TakeOver:
    """The taking over of the jobs of one queue of another region.

    It may be carried out again, and by several at once: a job that is here, or has ended here, is
    not put again. What has begun is to be finished: the other region leaves its jobs before they
    are put here, and in between they are in the copies alone.

    Args:
        region: whose jobs they are.

    Raises:
        ConfigError: the connection is not to a region, or to that one.
    """

    def __init__(self, connection: Connection, queue: EndpointName, region: str) -> None:
        check_other_region(connection.region, region)
        self.queue = queue
        self.region = region
        self._own = connection.region
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
        # Before anything of them is dropped.
        names = [one.name for one in self._copies]
        infos = [await self._jetstream.stream_info(name) for name in names]
        limits = [(await self._jetstream.stream_config(name)).limits.max_bytes for name in names]
        if answers and not dry:
            async with self._halted():
                await self._let_end(wait)
                copied, plan = await self._leave_there()
        else:
            copied = await self._read_copies()
            plan = self._plan(copied, infos[0].first_sequence, await self._moves())
            if plan.moves is not None and not dry:
                # Its takers leave them from now on, whatever becomes of this.
                await self._log.note_moves(self.region, replace(plan.moves, is_put=False))
        if dry:
            jobs = [job for job in plan.jobs if not await self._is_here(job)]
        else:
            jobs = await self._put(copied, plan)
        await self._prune(copied, await self._moves())
        heard = [info.silent for info in infos if info.silent is not None]
        return TakenOver(
            tuple(job.job_id for job in jobs),
            plan.left,
            answers,
            max(heard) if len(heard) == len(infos) else None,
            tuple(
                name
                for name, info, most in zip(names, infos, limits, strict=True)
                if most and info.size > FULL * most
            ),
        )

    async def _moves(self) -> list[Moves]:
        return await self._log.moves(self.region)

    def _plan(self, copied: CopiedJobs, first: int, moves: Sequence[Moves]) -> _Plan:
        """The plan for what is copied.

        Args:
            first: the first sequence that the copy of the queue has.
        """
        room = self._jetstream.max_payload - LETTER_ROOM
        jobs = copied.unfinished(moves)
        hindered = [(job, why) for job in jobs if (why := job.hindrance(room))]
        if len(hindered) > MOST_LEFT:
            raise ConfigError(
                f"{len(hindered)} jobs of {self.queue} can be put into no queue here, of which "
                f"{MOST_LEFT} may be: {hindered[0][0].token}: {hindered[0][1]}"
            )
        left = {job.token for job, _ in hindered}
        free = [job for job in jobs if job.token not in left]
        end = copied.last
        range_of = None
        if free and end is not None:
            stay = sorted(sequence for job, _ in hindered for sequence in job.sequences)
            range_of = Moves(end.sequence, end.time, max(first, 1) - 1, tuple(stay))
        return _Plan(free, {job.token: why for job, why in hindered}, range_of)

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

    async def _leave_there(self) -> tuple[CopiedJobs, _Plan]:
        """Have the region keep no jobs of the queue; returns what the copies have, and the plan."""
        first = await self._catch_up()
        copied = await self._read_copies()
        moves = await self._moves()
        await self._refuse_gap(copied, first, moves)
        plan = self._plan(copied, first, moves)
        if plan.moves is None:
            return copied, plan
        stream = work_stream(self.queue)
        if plan.left:
            await self._drop_jobs_there(plan.jobs, plan.moves.up_to)
        else:
            await self._there.purge(stream, up_to=plan.moves.up_to)
        # What was said of them meanwhile, and since the copies were read: they can be sent nothing
        # any more.
        await self._catch_up()
        copied = await self._read_copies()
        tokens = {job.token for job in plan.jobs}
        jobs = [job for job in copied.unfinished(moves) if job.token in tokens]
        woken = [job for job in jobs if job.sequences[-1] > plan.moves.up_to]
        await self._drop_jobs_there(woken, max((job.sequences[-1] for job in woken), default=0))
        logs = [job_log_subject(self.queue, token, "log.>") for token in tokens]
        await self._purge_there(self._log.stream, logs, copied.last_record)
        return copied, plan._replace(jobs=jobs)

    async def _drop_jobs_there(self, jobs: Sequence[CopiedJob], up_to: int) -> None:
        stream = work_stream(self.queue)
        subjects = [subject for job in jobs for subject in self._subjects(job.token)]
        await self._purge_there(stream, subjects, up_to)

    async def _purge_there(self, stream: str, subjects: Iterable[str], up_to: int) -> None:
        limiter = anyio.CapacityLimiter(AT_A_TIME)

        async def purge(subject: str) -> None:
            async with limiter:
                await self._there.purge(stream, subject, up_to=up_to)

        async with task_group() as tasks:
            for subject in subjects:
                tasks.start_soon(purge, subject)

    async def _catch_up(self) -> int:
        """Wait until the copies have what the region has; the first sequence of that of the queue.

        Raises:
            ConfigError: they are copies of streams that were made again.
            Unavailable: they do not catch up.
        """
        until = monotonic() + COPIED_WITHIN
        streams = (work_stream(self.queue), self._log.stream)
        for stream, config in zip(streams, self._copies, strict=True):
            there = await self._there.stream_info(stream)
            # What is gone there is not copied: jobs that were done before they were.
            last = await self._there.last(stream, ">")
            wanted = 0 if last is None else last.sequence
            while (has := await self._jetstream.stream_info(config.name)).last_sequence < wanted:
                if monotonic() >= until:
                    raise Unavailable(
                        f"the copy {config.name} is at {has.last_sequence} of {wanted} after "
                        f"{COPIED_WITHIN:g} s: nothing was taken over; try again later"
                    )
                await anyio.sleep(LOOK_PAUSE)
            is_older = has.messages and has.first_time < there.created - CLOCKS_DIFFER
            if is_older or has.last_sequence > there.last_sequence:
                raise ConfigError(
                    f"the copy {config.name} is of a stream that was deleted in region "
                    f"{self.region} and made again: nothing was taken over; take what it has over "
                    "with --lost while that region is away, or delete it, and run dynbus setup "
                    "with --copies-of again"
                )
        return (await self._jetstream.stream_info(self._copies[0].name)).first_sequence

    async def _refuse_gap(self, copied: CopiedJobs, first: int, moves: Sequence[Moves]) -> None:
        """Refuse a copy that has not all jobs that the region has: it drops its oldest when it is
        full. Those that were taken over before are dropped there.

        Raises:
            ConfigError: it lacks some.
        """
        stream = work_stream(self.queue)
        missing = 0
        async for message in _messages(self._there, stream):
            if message.sequence >= first:
                break
            if any(one.have(message) for one in moves):
                await self._there.purge(stream, message.subject, up_to=message.sequence)
            elif not copied.is_over(message, moves):
                missing += 1
        if missing:
            raise ConfigError(
                f"the copy {self._copies[0].name} lacks {missing} jobs that region {self.region} "
                "has, since it was full and drops its oldest: nothing was taken over. Raise it by "
                "`nats stream edit --max-bytes`, or delete it and run dynbus setup with "
                "--copies-of again, which copies all"
            )

    # Here ------------------------------------------------------------------------------

    async def _put(self, copied: CopiedJobs, plan: _Plan) -> list[CopiedJob]:
        """Put the jobs here, and note that they are; those that were not here before."""
        if copied.last_firing:
            await self._log.adopt_firing(copied.last_firing)
        await self._drop_old(copied.moved_there)
        old_log = (await self._jetstream.stream_info(self._log.stream)).last_sequence
        put: list[CopiedJob] = []
        for number, job in enumerate(plan.jobs):
            if number and number % DROPPED_EVERY == 0:
                # Should this be broken off and run again in days, nothing here tells of them.
                before = plan.jobs[number - DROPPED_EVERY : number]
                over = Leftover(0, {one.token: one.sequences[-1] for one in before})
                await self._drop(self._copies[0].name, over, self._subjects)
            try:
                if await self._move(job, old_log if copied.moved_there else None):
                    put.append(job)
            except DynbusError as error:
                text = (
                    f"{error.message}. {number} of {len(plan.jobs)} jobs of {self.queue} are here; "
                    "the others are in the copy, and done nowhere until this is run again"
                )
                raise DynbusError.of_code(error.code, text, started=error.started) from error
        if plan.moves is not None:
            await self._log.note_moves(self.region, plan.moves)
        return put

    async def _drop_old(self, moved_there: Sequence[Moves]) -> None:
        """Drop the jobs here that the other region had taken over, which takers here would drop,
        too: not the jobs that come back now."""
        if not moved_there:
            return
        stream = work_stream(self.queue)
        async for message in _messages(self._jetstream, stream):
            if any(one.have(message) for one in moved_there):
                await self._jetstream.delete_message(stream, message.sequence)

    async def _read_copies(self) -> CopiedJobs:
        copied = CopiedJobs(self.region, self._own)
        jobs, log = (one.name for one in self._copies)
        async for message in _messages(self._jetstream, log):
            copied.add_record(message)
        async for message in _messages(self._jetstream, jobs):
            copied.add_job(message)
        # The word that a job has ended comes before its message is gone, and may have come now.
        async for message in _messages(self._jetstream, log, start=copied.last_record + 1):
            copied.add_record(message)
        return copied

    async def _move(self, job: CopiedJob, old_log: int | None) -> bool:
        """Put a job here, after what it goes on with; False for one that is here.

        Args:
            old_log: the last sequence of what the own log may have of it from before it was moved
                away; None where it was not.
        """
        if await self._is_here(job):
            return False
        if old_log is not None:
            # It brings that with it.
            await self._log.forget_steps(job.job_id, up_to=old_log)
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
        return True

    async def _make_nothing(self) -> None:
        """The queue is an operator's to make."""

    async def _is_here(self, job: CopiedJob) -> bool:
        if await self._has_ended(job.token):
            return True
        stream = work_stream(self.queue)
        for subject in self._subjects(job.token):
            if await self._jetstream.last(stream, subject):
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

    def _subjects(self, token: str) -> tuple[str, ...]:
        """The subjects of a job in the queue: as it was put, and of what goes on in its place."""
        return (
            work_subject(self.queue, token, "*"),
            work_subject(self.queue, f"{token}.*", "*"),
        )

    async def _prune(self, copied: CopiedJobs, moves: Sequence[Moves]) -> None:
        jobs, log = (one.name for one in self._copies)
        await self._drop(jobs, copied.leftover_jobs(moves), self._subjects)
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


async def _messages(
    jetstream: JetStream, stream: str, *, start: int = 1
) -> AsyncGenerator[StoredMessage]:
    """All messages of a stream from a sequence on, oldest first."""
    while page := await jetstream.read_page(stream, start=start):
        for message in page:
            yield message
        start = page[-1].sequence + 1
