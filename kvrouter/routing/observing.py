"""Figures of a router for operators: its awareness of the caches, its loads, its decisions.

The labels of its metrics are bounded: the target, and closed lists.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

import anyio

from dynbus import DynbusError
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.spi import (
    Bus,
    Message,
    Metrics,
    Openable,
    Readings,
    monotonic,
    random_id,
)

from .caches import Follower
from .decision import (
    Decision,
    Explanation,
    Question,
    encode_explanation,
    read_question,
    why_subject,
)
from .scheduler import SchedulerStatistics

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at a router."""

AWARENESS_KEY: Final = "cache_aware"
TARGET_KEY: Final = "routes_to"

TOKEN_KINDS: Final = ("prompt", "best", "expected", "compared", "reused")
"""Of which tokens `dynbus.kv.tokens` counts, as `SchedulerStatistics` says."""


class WatchedRouter(Protocol):
    """A router as operators see it."""

    @property
    def follower(self) -> Follower | None: ...
    @property
    def decisions_limit(self) -> int: ...
    def awareness(self) -> CacheAwareness: ...
    def statistics(self) -> SchedulerStatistics: ...
    def decisions(self, request_id: str) -> list[Decision]: ...
    def latest_decisions(self, count: int = 20) -> list[Decision]: ...


class RouterWatch(Openable):
    """Shows a router to operators, while in the `async with`.

    Its awareness of the caches goes to the process's status, to the metrics, and to the log when
    it changes. What it decided is told to clients that ask on `_kv_why`. Entering it raises
    `PermissionDenied` when the server refuses that subject.
    """

    def __init__(self, bus: Bus, namespace: str, component: str, router: WatchedRouter) -> None:
        super().__init__(bus.background)
        self.target = f"{namespace}.{component}"
        self.id = random_id()
        self._bus = bus
        self._router = router
        self._subject = why_subject(namespace, component)
        self._labels: tuple[tuple[str, str], ...] = (
            ("dynbus.namespace", namespace),
            ("dynbus.component", component),
        )
        metrics = bus.telemetry.metrics if bus.telemetry is not None else None
        self._readings = {} if metrics is None else _readings(metrics)
        self._said: CacheAwareness | None = None
        self._logged: str | None = None
        self._looked = False

    def __repr__(self) -> str:
        return f"<RouterWatch {self.target} [{self._said}]>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        subscription = self._bus.data.subscribe(self._subject, self._answer)
        try:
            await self._bus.data.barrier()
            self.look()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                yield
                tasks.cancel_scope.cancel()
        finally:
            subscription.unsubscribe()
            self._bus.status.remove(self.id)
            for readings in self._readings.values():
                readings.remove(self.id)

    async def _run(self) -> None:
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            try:
                self.look()
            except Exception:
                # What is shown would grow old without a word.
                logger.exception("%r: reading the router's state failed", self)

    # Awareness and figures ----------------------------------------------------------------

    def look(self) -> None:
        """Show how the router is now."""
        awareness = self._router.awareness()
        self._log(awareness)
        self._said, self._looked = awareness, True
        self._bus.status.put(
            self.id, self.target, {AWARENESS_KEY: str(awareness), TARGET_KEY: self.target}
        )
        if self._readings:
            self._measure(awareness)

    def _measure(self, awareness: CacheAwareness) -> None:
        source, labels, readings = self.id, self._labels, self._readings
        statistics, follower = self._router.statistics(), self._router.follower
        levels = {
            (*labels, ("dynbus.level", level.value)): float(level is awareness.level)
            for level in AwarenessLevel
        }
        tokens = {kind: getattr(statistics, f"{kind}_tokens") for kind in TOKEN_KINDS}
        counts = {(*labels, ("dynbus.kind", kind)): count for kind, count in tokens.items()}
        readings["cache_aware"].put(source, levels)
        readings["decisions"].put(source, {labels: statistics.decisions})
        readings["waiting"].put(source, {labels: statistics.waiting})
        readings["tokens"].put(source, counts)
        if tokens["prompt"]:
            readings["hit_rate"].put(source, {labels: tokens["expected"] / tokens["prompt"]})
        if isinstance(follower, IndexFollower):
            status = follower.status()
            readings["resyncs"].put(source, {labels: status.requests})
            readings["staleness"].put(source, {labels: status.staleness.p99})
            readings["blocks"].put(source, {labels: follower.index.statistics().blocks})

    def _log(self, awareness: CacheAwareness) -> None:
        shape = _shape(awareness)
        if shape == self._logged:
            return
        follows = self._router.follower is not None
        intended = AwarenessLevel.EXACT if follows else AwarenessLevel.APPROXIMATE
        if awareness.level is not intended and follows and not self._looked:
            # An index begins empty: worth a warning if it is so at the next look as well.
            return
        expected = self._logged is None and awareness.level is intended
        level = logging.INFO if expected else logging.WARNING
        was = f", was {self._said}" if self._logged is not None else ""
        logger.log(level, "%s: cache_aware is %s%s", self.target, awareness, was)
        self._logged = shape

    # Questions ----------------------------------------------------------------------------

    def _answer(self, message: Message) -> None:
        answer_question(self, self._bus, message, self._explain)

    def _explain(self, question: Question, most_bytes: int) -> bytes:
        """The router's knowledge of a request, or its recent decisions."""
        now = monotonic()
        router = self._router
        limit = router.decisions_limit
        kept = router.latest_decisions(limit)
        asked = (
            router.decisions(question.request_id)
            if question.request_id
            else kept[: question.latest]
        )
        explanation = Explanation(
            self.id,
            own_process(),
            self.target,
            str(router.awareness()),
            len(kept),
            limit,
            round(now - kept[-1].decided_at, 3) if kept else None,
        )
        return encode_explanation(explanation, asked, now, most_bytes)


