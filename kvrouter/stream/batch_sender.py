"""The way of batches into the stream: several in flight, and again when that fails."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from typing import Final

from dynbus.bus.cleanup import end_tasks
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError, PayloadTooLarge
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import kv_event_subject
from dynbus.bus.transport import Connection, ConnectionState, NoStream

from .event_log import Batch, EventLog
from .event_stream import EventStream, ensure_stream

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT: Final = 1.0
FIRST_RETRY: Final = 0.05
MAX_RETRY: Final = 1.0
HEADER_ROOM: Final = 512
"""Bytes of a message that are left to its headers."""


class BatchSender:
    """Publishes the batches of an instance's ranks and tells their logs what became of them.

    Args:
        address: namespace, component and instance id.
        on_outcome: called with a log when it was told.

    Attributes:
        failures: publishes that were not acknowledged, and whatever else was noted as one.
        last_failure: its text; empty when a publish was acknowledged since.
        retry_at: monotonic seconds before which nothing is sent.
    """

    def __init__(
        self,
        connection: Connection,
        stream: EventStream,
        address: tuple[str, str, str],
        on_outcome: Callable[[EventLog], None],
    ) -> None:
        self.failures = 0
        self.last_failure = ""
        self.retry_at = 0.0
        self._connection = connection
        self._stream = stream
        self._address = address
        self._on_outcome = on_outcome
        self._tries = 0
        self._lacks_stream = False
        self._sending: dict[Batch, tuple[EventLog, asyncio.Task[None]]] = {}

    def __repr__(self) -> str:
        return f"<BatchSender {'.'.join(self._address)} [{len(self._sending)} in flight]>"

    @property
    def is_connected(self) -> bool:
        return self._connection.state is ConnectionState.CONNECTED

    async def send(self, logs: Collection[EventLog], now: float) -> None:
        """Send what the logs have to say, as far as that is possible now."""
        if now < self.retry_at or not self.is_connected:
            return
        if self._lacks_stream:
            try:
                await ensure_stream(
                    self._connection.jetstream, self._stream, timeout=PUBLISH_TIMEOUT
                )
            except DynbusError as error:
                self.note_failure(error)
                return
            self._lacks_stream = False
        for log in logs:
            self._limit_batches(log)
        for log in logs:
            while (batch := log.next_batch(now)) is not None:
                self._send(log, batch)
                # A resend has many batches, and each takes some milliseconds to encode.
                await asyncio.sleep(0)
                if self.retry_at > now or not self.is_connected:
                    return
        for batch, (log, task) in self._sending.items():
            if not log.is_current(batch):
                task.cancel()

    def try_at_once(self) -> None:
        """What kept from sending is over."""
        self.retry_at = 0.0

    async def close(self) -> None:
        """Give up what is in flight."""
        await end_tasks(*(task for _, task in self._sending.values()))

    def note_failure(self, error: Exception) -> None:
        """Count a failure, and send nothing for a while."""
        self.failures += 1
        self.last_failure = str(error)
        now = monotonic()
        if now >= self.retry_at:
            delay = min(FIRST_RETRY * 2.0**self._tries, MAX_RETRY)
            self._tries = min(self._tries + 1, 10)
            self.retry_at = now + delay * random.uniform(0.5, 1.0)
            logger.warning("%r: %s; again in %.2f s", self, error, self.retry_at - now)

    def _limit_batches(self, log: EventLog) -> None:
        log.limit_batches(self._connection.max_payload - HEADER_ROOM)

    def _send(self, log: EventLog, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._publish(log, batch), name="kv-events-batch")
        self._sending[batch] = (log, task)
        task.add_done_callback(lambda _: self._sending.pop(batch, None))

    async def _publish(self, log: EventLog, batch: Batch) -> None:
        namespace, component, instance_id = self._address
        subject = kv_event_subject(namespace, component, instance_id, log.dp_rank)
        number = f"{instance_id}.{log.dp_rank}.{batch.event_epoch}.{batch.first_id}"
        fields = {headers.PUBLISHED: f"{batch.since:.6f}"} if batch.since else {}
        if batch.awareness:
            fields[headers.KV_AWARENESS] = batch.awareness
        try:
            sequence = await self._connection.jetstream.publish(
                subject, batch.data, message_id=number, headers=fields, timeout=PUBLISH_TIMEOUT
            )
        except DynbusError as error:
            log.failed(batch)
            self._lacks_stream |= isinstance(error, NoStream)
            if isinstance(error, PayloadTooLarge):
                self._limit_batches(log)
            self.note_failure(error)
        else:
            self._tries = 0
            self.last_failure = ""
            log.stored(batch, sequence)
        self._on_outcome(log)
