"""Figures and spans of a work queue: outcomes of jobs, waits, depth, and the traces that jobs
belong to.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Final

import anyio

from dynbus.bus.background import Background
from dynbus.bus.context import Context
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.telemetry.metrics import Labels, Metrics
from dynbus.bus.telemetry.telemetry import CallObservation, Telemetry
from dynbus.bus.telemetry.trace_context import trace_fields

from .job import JobEnd, QueueDepth

logger = logging.getLogger(__name__)

TRIES: Final = (1, 2, 3, 4, 5, 10, 20, 50)
MEASURE_INTERVAL: Final = 5.0
"""Seconds between two questions for the depth of a queue that is taken from."""


class QueueFigures:
    """The counters of one process for a queue; metrics only with telemetry.

    Attributes:
        ended: how many jobs left their takers, by how they did.
    """

    def __init__(self, telemetry: Telemetry | None, name: EndpointName) -> None:
        self.ended: Counter[JobEnd] = Counter()
        self._telemetry = telemetry
        self._metrics: Metrics | None = None if telemetry is None else telemetry.metrics
        self._name = name
        self._labels: Labels = (
            ("dynbus.namespace", name.namespace),
            ("dynbus.component", name.component),
            ("dynbus.endpoint", name.endpoint),
        )

    def __repr__(self) -> str:
        return f"<QueueFigures {self._name}>"

    def put(self) -> None:
        """A job was put."""
        self._count("put")

    def putting(self, job_id: str) -> AbstractContextManager[Mapping[str, str]]:
        """A span while the block runs, of the caller's trace, and what carries that trace on."""
        parent = Context.current()
        if self._telemetry is None:
            return nullcontext({} if parent is None else parent.trace_headers())
        return self._span(self._telemetry.put_job(self._name, job_id=job_id, parent=parent))

    @contextmanager
    def _span(self, put: CallObservation) -> Generator[Mapping[str, str]]:
        try:
            yield put.trace_headers
        except BaseException as error:
            put.end(error)
            raise
        put.end()

    def attempt(
        self, headers: Mapping[str, str], job_id: str, tries: int
    ) -> CallObservation | None:
        """An attempt at a job begins, in the trace that its headers carry."""
        if self._telemetry is None:
            return None
        fields = trace_fields(headers)
        return self._telemetry.attempt(self._name, fields, job_id=job_id, tries=tries)

    def taken(self, waited: float | None) -> None:
        """A job was handed out.

        Args:
            waited: seconds since it was put, by the server's clock and ours; None for one that was
                handed out before.
        """
        self._count("taken")
        if self._metrics is not None and waited is not None:
            histogram = self._metrics.histogram(
                "work_queue.wait.duration", "Seconds until a job was handed out for the first time."
            )
            histogram.record(max(0.0, waited), dict(self._labels))

    def left(self, end: JobEnd, tries: int = 0) -> None:
        """A job has left its taker.

        Args:
            tries: how often it was handed out, where it is over with it.
        """
        self.ended[end] += 1
        self._count(str(end))
        if self._metrics is not None and tries and end in (JobEnd.DONE, JobEnd.DEAD):
            histogram = self._metrics.histogram(
                "work_queue.tries",
                "Tries of jobs that are done, or failed for good.",
                unit="{try}",
                bounds=TRIES,
            )
            histogram.record(tries, dict((*self._labels, ("dynbus.result", str(end)))))

    def _count(self, event: str) -> None:
        if self._metrics is not None:
            tally = self._metrics.tally(
                "work_queue.jobs", "{job}", "Jobs of work queues, by what became of them."
            )
            tally.add((*self._labels, ("dynbus.result", event)))

    @asynccontextmanager
    async def measured(
        self,
        background: Background,
        depth: Callable[[], Awaitable[QueueDepth]],
        oldest_age: Callable[[], Awaitable[float | None]],
    ) -> AsyncGenerator[None]:
        """Measure the depth of the queue, and the age of its oldest job, while the block runs."""
        if self._metrics is None:
            yield
            return
        # Each process that takes tells the depth of the whole queue.
        gauge = self._metrics.gauge(
            "work_queue.depth", "{job}", "Jobs that a work queue holds, by state.", max
        )
        ages = self._metrics.gauge(
            "work_queue.oldest.age", "s", "Seconds since the oldest job was stored.", max
        )
        source = random_id()

        async def measure() -> None:
            while True:
                try:
                    counts = await depth()
                    age = await oldest_age()
                    if age is not None:
                        ages.put(source, {self._labels: age})
                except DynbusError as error:
                    logger.debug("the depth of %s is not known: %s", self._name, error)
                else:
                    states = {"waiting": counts.waiting, "held": counts.held}
                    gauge.put(
                        source,
                        {
                            (*self._labels, ("dynbus.state", state)): count
                            for state, count in states.items()
                        },
                    )
                await anyio.sleep(MEASURE_INTERVAL)

        work = background.start(measure, name=f"measure {self._name}")
        try:
            yield
        finally:
            # It may be about to tell what it was answered.
            with anyio.CancelScope(shield=True):
                await work.end()
            gauge.remove(source)
            ages.remove(source)
