"""`simulate`: a story told on a simulated bus, seed by seed, and what a failure is reduced to."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, Unpack

import anyio

from dynbus.actors.calling.options import ClientOptions
from dynbus.actors.runtime import Actor, ActorInstance
from dynbus.bus.background import task_group
from dynbus.bus.clock import START, Deadlock
from dynbus.bus.errors import ConfigError, Unavailable, only_cause
from dynbus.bus.protocol.endpoint import DEFAULT_TIMEOUT
from dynbus.bus.transport import Message

from .loop import SimulatedLoop
from .nemesis import Nemesis, Trouble
from .plan import STORED, Fault, Kind, Plan, draw_plan, read_plan, shorten, write_plan
from .processes import SimulatedKit
from .randomness import seeded
from .watching import CallsInTime, LogWatch, Trace, watched_log

A = TypeVar("A", bound=Actor)

STORY_SECONDS: Final = 600.0
"""Virtual seconds in which a story is to end."""
LIMIT: Final = 4 * STORY_SECONDS
"""Virtual seconds for the story, and for closing all that it leaves."""
FAULT_SECONDS: Final = 8.0
"""Virtual seconds from the beginning of a story in which faults begin, unless stated."""
MOST_FAULTS: Final = 6
"""Faults of one plan at most, unless stated."""
SHORTENING_TRIES: Final = 200
RETRY_PAUSE: Final = 0.3
"""Seconds after which another instance is tried again in the place of one that is gone."""
WAYS: Final = (0.0, 0.001, 0.02)
"""Seconds that a message takes on a link at most; each simulation has one of them."""

ALL_KINDS: Final[Mapping[Kind, float]] = {kind: 1.0 for kind in Kind if kind not in STORED}
"""The weights of faults, unless stated: all but those that lose what is stored."""


class Broken(AssertionError):
    """Raised in a story: a promise of the library's that always holds was not kept."""


class SimulationFailed(AssertionError):
    """Raised by `simulate`: with a seed, a story does not hold.

    Attributes:
        seed: with which.
        plan: the shortest one with which it fails in the same way.
        drawn: the plan that the seed drew.
        cause: what the story raised, with the shortest plan.
        log: what the library logged, from warnings on.
    """

    def __init__(
        self, seed: int, plan: Plan, drawn: Plan, cause: BaseException, log: Sequence[str]
    ) -> None:
        self.seed = seed
        self.plan = plan
        self.drawn = drawn
        self.cause = cause
        self.log = log
        faults = "\n".join(f"  {fault}" for fault in plan) or "  none"
        last = "\n".join(f"  {line}" for line in log[-20:]) or "  nothing"
        super().__init__(
            f"seed {seed}: {type(cause).__name__}: {cause}\n"
            f"faults, {len(plan)} of the {len(drawn)} that the seed drew:\n{faults}\n"
            f"the last of the log:\n{last}\n"
            f"to replay it: simulate(story, seeds=[{seed}], plan={write_plan(plan)!r})"
        )


