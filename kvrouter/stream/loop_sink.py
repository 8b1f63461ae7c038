"""The sink of events for an engine's reader on the publisher's own event loop: into its logs,
without a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynbus.kvrouter.events import KvEvent
from dynbus.spi import unix_time

from .awareness import CacheAwareness
from .cache_mirror import CacheMirror
from .event_log import EventLog


class LoopSink:
    """Publishes what `cache` has taken in. To be called on the publisher's event loop only.

    Nothing is handed over, so nothing is checked or copied: hashes must not change afterwards.

    Args:
        log: that of a rank.
        takes: whether what is said now will be published.
        wake: called when there is something to publish.
    """

    def __init__(
        self, log: Callable[[int], EventLog], takes: Callable[[], bool], wake: Callable[[], None]
    ) -> None:
        self._log = log
        self._takes = takes
        self._wake = wake

    def cache(self, dp_rank: int) -> CacheMirror:
        """The blocks that a rank holds. The publisher takes the events in there first."""
        return self._log(dp_rank).mirror

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int) -> None:
        """Say events that `cache` has taken in, in order.

        Raises:
            RuntimeError: the publisher was not entered, or entering it failed.
        """
        if self._takes():
            self._log(dp_rank).tell(events, unix_time())
            self._wake()

    def reset(self, dp_rank: int) -> None:
        """Forget what was published of a rank.

        Raises:
            RuntimeError: the publisher was not entered, or entering it failed.
        """
        if self._takes():
            self._log(dp_rank).forget()
            self._wake()

    def set_awareness(self, awareness: CacheAwareness, *, dp_rank: int) -> None:
        """Say how far a rank's events can be relied on; also before the publisher is entered."""
        self._log(dp_rank).set_awareness(awareness)
        self._wake()
