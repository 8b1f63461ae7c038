"""The calls of a process that are open, the instances at which they are, and the window (bytes that
may be unread) of the next one.

A plain object without I/O or clock, and the only one that changes these tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias

from dynbus.bus.protocol.names import EndpointName, InstanceName

from .pending_call import PendingCall
from .remote_instance import RemoteInstance

SMALLEST_WINDOW: Final = 16 * 1024
WINDOW_SHARE: Final = 8
"""Of what is left of the connection's window, a call may have one part in so many."""
MAX_IDLE_REMOTES: Final = 1024

Remote: TypeAlias = RemoteInstance[PendingCall]


class OpenCalls:
    """The open calls by the remotes that they are at.

    Args:
        by_incarnation: the instances as control batches name them; it is kept up here.
        make_remote: an instance that was not called yet.
        stream_window: bytes of items that may be unread of one call.
        connection_window: the same of all calls together, about.

    Attributes:
        calls: by number.
    """

    def __init__(
        self,
        by_incarnation: dict[str, Remote],
        make_remote: Callable[[InstanceName], Remote],
        *,
        stream_window: int,
        connection_window: int,
    ) -> None:
        self.calls: dict[int, PendingCall] = {}
        self._by_incarnation = by_incarnation
        # An id alone may be another's, too.
        self._by_name: dict[tuple[str, str, str], Remote] = {}
        self._make_remote = make_remote
        self._number = 0
        self._stream_window = stream_window
        self._window_left = connection_window

    def __repr__(self) -> str:
        return f"<OpenCalls [{len(self.calls)} at {len(self._by_name)} instances]>"

    def next_number(self) -> int:
        """A number that no other call had."""
        self._number += 1
        return self._number

    def window(self) -> int:
        """Bytes of items that may be unread of the next call."""
        share = self._window_left // WINDOW_SHARE
        if share >= self._stream_window:
            return self._stream_window
        return min(self._stream_window, max(SMALLEST_WINDOW, share))

    def add(self, call: PendingCall) -> None:
        """A call is sent."""
        self.calls[call.number] = call
        call.remote.calls[call.number] = call
        self._window_left -= call.reader.window

    def remove(self, call: PendingCall) -> bool:
        """A call has ended; False for one that had already."""
        if call.number not in self.calls:
            return False
        del self.calls[call.number]
        del call.remote.calls[call.number]
        call.remote.done.append((call.number, call.secret))
        self._window_left += call.reader.window
        return True

    def remotes(self) -> list[Remote]:
        """The instances that were called lately."""
        return list(self._by_name.values())

    def find_remote(self, name: InstanceName) -> Remote | None:
        return self._by_name.get(name)

    def remote(self, endpoint: EndpointName, instance_id: str) -> Remote:
        """An instance of an endpoint; those that nothing is open at make room for a new one."""
        namespace, component, _ = endpoint
        # A name is equal to the tuple of its parts, which takes less time to make.
        remote = self._by_name.get((namespace, component, instance_id))
        if remote is None:
            name = InstanceName(namespace, component, instance_id)
            if len(self._by_name) >= MAX_IDLE_REMOTES:
                for idle in [one for one in self._by_name.values() if not one.has_work()]:
                    self.forget(idle)
            remote = self._by_name[name] = self._make_remote(name)
            self._by_incarnation[remote.incarnation] = remote
        return remote

    def forget(self, remote: Remote) -> None:
        """An instance is gone; what it keeps it keeps in vain."""
        remote.done.clear()
        if self._by_incarnation.pop(remote.incarnation, None) is not None:
            del self._by_name[remote.name]

    def count_by_instance(self) -> dict[str, int]:
        """Open calls by instance id."""
        counts = Counter[str]()
        for remote in self._by_name.values():
            if remote.calls:
                counts[remote.name.instance_id] += len(remote.calls)
        return dict(counts)
