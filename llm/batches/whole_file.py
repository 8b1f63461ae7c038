"""A file of requests as one run on this machine: what was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import IO, Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from dynbus import ConfigError, NoInstances, Runtime
from dynbus.llm.models.card import ModelType
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.fields import UNREADABLE, fields_of

from .lines import MAX_LINE_BYTES
from .records import Batch, BatchRequest, Status, check_endpoint, seconds_of_window
from .service import Batches, NotThere
from .store import MAX_UPLOADED
from .worker import BatchWorker

logger = logging.getLogger(__name__)

DIGEST: Final = "dynbus.file"
"""The metadata by which a run finds the batch that an earlier one has begun."""
LOOK_INTERVAL: Final = 0.25
READ_BYTES: Final = 256 * 1024

_WANTED: Final = {
    "/v1/chat/completions": ModelType.Chat,
    "/v1/completions": ModelType.Completions,
    "/v1/embeddings": ModelType.Embedding,
    "/v1/responses": ModelType.Chat,
}


class FileRun(NamedTuple):
    """A file that is run, and the terms of that.

    Attributes:
        model: of lines that name none; empty where all do.
        window: within which all is to be done, such as `24h`.
        concurrency: lines that are asked here at a time; 0 leaves them to workers elsewhere.
        wait: seconds for which models that are not served are waited for.
    """

    file: Path
    output: Path
    errors: Path
    endpoint: str
    model: str = ""
    window: str = "24h"
    concurrency: int = 32
    wait: float = 10.0

    def check(self) -> None:
        """Check what can be checked before anything is begun.

        Raises:
            ConfigError: a value is not usable.
        """
        try:
            check_endpoint(self.endpoint)
            seconds_of_window(self.window)
        except BadRequest as error:
            raise ConfigError(str(error)) from None
        if len({self.file.resolve(), self.output.resolve(), self.errors.resolve()}) < 3:
            raise ConfigError("the file, the output and the errors are to be three files")
        if self.file.exists() and not self.file.is_file():
            raise ConfigError(f"{self.file} is no regular file, and is read twice: store it first")
        for path in (self.output, self.errors):
            begun = _part_of(path)
            if begun.resolve() in (self.file.resolve(), self.output.resolve()):
                raise ConfigError(f"{path} is written as {begun}: call the file otherwise")
        for path in (self.output, self.errors):
            if not path.parent.is_dir():
                raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


async def run_file(runtime: Runtime, run: FileRun, tell: Callable[[Batch, str], object]) -> Batch:
    """Run a file, and write what comes of it; the batch as it has ended.

    One that was begun and not ended goes on. What was written to the bus for it is deleted at the
    end.

    Args:
        tell: called with the batch when it begins or goes on ("begun", "resumed"), and when more
            of its lines have ended ("").

    Raises:
        ConfigError: the file cannot be read, or changes meanwhile, or another run of it has taken
            what came of it.
        NoInstances: none of the models that lines name is served.
    """
    read = await _read_through(run)
    batches = Batches(runtime)
    await batches.store.ensure()
    batch = await _begun_before(batches, read.digest)
    how = "resumed"
    if batch is None:
        await _wait_for_models(runtime, read.models, run)
        pieces = _same_lines(run, read.digest)
        file = await batches.upload("", run.file.name, pieces, limit=MAX_UPLOADED)
        request = BatchRequest(file.id, run.endpoint, run.window, {DIGEST: read.digest})
        batch, how = await batches.create("", request), "begun"
    tell(batch, how)
    if run.concurrency:
        await runtime.start(BatchWorker, concurrency=run.concurrency)
    counts = batch.counts
    while not batch.has_ended:
        await anyio.sleep(LOOK_INTERVAL)
        batch = await batches.batch("", batch.id)
        if batch.counts != counts:
            counts = batch.counts
            tell(batch, "")
    if batch.status in (Status.COMPLETED, Status.EXPIRED):
        try:
            await _write(batches, batch.output_file_id, run.output)
            if batch.error_file_id is not None:
                await _write(batches, batch.error_file_id, run.errors)
            else:
                # Of an earlier run.
                run.errors.unlink(missing_ok=True)
        except NotThere:
            raise ConfigError(
                f"another run of {run.file} has taken what came of it: see where that has written"
            ) from None
    await _delete(batches, batch)
    return batch


class _Read(NamedTuple):
    """A file that was read through: what it is, and the first line of each model that it names."""

    digest: str
    models: dict[str, int]


class _Body(msgspec.Struct):
    model: str = ""


class _Line(msgspec.Struct):
    body: _Body = msgspec.field(default_factory=_Body)


async def _read_through(run: FileRun) -> _Read:
    """Read all of the file once."""
    digest = hashlib.sha256(_asked_of(run))
    models: dict[str, int] = {}
    number = 0
    async for line in _lines(run):
        number += 1
        digest.update(line)
        try:
            named = msgspec.json.decode(line, type=_Line).body.model
        except UNREADABLE:
            # The batch tells of lines that are none.
            continue
        if named:
            models.setdefault(named, number)
    return _Read(digest.hexdigest(), models)


def _asked_of(run: FileRun) -> bytes:
    """The terms on which its lines are asked, which belong to the digest of the file."""
    return msgspec.json.encode([run.endpoint, run.model])


async def _same_lines(run: FileRun, expected: str) -> AsyncGenerator[bytes]:
    """The lines of the file, as they were when it was read through.

    Raises:
        ConfigError: they are others by now.
    """
    digest = hashlib.sha256(_asked_of(run))
    async for line in _lines(run):
        digest.update(line)
        yield line
    if digest.hexdigest() != expected:
        raise ConfigError(f"{run.file} changes while it is read: run it when it is written")


async def _lines(run: FileRun) -> AsyncGenerator[bytes]:
    """The lines of the file, with the model where they name none.

    Raises:
        ConfigError: the file cannot be read, or a line of it is too long.
    """
    try:
        with await anyio.to_thread.run_sync(run.file.open, "rb") as file:
            number = 0
            while lines := await anyio.to_thread.run_sync(_next_lines, file):
                for line in lines:
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise ConfigError(
                            f"{run.file}, line {number} has more than {MAX_LINE_BYTES} bytes"
                        )
                    yield _with_model(line, run.model) if run.model else line
    except OSError as error:
        raise ConfigError(f"{run.file} cannot be read: {error.strerror}") from None


def _next_lines(file: IO[bytes]) -> list[bytes]:
    """The next lines of a file, some of them; of one that is too long no more than shows that."""
    lines: list[bytes] = []
    size = 0
    while size < READ_BYTES and (line := file.readline(MAX_LINE_BYTES + 1)):
        lines.append(line)
        size += len(line)
    return lines


def _with_model(line: bytes, model: str) -> bytes:
    """A line whose body names a model; one that is no request as it is."""
    try:
        fields = fields_of(msgspec.json.decode(line))
    except UNREADABLE:
        return line
    body = fields_of(fields.get("body"))
    if not body or "model" in body:
        return line
    return msgspec.json.encode({**fields, "body": {**body, "model": model}}) + b"\n"


async def _begun_before(batches: Batches, digest: str) -> Batch | None:
    """The batch of an earlier run of the same file whose end nobody has taken."""
    for batch in await batches.store.batches(""):
        if (batch.metadata or {}).get(DIGEST) == digest:
            return batch
    return None


async def _wait_for_models(runtime: Runtime, models: Mapping[str, int], run: FileRun) -> None:
    """Wait for the models of a file. Lines of those that are not there become errors of the batch.

    Args:
        models: with the first line of each.

    Raises:
        NoInstances: none of them is there.
    """
    missing: dict[str, NoInstances] = {}

    async def wait_for(catalog: Catalog, model: str) -> None:
        try:
            await catalog.wait_for(model, _WANTED[run.endpoint], timeout=run.wait)
        except NoInstances as error:
            missing[model] = error

    async with Catalog(runtime) as catalog, anyio.create_task_group() as tasks:
        for model in models:
            tasks.start_soon(wait_for, catalog, model)
    for model, number in models.items():
        if model not in missing:
            continue
        place = f"{run.file}, line {number}"
        if len(missing) == len(models):
            raise NoInstances(
                f"{place}: {missing[model].message}: start a worker of it, or name one of those "
                "that `dynbus models` lists"
            )
        logger.warning("%s: %s; the lines that ask it are errors", place, missing[model].message)


async def _write(batches: Batches, name: str | None, path: Path) -> None:
    """Write a file that a batch has made; an earlier one of the path is replaced by all of it."""
    part = _part_of(path)
    try:
        async with await anyio.open_file(part, "wb") as written:
            if name is not None:
                pieces: AsyncIterator[bytes] = batches.store.content(await batches.file("", name))
                async for piece in pieces:
                    await written.write(piece)
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def _part_of(path: Path) -> Path:
    """The path at which a file is written until it is whole."""
    return path.with_name(f"{path.name}.part")


async def _delete(batches: Batches, batch: Batch) -> None:
    """Have all of a batch be gone; until its record is, its outputs can be written once more."""
    await _delete_file(batches, batch.input_file_id)
    await batches.store.delete_batch(batch)
    await _delete_file(batches, batch.output_file_id)
    await _delete_file(batches, batch.error_file_id)


async def _delete_file(batches: Batches, name: str | None) -> None:
    file = None if name is None else await batches.store.file("", name)
    if file is not None:
        await batches.store.delete_file(file)
