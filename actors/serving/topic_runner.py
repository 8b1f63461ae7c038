"""The events of topics at an instance: heard as one of a group, or for itself."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import partial
from typing import Final

import anyio

from dynbus.actors.calling.jobs import error_line
from dynbus.actors.declaring.actor import Subscription
from dynbus.bus.background import Background
from dynbus.bus.bus import Bus
from dynbus.bus.errors import DynbusError, InvalidRequest, Migrate, only_cause
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.topics import Event, EventEnd, GroupConfig, GroupStream, Listening, TopicStream
from dynbus.bus.work_queue import Job, Taker

from .event_backlog import EventBacklog
from .handler_runner import MIGRATE_DELAY, NOT_TRIED_AGAIN, HandlerRunner, TakingRunner

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
MOST_BYTES: Final = 64 * 1024 * 1024
"""Events, and bytes of them, that wait for a method which every instance has."""


class GroupMember(TakingRunner):
    """Takes the events of a group with the other instances of it."""

    def __init__(
        self, bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
    ) -> None:
        super().__init__(bus, instance, endpoint)
        start = subscription.start
        self._group = GroupStream(
            bus,
            _stream(bus, instance, subscription),
            GroupConfig(
                subscription.group,
                self._name,
                subscription.options,
                new_only=start == "new",
                start_time=start.timestamp() if isinstance(start, datetime) else None,
            ),
        )

    async def start(self, background: Background) -> None:
        await self._once_answered(self._group.ensure)
        self._start_work(background, "events")

    def _taking(self) -> AbstractAsyncContextManager[Taker]:
        return self._group.take(self._endpoint.concurrency or 1)

    async def _carry_out(self, job: Job) -> None:
        try:
            called = self._context(dict(job.headers), job.job_id, job.tries)
            await self._invoke(self._endpoint.decode(job.data), called)
        except Exception as raised:  # noqa: BLE001 - what users' methods raise
            await self._failed(job, raised)
        else:
            await job.ack()

    async def _failed(self, job: Job, raised: BaseException) -> None:
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


class Listener(HandlerRunner):
    """Hears each event that is published while its instance runs."""

    def __init__(
        self, bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
    ) -> None:
        super().__init__(bus, instance, endpoint)
        self._topic = _stream(bus, instance, subscription)
        self._heard = EventBacklog(MOST_WAITING, MOST_BYTES)
        self._changed = asyncio.Event()
        self._listening: Listening | None = None

    async def start(self, background: Background) -> None:
        self._listening = await self._once_answered(partial(self._topic.listen, self._hear))
        self._start_work(background, "events")

    async def stop(self) -> None:
        await self._stop_listening()
        await super().stop()

    async def _take_no_more(self) -> None:
        await self._stop_listening()
        self._changed.set()

    async def _stop_listening(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _hear(self, event: Event) -> None:
        was_behind = self._heard.is_behind
        if self._heard.add(event):
            self._changed.set()
            return
        self._topic.figures.count(EventEnd.DROPPED)
        if not was_behind:
            logger.error(
                "%s is %d events behind, and misses further ones while it is: have it take them as "
                "a group, or do less in it",
                *(self._hop, len(self._heard)),
            )

    async def _run_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(self._endpoint.concurrency or 1):
                tasks.start_soon(self._run_each)

    async def _run_each(self) -> None:
        while True:
            while self._heard:
                await self._run(self._heard.take())
                if dropped := self._heard.caught_up():
                    logger.error("%s has caught up, and missed %d events", self._hop, dropped)
            if self._is_draining:
                return
            self._changed.clear()
            await self._changed.wait()

    async def _run(self, event: Event) -> None:
        figures = self._topic.figures
        seen = figures.hearing(self._name, event.headers, event.event_id)
        token = None if seen is None else seen.activate()
        failure: BaseException | None = None
        try:
            called = self._context(dict(event.headers), event.event_id, 1)
            if seen is not None:
                called.set_trace_headers(seen.trace_headers)
            await self._invoke(self._endpoint.decode(event.data), called)
        except InvalidRequest as error:
            failure = error
            logger.warning("event %s of %s: %s", event.event_id, self._topic.config, error)
        except Exception as error:
            failure = error
            logger.exception("%s raised with event %s", self._hop, event.event_id)
        finally:
            if seen is not None:
                seen.deactivate(token)
                seen.end(failure)
        figures.count(EventEnd.HEARD if failure is None else EventEnd.FAILED)


def _stream(bus: Bus, instance: InstanceName, subscription: Subscription) -> TopicStream:
    topic = subscription.topic
    config = topic.config(instance.namespace)
    return TopicStream(bus.data, config, topic.misfit, bus.telemetry)


def event_runner(
    bus: Bus, instance: InstanceName, endpoint: Endpoint, subscription: Subscription
) -> GroupMember | Listener:
    """The object that runs a method that hears a topic."""
    kind = GroupMember if subscription.group else Listener
    return kind(bus, instance, endpoint, subscription)
