"""`BatchWorker`: the actor that does batches. Each line is a durable job, and so is each batch."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Final

import anyio
import msgspec

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    Context,
    DynbusError,
    InvalidRequest,
    InvalidResponse,
    JobHandle,
    NoJob,
    Option,
    Options,
    Overloaded,
    PayloadTooLarge,
    Runtime,
    StepMismatch,
    Unavailable,
    call_options,
    context,
    handler,
    step,
    takes,
)
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.openai.errors import BadRequest, error_body
from dynbus.llm.permissions import asking_models
from dynbus.llm.pipeline.models import Models
from dynbus.llm.tenants.admission import Admission
from dynbus.llm.tenants.counting import SharedCounts
from dynbus.llm.tenants.limits import NO_LIMITS, Limits, quotas_of
from dynbus.llm.tenants.recording import store
from dynbus.llm.tenants.records import counting_grants
from dynbus.llm.tenants.usage import Tokens, UsageEntry, UsageRecord, by_model, usage_subject
from dynbus.spi import ComponentName, Grant, NoObject, Work, monotonic, unix_time

from .asking import LineAsker
from .lines import (
    Answer,
    Chunk,
    LineChecker,
    LineError,
    NoAnswer,
    chunks_of,
    read_line,
    told_line,
)
from .looks import LOOK_INTERVAL, BatchLooks
from .records import KEPT, OUTPUT, Batch, StoredFile, StoredPart, Written
from .store import BatchStore, StorageFull, batch_grants

logger = logging.getLogger(__name__)

WORKERS: Final = ComponentName("dynbus", "batches")
MAX_CONCURRENCY: Final = 64
"""Jobs of lines that an instance holds: those beyond its own concurrency wait in it."""
CHUNK: Final = 32
"""Lines that are asked and stored together."""
CHUNKS_AT_A_TIME: Final = 8
SUBMITTED_AT_ONCE: Final = 4
"""Lines that are submitted at the same time: requests of others wait for them on the event loop."""
MAX_BATCHES: Final = 256
"""Batches that an instance looks after at a time; each of them only waits for its lines."""

TRIES: Final = 10_000
"""More than the window of a batch has room for: the window alone ends the tries of a line."""
RESULTS_KEPT: Final = 6 * 3600.0
"""Seconds for which the answer to a line is kept; those of a chunk are stored with it before."""
RETRY_DELAY: Final = 0.25
ROOM_PATIENCE: Final = 600.0
"""Seconds for which a batch waits for room for its answers. What other batches have written may be
deleted, and then these are not asked in vain."""
ROOM_INTERVAL: Final = 5.0


FOR_GOOD: Final = (
    ConfigError,
    InvalidRequest,
    InvalidResponse,
    PayloadTooLarge,
    StepMismatch,
    msgspec.MsgspecError,
    RecursionError,
)
"""Errors that end a job at once, since every other try would end so, too."""


class BatchName(msgspec.Struct, frozen=True):
    """The name of a batch, and whose it is."""

    tenant: str
    id: str


class LineName(msgspec.Struct, frozen=True):
    """A line of an input file.

    Attributes:
        batch: the id of the batch.
        number: of the line, from 1.
        file: the id of the input file.
        part: of the file, from 0.
        index: of the line in the part, from 0.
        endpoint: that answers it.
        limits, key_id, key_limits: of its batch.
    """

    batch: str
    number: int
    file: str
    part: int
    index: int
    endpoint: str
    limits: Limits = NO_LIMITS
    key_id: str = ""
    key_limits: Limits = NO_LIMITS

    @property
    def key(self) -> str:
        """The name of its job."""
        return f"{self.batch}.{self.number}"

    @property
    def request(self) -> str:
        """The name of its request."""
        return f"batch_req_{self.batch.removeprefix('batch_')}_{self.number}"


class Checked(msgspec.Struct, frozen=True):
    """The outcome of reading an input file."""

    total: int
    errors: list[LineError]


class Done(msgspec.Struct, frozen=True):
    """The outcome of a chunk, whose output and errors are stored.

    Attributes:
        output, errors: bytes of each.
        expired: lines among those that failed that were not done in time.
        usage: of those that are completed, an entry for each model.
        lost: lines among those that failed for whose answers there was no room.
    """

    completed: int
    failed: int
    output: int
    errors: int
    expired: int
    usage: list[UsageEntry]
    lost: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """The options of a worker of batches."""

    concurrency: Annotated[
        int, Option("lines of batches that it asks at a time", least=1, most=MAX_CONCURRENCY)
    ] = 32


class BatchWorker(Actor, namespace=WORKERS.namespace, component=WORKERS.component):
    """Does batches: checks their files, asks their lines, and puts together what comes of them.

    Any number of them share the work. What one that dies had begun, another one does again.
    """

    __dynbus_calls_all__ = True

    @takes(BatchOptions)
    def __init__(self, options: BatchOptions) -> None:
        self._places = anyio.Semaphore(options.concurrency)
        self._exits = AsyncExitStack()
        self._lent: Models | None = None
        self._dropping: Work | None = None

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        inherited = super().__dynbus_grants__(address, namespaces)
        return [*inherited, *asking_models(namespaces), *batch_grants(), *counting_grants()]

    def lend(self, models: Models) -> None:
        """Have it ask models that its process has opened already, which outlive it."""
        self._lent = models

    async def on_start(self) -> None:
        async with AsyncExitStack() as exits:
            models = self._lent
            if models is None:
                catalog = await exits.enter_async_context(Catalog(self.runtime))
                models = await exits.enter_async_context(Models(self.runtime, catalog))
            self._asker = LineAsker(models)
            self._counts = await exits.enter_async_context(SharedCounts(self.runtime))
            self._store = BatchStore(self.runtime.bus.data.jetstream)
            self._looks = BatchLooks(self._store)
            await self._store.ensure()
            self._exits = exits.pop_all()
        # A bucket may have gibibytes, and lines do not wait for it.
        self._dropping = self.runtime.bus.background.start(
            self._drop_abandoned, name=f"what uploads have left, for {self.instance_id}"
        )

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._dropping is not None:
                await self._dropping.end()
            await self._exits.aclose()

    async def _drop_abandoned(self) -> None:
        try:
            files = await self._store.drop_abandoned()
        except DynbusError as error:
            logger.warning("what uploads that broke off have left was not looked for: %s", error)
        else:
            if files:
                logger.info("what %d uploads that broke off had left was dropped", files)

    # Lines -------------------------------------------------------------------------------------

    @handler(
        durable=True,
        concurrency=MAX_CONCURRENCY,
        tries=TRIES,
        backoff=0.5,
        result_age=RESULTS_KEPT,
    )
    async def line(self, line: LineName) -> Answer:
        """The answer to a line."""
        async with self._places:
            tenant = context().tenant
            stopped = await self._looks.reason_to_stop(tenant, line.batch)
            if stopped is not None:
                return _unasked(line, stopped)
            try:
                data = (await self._store.lines(line.file, line.part))[line.index]
            except NoObject:
                gone = BadRequest("the input file is not there any more", status=404)
                return Answer(404, line.request, msgspec.Raw(error_body(gone, line.request)))
            body = bytes(read_line(data).body)
            quotas = quotas_of(tenant, line.limits, line.key_id, line.key_limits)
            # `models` was checked when the file was.
            counts = tenant and any(
                one.limits != Limits(models=one.limits.models) for one in quotas
            )
            admission = Admission(self._counts, *quotas) if counts else None
            return await self._asker.ask(line.endpoint, body, line.request, tenant, admission)

    # Batches -----------------------------------------------------------------------------------

    @handler(
        durable=True,
        concurrency=MAX_BATCHES,
        tries=TRIES,
        backoff=0.2,
        result_age=RESULTS_KEPT,
    )
    async def run(self, name: BatchName) -> str:
        """Do a batch; the status with which it has ended."""
        try:
            return await self._run(name)
        except* FOR_GOOD as failure:
            logger.error("the batch %s cannot be done", name.id, exc_info=failure)
        why = LineError(code="server_error", message="the server failed; its log says why")
        return await self._change(name, lambda one: one.refused([why], _now()))

    async def _run(self, name: BatchName) -> str:
        store = self._store
        batch = await store.batch(name.tenant, name.id)
        if batch is None:
            return "deleted"
        if batch.has_ended:
            return batch.status
        file = await store.file(name.tenant, batch.input_file_id)
        checked = await step("check", self._check, batch, file)
        if checked.errors or file is None:
            return await self._change(name, lambda one: one.refused(checked.errors, _now()))
        await self._change(name, lambda one: one.begun(checked.total, _now()))
        run = BatchRun(self.runtime, store, self._looks, batch, file)
        done: list[Done] | None = None
        try:
            async with run.watching():
                done = await run.chunks()
        except* NoObject as error:
            logger.warning("the input file of the batch %s was deleted: %s", name.id, error)
        if done is None:
            return await self._change(name, lambda one: one.refused([_missing()], _now()))
        await self._change(name, lambda one: one.finalizing(_now()))
        now = await step("end", _time)
        output = await run.assemble("output", [one.output for one in done], now)
        errors = await run.assemble("error", [one.errors for one in done], now)
        expired, lost = any(one.expired for one in done), sum(one.lost for one in done)
        usage = await run.write_usage([entry for one in done for entry in one.usage], now)
        return await self._change(
            name, lambda one: one.ended(output, errors, usage, expired=expired, lost=lost, now=now)
        )

    async def _change(self, name: BatchName, change: Callable[[Batch], Batch]) -> str:
        """Store what becomes of a batch; its status then."""
        batch = await self._store.change_batch(name.tenant, name.id, change)
        return "deleted" if batch is None else batch.status

    async def _check(self, batch: Batch, file: StoredFile | None) -> Checked:
        """Read all of an input file."""
        if file is None:
            return Checked(0, [_missing()])
        checker = LineChecker(batch.endpoint, batch.models)
        try:
            async for data in self._store.content(file):
                checker.add(data)
        except NoObject:
            return Checked(0, [_missing()])
        checker.end()
        return Checked(checker.total, checker.errors)


class BatchRun:
    """One try of a batch whose file is valid."""

    def __init__(
        self,
        runtime: Runtime,
        store: BatchStore,
        looks: BatchLooks,
        batch: Batch,
        file: StoredFile,
    ) -> None:
        self._runtime = runtime
        self._worker = runtime.client(BatchWorker)
        self._store = store
        self._looks = looks
        self._batch = batch
        self._file = file
        self._open: set[JobHandle[Answer]] = set()
        # Why no more lines are asked; None while they are.
        self._stopped: NoAnswer | None = None
        self._completed = self._failed = 0
        self._waits_for_room = False
        self._submitting = anyio.Semaphore(SUBMITTED_AT_ONCE)

    def __repr__(self) -> str:
        return f"<BatchRun {self._batch.id} [{len(self._open)} lines asked]>"

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Have its lines end when it is cancelled, or its time is over."""
        await self._look()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            try:
                await self._look()
            except DynbusError as error:
                logger.info("the batch %s cannot be looked at: %s", self._batch.id, error)

    async def _look(self) -> None:
        if self._stopped is None:
            self._stopped = await self._looks.look(self._batch.tenant, self._batch.id)
        if self._stopped is not None:
            # All at once: a cancel takes some answers of the server.
            async with anyio.create_task_group() as tasks:
                for job in list(self._open):
                    tasks.start_soon(_cancel, job)

    # Lines -------------------------------------------------------------------------------------

    async def chunks(self) -> list[Done]:
        """Ask all lines, some chunks at a time, each a step: what is stored is not asked again."""
        chunks = chunks_of(self._file.lines, CHUNK)
        done: dict[int, Done] = {}
        free = anyio.Semaphore(CHUNKS_AT_A_TIME)

        async def one(place: int, chunk: Chunk) -> None:
            try:
                done[place] = finished = await step("lines", self._chunk, place, chunk)
            finally:
                free.release()
            self._completed += finished.completed
            self._failed += finished.failed

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._count, done, len(chunks))
            for place, chunk in enumerate(chunks):
                # In their order, which is that of the steps.
                await free.acquire()
                tasks.start_soon(one, place, chunk)
        return [done[place] for place in range(len(chunks))]

    async def _count(self, done: dict[int, Done], total: int) -> None:
        """Tell how many lines have ended, until all have."""
        counted = 0
        while len(done) < total:
            await anyio.sleep(LOOK_INTERVAL / 2)
            if len(done) > counted:
                counted = len(done)
                await self._tell_counts()
        await self._tell_counts()

    async def _tell_counts(self) -> None:
        completed, failed = self._completed, self._failed
        await self._store.change_batch(
            self._batch.tenant, self._batch.id, lambda batch: batch.counted(completed, failed)
        )

    async def _chunk(self, place: int, chunk: Chunk) -> Done:
        """Ask the lines of a chunk, and store what comes of them."""
        lines = await self._store.lines(self._file.id, self._file.parts[chunk.part].number)
        ids = [read_line(lines[chunk.first + at]).custom_id for at in range(chunk.size)]
        names = [
            LineName(
                self._batch.id,
                chunk.number + at,
                self._file.id,
                self._file.parts[chunk.part].number,
                chunk.first + at,
                self._batch.endpoint,
                self._batch.limits,
                self._batch.key,
                self._batch.key_limits,
            )
            for at in range(chunk.size)
        ]
        answers: dict[int, Answer | NoAnswer] = {}

        async def ask(at: int) -> None:
            answers[at] = await self._answer(names[at])

        async with anyio.create_task_group() as tasks:
            for at in range(chunk.size):
                tasks.start_soon(ask, at)
        written: dict[bool, list[bytes]] = {True: [], False: []}
        expired, used = 0, list[UsageEntry]()
        for at in range(chunk.size):
            answer = answers[at]
            is_well = isinstance(answer, Answer) and answer.is_well
            written[is_well].append(told_line(names[at].request, ids[at], answer))
            expired += isinstance(answer, NoAnswer) and answer.code == "batch_expired"
            if isinstance(answer, Answer) and answer.used is not None:
                used.append(answer.used)
        output, errors = b"".join(written[True]), b"".join(written[False])
        kinds: dict[Written, bytes] = {"output": output, "error": errors}
        try:
            for kind, data in kinds.items():
                if data:
                    await self._keep(kind, place, data)
        except StorageFull as error:
            logger.error("answers of the batch %s are lost: %s", self._batch.id, error)
            return Done(0, chunk.size, 0, 0, expired, [], chunk.size)
        counts = len(written[True]), len(written[False]), len(output), len(errors)
        return Done(*counts, expired, by_model(used))

    async def _keep(self, kind: Written, place: int, data: bytes) -> None:
        """Store what comes of a chunk, once there is room.

        Raises:
            StorageFull: there is none for long, or the batch is to end.
        """
        end = monotonic() + ROOM_PATIENCE
        while True:
            try:
                return await self._store.put_part(self._batch.written(kind), place, data)
            except StorageFull as error:
                if self._stopped is not None or monotonic() >= end:
                    raise
                if not self._waits_for_room:
                    self._waits_for_room = True
                    logger.warning("the batch %s waits: %s", self._batch.id, error)
            await anyio.sleep(ROOM_INTERVAL)

    async def _answer(self, name: LineName) -> Answer | NoAnswer:
        """The answer to a line, or why there is none."""
        while self._stopped is None:
            try:
                return await self._result(await self._submit(name))
            except NoJob:
                # Its answer was kept for a while, and is done again.
                continue
            except Overloaded as error:
                await anyio.sleep(error.retry_after)
            except Unavailable:
                await anyio.sleep(RETRY_DELAY)
        return await self._left(name)

    async def _submit(self, name: LineName) -> JobHandle[Answer]:
        """Have a line asked, unless it was submitted before."""
        tenant = self._batch.tenant
        metadata = {Context.TENANT_KEY: tenant} if tenant else {}
        with call_options(metadata=metadata, request_id=name.request):
            async with self._submitting:
                return await self._worker.line.submit(name, idempotency_key=name.key, priority=-1)

    async def _left(self, name: LineName) -> Answer | NoAnswer:
        """The answer to a line that an earlier try of the batch may have submitted, when no more
        are asked."""
        job = self._runtime.job(f"{WORKERS}.line.{name.key}", BatchWorker.line)
        try:
            await job.cancel()
            return await self._result(job)
        except NoJob:
            assert self._stopped is not None
            return self._stopped

    async def _result(self, job: JobHandle[Answer]) -> Answer | NoAnswer:
        self._open.add(job)
        try:
            if self._stopped is not None:
                # Who was stopped meanwhile has not cancelled it.
                await job.cancel()
            answer = await job.result()
            if answer.stopped is None:
                return answer
            # Its worker has looked before this one.
            self._stopped = answer.stopped
            return answer.stopped
        except Cancelled:
            return self._stopped or NoAnswer("request_cancelled", "an operator cancelled it")
        except (NoJob, Overloaded, Unavailable):
            raise
        except DynbusError as error:
            return NoAnswer(error.code, error.message or error.code)
        finally:
            self._open.discard(job)

    # Files -------------------------------------------------------------------------------------

    async def assemble(self, kind: Written, sizes: Sequence[int], now: int) -> str | None:
        """Have a file be there that consists of what the chunks have stored; its id, None where
        they have stored nothing.

        Args:
            sizes: of what each chunk has stored.
        """
        parts = [StoredPart(place, size, 0) for place, size in enumerate(sizes) if size]
        if not parts:
            return None
        file = StoredFile(
            id=self._batch.written(kind),
            tenant=self._batch.tenant,
            filename=f"{self._batch.id}_{kind}.jsonl",
            purpose=OUTPUT,
            created_at=now,
            expires_at=now + KEPT,
            parts=parts,
        )
        await self._store.put_file(file)
        return file.id

    async def write_usage(self, entries: Sequence[UsageEntry], now: int) -> Tokens:
        """Write what the lines in its output file have used, the same however often it is done;
        returns all of it.
        """
        models, batch = by_model(entries), self._batch
        if batch.tenant and models:
            subject = usage_subject(now, batch.tenant, batch.id)
            record = UsageRecord(batch.tenant, models)
            await store(self._runtime.bus.data.jetstream, subject, record)
        return functools.reduce(Tokens.more, (one.tokens for one in models), Tokens())


async def _cancel(job: JobHandle[Answer]) -> None:
    try:
        await job.cancel()
    except NoJob:
        pass
    except DynbusError as error:
        logger.info("%s is cancelled at the next look: %s", job.id, error)


def _unasked(line: LineName, why: NoAnswer) -> Answer:
    """The answer to a line that is not asked any more."""
    refusal = BadRequest(why.message, status=499, reason=why.code)
    body = msgspec.Raw(error_body(refusal, line.request))
    return Answer(499, line.request, body, stopped=why)


def _missing() -> LineError:
    return LineError(code="file_not_found", message="the input file is not there any more")


def _now() -> int:
    return int(unix_time())


async def _time() -> int:
    return _now()
