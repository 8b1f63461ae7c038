"""The decisions of a job that goes on with what its earlier tries have finished, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final

import msgspec

from dynbus.bus.errors import DynbusError
from dynbus.bus.work_queue import RunPhase, RunState


class StepMismatch(DynbusError):
    """Raised when a job reaches another step than the one that it had finished at this place."""

    code = "StepMismatch"


STEP: Final = "step"
SLEEP: Final = "sleep"
SIGNAL: Final = "signal"


class FinishedStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step of a job that is not done again.

    Attributes:
        kind: `STEP`, `SLEEP` or `SIGNAL`.
        name: as the handler gives it; empty for a sleep.
        result: encoded; of a sleep when it ends, in Unix seconds by the server's clock.
        sequence: of the signal that it took; 0 for none.
        timed_out: whether it waited for a signal that did not come in time.
    """

    kind: str
    name: str
    result: msgspec.Raw
    sequence: int = 0
    timed_out: bool = False


def step_label(kind: str, name: str) -> str:
    """The name of a step in messages."""
    return f"{kind} {name!r}" if name else kind


class StepHistory:
    """The finished steps of a job, and the progress of the present try among them.

    Args:
        finished: by their places, from 0 on, in the order in which the handler begins them.
    """

    def __init__(self, finished: Mapping[int, FinishedStep]) -> None:
        self._finished = dict(finished)
        self._reached = 0

    def __repr__(self) -> str:
        return f"<StepHistory [{self._reached} reached | {len(self._finished)} finished]>"

    def reach(self, kind: str, name: str) -> tuple[int, FinishedStep | None]:
        """The place of the next step, and what it gave where it is finished.

        Raises:
            StepMismatch: another step was finished at this place.
        """
        place = self._reached
        self._reached += 1
        return place, self.finished(place, kind, name)

    def finished(self, place: int, kind: str, name: str) -> FinishedStep | None:
        """The result of the step at a place; None where it is not finished.

        Raises:
            StepMismatch: another step was finished there.
        """
        step = self._finished.get(place)
        if step is not None and (step.kind, step.name) != (kind, name):
            raise StepMismatch(
                f"step {place + 1} of this job was {step_label(step.kind, step.name)} when it "
                f"ran before, and is {step_label(kind, name)} now: a handler that has changed may "
                "add steps behind those that are finished, and neither reorder nor rename these"
            )
        return step

    def finish(self, place: int, step: FinishedStep) -> None:
        """A step is finished."""
        self._finished[place] = step

    def taken_signals(self, name: str) -> int:
        """The sequence of the last signal of a name that a step took; 0 for none."""
        return max(
            (
                step.sequence
                for step in self._finished.values()
                if step.kind == SIGNAL and step.name == name
            ),
            default=0,
        )


class Begin(Enum):
    """The decision of a taker about a message of a job that has waited."""

    RUN = "run"
    CLAIM = "claim"
    """Run it once the record says so."""
    DROP = "drop"
    """Another message of the job runs it, or will."""


def how_to_begin(state: RunState | None, own: int, queued: Collection[int]) -> Begin:
    """Decide about the message `own` of a job.

    Args:
        queued: the sequences of all messages of the job that are in the queue.
    """
    if state is None or (state.phase is RunPhase.RUNNING and state.sequence == own):
        return Begin.RUN
    if queued and own not in queued:
        # It was handed out once more, and then dropped for another one: it would go on, and leave
        # the job without a message.
        return Begin.DROP
    if state.phase is RunPhase.RUNNING:
        # A message that is gone runs nothing: its copy goes on in its place.
        return Begin.DROP if state.sequence in queued else Begin.CLAIM
    if (
        state.phase is RunPhase.WOKEN
        and state.sequence == own
        and any(one != own for one in queued)
    ):
        return Begin.DROP
    return Begin.CLAIM
