"""The rest that a bus comes to once no call is open and nothing disturbs it: nothing is left of any
call, and each instance is known and has all its places free."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from dynbus import ActorInstance, Runtime
from dynbus.testing import Simulation

REST = 32.0
"""Seconds after the last fault: leases of the dead are over, and what was kept for readers that
never said that they have it is forgotten."""
BREATH = 1.0
"""Seconds after the last call where nothing is lost: readers have said what they have."""


async def rest(simulation: Simulation, seconds: float = REST) -> list[ActorInstance]:
    """Wait until all is healed, and for `seconds` more; then nothing may be left.

    Returns:
        The instances that live.
    """
    await simulation.over()
    await asyncio.sleep(seconds)
    instances = known(simulation)
    left = [
        *(one for process in simulation.kit.alive() for one in _left_in(process.runtime)),
        *(one for instance in instances for one in _left_at(instance)),
    ]
    assert not left, f"when all rests there are {left}"
    return instances


def known(simulation: Simulation) -> list[ActorInstance]:
    """The instances that live, which are all that the caller knows, and may choose."""
    instances = [one for process in simulation.kit.alive() for one in process.instances]
    view = simulation.kit.caller.discovery.view
    for component in {instance.name[:2] for instance in instances}:
        alive = {instance.id for instance in instances if instance.name[:2] == component}
        chosen = {one.id for one in view.instances(*component, simulation.now)}
        assert chosen == alive, f"{sorted(alive)} live, {sorted(chosen)} may be chosen"
        ids = {one.id for one in view.everything() if one.record.name[:2] == component}
        assert ids == alive, f"{sorted(alive)} live, {sorted(ids)} are known"
    return instances


def _left_in(runtime: Runtime) -> Iterator[str]:
    """What a process keeps of calls that it made."""
    opened = runtime.caller._open
    if opened.calls:
        yield f"open calls {list(opened.calls.values())}"
    if opened._window_left != runtime.bus.config.connection_window:
        yield f"{opened._window_left} bytes of the connection's window"
    if runtime.bus.bounce_handlers:
        yield f"{len(runtime.bus.bounce_handlers)} questions whether somebody listens"
    if len(runtime.caller.deadlines):
        yield f"{len(runtime.caller.deadlines)} deadlines"
    if runtime.migrations._lines:
        yield f"streams that move: {runtime.migrations}"


def _left_at(instance: ActorInstance) -> Iterator[str]:
    """What an instance keeps of calls that were made there."""
    server = instance.server
    if server.execution.load or server.execution._tasks or len(server.execution._deadlines):
        yield f"calls at {server.execution}"
    for served in server.served.values():
        if served.admission.running or served.admission.waiting:
            yield f"places of {served.address}: {served.admission}"
        if served.batches is not None and (
            len(served.batches._gathering) or served.batches._gathering.running
        ):
            yield f"{served.batches}"
    if left := [client for client in server.ledger.clients.values() if client.has_work()]:
        yield f"calls of {left}"
    if server.ledger.unread.held:
        yield f"bytes for readers: {server.ledger.unread}"
