"""`ServerClock`: the server's time of day, without I/O or clock."""

from __future__ import annotations


class ServerClock:
    """The server's time of day as its messages tell it, carried on by the own monotonic clock.

    No other host's time of day has a part in it. It is never later than the server's own: what a
    message says is as old as the message was on its way. Times are Unix seconds by the server, and
    seconds on the own monotonic clock.
    """

    __slots__ = ("_ahead", "_set_at")

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._set_at = 0.0

    def __repr__(self) -> str:
        return f"<ServerClock [set at: {self._set_at:.3f}]>"

    def set(self, unix: float, now: float) -> None:
        """An answer came that the server gave at `unix`: what it said before does not count any
        more, since its clock may have been set."""
        self._ahead = unix - now
        self._set_at = now

    def stored(self, unix: float, now: float) -> None:
        """A message came that the server stored at `unix`."""
        if self._ahead is None or unix - now > self._ahead:
            self._ahead = unix - now

    def age(self, now: float) -> float:
        """Seconds since the server was last asked."""
        return now - self._set_at

    def unix(self, now: float) -> float:
        """The least time that the server's clock can show.

        Raises:
            ValueError: the server has told nothing yet.
        """
        if self._ahead is None:
            raise ValueError("the server has not told its time yet")
        return now + self._ahead
