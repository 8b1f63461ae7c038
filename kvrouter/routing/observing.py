"""What operators see of a router: its awareness of the caches, its figures, its decisions."""

from __future__ import annotations

import asyncio
import logging
import re
from types import TracebackType
from typing import Final, Protocol

from dynbus.bus.bus import Bus
from dynbus.bus.cleanup import end_tasks, finish
from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import is_safe_reply
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.transport import Message, Subscription
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness

from .decision import Decision
from .router_metrics import RouterMetrics
from .scheduling import Follower, SchedulerStatistics
from .why import Answer, Question, encode_answer, process_name, read_question, tell, why_subject

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at a router."""

AWARENESS_KEY: Final = "cache_aware"
TARGET_KEY: Final = "routes_to"


class WatchedRouter(Protocol):
    """A router as operators see it."""

    @property
    def follower(self) -> Follower | None: ...
    @property
    def decisions_limit(self) -> int: ...
    def awareness(self) -> CacheAwareness: ...
    def statistics(self) -> SchedulerStatistics | None: ...
    def decisions(self, request_id: str) -> list[Decision]: ...
    def latest_decisions(self, count: int = 20) -> list[Decision]: ...


class RouterWatch:
    """Shows a router to operators, while in the `async with`.

    Its awareness of the caches goes to the process's status, to the metrics, and to the log when
    it changes. What it decided is told to whoever asks on `_kv_why`.
    """

    def __init__(self, bus: Bus, namespace: str, component: str, router: WatchedRouter) -> None:
        self.target = f"{namespace}.{component}"
        self.id = random_id()
        self._bus = bus
        self._router = router
        self._subject = why_subject(namespace, component)
        metrics = bus.telemetry.metrics if bus.telemetry is not None else None
        self._metrics = (
            None if metrics is None else RouterMetrics(metrics, self.id, namespace, component)
        )
        self._said: CacheAwareness | None = None
        self._logged: str | None = None
        self._looked = False
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RouterWatch {self.target} [{self._said}]>"

    async def __aenter__(self) -> RouterWatch:
        """Begin.

        Raises:
            PermissionDenied: the server refuses the subject of questions.
        """
        self._subscription = self._bus.data.subscribe(self._subject, self._answer)
        try:
            await self._bus.data.barrier()
            self.look()
        except BaseException:
            self._subscription.unsubscribe()
            raise
        self._task = asyncio.create_task(self._run(), name=f"watch of {self.target}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await finish(self._close())

    async def _close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)
        if self._subscription is not None:
            self._subscription.unsubscribe()
        self._bus.status.remove(self.id)
        if self._metrics is not None:
            self._metrics.remove()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            try:
                self.look()
            except Exception:
                # What is shown would grow old without a word.
                logger.exception("%r: a look at the router failed", self)

    # Awareness and figures ----------------------------------------------------------------

    def look(self) -> None:
        """Show how the router is now."""
        awareness = self._router.awareness()
        self._log(awareness)
        self._said, self._looked = awareness, True
        self._bus.status.put(
            self.id, self.target, {AWARENESS_KEY: str(awareness), TARGET_KEY: self.target}
        )
        if self._metrics is not None:
            self._metrics.put(awareness, self._router.statistics(), self._router.follower)

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
        question = read_question(message.data)
        if question is None:
            self._bus.drop(DropReason.MALFORMED)
            return
        if not is_safe_reply(message.reply, self._bus.config.reply_prefixes):
            self._bus.drop(DropReason.UNSAFE_REPLY if message.reply else DropReason.NO_REPLY)
            return
        try:
            data = encode_answer(self.explain(question), self._bus.data.max_payload)
            self._bus.data.publish(message.reply, data)
        except (DynbusError, ValueError) as error:
            logger.warning("%r: %s was not answered: %s", self, question, error)

    def explain(self, question: Question) -> Answer:
        """What the router knows of a request, or has decided of late."""
        now = monotonic()
        router = self._router
        limit = router.decisions_limit
        kept = router.latest_decisions(limit)
        asked = (
            router.decisions(question.request_id)
            if question.request_id
            else kept[: question.latest]
        )
        told = tell(asked, now)
        return Answer(
            self.id,
            process_name(),
            self.target,
            str(router.awareness()),
            len(kept),
            limit,
            round(now - kept[-1].decided_at, 3) if kept else None,
            told,
            len(asked) - len(told),
        )


def _shape(awareness: CacheAwareness) -> str:
    """What is the same while only numbers in it change."""
    return re.sub(r"\d+", "#", str(awareness))
