"""The events of topics at an instance: heard as one of a group, or for itself."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import datetime
from typing import Final

import anyio

from dynbus.actors.calling.jobs import error_line
from dynbus.actors.declaring.actor import Subscription
from dynbus.bus.background import Background, Work
from dynbus.bus.bus import Bus, enter_bus
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, entered, inside_instance
from dynbus.bus.errors import (
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    Migrate,
    only_cause,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.serving.requests import read_context
from dynbus.bus.topics import GroupConfig, GroupStream, Listening, TopicStream
from dynbus.bus.transport import StoredMessage
from dynbus.bus.work_queue import Job, Taker

from .job_runner import MIGRATE_DELAY, NOT_TRIED_AGAIN

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
"""Events that wait for a method which every instance has; further ones are dropped, and told."""


class EventRunner:
    """Runs a method with the events of a topic.

    Args:
        endpoint: of the method: how an event is read, and run.
    """

    def __init__(
        self, bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._endpoint = endpoint
        self._name = EndpointName(instance.namespace, instance.component, endpoint.name)
        self._hop = self._name.hop(instance.instance_id)
        self._topic = TopicStream(
            bus.data, subscription.topic.config(instance.namespace), subscription.topic.misfit
        )
        self._concurrency = endpoint.concurrency or 1
        self._is_draining = False
        self._ended = asyncio.Event()
        self._stopping = anyio.CancelScope()
        self._work: Work | None = None

    def __repr__(self) -> str:
        state = "draining" if self._is_draining else "hearing"
        return f"<{type(self).__name__} {self._name} [{state}]>"

    async def stop(self) -> None:
        """Give back what still runs, and hear no more."""
        self._is_draining = True
        self._stopping.cancel()
        if self._work is not None:
            await self._work.wait()

    async def _try(self, data: bytes, called: Context) -> BaseException | None:
        """Run the method with an event; what it raised.

        Raises:
            InvalidRequest: the event is not of its type.
        """
        event = self._endpoint.decode(data)
        leave = entered(called)
        try:
            with anyio.move_on_after(self._endpoint.timeout) as limit:
                await self._endpoint.invoke(event)
            if limit.cancelled_caught:
                called.kill()
                seconds = self._endpoint.timeout
                return DeadlineExceeded(f"the method took longer than its {seconds:g} s")
        except Exception as error:  # noqa: BLE001 - what users' methods raise
            return error
        finally:
            leave()
        return None

    def _context(self, fields: dict[str, str], event_id: str, tries: int) -> Context:
        fields.setdefault(headers.REQUEST_ID, event_id)
        # Of who published it, which does not wait for it.
        fields.pop(headers.DEADLINE, None)
        called = read_context(
            fields,
            timeout=self._endpoint.timeout,
            hop=self._hop,
            draining=lambda: self._is_draining,
            now=monotonic(),
        )
        called.attempt = tries
        called.idempotency_key = event_id
        current = Context.current()
        if current is not None:
            called.set_trace_headers(current.trace_headers())
        return called


class GroupMember(EventRunner):
    """Takes the events of a group with the other instances of it."""

    def __init__(
        self, bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
    ) -> None:
        super().__init__(bus, instance, endpoint, subscription)
        self._options = subscription.options
        start = subscription.start
        self._group = GroupStream(
            bus,
            self._topic,
            GroupConfig(
                subscription.group,
                self._name,
                subscription.options.queue,
                ordered=subscription.ordered,
                new_only=start == "new",
                start_time=start.timestamp() if isinstance(start, datetime) else None,
            ),
        )
        self._taker: Taker | None = None

    async def start(self, background: Background) -> None:
        """Begin to take events.

        Raises:
            ConfigError, PermissionDenied, Unavailable: the stream or the place of the group is not
                there, and cannot be made.
        """
        await self._group.ensure()
        self._work = background.start(self._take, name=f"events of {self._name}")

    async def drain(self, grace: float) -> None:
        """Take no more events, and let those that run end within `grace` seconds; others go to
        another instance."""
        self._is_draining = True
        if self._work is None:
            return
        with anyio.move_on_after(grace):
            if self._taker is not None:
                await self._taker.drain()
            await self._ended.wait()

    async def _take(self) -> None:
        enter_bus(self._bus)
        try:
            with inside_instance(self._instance), self._stopping:
                async with (
                    self._group.take(self._concurrency) as taker,
                    anyio.create_task_group() as tasks,
                ):
                    self._taker = taker
                    if self._is_draining:
                        await taker.drain()
                    async for job in taker:
                        tasks.start_soon(self._run, job)
        finally:
            self._ended.set()

    async def _run(self, job: Job) -> None:
        try:
            async with job:
                await self._carry_out(job)
        except DynbusError as error:
            # Another instance gets it.
            logger.warning("event %s of %s: %s", job.job_id, self._name, error)

    async def _carry_out(self, job: Job) -> None:
        try:
            called = self._context(dict(job.headers), job.job_id, job.tries)
            raised = await self._try(job.data, called)
        except InvalidRequest as misfit:
            raised = misfit
        if raised is None:
            await job.ack()
            return
        error = only_cause(raised)
        if isinstance(error, Migrate):
            await job.give_back(delay=MIGRATE_DELAY)
            return
        if not isinstance(error, DynbusError):
            logger.error(
                "%s raised in try %d of event %s",
                *(self._name, job.tries, job.job_id),
                exc_info=raised,
            )
        text = error_line(error) if isinstance(error, DynbusError) else error
        if isinstance(error, NOT_TRIED_AGAIN):
            await job.bury(text)
        else:
            await job.nak(text)


class Listener(EventRunner):
    """Hears each event that is published while its instance runs."""

    def __init__(
        self, bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
    ) -> None:
        super().__init__(bus, instance, endpoint, subscription)
        self._heard: deque[StoredMessage] = deque()
        self._changed = asyncio.Event()
        self._dropped = 0
        self._listening: Listening | None = None

    async def start(self, background: Background) -> None:
        """Begin to listen; what is published from now on is heard.

        Raises:
            ConfigError, PermissionDenied, Unavailable: the topic is not there, and cannot be made.
        """
        self._listening = await self._topic.listen(self._hear)
        self._work = background.start(self._run_all, name=f"events of {self._name}")

    async def drain(self, grace: float) -> None:
        """Hear no more, and let what was heard end within `grace` seconds."""
        await self._stop_listening()
        self._is_draining = True
        self._changed.set()
        if self._work is None:
            return
        with anyio.move_on_after(grace):
            await self._ended.wait()

    async def stop(self) -> None:
        await self._stop_listening()
        await super().stop()

    async def _stop_listening(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _hear(self, message: StoredMessage) -> None:
        if len(self._heard) >= MOST_WAITING:
            self._dropped += 1
            if self._dropped == 1:
                logger.error(
                    "%s is %d events behind, and does not get further ones: have it take them as a "
                    "group, or do less in it",
                    *(self._hop, MOST_WAITING),
                )
            return
        self._heard.append(message)
        self._changed.set()

    async def _run_all(self) -> None:
        enter_bus(self._bus)
        try:
            with inside_instance(self._instance), self._stopping:
                async with anyio.create_task_group() as tasks:
                    for _ in range(self._concurrency):
                        tasks.start_soon(self._run_each)
        finally:
            self._ended.set()

    async def _run_each(self) -> None:
        while True:
            while self._heard:
                await self._run(self._heard.popleft())
            if self._is_draining:
                return
            self._changed.clear()
            await self._changed.wait()

    async def _run(self, message: StoredMessage) -> None:
        event_id = message.headers.get(headers.JOB) or str(message.sequence)
        try:
            called = self._context(dict(message.headers), event_id, 1)
            raised = await self._try(message.data, called)
        except InvalidRequest as error:
            logger.warning("event %s of %s: %s", event_id, self._topic.config, error)
            return
        if raised is not None:
            logger.error("%s raised with event %s", self._hop, event_id, exc_info=raised)


def event_runner(
    bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
) -> GroupMember | Listener:
    """What runs a method that hears a topic."""
    kind = GroupMember if subscription.group else Listener
    return kind(bus, instance, endpoint, subscription)