def own_process() -> str:
    """The name of this process in explanations."""
    return f"{socket.gethostname()}:{os.getpid()}"


def answer_question(
    who: object,
    bus: Bus,
    message: Message,
    explain: Callable[[Question, int], bytes | None],
) -> None:
    """Answer what `dynbus why` asks.

    Args:
        who: answers, for the log.
        explain: makes the answer to a question, of so many bytes at most; None for no answer.
    """
    question = read_question(message.data)
    if question is None:
        bus.drop_malformed()
        return
    if not bus.may_answer(message):
        return
    try:
        data = explain(question, bus.data.max_payload)
        if data is not None:
            bus.data.publish(message.reply, data)
    except (DynbusError, ValueError) as error:
        logger.warning("%r: %s was not answered: %s", who, question, error)


def _shape(awareness: CacheAwareness) -> str:
    """The text without its numbers, which stays the same while only these change."""
    return re.sub(r"\d+", "#", str(awareness))


def _readings(metrics: Metrics) -> dict[str, Readings]:
    """The measurements of routers."""
    return {
        "cache_aware": metrics.gauge(
            "kv.cache_aware", "{router}", "Routers, by how far they know the caches."
        ),
        "decisions": metrics.counter("kv.decisions", "{decision}", "Requests routed."),
        "tokens": metrics.counter(
            "kv.tokens", "{token}", "Prompt tokens of routed requests, by what they are."
        ),
        "hit_rate": metrics.gauge(
            "kv.hit_rate", "1", "Share of prompt tokens expected in the chosen cache.", max
        ),
        "waiting": metrics.gauge("kv.waiting", "{request}", "Requests in routers' queues."),
        "resyncs": metrics.counter("kv.resyncs", "{request}", "Resyncs asked for."),
        "blocks": metrics.gauge("kv.index.blocks", "{block}", "Blocks held in the index."),
        "staleness": metrics.gauge(
            "kv.staleness", "s", "Age of events when applied, 99th percentile.", max
        ),
    }
