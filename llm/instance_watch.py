"""Figures of an instance beside its calls: lines in `dynbus ps`, figures and metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dynbus.spi import Bus, InstanceName, Metrics, Openable, Readings

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks."""


class InstanceWatch(Openable):
    """Shows one thing of an instance to operators, while in the `async with`.

    A subclass reads it in `look`, which is called twice a second and once at the end, and tells it
    with `show` and `put`.

    Args:
        what: names the thing; an instance may have several of these.
        readings: makes the metrics, by names that `put` takes. Those of several instances in one
            process with the same labels add up.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        what: str,
        readings: Callable[[Metrics], dict[str, Readings]],
    ) -> None:
        super().__init__(bus.background)
        namespace, component, instance_id = name
        # Not the component alone: its own instances show what is about others.
        self._about = f"{namespace}.{component}/{instance_id}"
        self._source = f"{what} of {self._about}"
        self._name = self._counted_as = name
        self._before: Mapping[str, float] = {}
        self._status = bus.status
        self._flight = bus.flight
        self._labels = (("dynbus.namespace", namespace), ("dynbus.component", component))
        metrics = bus.telemetry.metrics if bus.telemetry is not None else None
        self._readings = {} if metrics is None else readings(metrics)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._about}>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                yield
                tasks.cancel_scope.cancel()
            # What came last is counted.
            self.look()
        finally:
            self._status.remove(self._source)
            for readings in self._readings.values():
                readings.remove(self._source)

    async def _run(self) -> None:
        while True:
            self.look()
            await anyio.sleep(LOOK_INTERVAL)

    def look(self) -> None:
        """Show how it is now."""
        raise NotImplementedError

    def show(
        self,
        key: str,
        text: str,
        figures: Mapping[str, float] | None = None,
        instance: InstanceName | None = None,
        sums: Collection[str] = (),
    ) -> None:
        """A line for people, and figures by their names, of this instance unless told.

        Args:
            sums: figures that only grow. Under another name than before, as after a change of what
                an instance serves, they count from then on: it is another instance to others.
        """
        self._status.put(self._source, self._about, {key: text})
        if figures is None:
            return
        shown = instance or self._name
        if shown != self._counted_as:
            self._counted_as, self._before = shown, {name: figures[name] for name in sums}
        grown = {name: figures[name] - was for name, was in self._before.items()}
        self._status.put_figures(self._source, str(shown), {**figures, **grown})

    def record(self, what: str, request_id: str = "", /, **details: str | int) -> None:
        """Have in the flight what has happened to the instance."""
        if self._flight is not None:
            name = self._name
            self._flight.note(name.namespace, what, str(name), request_id, **details)

    def put(self, reading: str, value: float) -> None:
        """The value of a metric."""
        self.put_each(reading, {(): value})

    def put_by(self, reading: str, label: str, values: Mapping[str, float]) -> None:
        """The values of a metric by one more label."""
        self.put_each(reading, {((label, name),): value for name, value in values.items()})

    def put_each(self, reading: str, values: Mapping[tuple[tuple[str, str], ...], float]) -> None:
        """The values of a metric by more labels than those of the instance."""
        if self._readings:
            labelled = {(*self._labels, *more): value for more, value in values.items()}
            self._readings[reading].put(self._source, labelled)
