"""The life of a transfer, as a table.

A transfer is one handle of NIXL. What counts is whether its local memory is *quiet*: whether it is
certain that nothing is written to it, or read from it, any more. NIXL cannot revoke a transfer:
after a cancel, or a deadline, bytes may arrive for as long as the link's agent lives. So a transfer
that was given up before it ended is ABANDONED, and becomes QUIET when its handle says that it has
ended, or when its link was destroyed.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(Enum):
    """The state of a transfer."""

    NEW = "new"
    """Nothing was given to NIXL."""
    POSTING = "posting"
    """A thread is inside of NIXL's post, which may copy everything before it returns."""
    ACTIVE = "active"
    """Posted; the handle says that it goes on."""
    DONE = "done"
    """All bytes are there."""
    FAILED = "failed"
    """It ended without all bytes, and none will arrive any more."""
    ABANDONED = "abandoned"
    """Nobody waits for it any more, and bytes may still arrive."""
    QUIET = "quiet"
    """It was given up, and no byte will arrive any more."""


class Event(Enum):
    """An event in the life of a transfer."""

    POST = "post"
    """A thread begins to post it."""
    POSTED = "posted"
    """The post returned, and the handle goes on."""
    FINISHED = "finished"
    """The handle says DONE."""
    BROKE = "broke"
    """The handle says that the transfer itself has failed and is over."""
    LOST = "lost"
    """The handle cannot be asked any more: its link's end alone proves the memory quiet."""
    CANCEL = "cancel"
    """It was cancelled, or its time is over."""
    DESTROYED = "destroyed"
    """The agent of its link was destroyed, and no thread is inside of it."""


class ImpossibleEventError(AssertionError):
    """Raised for an event that cannot happen in a state: a bug in its reporter."""


_FINAL: Final = (State.DONE, State.FAILED, State.QUIET)

TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.NEW, Event.POST): State.POSTING,
    (State.NEW, Event.CANCEL): State.QUIET,
    (State.NEW, Event.DESTROYED): State.FAILED,
    (State.POSTING, Event.POSTED): State.ACTIVE,
    (State.POSTING, Event.FINISHED): State.DONE,
    (State.POSTING, Event.BROKE): State.FAILED,
    (State.POSTING, Event.LOST): State.ABANDONED,
    (State.POSTING, Event.CANCEL): State.ABANDONED,
    (State.POSTING, Event.DESTROYED): State.FAILED,
    (State.ACTIVE, Event.FINISHED): State.DONE,
    (State.ACTIVE, Event.BROKE): State.FAILED,
    (State.ACTIVE, Event.LOST): State.ABANDONED,
    (State.ACTIVE, Event.CANCEL): State.ABANDONED,
    (State.ACTIVE, Event.DESTROYED): State.FAILED,
    # Its post may return after it was given up.
    (State.ABANDONED, Event.POSTED): State.ABANDONED,
    (State.ABANDONED, Event.FINISHED): State.QUIET,
    (State.ABANDONED, Event.BROKE): State.QUIET,
    (State.ABANDONED, Event.LOST): State.ABANDONED,
    (State.ABANDONED, Event.CANCEL): State.ABANDONED,
    (State.ABANDONED, Event.DESTROYED): State.QUIET,
    # Cancellers, and destroyers of a link, need not know what has ended.
    **{(state, event): state for state in _FINAL for event in (Event.CANCEL, Event.DESTROYED)},
}
"""The next state by state and event; pairs that are not in it cannot happen."""


def after(state: State, event: Event) -> State:
    """The state after an event.

    Raises:
        ImpossibleEventError: the event cannot happen in this state.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise ImpossibleEventError(f"a transfer that is {state.value} cannot be {event.value}")
    return following


def is_over(state: State) -> bool:
    """True if nobody waits for its result any more."""
    return state in _FINAL or state is State.ABANDONED


def is_posted(state: State) -> bool:
    """True if NIXL has some of it."""
    return state in (State.POSTING, State.ACTIVE, State.ABANDONED)


def is_quiet(state: State) -> bool:
    """True if its local memory may be used for something else."""
    return state in _FINAL or state is State.NEW
