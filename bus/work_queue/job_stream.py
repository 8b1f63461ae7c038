"""The stream of a work queue: made where it is missing, written, measured, and settled."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import anyio

from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    PayloadTooLarge,
    Unavailable,
)
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import (
    WOKEN,
    EndpointName,
    is_safe_reply,
    job_log_stream,
    job_log_subject,
    job_of_subject,
    job_token,
    lane_of_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.server_clock import ServerClock
from dynbus.bus.transport import (
    AckKind,
    Connection,
    ConnectionState,
    ConsumerInfo,
    Delivery,
    NoStream,
    PullConsumerConfig,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    SubjectTaken,
)

from .job import (
    Moves,
    QueueDepth,
    WorkQueueConfig,
    copy_headers,
    copying_regions,
    job_headers,
    milliseconds,
    put_at,
)
from .job_log import JobLog
from .lanes import lanes_of
from .storing import MAX_RETRY_PAUSE, RETRY_PAUSE, TRY_SECONDS, store

T = TypeVar("T")

logger = logging.getLogger(__name__)

CONSUMER: Final = "takers"
"""Each lane has one of this name, with `-` and that of the lane behind it."""
DUPLICATE_WINDOW: Final = 120.0
MAX_PUT_SECONDS: Final = 100.0
"""Below the window in which a repeat is known as one."""
PROBE: Final = "_probe"
LETTER_ROOM: Final = 4096
"""Bytes of a message that a job leaves to what a dead letter says of it."""
RETURN_RECORD: Final = "return"
RETURNS_KEPT_FOR: Final = 400 * 24 * 3600.0
"""Seconds: the server counts deliveries for as long as a job is there, which may be as long as its
steps are kept."""
MOVES_WITHIN: Final = 15.0
"""Seconds for which a region that copies the queue is asked what it has taken over: more than a
leaf node takes to join another server."""
MOVES_PAUSE: Final = 0.5
CLOCK_AGE: Final = 60.0
"""Seconds after which the server is asked again what time it is: its clock may have been set."""


def queue_config(name: EndpointName, config: WorkQueueConfig) -> StreamConfig:
    """The stream of a queue."""
    return StreamConfig(
        work_stream(name),
        # What is put elsewhere is refused by the server: nobody would take it.
        tuple(work_subject(name, lane=lane) for lane in lanes_of(ordered=config.ordered)),
        StreamLimits(
            max_bytes=config.max_bytes,
            max_messages=config.max_jobs,
            max_messages_per_subject=1,
            duplicate_window=DUPLICATE_WINDOW,
            discard_new=True,
            # A job that is in the queue is not put again, however long it waits.
            keep_first=True,
        ),
        work_queue=True,
        in_memory=config.in_memory,
        replicas=config.replicas,
        description="dynbus: jobs",
    )


def takers_config(name: EndpointName, config: WorkQueueConfig) -> tuple[PullConsumerConfig, ...]:
    """The consumers that the takers of a queue share, one for each lane."""
    consumers = [
        PullConsumerConfig(
            f"{CONSUMER}-{lane}", config.ack_wait, subject=work_subject(name, lane=lane)
        )
        for lane in lanes_of(ordered=config.ordered)
    ]
    if config.ordered:
        # So the server hands out the next job of a lane when the one before it has left.
        consumers = [one._replace(max_ack_pending=1) for one in consumers]
    return tuple(consumers)


class JobStream:
    """The stream and the clock that the putters and the takers of one queue share.

    Attributes:
        lanes: of the queue; those that come first are preferred, or none where it is ordered.
        consumers: of the lanes.
        waiting: jobs in each lane at the last `ensure`.
        ack_wait: of the queue as it is, also where another process made it; known after `ensure`.
        is_copied: whether another region copies the queue, as was known at most a minute ago.
        moves: what other regions have taken over of the jobs of this one.
        moves_known_at: when that was learned, on the library's monotonic clock.
    """

    def __init__(self, connection: Connection, name: EndpointName, config: WorkQueueConfig) -> None:
        self.connection = connection
        self.jetstream = connection.jetstream
        self.name = name
        self.config = config.check()
        self.stream = work_stream(name)
        self.lanes = lanes_of(ordered=config.ordered)
        self.consumers = takers_config(name, config)
        self.waiting: Sequence[int] = [0] * len(self.lanes)
        self.ack_wait = config.ack_wait
        self._created = 0.0
        self._clock = ServerClock()
        # By the own time of day.
        self._asked_at = 0.0
        # When takers last had a reason to connect again.
        self.outage_at = -math.inf
        # Since when no server can have forgotten, unnoticed here, what it had handed out.
        self.watched_since = math.inf
        self._watches_outages = False
        self.is_copied = False
        self.moves: Sequence[Moves] = ()
        self._moved_log_end = 0
        self.moves_known_at = -math.inf
        self._learning = asyncio.Lock()
        self._depth = QueueDepth(0, 0)
        self._measured = -1e9
        self._measuring = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<JobStream {self.name}>"

    @property
    def created(self) -> float:
        """The time at which the stream was made that was there at the last `ensure`."""
        return self._created

    def watch_outages(self) -> None:
        """Note from now on when the connection breaks, or its cluster loses a server."""
        if self._watches_outages:
            return
        self._watches_outages = True
        self.watched_since = monotonic()
        if self.connection.has_peers:
            # Who comes to a cluster that has just lost a server is there before others.
            self._note_outage()
        self.connection.on_peer_lost(self._note_outage)
        self.connection.on_state(lambda _: self._note_outage())

    def _note_outage(self) -> None:
        self.outage_at = self.watched_since = monotonic()

    async def ensure(self) -> None:
        """Make the stream and its consumers where they are missing.

        Raises:
            ConfigError: there is a stream of this name that is another one, or it had no order of
                keys until now, or had one, or another region keeps the jobs as well.
            PermissionDenied: it is missing, and we may not make it.
            NoRoom: there is no room to make it.
            Unavailable: the server does not answer.
        """
        config = queue_config(self.name, self.config)
        probe = work_subject(self.name, PROBE, self.lanes[0])
        try:
            await self.jetstream.ensure_stream(config, probe=probe)
        except ConfigError:
            await self._refuse_other_order()
            raise
        await self._of_each(lambda one: self.jetstream.ensure_pull_consumer(self.stream, one))
        await self._check_age()
        try:
            await self.learn()
        except NoStream as error:
            # Servers of a cluster learn one after the other what was made a moment ago.
            raise Unavailable(f"not all servers know the queue {self.name} yet: {error}") from None

    async def _refuse_other_order(self) -> None:
        ordered = not self.config.ordered
        other = queue_config(self.name, self.config._replace(ordered=ordered))
        try:
            there = await self.jetstream.stream_config(self.stream)
        except NoStream:  # another region has one
            return
        if set(there.subjects) == set(other.subjects):
            raise ConfigError(
                f"the queue {self.name} was made {'with' if ordered else 'without'} an order of "
                f"keys (`ordered_by`), and has it {'not' if ordered else 'now'}: let its jobs be "
                "done by the version that put them and delete it (`nats stream delete "
                f"{self.stream}`), or give the handler another name"
            )

    async def learn(self) -> ConsumerInfo:
        """Ask what the stream and the consumer are that there are now."""
        self._created = await self._ask_clock()
        infos = await self._infos()
        self.ack_wait = infos[0].ack_wait
        self.waiting = [info.pending for info in infos]
        return infos[0]

    async def pause(self, paused: bool) -> None:
        """See `WorkQueue.pause` and `WorkQueue.resume`."""
        await self.ensure()
        await self._of_each(
            lambda one: self.jetstream.pause_consumer(self.stream, one.name, paused)
        )

    async def _infos(self, timeout: float = 5.0) -> list[ConsumerInfo]:
        """The progress of the takers of each lane."""
        return await self._of_each(
            lambda one: self.jetstream.consumer_info(self.stream, one.name, timeout=timeout)
        )

    async def _of_each(self, ask: Callable[[PullConsumerConfig], Awaitable[T]]) -> list[T]:
        """The server's answer for each consumer, or the first of its refusals."""
        answers: dict[str, T] = {}
        failures: list[DynbusError] = []

        async def one_of(consumer: PullConsumerConfig) -> None:
            try:
                answers[consumer.name] = await ask(consumer)
            except DynbusError as error:
                failures.append(error)

        async with task_group() as tasks:
            for consumer in self.consumers:
                tasks.start_soon(one_of, consumer)
        if failures:
            raise failures[0]
        return [answers[consumer.name] for consumer in self.consumers]

    async def _check_age(self) -> None:
        """Tell of a queue that loses jobs: one that somebody else made, or an earlier version."""
        age = (await self.jetstream.stream_config(self.stream)).limits.max_age
        if age is not None:
            logger.warning(
                "the queue %s drops jobs that are older than %g s, and nobody learns of it: its "
                "stream was made with that limit; nats stream edit %s --max-age 0",
                *(self.name, age, self.stream),
            )

    async def learn_moves(self) -> None:
        """Learn which jobs other regions have taken over while this one was away, unless that is
        known since the last outage.

        A region that does not answer is waited for some seconds: it may be lost, and this one needs
        nobody else to work.
        """
        async with self._learning:
            asked_at = monotonic()
            if self.moves_known_at >= self.watched_since:
                return
            until = asked_at + MOVES_WITHIN
            while True:
                try:
                    self.moves = await self._ask_moves()
                    break
                except DynbusError as error:
                    if not error.retryable or monotonic() + MOVES_PAUSE >= until:
                        logger.warning(
                            "jobs of %s begin though it is not known which of them another region "
                            "has taken over: %s",
                            *(self.name, error),
                        )
                        break
                await anyio.sleep(MOVES_PAUSE)
            self.moves_known_at = asked_at

    async def _ask_moves(self) -> list[Moves]:
        info = await self.jetstream.stream_info(self.stream, timeout=TRY_SECONDS)
        logs = [
            JobLog(self.jetstream.of_region(region), self.name)
            for region in copying_regions(info.metadata)
        ]
        if logs:
            own = JobLog(self.jetstream, self.name)
            with suppress(NoStream):
                info = await self.jetstream.stream_info(own.stream, timeout=TRY_SECONDS)
                self._moved_log_end = info.last_sequence
        return [moves for log in logs for moves in await log.moves(self.connection.region)]

    async def forget_moved(self, job_id: str) -> None:
        """Drop the steps of a job that another region has taken over. What was written since that
        is known is of a job that came back.
        """
        if self._moved_log_end:
            log = JobLog(self.jetstream, self.name)
            await log.forget_steps(job_id, up_to=self._moved_log_end)

    async def read_clock(self) -> None:
        """Ask the server what time it is, unless it said so a moment ago.

        Raises:
            NoStream: the queue is gone.
            Unavailable: the server does not answer.
        """
        # A process that was suspended sees it by its own time of day alone.
        went_by = max(self._clock.age(monotonic()), abs(unix_time() - self._asked_at))
        if went_by >= CLOCK_AGE:
            await self._ask_clock()

    async def _ask_clock(self) -> float:
        """Ask the server what time it is; when the stream was made."""
        info = await self.jetstream.stream_info(self.stream, timeout=TRY_SECONDS)
        self._clock.set(info.now, monotonic())
        self._asked_at = unix_time()
        self.is_copied = bool(copying_regions(info.metadata))
        return info.created

    async def now(self) -> float:
        """See `WorkQueue.now`."""
        try:
            await self.read_clock()
        except NoStream:
            await self.ensure()
        return self._clock.unix(monotonic())

    async def find(self, job_id: str) -> list[StoredMessage]:
        """See `WorkQueue.find`."""
        subject = work_subject(self.name, job_token(job_id), "*")
        try:
            whole = await self.jetstream.last(self.stream, subject)
            copies = await self.jetstream.read(self.stream, f"{subject}.*")
        except NoStream:
            return []
        return copies if whole is None else [whole, *copies]

    async def forget(self, job_id: str, but: int = 0) -> None:
        """See `WorkQueue.forget`."""
        try:
            for message in await self.find(job_id):
                if message.sequence != but:
                    await self.jetstream.delete_message(self.stream, message.sequence)
        except DynbusError as error:
            # A taker that gets one finds that its job has ended.
            logger.debug("messages of job %s of %s stay: %s", job_id, self.name, error)

    async def wake(self, job: StoredMessage, job_id: str) -> None:
        """See `WorkQueue.wake`."""
        # It may be such a copy that waits now, however often it has waited since.
        name = next(one for one in WOKEN if not job.subject.endswith(f".{one}"))
        with suppress(SubjectTaken):
            await self._publish_copy(job, job_id, name, random_id(), put_at(job), 0.0)

    async def hand_out(self, token: str) -> None:
        """See `WorkQueue.hand_out`."""
        if is_safe_reply(token, (f"$JS.ACK.{self.stream}.",)):
            await self.jetstream.acknowledge(token, AckKind.NAK)

    def queued(self, delivery: Delivery, now: float) -> float:
        """The time at which a job was put, on the own monotonic clock: by what the server says that
        it is now, and not by the time of day of any other host."""
        self._clock.stored(delivery.message.time, now)
        return min(now, now - self._clock.unix(now) + put_at(delivery.message))

    async def put(
        self,
        data: bytes,
        job_id: str,
        deadline: float | None,
        headers: Mapping[str, str] | None,
        timeout: float,
        delay: float,
        lane: str,
        *,
        anew: bool,
    ) -> None:
        """See `WorkQueue.put`."""
        now = monotonic()
        until = now + min(timeout, MAX_PUT_SECONDS)
        fields = job_headers(job_id, headers)
        if delay > 0:
            fields[header_names.JOB_BEGINS] = milliseconds(delay)
        if deadline is not None:
            fields[header_names.DEADLINE] = milliseconds(deadline - now)
        room = self.jetstream.max_payload - LETTER_ROOM
        size = len(data) + sum(len(name) + len(value) + 4 for name, value in fields.items())
        if size > room:
            raise PayloadTooLarge(
                f"a job of {size} bytes does not fit into the queue {self.name}, whose messages "
                f"have room for {room}: put what it is about elsewhere, and its name into the job"
            )
        if deadline is not None:
            if deadline <= now:
                raise DeadlineExceeded(f"job {job_id} was not put: its deadline has passed")
            until = min(until, deadline)
        subject = work_subject(self.name, job_token(job_id), lane)
        message_id = random_id() if anew else job_id
        await self._store(subject, data, job_id, message_id, fields, deadline, until)
        self._depth = QueueDepth(self._depth.waiting + 1, self._depth.held)

    async def _store(
        self,
        subject: str,
        data: bytes,
        job_id: str,
        message_id: str,
        fields: dict[str, str],
        deadline: float | None,
        until: float,
    ) -> None:
        def refresh() -> None:
            if deadline is not None:
                # It counts from when the server stores this try.
                fields[header_names.DEADLINE] = milliseconds(deadline - monotonic())

        await store(
            self.jetstream,
            subject,
            data,
            message_id=message_id,
            fields=fields,
            until=until,
            ensure=self.ensure,
            refresh=refresh,
            what=f"job {job_id}",
            where=f"the queue {self.name}",
        )

    async def depth(self, max_age: float, timeout: float = TRY_SECONDS) -> QueueDepth:
        """See `WorkQueue.depth`."""
        if monotonic() - self._measured < max_age:
            return self._depth
        async with self._measuring:
            # The caller that waited has been answered by the one before.
            if monotonic() - self._measured >= max_age:
                await self._measure(timeout)
        return self._depth

    async def oldest_age(self) -> float | None:
        """Seconds since the oldest job was stored, by the server's clock; 0 where there is none,
        None where nobody can tell.

        Raises:
            NoStream: the queue is gone.
            Unavailable: the server does not answer.
        """
        return (await self.jetstream.stream_info(self.stream, timeout=TRY_SECONDS)).oldest_age

    async def _measure(self, timeout: float) -> None:
        try:
            infos = await self._infos(timeout)
        except NoStream:
            await self.ensure()
            infos = await self._infos(timeout)
        self._depth = QueueDepth(
            sum(info.pending for info in infos), sum(info.ack_pending for info in infos)
        )
        self._measured = monotonic()

    async def acknowledge(self, delivery: Delivery) -> None:
        """Have a job leave the queue.

        Raises:
            Unavailable: the server did not confirm that.
        """
        await self.jetstream.acknowledge(delivery.token, AckKind.ACK, timeout=TRY_SECONDS / 2)
        await self._leave_to_no_copy(delivery)

    async def _leave_to_no_copy(self, delivery: Delivery) -> None:
        """Drop a job that is done from a queue that another region copies.

        The server keeps it until it is copied, and it never is while the other region is lost: the
        queue would fill with jobs that are done, and take no others.
        """
        if not self.is_copied:
            return
        sequence = delivery.message.sequence
        try:
            await self.jetstream.delete_message(self.stream, sequence, timeout=TRY_SECONDS)
        except DynbusError as error:
            logger.debug("%r: job %d stays until it is copied: %s", self, sequence, error)

    async def drop(self, delivery: Delivery, created: float, until: float) -> bool:
        """Have a job leave the queue; False when the server did not confirm that in time."""
        pause = RETRY_PAUSE
        while (left := until - monotonic()) > 0:
            try:
                await self.jetstream.acknowledge(
                    delivery.token, AckKind.ACK, timeout=min(TRY_SECONDS / 2, left)
                )
                await self._leave_to_no_copy(delivery)
                return True
            except DynbusError as error:
                logger.debug("%r: %s", self, error)
            try:
                if await self.is_dropped(delivery, created, min(TRY_SECONDS, left)):
                    return True
            except DynbusError as error:
                logger.debug("%r: %s", self, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_PAUSE)
        return False

    def copy_subject(self, message: StoredMessage, name: str) -> str:
        """The subject of a copy of a job, by the tokens of both."""
        return work_subject(self.name, name, lane_of_subject(message.subject))

    def lane_of(self, message: StoredMessage) -> str:
        """The lane of a job."""
        return lane_of_subject(message.subject)

    def group_of(self, message: StoredMessage) -> str:
        """The subject below which a group gets an event again; empty for a job."""
        return ""

    def default_id(self, message: StoredMessage) -> str:
        """The id of a job whose putter gave it none: any NATS client may put one."""
        return job_of_subject(message.subject)

    async def is_dropped(self, delivery: Delivery, created: float, timeout: float) -> bool:
        """Drop a message whose delivery its server has forgotten: it answers nothing of it."""
        if self.connection.state is not ConnectionState.CONNECTED:
            return False
        try:
            info = await self.jetstream.stream_info(self.stream, timeout=timeout)
            # A stream that was made again has other jobs under the same numbers.
            if info.created == created:
                sequence = delivery.message.sequence
                await self.jetstream.delete_message(self.stream, sequence, timeout=timeout)
        except NoStream:
            return False
        return True

    async def put_again(self, delivery: Delivery, job_id: str, delay: float) -> bool:
        """Put a copy of a job whose deliveries are used up though nothing was wrong with it, to
        begin after `delay` seconds; False where it cannot be put."""
        message = delivery.message
        try:
            unix = self._clock.unix(self.queued(delivery, monotonic()))
            name = str(message.sequence)
            await self._publish_copy(message, job_id, name, name, unix, delay)
        except SubjectTaken:
            return True
        except DynbusError as error:
            logger.warning("job %s of %s could not be put again: %s", job_id, self.name, error)
            return False
        return True

    async def _publish_copy(
        self,
        message: StoredMessage,
        job_id: str,
        name: str,
        repeat_id: str,
        put: float,
        delay: float,
    ) -> None:
        """Put a copy of a job beside it.

        Args:
            name: of the copy; there is one at a time of a name.
            repeat_id: the same for a repeat, which is not put again in two minutes.
            put: when the job was put, in Unix seconds by the server's clock.
        """
        fields = copy_headers(message, job_id, await self.now() - put)
        if delay > 0:
            fields[header_names.JOB_DELAY] = milliseconds(delay)
        await self.jetstream.publish(
            self.copy_subject(message, f"{job_token(job_id)}.{name}"),
            message.data,
            timeout=TRY_SECONDS,
            message_id=f"{job_id} again {repeat_id}{self.group_of(message)}",
            headers=fields,
        )

    async def note_return(self, delivery: Delivery, job_id: str) -> None:
        """Keep that a delivery was no try; where that cannot be stored it counts as one."""
        try:
            await self.jetstream.publish(
                job_log_subject(self.name, job_token(job_id), RETURN_RECORD),
                str(delivery.message.sequence).encode(),
                ttl=RETURNS_KEPT_FOR,
                timeout=TRY_SECONDS,
            )
        except DynbusError as error:
            logger.warning("job %s of %s has a try less: %s", job_id, self.name, error)

    async def returns(self, delivery: Delivery, job_id: str) -> int:
        """The number of deliveries that were none of a job's tries.

        Raises:
            Unavailable: the server does not say.
        """
        subject = job_log_subject(self.name, job_token(job_id), RETURN_RECORD)
        try:
            records = await self.jetstream.read(
                job_log_stream(self.name), subject, timeout=TRY_SECONDS
            )
        except NoStream:
            return 0
        return sum(record.data == b"%d" % delivery.message.sequence for record in records)

    async def give_back(self, delivery: Delivery, delay: float) -> None:
        """Have a job handed out again; where the server does not hear it, that takes `ack_wait`."""
        try:
            await self.jetstream.acknowledge(
                delivery.token, AckKind.NAK, delay=delay, timeout=TRY_SECONDS
            )
        except DynbusError as error:
            logger.debug("%r: a job comes back after %s s: %s", self, self.ack_wait, error)

    async def keep(self, delivery: Delivery) -> bool:
        """Have the server wait for another `ack_wait`; False when it did not hear that."""
        try:
            await self.jetstream.acknowledge(
                delivery.token, AckKind.IN_PROGRESS, timeout=self.ack_wait / 4
            )
        except DynbusError as error:
            logger.debug("%r: a job was not kept: %s", self, error)
            return False
        return True
