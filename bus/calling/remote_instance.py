"""An instance as its callers see it: the calls open there, and what its heartbeats carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynbus.bus.protocol.liveness import RemoteLiveness
from dynbus.bus.protocol.names import control_subject
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.protocol.wire import Frame, Open
from dynbus.bus.telemetry.call_spans import CALL_BYTES, span_room, split_calls

if TYPE_CHECKING:
    from .caller import Caller
    from .pending_call import PendingCall

ACKNOWLEDGEMENT_BYTES: Final = 32


class RemoteInstance:
    """An instance that this process calls, and the calls that are open there.

    Attributes:
        place: its namespace, component and id.
        incarnation: what requests to it tell and control batches carry, both ways; random, so
            that only the two know it.
        heard_at: when results of it last arrived.
        load: calls that it last reported to run or wait there.
    """

    def __init__(self, caller: Caller, namespace: str, component: str, instance_id: str) -> None:
        self._caller = caller
        self.place = (namespace, component, instance_id)
        self.instance_id = instance_id
        self.name = f"{namespace}.{component}@{instance_id}"
        self._control_subject = control_subject(namespace, component, instance_id)
        self.liveness: RemoteLiveness | None = None
        self.incarnation = random_id()
        self.heard_at = 0.0
        self.calls: dict[int, PendingCall] = {}
        self.done: list[tuple[int, bytes]] = []
        self.load = 0

    @property
    def control_subject(self) -> str:
        return self._control_subject

    @property
    def due_since(self) -> float | None:
        calls = list(self.calls.values())
        return calls[0].begun_at if calls else None

    def has_work(self) -> bool:
        return bool(self.calls or self.done)

    def beat(self) -> list[Frame]:
        open_calls = list(self.calls.values())
        calls = {call.number: call.reader.next_sequence for call in open_calls}
        room = span_room(self._caller.bus.lane.connection.max_payload)
        # However many calls are open, half of a message is left for acknowledgements.
        room_for_done = max(room // 2, room - CALL_BYTES * len(calls))
        count = min(len(self.done), max(1, room_for_done // ACKNOWLEDGEMENT_BYTES))
        # The main loop only appends to `done`, so taking a prefix away loses nothing.
        done = self.done[:count]
        del self.done[:count]
        first, *rest = split_calls(calls, (room - ACKNOWLEDGEMENT_BYTES * count) // CALL_BYTES)
        return [
            Open(first.calls, done, first.first, first.last),
            *(Open(span.calls, [], span.first, span.last) for span in rest),
        ]

    def returned(self) -> None:
        self._caller.ask_anew(self)

    def gone(self) -> None:
        self._caller.instance_gone(self)
