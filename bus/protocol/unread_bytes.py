"""Bytes of results that an instance keeps because their readers do not have them yet.

Plain objects that count. All clients of an instance share one limit. Each may hold as much as
a quarter of what is free, so the first that does not read leaves most of the room to others, and
the next ones get less each: there is always room for one that reads.
"""

from __future__ import annotations

import sys
from typing import Final

UNIT_COST: Final = 64
"""Bytes of memory that a unit takes beside its own."""
FREE_SHARE: Final = 4
"""Of what is free, a client may hold one part in so many."""
LEAST_PER_STREAM: Final = 16 * 1024
"""Bytes that a stream may always hold, so that one that is read goes on beside any that are not."""


class UnreadBytes:
    """The bytes that all clients of an instance have not read yet.

    Args:
        limit: bytes.

    Attributes:
        free: what is left of it; below 0 where the least of each stream and results add up to more.
    """

    __slots__ = ("free", "limit")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit
        self.free = limit

    def __repr__(self) -> str:
        return f"<UnreadBytes [{self.held} of {self.limit}]>"

    @property
    def held(self) -> int:
        """Bytes that were pushed and neither acknowledged nor forgotten."""
        return self.limit - self.free


class ClientUnreadBytes:
    """The bytes that one client has not read yet, which count in the whole as well.

    Attributes:
        whole: what it is a part of.
        held: its bytes.
    """

    __slots__ = ("held", "whole")

    def __init__(self, whole: UnreadBytes) -> None:
        self.whole = whole
        self.held = 0

    def __repr__(self) -> str:
        return f"<ClientUnreadBytes [{self.held} of {self.whole!r}]>"

    @property
    def has_room(self) -> bool:
        """True if the client may hold more."""
        return FREE_SHARE * self.held <= self.whole.free

    @property
    def is_refused(self) -> bool:
        """True if the client may begin no call: nothing is free, and it is not one of the least."""
        return self.whole.free <= 0 and self.held > LEAST_PER_STREAM

    def add(self, count: int) -> None:
        """Count bytes, or with a negative number no longer."""
        self.held += count
        self.whole.free -= count

    def close(self) -> None:
        """The client is forgotten, with all that it holds; what comes later counts for nothing."""
        self.whole.free += self.held
        self.whole = UnreadBytes()
