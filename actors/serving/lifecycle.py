"""The life of an instance, as a table.

NEW ──> STARTING ──> READY ──> DRAINING ──> STOPPED
           └────────────────────────────────> STOPPED   (on_start raised)
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class InstanceState(Enum):
    """Where an instance is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS: Final = {
    InstanceState.NEW: frozenset({InstanceState.STARTING}),
    InstanceState.STARTING: frozenset({InstanceState.READY, InstanceState.STOPPED}),
    InstanceState.READY: frozenset({InstanceState.DRAINING, InstanceState.STOPPED}),
    InstanceState.DRAINING: frozenset({InstanceState.STOPPED}),
    InstanceState.STOPPED: frozenset[InstanceState](),
}


class Lifecycle:
    """The current state, which changes along the table only."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = InstanceState.NEW

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state.value}>"

    def to(self, state: InstanceState) -> None:
        """Move on.

        Raises:
            RuntimeError: the table has no such step.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an instance cannot go from {self.state.value} to {state.value}")
        self.state = state
