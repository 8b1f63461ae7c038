"""Looks at batches: whether one is to end, as the lines and the run of it ask in one process."""

from __future__ import annotations

from typing import Final, NamedTuple

import anyio

from dynbus.spi import monotonic, unix_time

from .lines import NoAnswer
from .records import Batch, Status
from .store import BatchStore

LOOK_INTERVAL: Final = 1.0
"""Seconds for which a look at whether a batch is cancelled holds."""


class _Seen(NamedTuple):
    batch: Batch | None
    at: float


class BatchLooks:
    """The last look at each batch. Lines that begin within a second share one."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._looking = anyio.Lock()

    def __repr__(self) -> str:
        return f"<BatchLooks [{len(self._seen)} batches]>"

    async def look(self, tenant: str, name: str) -> NoAnswer | None:
        """The reason for which no more lines of a batch are asked, as it is now; None while they
        are.
        """
        at = monotonic()
        batch = await self._store.batch(tenant, name)
        for old in [one for one, seen in self._seen.items() if at - seen.at > LOOK_INTERVAL]:
            del self._seen[old]
        self._seen[tenant, name] = _Seen(batch, at)
        return _reason_to_stop(batch)

    async def reason_to_stop(self, tenant: str, name: str) -> NoAnswer | None:
        """The same, by a look that is a second old at most."""
        async with self._looking:
            seen = self._seen.get((tenant, name))
            if seen is None or monotonic() - seen.at > LOOK_INTERVAL:
                return await self.look(tenant, name)
        return _reason_to_stop(seen.batch)


def _reason_to_stop(batch: Batch | None) -> NoAnswer | None:
    if batch is None or batch.status is Status.CANCELLING:
        return NoAnswer("batch_cancelled", "the batch was cancelled before this was done")
    if unix_time() >= batch.expires_at:
        return NoAnswer(
            "batch_expired",
            f"this was not done within the completion window, {batch.completion_window}",
        )
    return None
