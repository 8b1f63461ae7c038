"""The parent of `dynbus run`: one child process per instance, restarted when it crashes.

Dependencies start before what depends on them and drain after it. An actor that fails to start
ends the run, with its reason. An instance that ends later restarts, however often, after a pause
that doubles, while the others keep serving; one whose `on_crash` is `"escalate"` ends the run.

Instances can be added, drained and replaced while the run goes on. What is added and does not
start is told to the asker; the run and the instances that it has go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from dynbus.actors.declaring.restart_policy import RestartPolicy
from dynbus.actors.placing.allotment import (
    Allotment,
    Machine,
    NoRoom,
    Wanted,
    all_of,
    placement,
)
from dynbus.actors.serving.instance import CANCEL_TIMEOUT, STOP_TIMEOUT
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.config import suggestion

from .child import HELD_UP, HELD_UP_SECONDS, Child, ChildState
from .child_messages import DrainInstance, StartInstance, WorkerSettings
from .graph import dependents_first
from .in_process import Ending, Failure, failure_of
from .plan import PlannedNode
from .processes import ForkServer, exit_text

LEAVING_SECONDS: Final = 5.0
"""Seconds for withdrawing from the bus and for leaving it."""
DRAIN_SLACK: Final = STOP_TIMEOUT + CANCEL_TIMEOUT + LEAVING_SECONDS
"""Seconds beyond the grace period in which a child ends by itself: those of `on_stop` too."""
FAILED_GRACE: Final = 2.0
"""Seconds that the others have to end when an actor does not start."""

logger = logging.getLogger(__name__)


def _tell_nobody(text: str) -> None:
    """Of a change that nobody waits for."""


def _counted(count: int, verb: str) -> str:
    return f"1 instance {verb}s" if count == 1 else f"{count} instances {verb}"


class ChangeFailed(Exception):
    """Raised when a run could not be changed as asked; what it has goes on.

    Attributes:
        traceback: of the user's code; empty when it had no part in it.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


Listener = Callable[[str, str, Mapping[str, int]], object]
"""Called with what happened, to whom, and details."""


