"""Faults that the library had, each behind a switch: the block in which it has it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dynbus import DynbusError
from dynbus.actors.calling.invocation import Invocation
from dynbus.actors.simulation.processes import Process
from dynbus.bus.calling.call_progress import CallProgress
from dynbus.bus.calling.remote_instance import RemoteInstance
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.protocol.liveness import RemoteLiveness
from dynbus.bus.serving.ledger import Ledger


def heartbeats_demanded_between_calls(patch: pytest.MonkeyPatch) -> None:
    """A caller demanded heartbeats of an instance that owed it none, and took results for no sign
    of life: an instance that was called now and then was taken for dead."""

    def due_since(self: RemoteInstance[Any]) -> float | None:
        return 0.0 if self.has_work() else None

    patch.setattr(RemoteInstance, "due_since", property(due_since))

    def heard_data(self: RemoteLiveness, at: float) -> None:
        return

    patch.setattr(RemoteLiveness, "heard_data", heard_data)


def request_taken_after_unknown(patch: pytest.MonkeyPatch) -> None:
    """An instance said of requests that waited to be read that they had never come, and began them
    when they came: they ran twice."""

    def ask(self: Ledger, client: Any, inquiry: Any) -> Any:
        writer = client.writer(inquiry.frame.number) if client is not None else None
        if client is None or writer is None:
            return self.answer(inquiry, inquiry.at)
        return original(self, client, inquiry)

    def said_before(self: Ledger, call: Any) -> None:
        return

    original: Any = vars(Ledger)["_ask"]
    patch.setattr(Ledger, "_ask", ask)
    patch.setattr(Ledger, "_said_before", said_before)


def connections_at_two_servers(patch: pytest.MonkeyPatch) -> None:
    """The two connections of a process chose their servers apart."""

    def groups(self: Process) -> Sequence[Sequence[MemoryConnection]]:
        return [(one,) for one in self.connections]

    patch.setattr(Process, "groups", property(groups))


def heartbeats_without_numbers(patch: pytest.MonkeyPatch) -> None:
    """Heartbeats of a link that was left long ago counted as news."""

    def is_news(self: RemoteLiveness, beat: int) -> bool:
        return True

    patch.setattr(RemoteLiveness, "is_news", is_news)


def resume_lost(patch: pytest.MonkeyPatch) -> None:
    """A reader asked for what it missed once: where that was lost, its stream stood still."""

    def compare(self: CallProgress, sent: int | None, now: float) -> Any:
        said = original(self, sent, now)
        return None if sent is not None and sent > self.reader.next_sequence else said

    original = CallProgress.compare
    patch.setattr(CallProgress, "compare", compare)


def hop_compared_wrongly(patch: pytest.MonkeyPatch) -> None:
    """The loss of a call that a handler made was taken for that of its own instance."""

    def is_own(self: Invocation, error: DynbusError) -> bool:
        return True

    patch.setattr(Invocation, "_is_own", is_own)
