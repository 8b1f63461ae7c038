"""Whether the other side of a call is still there.

Two signals speak against it: silence (heartbeats come every `HEARTBEAT_INTERVAL` while calls
are open) and the server's own 503 for a message that found nobody. Neither is believed
blindly: silence does not count while we are cut off ourselves or have been frozen, and a 503
only after a ping on the control lane found nobody either and the other side had time to
connect again. One object per remote side, without I/O or clock.
"""

from __future__ import annotations

from typing import Final

HEARTBEAT_INTERVAL: Final = 0.4
SILENCE_LIMIT: Final = 1.4
GONE_AFTER: Final = 0.8
RECONNECT_GRACE: Final = 3.0


class RemoteLiveness:
    """The evidence about one remote side of calls. Times are seconds of one monotonic clock.

    Args:
        now: when the first call with this remote began.
    """

    __slots__ = ("_absent_since", "_heard", "_pinged")

    def __init__(self, now: float) -> None:
        self._heard = now
        self._absent_since: float | None = None
        self._pinged = False

    def __repr__(self) -> str:
        state = "absent" if self._absent_since is not None else "heard"
        return f"<RemoteLiveness [{state} | heard: {self._heard:.3f}]>"

    @property
    def heard_at(self) -> float:
        """When the remote was last heard, or was given time until."""
        return self._heard

    def heard(self, now: float) -> None:
        """A message of the remote arrived."""
        self._heard = max(self._heard, now)
        self._absent_since = None
        self._pinged = False

    def bounced(self) -> bool:
        """A message to the remote found nobody; True when it should be pinged to confirm that."""
        if self._pinged or self._absent_since is not None:
            return False
        self._pinged = True
        return True

    def ping_bounced(self, now: float) -> None:
        """The confirming ping found nobody either."""
        if self._absent_since is None and now >= self._heard:
            self._absent_since = now

    def extend(self, until: float) -> None:
        """Give the remote time until then: we were cut off, or did not run."""
        self._heard = max(self._heard, until)
        self._absent_since = None
        self._pinged = False

    def is_gone(self, now: float) -> bool:
        """Whether the remote is to be treated as dead."""
        if self._absent_since is not None and now - self._absent_since >= GONE_AFTER:
            return True
        return now - self._heard >= SILENCE_LIMIT