class Supervisor:
    """Runs the children of one `dynbus run`. `run` carries it out; the rest steers it.

    Args:
        drain_grace: seconds that all children together have to end tidily.
        lasting: whether the run goes on when an instance does not start or ends for good: it
            waits for a change that mends it.
        machine: what the instances are placed on; it has enough GPUs for those of the nodes.

    Attributes:
        nodes: what can be started, by address, dependencies first.
        children: the instances that the run has now.
        settings: of the children that are started from now on.
        forks: makes the processes; it outlives the run.
        ending: whether the run is to end; the supervisor asks for it when it cannot go on.
        failure: why the run cannot go on; None while it can.
        ended: set when no child is left.
        news: set when a child has begun or ended a step of its start, or announced something, and
            when no child is left.
    """

    def __init__(
        self,
        nodes: Sequence[PlannedNode],
        settings: WorkerSettings,
        forks: ForkServer,
        ending: Ending,
        *,
        drain_grace: float,
        lasting: bool = False,
        machine: Machine = Machine(),  # noqa: B008 - nothing can change it
        policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self.nodes = {node.address: node for node in nodes}
        self._machine = machine
        self._allotment = Allotment(machine)
        self.news = asyncio.Event()
        wanted = {
            n.address: all_of(n.address, n.service.resources, n.service.workers) for n in nodes
        }
        places = self._allotment.allot_all(itertools.chain.from_iterable(wanted.values()))
        self.children = [
            Child(
                *(node, index + 1, settings),
                placed=placement(machine, places[each.label], index, node.service.environment),
                required=True,
                news=self.news,
            )
            for node in nodes
            for index, each in enumerate(wanted[node.address])
        ]
        self.settings = settings
        self._changing = asyncio.Lock()
        self._tasks: TaskGroup | None = None
        self._runs = asyncio.Event()
        self.failure: Failure | None = None
        self._grace = drain_grace
        self._lasting = lasting
        self._policy = policy
        self._begun = asyncio.Event()
        self.forks = forks
        self.ending = ending
        self.ended = asyncio.Event()
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        ready = sum(child.state is ChildState.READY for child in self.children)
        return f"<Supervisor [{ready} of {len(self.children)} ready]>"

    def begin(self) -> None:
        """Let the children start: the server is there."""
        self._begun.set()

    def follow(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with what happens to processes and nodes, until what this returns is
        called: `process.ended` with its code, `node.scaled` and `node.restarted` with their
        counts."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def _happened(self, what: str, who: str, **details: int) -> None:
        for listener in self._listeners:
            listener(what, who, details)

    async def run(self) -> int:
        """Run the children until the end is asked for or one has failed for good.

        Returns the exit code; `failure` says why when it is neither `OK` nor `INTERRUPTED`. No
        child is left when this returns or raises.
        """
        try:
            async with task_group() as self._tasks:
                tasks = self._tasks
                self._runs.set()
                for child in self.children:
                    tasks.start_soon(self._keep, child, name=child.label)
                await self.ending.asked.wait()
                await self._drain()
                tasks.cancel_scope.cancel()
        finally:
            self.ending.drain()
            self.ended.set()
            self.news.set()
        return self.exit_code

    @property
    def exit_code(self) -> int:
        """The exit code of the run, once it has ended."""
        if self.failure is None or self.ending.at_once.is_set():
            return self.ending.exit_code
        return self.failure.code

    def problems(self) -> dict[str, str]:
        """The reasons for which the run is not ready, by the label of the child."""
        reasons: dict[str, str] = {}
        for child in self.children:
            if child.is_leaving and not self.ending.asked.is_set():
                continue  # it was asked to
            if child.state is not ChildState.READY:
                why = f": {child.crash}" if child.crash else ""
                is_back = child.crash and child.state is not ChildState.ENDED
                state = ChildState.RESTARTING if is_back else child.state
                steps = ", ".join(map(str, child.steps))
                reasons[child.label] = (steps or state.value) + why
            elif child.held_up > HELD_UP_SECONDS:
                reasons[child.label] = f"{HELD_UP}, for {child.held_up:.0f} s"
            elif child.problems:
                reasons[child.label] = "; ".join(f"{k}: {v}" for k, v in child.problems.items())
        if self.ending.asked.is_set():
            reasons["run"] = "draining"
        return reasons

    def details(self) -> dict[str, str]:
        """The details that the processes of the children report of themselves, by the label of the
        child."""
        return {
            child.label: "; ".join(f"{key}: {text}" for key, text in child.details.items())
            for child in self.children
            if child.state is ChildState.READY and child.details
        }

    async def metrics(self, timeout: float = 2.0) -> list[tuple[Child, str]]:
        """The metrics page of each child that gives one within `timeout` seconds."""
        asked = {
            child.collect_metrics(): child
            for child in self.children
            if child.state is ChildState.READY
        }
        if not asked:
            return []
        answered, _ = await asyncio.wait(asked, timeout=timeout)
        return [(asked[page], page.result()) for page in answered if not page.cancelled()]

    async def loaded_files(self, timeout: float = 2.0) -> dict[str, set[str]]:
        """The files of the user's that the instances of each node have loaded, by its address.

        Left out is a node of which one instance has not said so within `timeout` seconds, and has
        not before.
        """
        children = [child for child in self.children if not child.is_leaving]
        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as tasks:
                for child in children:
                    tasks.start_soon(child.collect_files)
        return self.known_files()

    def known_files(self) -> dict[str, set[str]]:
        """The same, as it was when it was asked last."""
        by_address: dict[str, set[str]] = {}
        unknown: set[str] = set()
        for child in self.children:
            if child.files is None:
                unknown.add(child.node.address)
            if not child.is_leaving:
                by_address.setdefault(child.node.address, set()).update(child.files or ())
        return {address: files for address, files in by_address.items() if address not in unknown}

    # Changes -------------------------------------------------------------------------------

    async def scale(
        self,
        address: str,
        count: int,
        *,
        overlap: bool = False,
        tell: Callable[[str], object] = _tell_nobody,
    ) -> None:
        """Have `count` instances of a node: start those that are missing, or drain the last ones.

        Args:
            overlap: do not wait for those that drain.
            tell: called with what is waited for, in words.

        Raises:
            ChangeFailed: one of the instances did not start.
        """
        async with self._changing:
            await self._forget_ended(address)
            children = self.instances(address)
            if len(children) < count:
                added = await self._more(self.nodes[address], count - len(children))
                tell(f"{address}: {_counted(len(added), 'start')}")
                await self._add(added)
            if surplus := children[count:]:
                tell(f"{address}: {_counted(len(surplus), 'drain')}")
                await self._part_with(surplus, overlap)
            if len(children) != count:
                self._happened("node.scaled", address, before=len(children), count=count)

    async def restart(
        self,
        address: str,
        count: int | None = None,
        *,
        overlap: bool = False,
        tell: Callable[[str], object] = _tell_nobody,
    ) -> None:
        """Replace the instances of a node, one after the other: each is drained when the one that
        replaces it is ready, or before that one starts where it needs the GPUs of the former. When
        this is cancelled, those that are not replaced go on.

        Args:
            count: how many there are to be afterwards; as many as before when None.
            overlap: start the next without waiting for the one that drains.
            tell: called with what is waited for, in words.

        Raises:
            ChangeFailed: an instance did not start; those that are not replaced go on.
        """
        async with self._changing:
            node, old = self.nodes[address], self.instances(address)
            count = len(old) if count is None else count
            surplus = old[count:]
            for number, former in enumerate(old[:count], 1):
                progress = f"{number} of {min(count, len(old))}"
                await self._replace(former, node, surplus, overlap, progress, tell)
            for _ in range(count - len(old)):
                await self._add(await self._more(node, 1))
            await self._part_with(surplus, overlap)
            self._happened("node.restarted", address, before=len(old), count=count)

    def use(
        self,
        nodes: Sequence[PlannedNode],
        settings: WorkerSettings,
        *,
        drain_grace: float,
        machine: Machine,
    ) -> None:
        """Start what follows by another plan; the instances that are there stay as they are."""
        self.nodes = {node.address: node for node in nodes}
        self.settings = settings
        self._machine = self._allotment.machine = machine
        if not self.ending.asked.is_set():
            self._grace = drain_grace
        for child in self.children:
            # It may come earlier or later in a drain now.
            child.node = self.nodes.get(child.node.address, child.node)

    def remove(self, addresses: Collection[str]) -> None:
        """Drain all instances of nodes that the run is to have no longer, dependents first."""
        gone = [c for c in self.children if c.node.address in addresses and not c.is_leaving]
        self._let_go(*dependents_first(gone, lambda child: child.node.depth))

    def find(self, name: str) -> str:
        """The address of a node by that address, or by its component where one alone has it.

        Raises:
            ChangeFailed: there is no such node, or there are several.
        """
        matching = [a for a in self.nodes if name in (a, a.partition(".")[2])]
        if len(matching) > 1:
            raise ChangeFailed(f"{name} may be {' or '.join(matching)}: write one of them")
        if not matching:
            components = [address.partition(".")[2] for address in self.nodes]
            near = suggestion(name, [*self.nodes, *components])
            raise ChangeFailed(f"this run has no {name}{near}; it has {', '.join(self.nodes)}")
        return matching[0]

    def instances(self, address: str) -> list[Child]:
        """The instances of a node by their numbers, without those that are leaving."""
        children = [c for c in self.children if c.node.address == address and not c.is_leaving]
        return sorted(children, key=lambda child: child.number)

    def served(self) -> list[str]:
        """The addresses of the nodes that are to have instances here, or have some."""
        return [
            address
            for address, node in self.nodes.items()
            if node.service.workers or self.instances(address)
        ]

    async def _forget_ended(self, address: str) -> None:
        """Give up instances that have ended and do not restart: others take their place."""
        await self._retire([child for child in self.instances(address) if child.ended.is_set()])

    async def _replace(
        self,
        former: Child,
        node: PlannedNode,
        surplus: list[Child],
        overlap: bool,
        progress: str,
        tell: Callable[[str], object],
    ) -> None:
        """Start what replaces an instance, and drain that; first where its GPUs are needed.

        Args:
            surplus: others that are to go; those that went are taken out.
            progress: which one of how many it is.

        Raises:
            ChangeFailed: the new one did not start.
        """
        try:
            added = await self._new_child(node, former.index, instead_of=former.label)
        except NoRoom:
            going = [former, *surplus]
            surplus.clear()
            for child in going:
                logger.info("%s is drained first: its GPUs are needed", child.label)
            # A reload that gives up here would leave the node with one instance less.
            with anyio.CancelScope(shield=True):
                tell(f"{former.label} drains first: its GPUs are needed ({progress})")
                await self._retire(going)
                more = await self._more(node, 1)
                tell(f"{more[0].label} starts in its place")
                await self._add(more)
        else:
            tell(f"{added.label} starts in place of {former.label} ({progress})")
            await self._add([added])
            tell(f"{added.label} is ready, {former.label} drains")
            await self._part_with([former], overlap)

    async def _more(self, node: PlannedNode, count: int) -> list[Child]:
        """Further instances of a node, with the lowest indices that are free.

        Raises:
            ChangeFailed: there is no room for one of them.
        """
        used = {child.index for child in self.instances(node.address)}
        free = (index for index in itertools.count() if index not in used)
        made: list[Child] = []
        try:
            for _ in range(count):
                made.append(await self._new_child(node, next(free), beside=made))
        except NoRoom as error:
            self._give_up(made)
            raise ChangeFailed(str(error)) from None
        except asyncio.CancelledError:
            self._give_up(made)
            raise
        return made

    async def _new_child(
        self,
        node: PlannedNode,
        index: int,
        *,
        beside: Sequence[Child] = (),
        instead_of: str = "",
    ) -> Child:
        """A further instance of a node, which has a place and is not started yet.

        Instances that are leaving are waited for where they have the GPUs that it needs.

        Args:
            beside: others that were made and are not the run's yet.
            instead_of: the label of the one that it replaces.

        Raises:
            NoRoom: there are too few GPUs.
        """
        there = [*self.children, *beside]
        taken = {child.number for child in there if child.node.address == node.address}
        number = next(number for number in itertools.count(1) if number not in taken)
        while True:
            try:
                wanted = Wanted(f"{node.address}/{number}", node.service.resources)
                place = self._allotment.allot(wanted, instead_of=instead_of)
                break
            except NoRoom:
                leaving = [c for c in self.children if c.is_leaving and not c.ended.is_set()]
                holding = [child for child in leaving if child.placed.place.gpus]
                if not holding:
                    raise
                await holding[0].ended.wait()
        placed = placement(self._machine, place, index, node.service.environment)
        return Child(node, number, self.settings, placed=placed, news=self.news)

    def _give_up(self, children: Sequence[Child]) -> None:
        """Forget instances that were made and are not started."""
        for child in children:
            self._allotment.free(child.label)

    async def _add(self, added: Sequence[Child]) -> None:
        """Start new instances, and wait until they are ready.

        Raises:
            ChangeFailed: one did not start; those that did are drained again.
        """
        try:
            await self._runs.wait()
        except asyncio.CancelledError:
            self._give_up(added)
            raise
        assert self._tasks is not None
        if self.ending.asked.is_set():
            self._give_up(added)
            raise ChangeFailed("the run is ending")
        self.children += added
        for child in added:
            self._tasks.start_soon(self._keep, child, name=child.label)
        try:
            for child in added:
                await child.settled.wait()
        except asyncio.CancelledError:
            self._let_go(added)
            raise
        failed = [child for child in added if not child.has_been_ready.is_set()]
        if failed:
            await self._retire(added)
            failure = failed[0].failure
            if failure is None:
                raise ChangeFailed("the run is ending")
            raise ChangeFailed(failure.message, failure.traceback)

    async def _part_with(self, children: Sequence[Child], overlap: bool) -> None:
        if overlap:
            self._let_go(children)
        else:
            await self._retire(children)

    def _let_go(self, *groups: Sequence[Child]) -> None:
        """Retire groups of instances, one group after the other, without waiting for it."""
        if any(groups):
            assert self._tasks is not None
            for child in groups[0]:
                child.request_end(DrainInstance(self._grace))
            self._tasks.start_soon(self._retire_all, groups)

    async def _retire_all(self, groups: Sequence[Sequence[Child]]) -> None:
        first, *others = groups
        await self._retire(first)
        for children in others:
            # Others may have let go of them meanwhile.
            await self._retire([child for child in children if not child.is_leaving])

    async def _retire(self, children: Sequence[Child]) -> None:
        """Drain instances, and end those that take too long; the run does not have them then."""
        for child in children:
            child.request_end(DrainInstance(self._grace))
        with anyio.move_on_after(self._grace + DRAIN_SLACK):
            for child in children:
                await child.ended.wait()
        for child in children:
            child.keeping.cancel()
            await child.ended.wait()
            self.children.remove(child)

    # One child -----------------------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        try:
            with child.keeping:
                await self._keep_running(child)
        except Exception as error:  # noqa: BLE001 - a child that nobody keeps must not go unnoticed
            text = f"{child.label} cannot be supervised: {type(error).__name__}: {error}"
            self._fail(Failure(exit_codes.FAILURE, text, failure_of(error).traceback))
        finally:
            child.state = ChildState.ENDED
            self._allotment.free(child.label)
            child.settled.set()
            child.ended.set()

    async def _keep_running(self, child: Child) -> None:
        """Run a child until the end is asked for, or it has failed for good."""
        policy = self._policy()
        while not self._is_over(child):
            try:
                code = await child.run(self.forks, partial(self._start, child))
                why = exit_text(code) + child.memory_note(code)
                if code is not None and not self._is_over(child):
                    self._happened("process.ended", child.label, code=code)
            except OSError as error:
                why = f"its process could not be started: {error}"
            if self._is_over(child):
                return
            if not child.has_been_ready.is_set():
                text = f"{child.label} ended before it was ready: {why}"
                child.failure = child.failure or Failure(exit_codes.START_FAILED, text)
                child.crash = child.failure.message
                if child.required:
                    self._fail(child.failure)
                return
            if child.failure is not None:
                why = child.failure.message
            trace = child.failure.traceback if child.failure is not None else ""
            if child.node.service.on_crash == "escalate":
                text = f"{child.label} ended: {why}; its on_crash is escalate"
                self._fail(Failure(exit_codes.ESCALATED, text, trace))
                return
            if child.node.service.on_crash == "stop":
                logger.warning(
                    "%s ended: %s; its on_crash is stop: it stays away until asked for%s",
                    *(child.label, why, f"\n{trace}" if trace else ""),
                )
                child.crash = why
                if all(other.ended.is_set() for other in self.children if other is not child):
                    text = f"{child.label} ended, and no other instance is left: {why}"
                    self._fail(Failure(exit_codes.FAILURE, text, trace))
                return
            lived = 0.0 if child.ready_at is None else monotonic() - child.ready_at
            pause = policy.pause_after(lived, random.random())
            times = f" ({policy.crashes} times in a row)" if policy.crashes > 1 else ""
            logger.warning(
                "%s ended%s: %s; restarting in %.1f s%s",
                *(child.label, times, why, pause, f"\n{trace}" if trace else ""),
            )
            child.crash = why + times
            child.state = ChildState.RESTARTING
            with anyio.move_on_after(pause):
                await child.leaving.wait()

    def _is_over(self, child: Child) -> bool:
        return self.ending.asked.is_set() or child.is_leaving

    async def _start(self, child: Child) -> None:
        """Start a child that has loaded, once the server and its dependencies are there."""
        await self._begun.wait()
        below = [other for other in self.children if other.node.depth < child.node.depth]
        for other in below:
            await other.settled.wait()
        child.send(StartInstance())

    def _fail(self, failure: Failure) -> None:
        if self._lasting:
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            logger.error("%s; it starts again when a file changes%s", failure.message, trace)
            return
        if self.failure is None and not self.ending.asked.is_set():
            self.failure = failure
            if failure.code != exit_codes.ESCALATED:
                self._grace = min(self._grace, FAILED_GRACE)
        self.ending.drain()

    async def _drain(self) -> None:
        """Drain the children, dependencies last, until all have ended or their time is up."""
        deadline = monotonic() + self._grace
        async with task_group() as tasks:
            tasks.start_soon(self._stop_at_once, tasks.cancel_scope)
            for children in dependents_first(self.children, lambda child: child.node.depth):
                left = max(0.0, deadline - monotonic())
                for child in children:
                    child.request_end(DrainInstance(left))
                with anyio.move_on_after(left + DRAIN_SLACK):
                    for child in children:
                        await child.ended.wait()
            tasks.cancel_scope.cancel()

    async def _stop_at_once(self, draining: anyio.CancelScope) -> None:
        await self.ending.at_once.wait()
        draining.cancel()
