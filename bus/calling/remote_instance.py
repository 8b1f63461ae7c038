"""An instance as its callers see it: the calls open there, and what its heartbeats carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynbus.bus.liveness import RemoteLiveness
from dynbus.bus.names import control_subject
from dynbus.bus.wire import Frame, Open

if TYPE_CHECKING:
    from .caller import Caller
    from .pending_call import PendingCall

ACKNOWLEDGEMENT_BYTES: Final = 32


class RemoteInstance:
    """An instance that this process calls, and the calls that are open there."""

    def __init__(self, caller: Caller, namespace: str, component: str, instance_id: str) -> None:
        self._caller = caller
        self.instance_id = instance_id
        self._control_subject = control_subject(namespace, component, instance_id)
        self.liveness: RemoteLiveness | None = None
        self.calls: dict[int, PendingCall] = {}
        self.done: list[tuple[int, bytes]] = []
        self.load = 0

    @property
    def control_subject(self) -> str:
        return self._control_subject

    def has_work(self) -> bool:
        return bool(self.calls or self.done)

    def beat(self) -> list[Frame]:
        # The main loop only appends to `done`, so taking a prefix away loses nothing.
        room = self._caller.bus.lane.connection.max_payload - 16 * len(self.calls)
        count = min(len(self.done), max(1, room // ACKNOWLEDGEMENT_BYTES - 8))
        done = self.done[:count]
        del self.done[:count]
        calls = list(self.calls.values())
        return [Open([(call.number, call.reader.next_sequence) for call in calls], done)]

    def gone(self) -> None:
        self._caller.instance_gone(self)