class Simulation:
    """A story's bus, with the faults of its plan.

    Attributes:
        seed: of everything.
        kit: the bus and its processes.
        random: for the draws of the story.
        plan: the faults.
        counts: for what the story counts.
        trace: what has reached the server.
        late: calls of `client` that ended too late, in words.
    """

    def __init__(
        self,
        seed: int,
        plan: Plan,
        log: LogWatch,
        invariants: Sequence[Callable[[Simulation], object]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        network = random.Random(f"{seed} network")
        most = WAYS[int(network.random() * len(WAYS))]

        def way() -> float:
            return network.random() * most

        self.seed = seed
        self.random = random.Random(f"{seed} story")
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self.kit = SimulatedKit(way if most else None, seed=seed, settings=settings or {})
        self.trace = Trace()
        self.late: list[str] = []
        self._log = log
        self._invariants = invariants
        self._nemesis = Nemesis(self.kit, plan, network, self._replace, self.check)
        self._started: dict[str, Callable[[], Awaitable[ActorInstance]]] = {}

    def __repr__(self) -> str:
        return f"<Simulation [seed: {self.seed}, faults: {len(self.plan)}]>"

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    @property
    def troubles(self) -> list[Trouble]:
        """The faults that were carried out so far."""
        return self._nemesis.troubles

    async def start(self, actor: type[Actor], /, **arguments: Any) -> ActorInstance:
        """Start an actor in a process of its own, see `TestKit.start`; tried again where the bus is
        away. Faults may kill it, and start another like it.

        Raises:
            ConfigError: the class or an argument is not usable.
            Exception: what `on_start` raised.
        """
        while True:
            try:
                instance = await self.kit.start(actor, **arguments)
            except Unavailable:
                # As a supervisor does.
                await anyio.sleep(RETRY_PAUSE)
                continue
            if self.kit.process_of(instance.actor.runtime) not in self.kit.alive():
                # A fault hit it before it was known, and knew of nothing to start in its place.
                continue
            self._started[instance.id] = partial(self.start, actor, **arguments)
            return instance

    def client(self, actor: type[A], **options: Unpack[ClientOptions]) -> A:
        """A client of an actor, see `TestKit.client`, whose calls are to end in time."""
        timeout = options.setdefault("timeout", DEFAULT_TIMEOUT)
        watch = CallsInTime(timeout, self.late)
        options["middleware"] = (watch, *(options.get("middleware") or ()))
        return self.kit.client(actor, **options)

    async def over(self) -> None:
        """Wait until the plan is over and what it did is healed."""
        await self._nemesis.done.wait()

    def undisturbed(self, since: float, *, despite: Collection[Kind] = ()) -> float:
        """Seconds for which no fault has been there, from `since` on; 0 while one is.

        Args:
            despite: kinds of faults that do not count.
        """
        ends = [one.ended for one in self.troubles if one.fault.kind not in despite]
        return max(0.0, self.now - max([since, *ends]))

    def check(self) -> None:
        """See whether all invariants hold.

        Raises:
            AssertionError: one does not.
        """
        for invariant in self._invariants:
            invariant(self)

    async def tell(self, story: Callable[[Simulation], Awaitable[object]]) -> None:
        """Carry out a story and its plan.

        Raises:
            Exception: what the story or an invariant raised.
            Broken: the story did not end, or calls were late.
        """
        self.kit.bus.observers.append(self._note)
        try:
            async with self.kit:
                await self._tell(story)
                self.check()
            self._check_end()
        finally:
            # Nobody hears of them any more, whatever they still say.
            await self.kit.bury()

    async def _tell(self, story: Callable[[Simulation], Awaitable[object]]) -> None:
        limit = asyncio.timeout(STORY_SECONDS)
        try:
            async with limit, task_group() as tasks:
                tasks.start_soon(self._nemesis.run, name="nemesis")
                await story(self)
                tasks.cancel_scope.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            raise Broken(f"the story has not ended after {STORY_SECONDS:g} s") from None

    def _check_end(self) -> None:
        if self._log.errors:
            raise Broken(f"the library logged an error: {self._log.errors[0]}")
        if self.late:
            raise Broken(f"calls ended late: {'; '.join(self.late)}")
        if self.kit.orphans:
            raise Broken(f"tasks are left of processes that were closed: {self.kit.orphans}")

    def all_counts(self) -> Counter[str]:
        """The counts of faults, of what the library did about them, and of the story's own."""
        counts = self.counts + self.trace.counts
        for kind, number in self._nemesis.carried_out.items():
            counts[f"fault: {kind}"] += number
        for one in self.kit.processes:
            for reason, number in one.runtime.bus.drops.items():
                counts[f"dropped: {reason}"] += number
        return counts

    def _note(self, message: Message) -> None:
        self.trace.note(self.now, message)

    async def _replace(self, lost: Sequence[ActorInstance]) -> None:
        for instance in lost:
            start = self._started.pop(instance.id, None)
            if start is not None:
                await start()


class Outcome(NamedTuple):
    """A story that was told once.

    Attributes:
        error: what ended it; None where it holds.
        digest: of all that reached the server.
        counts: of faults, of what the library did about them, and of the story's own.
        log: from warnings on.
        seconds: virtual ones.
    """

    error: BaseException | None
    digest: str
    counts: Counter[str]
    log: Sequence[str]
    seconds: float


@dataclass
class Report:
    """The stories of a simulation that hold.

    Attributes:
        digests: of all that reached the server, by seed.
        counts: of faults, of what the library did about them, and of the stories' own.
        seconds: virtual ones, of all together.
    """

    digests: dict[int, str]
    counts: Counter[str]
    seconds: float = 0.0


Story = Callable[[Simulation], Awaitable[object]]
Invariant = Callable[[Simulation], object]


def simulate(
    story: Story,
    *,
    seeds: Iterable[int] = range(100),
    invariants: Sequence[Invariant] = (),
    faults: Mapping[Kind, float] | None = None,
    seconds: float = FAULT_SECONDS,
    most_faults: int = MOST_FAULTS,
    plan: Sequence[Fault] | str | None = None,
    **settings: Any,
) -> Report:
    """Tell a story once for each seed, on a bus with the faults that the seed draws.

    The seed says all: the faults and their times, which task runs next, how long messages take,
    random ids, and `simulation.random`. The same seed repeats to the byte. Of a story that fails
    the plan of faults is shortened.

    Args:
        story: raises where a promise is broken.
        invariants: what has to hold at each beginning and end of a fault, and at the end of the
            story; each raises where it does not.
        faults: the weights of their kinds; all but `Kind.DISK` alike unless given.
        seconds: virtual ones from the beginning of a story, in which faults begin.
        most_faults: of one story; it has any number up to that.
        plan: these faults in place of drawn ones, which are not shortened: of a failure that is
            repeated, as it shows them.
        settings: of the bus, see `BusConfig`.

    Raises:
        SimulationFailed: a story does not hold, or the library logged an error, ended a call late,
            or left tasks.
        ConfigError: `plan` cannot be read, there is no seed, or `seconds` or `most_faults` cannot
            be.
    """
    if not 0.0 <= seconds < math.inf or most_faults < 0:
        raise ConfigError(
            f"seconds = {seconds}, most_faults = {most_faults}: give seconds and a number from 0 on"
        )
    report = Report({}, Counter())
    given = read_plan(plan) if isinstance(plan, str) else None if plan is None else tuple(plan)
    kinds = ALL_KINDS if faults is None else faults
    for seed in seeds:
        drawn = given
        if drawn is None:
            chance = random.Random(f"{seed} plan")
            drawn = draw_plan(chance, kinds, seconds=seconds, most=most_faults)
        outcome = tell(story, seed, drawn, invariants, settings)
        if outcome.error is not None:
            # Of one that goes on without an end each try to shorten it would take seconds.
            if given is None and not isinstance(outcome.error, Deadlock):
                _reduce(story, seed, drawn, invariants, settings, outcome)
            raise SimulationFailed(seed, drawn, drawn, outcome.error, outcome.log) from (
                outcome.error
            )
        report.digests[seed] = outcome.digest
        report.counts += outcome.counts
        report.seconds += outcome.seconds
    if not report.digests:
        raise ConfigError("there is no seed, and so no story was told: give seeds=range(100)")
    return report


def tell(
    story: Story,
    seed: int,
    plan: Plan,
    invariants: Sequence[Invariant] = (),
    settings: Mapping[str, Any] | None = None,
) -> Outcome:
    """Tell a story once."""
    with seeded(str(seed)), watched_log() as log:
        loops: list[SimulatedLoop] = []

        def make_loop() -> SimulatedLoop:
            loops.append(SimulatedLoop(random.Random(f"{seed} order"), limit=LIMIT))
            return loops[-1]

        error: BaseException | None = None
        simulation: Simulation | None = None

        async def begin() -> None:
            nonlocal simulation
            simulation = Simulation(seed, plan, log, invariants, settings)
            await simulation.tell(story)

        with asyncio.Runner(loop_factory=make_loop) as runner:
            try:
                runner.run(begin(), context=contextvars.copy_context())
            except Exception as raised:  # noqa: BLE001 - what a story raises is its outcome
                error = only_cause(raised)
            seconds = loops[0].time() - START
        assert simulation is not None, "the loop ran"
        return Outcome(
            error, simulation.trace.digest, simulation.all_counts() + log.counts, log.lines, seconds
        )


def _reduce(
    story: Story,
    seed: int,
    drawn: Plan,
    invariants: Sequence[Invariant],
    settings: Mapping[str, Any],
    first: Outcome,
) -> None:
    """Raise the failure with the shortest plan with which a story fails as it did."""
    last = [first]
    kind = type(first.error)

    def fails(plan: Plan) -> bool:
        outcome = tell(story, seed, plan, invariants, settings)
        if type(outcome.error) is not kind:
            return False
        last[0] = outcome
        return True

    shortest, _ = shorten(drawn, fails, tries=SHORTENING_TRIES)
    failure = last[0].error
    assert failure is not None, "it failed at first"
    raise SimulationFailed(seed, shortest, drawn, failure, last[0].log) from failure
