"""The port that takes the results of one running call, from a handler, an engine or a relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynbus.bus.errors import DynbusError


class ReplyPort(Protocol):
    """The results of one call, on their way to its reader. To be used on the main loop.

    A call ends once: with the first `end` or `fail`, when its handler returns or raises, or when
    it is cancelled. What comes later changes nothing.
    """

    @property
    def paused(self) -> bool:
        """True if no item may follow until the reader has taken more."""
        ...

    @property
    def ended(self) -> bool:
        """True if the call has ended, so that nothing is sent any longer."""
        ...

    def push(self, item: bytes) -> bool:
        """Send an item of a stream, encoded.

        Returns:
            Whether another may follow at once. False is not a refusal of this item: wait for
            `writable` before the next one. It is False as well when the call has ended.

        Raises:
            PayloadTooLarge: the item exceeds `max_item_bytes`.
        """
        ...

    async def writable(self) -> None:
        """Wait until another item may follow, or the call has ended.

        Raises:
            Unavailable: the reader is a plain NATS client, and the server takes nothing.
        """
        ...

    def when_writable(self, then: Callable[[], object]) -> None:
        """Have `then` called once, soon after another item may follow or the call has ended."""
        ...

    async def closed(self) -> None:
        """Wait until the call has ended."""
        ...

    def end(self, result: bytes | None = None) -> None:
        """End the call well; a unary call with its encoded result.

        Raises:
            PayloadTooLarge: the result exceeds `max_item_bytes`.
        """
        ...

    def fail(self, error: DynbusError) -> None:
        """End the call with an error."""
        ...
