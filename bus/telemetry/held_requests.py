"""The requests that a process holds: no instance has them yet, and no call of them is made."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import ComponentName


class HeldRequest(NamedTuple):
    """A request that waits for the first instance of any of these components.

    Attributes:
        since: on the monotonic clock.
    """

    request_id: str
    components: Sequence[ComponentName]
    since: float


class HeldRequests:
    """Those of one process, for `dynbus ps --requests`; of the main loop alone."""

    def __init__(self) -> None:
        self._held: dict[object, HeldRequest] = {}

    def __repr__(self) -> str:
        return f"<HeldRequests [{len(self)}]>"

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def hold(self, request_id: str, components: Sequence[ComponentName]) -> Generator[None]:
        """Tell of a request as long as the block lasts."""
        key = object()  # clients may choose the same id
        self._held[key] = HeldRequest(request_id, components, monotonic())
        try:
            yield
        finally:
            del self._held[key]

    def oldest(self, most: int) -> list[HeldRequest]:
        """So many of them at most, the oldest first."""
        return list(islice(self._held.values(), most))
