"""The liveness of the other side of a call, judged by its heartbeats.

Two signals speak against it: silence, where heartbeats are due (they come every
`HEARTBEAT_INTERVAL` while a call is open), and the server's own 503 for a message that found
nobody. Neither is believed blindly: silence counts from the moment on since when the other side
knows of an open call, and not while we are cut off ourselves or have been frozen; a 503 counts
only after a ping on the control lane found nobody either and the other side had time to connect
again. Nor is a heartbeat that comes after a later one: a link that was cut delivers
what it held when it heals, on a connection that its sender has left long ago. One object per
remote side, without I/O or clock.
"""

from __future__ import annotations

import math
from typing import Final

HEARTBEAT_INTERVAL: Final = 0.4
SILENCE_LIMIT: Final = 1.4
GONE_AFTER: Final = 0.8
RECONNECT_GRACE: Final = 2.8
"""Seconds for the other side to come back in after our own reconnection: the 2.5 after which a
process is connected again whose server fell silent, and its way."""


class RemoteLiveness:
    """The evidence about one remote side of calls. Times are seconds of one monotonic clock.

    Args:
        now: when the first call with this remote began.
    """

    __slots__ = ("_absent_since", "_beat", "_grace_until", "_heard", "_missed", "_pinged")

    def __init__(self, now: float) -> None:
        self._beat = 0
        self._heard = now
        self._grace_until = now
        self._absent_since: float | None = None
        self._pinged = False
        # Whether a message to it found nobody since it was heard on the control lane.
        self._missed = False

    def __repr__(self) -> str:
        state = "absent" if self._absent_since is not None else "heard"
        return f"<RemoteLiveness [{state} | heard: {self._heard:.3f}]>"

    def heard(self, now: float) -> bool:
        """A control message of the remote arrived; True when one to it had bounced before."""
        returned = self._missed
        self._missed = False
        self._heard = max(self._heard, now)
        self._absent_since = None
        self._pinged = False
        return returned

    def is_news(self, beat: int) -> bool:
        """True if a heartbeat of this number is no older than all that came before."""
        if beat < self._beat:
            return False
        self._beat = beat
        return True

    def heard_data(self, at: float) -> None:
        """Something of the remote arrived on the data connection at `at`."""
        self._heard = max(self._heard, at)
        if self._absent_since is not None and at > self._absent_since:
            self._absent_since = None

    def is_heard(self, now: float) -> bool:
        """True if there is no sign of its death yet."""
        return now < max(self._heard + SILENCE_LIMIT, self._grace_until)

    def bounced(self) -> bool:
        """A message to the remote found nobody; True when it should be pinged to confirm that."""
        self._missed = True
        if self._pinged or self._absent_since is not None:
            return False
        self._pinged = True
        return True

    def ping_bounced(self, now: float) -> None:
        """The confirming ping found nobody either."""
        self._missed = True
        if self._absent_since is None:
            self._absent_since = now

    def extend(self, until: float) -> None:
        """Judge the remote no sooner than then: we were cut off, or did not run."""
        self._grace_until = max(self._grace_until, until)
        self._absent_since = None
        self._pinged = False

    def silent_since(self, due_since: float | None) -> float | None:
        """Since when nothing has come of the remote that owes heartbeats; None for one that owes
        none, or of which the server says that nobody listens there."""
        if due_since is None or self._absent_since is not None:
            return None
        return max(self._heard, due_since)

    def gone_at(self, due_since: float | None) -> float:
        """From when on the remote is to be treated as dead, unless it is heard before.

        Args:
            due_since: since when it has owed us heartbeats; None while it owes none.
        """
        at = math.inf if self._absent_since is None else self._absent_since + GONE_AFTER
        if due_since is not None:
            at = min(at, max(self._heard, due_since) + SILENCE_LIMIT)
        return max(at, self._grace_until)
