"""Carries a schedule out, on processes, servers and connections of its own run alone."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import anyio
import msgspec

from dynbus.actors.running.child import Child, ChildState
from dynbus.actors.running.supervisor import ChangeFailed, Supervisor
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic

from .frozen import frozen
from .proxy import ProxiedConnection, Proxy, links_of
from .schedule import Kind, Step
from .servers import OwnServers

LATE_BY: Final = 0.4
"""Seconds that the worst delay adds to what a connection carries."""

logger = logging.getLogger(__name__)


class Done(msgspec.Struct, frozen=True):
    """The outcome of a step.

    Attributes:
        at: seconds after the faults began.
        what: which process, server or node it hit; why it hit none.
        carried_out: whether there was one that it could hit.
    """

    at: float
    kind: Kind
    what: str
    carried_out: bool = True


class Nemesis:
    """Does what a schedule says to the instances of a supervisor and to the servers under them.

    It leaves at least one instance of each node alone: where no other is left, a step is skipped.

    Args:
        bounds: how many instances a node may have: those that join and leave keep within them.
        struck: called as a fault begins, with the time and the kind.
        callers_pid: the process whose connections are the callers'.

    Attributes:
        done: what was carried out, and what was skipped.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        servers: OwnServers,
        *,
        bounds: Callable[[str], tuple[int, int]],
        struck: Callable[[float, str], None],
        callers_pid: int,
    ) -> None:
        self._supervisor = supervisor
        self._servers = servers
        self._bounds = bounds
        self._struck = struck
        self._callers_pid = callers_pid
        self._held: set[Child] = set()
        self._cut_off: set[Child] = set()
        self._changing: set[str] = set()
        self._began = 0.0
        self.done: list[Done] = []

    def __repr__(self) -> str:
        return f"<Nemesis [{len(self.done)} steps]>"

    @property
    def counts(self) -> Counter[str]:
        """The number of faults of each kind that were carried out."""
        return Counter(each.kind.value for each in self.done if each.carried_out)

    async def run(self, steps: Sequence[Step]) -> None:
        """Carry all steps out; every fault is healed when this returns, or is cancelled."""
        self._began = monotonic()
        async with task_group() as tasks:
            for step in steps:
                await anyio.sleep(max(0.0, self._began + step.at - monotonic()))
                tasks.start_soon(self._carry_out, step)

    async def _carry_out(self, step: Step) -> None:
        actions: dict[Kind, Callable[[Step], Awaitable[str]]] = {
            Kind.KILL: self._kill,
            Kind.KILL_THIRD: self._kill_third,
            Kind.FREEZE: self._freeze,
            Kind.JOIN: self._join,
            Kind.LEAVE: self._leave,
            Kind.RESTART: self._restart,
            Kind.SERVER: self._server,
            Kind.LEADER: self._leader,
            Kind.FREEZE_SERVER: self._freeze_server,
            Kind.DELAY: self._delay,
            Kind.CUT: self._cut,
            Kind.HALF_OPEN: self._half_open,
            Kind.SILENCE: self._silence,
        }
        at, number = round(monotonic() - self._began, 3), len(self.done)
        self.done.append(Done(at, step.kind, "going on"))
        try:
            what, carried_out = await actions[step.kind](step), True
        except _Skipped as error:
            what, carried_out = str(error), False
        except ChangeFailed as error:
            what, carried_out = f"failed: {error}", True
        logger.info("%.1f s: %s %s", at, step.kind.value, what)
        self.done[number] = Done(at, step.kind, what, carried_out)

    def _strikes(self, kind: Kind) -> None:
        self._struck(monotonic(), kind.value)

    # Instances ---------------------------------------------------------------------------------

    def _healthy(self) -> list[Child]:
        """The instances that serve and have no fault, in a lasting order."""
        return sorted(
            (
                child
                for child in self._supervisor.children
                if child.state is ChildState.READY
                and child.pid is not None
                and not child.is_leaving
                and child not in self._held
                and child not in self._cut_off
            ),
            key=lambda child: child.label,
        )

    def _spare(self) -> list[Child]:
        """The healthy instances that are not the last one of their node."""
        healthy = self._healthy()
        counts = Counter(child.node.address for child in healthy)
        return [child for child in healthy if counts[child.node.address] > 1]

    def _victim(self, step: Step) -> Child:
        spare = self._spare()
        if not spare:
            raise _Skipped("no instance could be spared")
        return spare[step.among(len(spare))]

    async def _kill(self, step: Step) -> str:
        victim = self._victim(step)
        self._strikes(step.kind)
        victim.kill()
        return victim.label

    async def _kill_third(self, step: Step) -> str:
        spare = self._spare()
        count = math.ceil(len(self._healthy()) / 3)
        first = step.among(len(spare)) if spare else 0
        victims: list[Child] = []
        for offset in range(len(spare)):
            victim = spare[(first + offset) % len(spare)]
            left = [c for c in self._healthy() if c not in victims]
            same = [c for c in left if c.node.address == victim.node.address]
            if len(victims) < count and len(same) > 1:
                victims.append(victim)
        if not victims:
            raise _Skipped("no instance could be spared")
        self._strikes(step.kind)
        for victim in victims:
            victim.kill()
        return ", ".join(victim.label for victim in victims)

    async def _freeze(self, step: Step) -> str:
        victim = self._victim(step)
        assert victim.pid is not None
        self._held.add(victim)
        try:
            async with frozen(victim.pid) as at:
                self._struck(at, step.kind.value)
                await anyio.sleep(step.lasts)
        finally:
            self._held.discard(victim)
        return f"{victim.label} for {step.lasts:g} s"

    @asynccontextmanager
    async def _node(self, step: Step) -> AsyncGenerator[str]:
        """A node that no other step changes at this moment."""
        free = sorted(self._supervisor.nodes.keys() - self._changing)
        if not free:
            raise _Skipped("every node is being changed")
        address = free[step.among(len(free))]
        self._changing.add(address)
        try:
            yield address
        finally:
            self._changing.discard(address)

    async def _join(self, step: Step) -> str:
        async with self._node(step) as address:
            count = len(self._supervisor.instances(address))
            if count >= self._bounds(address)[1]:
                raise _Skipped(f"{address} has {count} instances, its most")
            self._strikes(step.kind)
            await self._supervisor.scale(address, count + 1)
        return f"{address}: {count + 1} instances"

    async def _leave(self, step: Step) -> str:
        async with self._node(step) as address:
            count = len(self._supervisor.instances(address))
            if count <= self._bounds(address)[0]:
                raise _Skipped(f"{address} has {count} instances, its least")
            self._strikes(step.kind)
            await self._supervisor.scale(address, count - 1, overlap=True)
        return f"{address}: {count - 1} instances"

    async def _restart(self, step: Step) -> str:
        async with self._node(step) as address:
            self._strikes(step.kind)
            await self._supervisor.restart(address)
        return address

    # Servers -----------------------------------------------------------------------------------

    def _victim_server(self, step: Step) -> int:
        # A cluster without its majority is no cluster: one server at a time.
        if self._servers.down:
            raise _Skipped("a server is down already")
        return step.among(len(self._servers.servers))

    async def _server(self, step: Step, index: int | None = None) -> str:
        servers = self._servers
        victim = self._victim_server(step)
        index = victim if index is None else index
        self._strikes(step.kind)
        try:
            await servers.kill(index)
            await anyio.sleep(step.lasts)
        finally:
            with anyio.CancelScope(shield=True):
                await servers.start(index)
        return f"{index + 1} of {len(servers.servers)} for {step.lasts:g} s"

    async def _leader(self, step: Step) -> str:
        index = await self._servers.leader()
        if index is None:
            raise _Skipped("nobody leads, or nobody could tell")
        return await self._server(step, index)

    async def _freeze_server(self, step: Step) -> str:
        servers = self._servers
        index = self._victim_server(step)
        is_killed = step.manner < 0.5
        async with servers.frozen(index, is_killed=is_killed) as at:
            self._struck(at, step.kind.value)
            await anyio.sleep(step.lasts)
        end = "killed" if is_killed else "gone on"
        return f"{index + 1} of {len(servers.servers)} for {step.lasts:g} s, then {end}"

    # Connections -------------------------------------------------------------------------------

    def _connections(self, step: Step) -> tuple[Child | None, Sequence[Proxy], str]:
        """The connections that a step hits: an instance's, or the callers'."""
        servers = self._servers
        if not servers.for_workers:
            raise _Skipped("nothing is proxied")
        spare = self._spare()
        number = step.among(len(spare) + 1)
        if number == len(spare):
            return None, servers.for_callers, "the callers"
        return spare[number], servers.for_workers, spare[number].label

    def _links(self, child: Child | None, proxies: Sequence[Proxy]) -> list[ProxiedConnection]:
        pid = self._callers_pid if child is None else child.pid
        return [] if pid is None else links_of(pid, proxies)

    @contextmanager
    def _spared(self, child: Child | None) -> Generator[None]:
        """Have no other fault hit an instance that is cut off meanwhile."""
        if child is not None:
            self._cut_off.add(child)
        try:
            yield
        finally:
            if child is not None:
                self._cut_off.discard(child)

    async def _cut(self, step: Step) -> str:
        child, proxies, whose = self._connections(step)
        self._strikes(step.kind)
        for link in self._links(child, proxies):
            link.cut()
        return whose

    async def _delay(self, step: Step) -> str:
        child, proxies, whose = self._connections(step)
        links, seconds = self._links(child, proxies), LATE_BY * step.manner
        self._strikes(step.kind)
        for link in links:
            link.delay = seconds
        try:
            await anyio.sleep(step.lasts)
        finally:
            for link in links:
                link.delay = 0.0
        return f"{whose} by {1000 * seconds:.0f} ms for {step.lasts:g} s"

    async def _half_open(self, step: Step) -> str:
        child, proxies, whose = self._connections(step)
        links = self._links(child, proxies)
        ways = ("held, then let go", "held, then reset", "deaf", "mute")
        way = ways[min(int(step.manner * len(ways)), len(ways) - 1)]
        self._strikes(step.kind)
        for link in links:
            if way == "deaf":
                link.swallow_to_client = True
            elif way == "mute":
                link.swallow_to_server = True
            else:
                link.freeze()
        try:
            with self._spared(child):
                await anyio.sleep(step.lasts)
        finally:
            for link in links:
                if way == "held, then let go":
                    link.thaw()
                else:
                    link.cut()  # what was lost cannot be made good
        return f"{whose} {way}, for {step.lasts:g} s"

    async def _silence(self, step: Step) -> str:
        child, proxies, whose = self._connections(step)
        pid = self._callers_pid if child is None else child.pid
        assert pid is not None
        self._strikes(step.kind)
        for proxy in proxies:
            proxy.silence(pid)
        try:
            with self._spared(child):
                await anyio.sleep(step.lasts)
        finally:
            for proxy in proxies:
                proxy.hear(pid)
        return f"{whose} for {step.lasts:g} s"


class _Skipped(Exception):
    """Raised for a step that nothing could be done for; it says why."""
