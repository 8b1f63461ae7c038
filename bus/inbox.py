"""The messages of peers that the main loop has yet to hear: bounded, and heard by turns of peers.

Control messages are read on the lane and carried out on the main loop. However much one peer
says, it waits in a queue of its own: a turn of the loop carries out a bounded amount, one thing
of each peer after the other, and what exceeds the bounds is dropped by its reader.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

FRAME_COST: Final = 32
"""The cost of a frame. The unit is at most 40 bytes, and about 0.1 us of the main loop."""
ENTRY_COST: Final = 4
"""The cost of each call in a heartbeat, and of each that it is compared with."""
TURN_COST: Final = 8 * 1024
"""The cost that one turn of the loop carries out: about a millisecond, and one thing at least."""
PEER_COST: Final = 256 * 1024
"""The most that may wait of one peer: 8,192 frames, or a heartbeat of 64,000 calls."""
COST: Final = 1024 * 1024
"""The most that may wait of all peers together: at most 40 MiB."""


class Inbox(Generic[T]):
    """Things that were said, in queues by peer. `put` may be called from any thread.

    Args:
        carry_out: called on the main loop with each.
        to_main: has a function called on the main loop soon, from any thread.
    """

    __slots__ = (
        "_carry_out",
        "_cost",
        "_costs",
        "_emptied",
        "_lock",
        "_queues",
        "_scheduled",
        "_to_main",
    )

    def __init__(
        self, carry_out: Callable[[T], None], to_main: Callable[[Callable[[], None]], None]
    ) -> None:
        self._carry_out = carry_out
        self._to_main = to_main
        self._lock = threading.Lock()
        # The peer whose turn is next comes first.
        self._queues: dict[str, deque[tuple[T, int]]] = {}
        self._costs: dict[str, int] = {}
        self._cost = 0
        self._scheduled = False
        self._emptied: asyncio.Event | None = None

    def __repr__(self) -> str:
        return f"<Inbox [{len(self._queues)} peers, cost: {self._cost}]>"

    def put(self, peer: str, item: T, cost: int) -> bool:
        """Have `item` carried out when it is the peer's turn; False when too much waits already.

        What the peer said before is carried out before.
        """
        with self._lock:
            waiting = self._costs.get(peer, 0)
            if waiting and waiting + cost > PEER_COST:
                return False
            # However much it costs, one thing alone is heard.
            if self._cost and self._cost + cost > COST:
                return False
            self._queues.setdefault(peer, deque()).append((item, cost))
            self._costs[peer] = waiting + cost
            self._cost += cost
            is_first = not self._scheduled
            self._scheduled = True
        if is_first:
            self._to_main(self._turn)
        return True

    async def carried_out(self) -> None:
        """Wait, on the main loop, until all that was said has been carried out."""
        with self._lock:
            if not self._queues:
                return
            emptied = self._emptied = self._emptied or asyncio.Event()
        await emptied.wait()

    def _turn(self) -> None:
        left = TURN_COST
        try:
            while left > 0 and (taken := self._pop()) is not None:
                item, cost = taken
                left -= cost
                self._carry_out(item)
        finally:
            self._go_on()

    def _pop(self) -> tuple[T, int] | None:
        with self._lock:
            if not self._queues:
                return None
            peer = next(iter(self._queues))
            queue = self._queues.pop(peer)
            item, cost = queue.popleft()
            self._cost -= cost
            if queue:
                self._queues[peer] = queue
                self._costs[peer] -= cost
            else:
                del self._costs[peer]
            return item, cost

    def _go_on(self) -> None:
        with self._lock:
            self._scheduled = bool(self._queues)
        if self._scheduled:
            self._to_main(self._turn)
        elif self._emptied is not None:
            self._emptied.set()
            self._emptied = None
