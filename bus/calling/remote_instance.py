"""An instance as its callers see it: the calls open there, its load, and what is said to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.call_ranges import CALL_BYTES, heartbeat_room, split_calls
from dynbus.bus.protocol.liveness import RemoteLiveness
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.wire import BATCH_OVERHEAD, Credit, Frame, Open, encode_batch
from dynbus.bus.transport import ConnectionState

from .call_progress import CallProgress

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus

ACKNOWLEDGEMENT_BYTES: Final = 32
CONTROL_FRAME_BYTES: Final = 64
MAX_CONTROL_FRAMES: Final = 1024

C = TypeVar("C", bound=CallProgress)


class RemoteInstance(Generic[C]):
    """An instance that this process calls, and the calls that are open there.

    Args:
        bounce_token: of the bounce subject of what is said to it, by incarnation.

    Attributes:
        incarnation: what requests to it tell and control batches carry, both ways; random, so
            that only the two know it.
        heard_at: when results of it last arrived.
        calls: those that are open, by number.
        done: number and secret of those that have ended, which it need not keep any longer.
        load: calls that it last reported to run or wait there.
        pinged: token of the latest ping of the control lane, and when it was sent.
        round_trip: seconds of the way there and back; None where it was not measured.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        bounce_token: Callable[[str], str],
    ) -> None:
        self._bus = bus
        self._bounce_token = bounce_token
        self.name = name
        self.control_subject = name.control_subject
        self.liveness: RemoteLiveness | None = None
        self.incarnation = random_id()
        self.heard_at = 0.0
        self.calls: dict[int, C] = {}
        self.done: list[tuple[int, bytes]] = []
        self.load = 0
        self.pinged: tuple[int, float] = (-1, 0.0)
        self.round_trip: float | None = None
        self._credits: list[Frame] = []

    def __repr__(self) -> str:
        return f"<RemoteInstance {self.name} [{len(self.calls)} calls]>"

    @property
    def due_since(self) -> float | None:
        calls = list(self.calls.values())
        return calls[0].begun_at if calls else None

    def has_work(self) -> bool:
        return bool(self.calls or self.done)

    def send(self, frames: Sequence[Frame], bounce_token: str = "") -> None:
        """Send control frames from the main loop, in as few messages as they fit.

        Args:
            bounce_token: of where the server says that nobody hears them, unless at the usual
                place.
        """
        bus = self._bus
        reply = bus.replies.bounce(bounce_token or self._bounce_token(self.incarnation))
        room = (bus.data.max_payload - BATCH_OVERHEAD) // CONTROL_FRAME_BYTES
        room = min(room, MAX_CONTROL_FRAMES)
        for first in range(0, len(frames), room):
            batch = list(frames[first : first + room])
            data = encode_batch(bus.replies.base, self.incarnation, 0, batch)
            bus.data.publish(self.control_subject, data, reply=reply)

    def grant(self, credit: Credit) -> None:
        """Send credit at the end of this turn of the loop, together with that of other calls.

        Streams that began together and are of one pace need theirs together.
        """
        if not self._credits:
            self._bus.data.before_sending(self._send_credits)
        self._credits.append(credit)

    def _send_credits(self) -> None:
        credits, self._credits = self._credits, []
        self.send(credits)

    def beat(self, number: int) -> list[Frame]:
        """The heartbeat of a number, a frame for each of its messages."""
        open_calls = list(self.calls.values())
        calls = {call.number: call.reader.next_sequence for call in open_calls}
        room = heartbeat_room(self._bus.lane.connection.max_payload)
        # However many calls are open, half of a message is left for acknowledgements.
        room_for_done = max(room // 2, room - CALL_BYTES * len(calls))
        count = min(len(self.done), max(1, room_for_done // ACKNOWLEDGEMENT_BYTES))
        # The main loop only appends to `done`, so taking a prefix away loses nothing.
        done = self.done[:count]
        del self.done[:count]
        first, *rest = split_calls(calls, (room - ACKNOWLEDGEMENT_BYTES * count) // CALL_BYTES)
        return [
            Open(number, first.calls, done, first.first, first.last),
            *(Open(number, part.calls, [], part.first, part.last) for part in rest),
        ]

    def returned(self) -> None:
        """Tell it again where its calls stand: what was said last may be lost."""
        if self._bus.data.state is ConnectionState.CONNECTED:
            now = monotonic()
            self.send([frame for call in list(self.calls.values()) for frame in call.standing(now)])
