"""The nemesis of a simulation: carries the faults of a plan out, and heals them."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import anyio
from anyio.abc import TaskGroup

from dynbus.actors.runtime import ActorInstance
from dynbus.bus.background import task_group
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.transport import Message

from .loop import process
from .plan import Fault, Kind, Plan
from .processes import Process, SimulatedKit

MOST_LATE: Final = 2.0
"""Seconds that a message is late at most, of a connection that is slow."""
NOTICED_AFTER: Final = (0.9, 1.5)
"""Seconds after which a link that is silent is left, from and to, by `Fault.manner`: a process with
calls open notices that soon."""
LEAST_LOSS: Final = 0.02
MOST_LOSS: Final = 0.5
LOST_SUBJECTS: Final = (">", "_R.*.*.f", "*.*._ctl.*", "_R.*.*.ctl.f", "$JS.API.>")
"""The messages of which some are lost: all of them, results, what is said to instances on the
control lane and by them, and questions to JetStream."""
ENDS: Final = frozenset({Kind.KILL, Kind.LEAVE, Kind.FREEZE})
DISTURBS: Final = frozenset({Kind.CUT, Kind.SLOW, Kind.SILENCE, Kind.LATE})
"""The faults of one process: of an instance's, and of any process's links."""
AT_A_MESSAGE: Final = 0.5
"""The share of them that begin when a message of the process has reached the server."""
SHARES: Final = 64
"""Parts of what `Fault.pick` draws from: each has that share."""
MOMENT: Final = 0.5
"""Seconds within which such a message has to come."""


class Trouble(NamedTuple):
    """A fault that was carried out.

    Attributes:
        fault: of the plan.
        began, ended: on the virtual clock; `ended` is infinite until it is healed.
        processes: that it hit; empty for one that hits all of them.
    """

    fault: Fault
    began: float
    ended: float
    processes: frozenset[Process]


class Nemesis:
    """Carries out one plan.

    Args:
        chance: draws how late a message of a slow connection is, and which messages are lost.
        replace: starts others in the place of instances that are gone.
        noted: called when a fault has begun, and when it has ended.

    Attributes:
        carried_out: faults by kind.
        done: set when the plan is over, and all is healed.
        troubles: the faults so far, in the order of their beginnings.
    """

    def __init__(
        self,
        kit: SimulatedKit,
        plan: Plan,
        chance: random.Random,
        replace: Callable[[Sequence[ActorInstance]], Awaitable[object]],
        noted: Callable[[], object],
    ) -> None:
        self.carried_out: Counter[str] = Counter()
        self.troubles: list[Trouble] = []
        self.done = asyncio.Event()
        self._kit = kit
        self._plan = plan
        self._chance = chance
        self._replace = replace
        self._noted = noted

    def __repr__(self) -> str:
        return f"<Nemesis [{len(self.troubles)} of {len(self._plan)} faults]>"

    async def run(self) -> None:
        """Carry the plan out; what is not healed when it is cancelled is healed then."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        async with task_group() as tasks:
            for fault in self._plan:
                await anyio.sleep(max(0.0, begin + fault.at - loop.time()))
                tasks.start_soon(self._carry_out, fault, tasks)
        self.done.set()

    async def _carry_out(self, fault: Fault, tasks: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as healed:
            one = self._hit_by(fault)
            if one is not None and fault.pick * SHARES % 1 < AT_A_MESSAGE:
                await self._next_message(one)
            hit = self._begin(fault, healed, tasks)
            if hit is None:
                return
            self.carried_out[fault.kind] += 1
            index = len(self.troubles)
            self.troubles.append(Trouble(fault, loop.time(), math.inf, frozenset(hit)))
            self._noted()
            await anyio.sleep(fault.lasts)
        self.troubles[index] = self.troubles[index]._replace(ended=loop.time())
        self._noted()

    def _begin(
        self, fault: Fault, healed: AsyncExitStack, tasks: TaskGroup
    ) -> Collection[Process] | None:
        """Begin a fault that ends with `healed`.

        Returns:
            The processes that it hits; none where it hits all, and None where it hits nothing.
        """
        one = self._hit_by(fault)
        if fault.kind in ENDS:
            return None if one is None else self._end(fault, healed, one, tasks)
        if one is not None:
            data, control = one.connections
            links = ((data,), (control,), (data, control))[int(fault.manner * 0.999 * 3)]
            self._disturb(fault, links, healed)
            return (one,)
        bus, there = self._kit.bus, list(self._kit.alive())
        match fault.kind:
            case Kind.SERVER | Kind.DISK:
                if not bus.running:
                    return None
                bus.stop(keep_disk=fault.kind is Kind.SERVER)
                healed.callback(bus.start)
                return ()
            case Kind.LOSS:
                subject = LOST_SUBJECTS[int(fault.manner * 0.999 * len(LOST_SUBJECTS))]
                share = LEAST_LOSS + (MOST_LOSS - LEAST_LOSS) * fault.pick**2
                loss = bus.drop(subject, when=lambda _: self._chance.random() < share)
                healed.callback(loss.remove)
                return ()
            case Kind.SPLIT:
                return self._split(fault, healed, there)
            case _:
                first, count = fault.among(len(there)), 2 + int(fault.manner * (len(there) - 1))
                hit = [*there, *there][first : first + min(count, len(there))]
                for each in hit:
                    self._cut(each.connections, healed)
                return hit

    def _hit_by(self, fault: Fault) -> Process | None:
        """The process that a fault of one process would hit now; None where there is none, and for
        other faults."""
        there = list(self._kit.alive())
        if fault.kind in ENDS:
            there = [one for one in there if one.instances and not one.is_frozen]
        elif fault.kind not in DISTURBS:
            return None
        return there[fault.among(len(there))] if there else None

    async def _next_message(self, of: Process) -> None:
        """Wait until the next message of a process has reached the server, `MOMENT` at most.

        What breaks off there breaks off between two steps, which take next to no time.
        """
        sent = asyncio.Event()

        def note(_: Message) -> None:
            if process.get() is of:
                sent.set()

        observers = self._kit.bus.observers
        observers.append(note)
        with anyio.move_on_after(MOMENT):
            await sent.wait()
        observers.remove(note)

    def _end(
        self, fault: Fault, healed: AsyncExitStack, victim: Process, tasks: TaskGroup
    ) -> Collection[Process]:
        if fault.kind is Kind.FREEZE:
            victim.freeze()
            healed.callback(victim.thaw)
            return (victim,)
        if fault.kind is Kind.KILL:
            victim.kill()
        else:
            tasks.start_soon(victim.leave)
        lost, victim.instances = victim.instances, []
        healed.push_async_callback(self._replace, lost)
        return (victim,)

    def _disturb(
        self, fault: Fault, links: Sequence[MemoryConnection], healed: AsyncExitStack
    ) -> None:
        if fault.kind is Kind.CUT:
            self._cut(links, healed)
        elif fault.kind is Kind.SLOW:
            for link in links:
                link.way = self._slow
                healed.callback(setattr, link, "way", self._kit.way)
        else:
            low, high = NOTICED_AFTER
            silence = self._kit.bus.partition(
                *links,
                notice_after=low + (high - low) * (fault.manner * 3 % 1),
                arrives_late=fault.kind is Kind.LATE,
            )
            healed.callback(silence.heal)

    def _slow(self) -> float:
        return self._chance.random() * MOST_LATE

    def _cut(self, links: Sequence[MemoryConnection], healed: AsyncExitStack) -> None:
        for link in links:
            link.disconnect()
            healed.callback(self._reconnect, link)

    def _reconnect(self, link: MemoryConnection) -> None:
        if any(link in one.connections for one in self._kit.alive()):
            link.reconnect()

    def _split(
        self, fault: Fault, healed: AsyncExitStack, there: Sequence[Process]
    ) -> Collection[Process] | None:
        if self._kit.bus.is_split:
            return None
        lonely = there[fault.among(len(there))]
        second = lonely.groups[int(fault.manner * 0.999 * len(lonely.groups))]
        first = [group for one in there for group in one.groups if group != second]
        healed.callback(self._kit.bus.split(first, [second]).heal)
        return (lonely,)
