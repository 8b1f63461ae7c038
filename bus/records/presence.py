"""Asking whether anybody listens where an instance would.

A question goes to the instance's control subject, and the server says at once when nobody is there.
Records and heartbeats tell more, but records wait for a leader of JetStream, and heartbeats flow
only while calls are open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.protocol.wire import Ping, encode_batch
from dynbus.bus.transport import ConnectionState

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus

ANSWER_SECONDS: Final = 0.25
"""The server's answer takes a round trip; none after this long means that somebody listens."""


class Presence:
    """The questions of one process. Belongs to its main loop."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reconnects = 0
        bus.data.on_state(self._on_state)

    def ask(self, instance: InstanceName, answer: Callable[[bool | None], None]) -> None:
        """Ask for one instance.

        Args:
            answer: called once: False when nobody listens, True when somebody does, which a
                frozen process does too, None when the connection broke meanwhile.
        """
        bus = self._bus
        if bus.data.state is not ConnectionState.CONNECTED:
            bus.loop.call_soon(answer, None)
            return
        # Who could guess the subject could speak for the server.
        token = random_id()
        reconnects = self._reconnects
        timer = bus.loop.call_later(ANSWER_SECONDS, self._nothing_came, token, reconnects, answer)

        def nobody_listens() -> None:
            timer.cancel()
            del bus.bounce_handlers[token]
            answer(False)

        bus.bounce_handlers[token] = nobody_listens
        data = encode_batch(bus.replies.base, token, 0, [Ping(0)])
        bus.data.publish(instance.control_subject, data, reply=bus.replies.bounce(token))

    def _nothing_came(
        self, token: str, reconnects: int, answer: Callable[[bool | None], None]
    ) -> None:
        del self._bus.bounce_handlers[token]
        unbroken = (
            reconnects == self._reconnects and self._bus.data.state is ConnectionState.CONNECTED
        )
        answer(True if unbroken else None)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._reconnects += 1
