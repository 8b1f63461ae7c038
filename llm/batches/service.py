"""`Batches`: what clients do with files and batches, whatever they come by."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from dynbus import Context, DynbusError, Runtime, call_options
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.tenants.limits import NO_LIMITS, Limits
from dynbus.spi import random_id, unix_time

from .records import OUTPUT, Batch, BatchRequest, Status, StoredFile, seconds_of_window
from .store import RETRY_FOR, BatchStore, reaching
from .worker import BatchName, BatchWorker

MAX_OPEN: Final = 64
"""Batches of one tenant that have not ended."""


class NotThere(DynbusError):
    """Raised when a tenant has no file or batch of an id."""

    code = "NotThere"

    @property
    def http_status(self) -> int:
        return 404


class Batches:
    """Files and batches, as the clients of a runtime ask for them. A tenant sees its own alone.

    Args:
        patience: see `BatchStore`.
    """

    def __init__(self, runtime: Runtime, *, patience: float = RETRY_FOR) -> None:
        self.store = BatchStore(runtime.bus.data.jetstream, patience=patience)
        self._worker = runtime.client(BatchWorker)

    def __repr__(self) -> str:
        return f"<Batches {self.store!r}>"

    async def upload(
        self,
        tenant: str,
        filename: str,
        pieces: AsyncIterator[bytes],
        *,
        limit: int,
        bound: str = "",
    ) -> StoredFile:
        """See `BatchStore.create_file`."""
        return await self.store.create_file(tenant, filename, pieces, limit=limit, bound=bound)

    async def file(self, tenant: str, name: str) -> StoredFile:
        """A file of a tenant.

        Raises:
            NotThere: it has none of this id.
        """
        file = await self.store.file(tenant, name)
        if file is None:
            raise NotThere(f"there is no file {name[:80]!r}", started=False)
        return file

    async def delete_file(self, tenant: str, name: str) -> None:
        """Have a file be gone.

        Raises:
            NotThere: there is none of this id.
            BadRequest: a batch that has not ended reads it.
        """
        file = await self.file(tenant, name)
        for batch in await self.store.batches(tenant):
            if batch.input_file_id == file.id and not batch.has_ended:
                raise BadRequest(
                    f"the batch {batch.id} reads {file.id}, and has not ended: cancel it first",
                    status=409,
                    reason="file_in_use",
                )
        await self.store.delete_file(file)

    async def create(
        self,
        tenant: str,
        request: BatchRequest,
        limits: Limits = NO_LIMITS,
        *,
        key: str = "",
        key_limits: Limits = NO_LIMITS,
    ) -> Batch:
        """Have a batch begin.

        Args:
            limits: of the tenant.
            key: the id of the key that makes it.
            key_limits: of that key alone.

        Raises:
            NotThere: its file is not there.
            BadRequest: it cannot begin, or there is no room for what it would write.
        """
        file = await self.file(tenant, request.input_file_id)
        now = int(unix_time())
        window = seconds_of_window(request.completion_window)
        if file.purpose == OUTPUT or file.expires_at < now + window:
            why = "is an output" if file.purpose == OUTPUT else "is gone before the window ends"
            raise BadRequest(f"input_file_id: {file.id} {why}", param="input_file_id")
        if len(await self._open(tenant)) >= MAX_OPEN:
            raise _too_many()
        await self.store.check_room(tenant, file.size)
        batch = Batch(
            id=f"batch_{random_id()}",
            tenant=tenant,
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + window,
            metadata=request.metadata,
            limits=limits.of_batches,
            key=key if key_limits != NO_LIMITS else "",
            key_limits=key_limits.of_batches,
        )
        await self.store.create_batch(batch)
        # Others may have been stored at the same time, also by other front ends.
        if batch.id not in (await self._open(tenant))[:MAX_OPEN]:
            await self.store.delete_batch(batch)
            raise _too_many()
        await self._begin(batch)
        return batch

    async def _open(self, tenant: str) -> list[str]:
        """The batches of a tenant that have not ended, the oldest first."""
        known = [batch for batch in await self.store.batches(tenant) if not batch.has_ended]
        return [one.id for one in sorted(known, key=lambda one: (one.created_at, one.id))]

    async def batch(self, tenant: str, name: str) -> Batch:
        """A batch of a tenant.

        Raises:
            NotThere: it has none of this id.
        """
        batch = await self.store.batch(tenant, name)
        if batch is None:
            raise NotThere(f"there is no batch {name[:80]!r}", started=False)
        if batch.status is Status.VALIDATING:
            # Who stored it may have died before it was submitted.
            await self._begin(batch)
        return batch

    async def cancel(self, tenant: str, name: str) -> Batch:
        """Have a batch end.

        Raises:
            NotThere: there is none of this id.
            BadRequest: it has ended, or is about to.
        """
        await self.batch(tenant, name)
        now = int(unix_time())
        batch = await self.store.change_batch(tenant, name, lambda one: one.cancelling(now))
        if batch is None:
            raise NotThere(f"there is no batch {name[:80]!r}", started=False)
        return batch

    async def _begin(self, batch: Batch) -> None:
        metadata = {Context.TENANT_KEY: batch.tenant} if batch.tenant else {}
        with call_options(metadata=metadata), reaching():
            await self._worker.run.submit(
                BatchName(batch.tenant, batch.id), idempotency_key=batch.id, priority=0
            )


def _too_many() -> BadRequest:
    return BadRequest(
        f"{MAX_OPEN} batches have not ended; wait for one, or cancel one",
        status=429,
        reason="too_many_batches",
    )
