"""`python -m benchmarks.fleet_size`: what a request costs a router, its index and the simulation.

Fleets of mock engines in virtual time get a request a second each: turns of conversations that
begin with one of some system prompts, so that many engines hold the beginning of any prompt.
"""

from __future__ import annotations

import gc
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from random import Random
from time import process_time
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dynbus.kvrouter import Decision, InstanceProfile, KvScheduler, RouterConfig, SchedulingRequest
from dynbus.kvrouter.radix.index import Applied, RadixIndex
from dynbus.kvrouter.routing.profiles import (
    BLOCK_SIZE_KEY,
    ROUTES_KEY,
    TOTAL_BLOCKS_KEY,
    read_profile,
)
from dynbus.kvrouter.routing.queue import Ticket
from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.replay.fleet import Fleet
from dynbus.llm.replay.report import summarize
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import Trace, TraceRequest

BLOCK_SIZE: Final = 64
POLICY: Final = "kv"
SYSTEM_PROMPTS: Final = 16
SYSTEM_BLOCKS: Final = 4
GOES_ON: Final = 0.7
"""The part of requests that go on with a conversation of the last ones."""
MOST_BLOCKS: Final = 300
"""Of a conversation that goes on."""

P = ParamSpec("P")
T = TypeVar("T")


class Figures(NamedTuple):
    """The costs of a fleet of one size.

    Attributes:
        router, its_index, engines: microseconds of a processor for a request.
        requests_per_s: that a router with its index decides on one core.
        simulated_per_s: requests of the whole simulation.
        messages, bytes: of events, for a request.
    """

    instances: int
    requests: int
    router: float
    its_index: float
    engines: float
    requests_per_s: float
    simulated_per_s: float
    messages: float
    bytes: float
    hit_rate: float
    ttft_ms: float


def draw_trace(instances: int, requests: int, seed: int) -> Trace:
    """Requests for a fleet, of which each engine gets one a second."""
    rng = np.random.default_rng(seed)

    def blocks(count: int) -> Any:
        return rng.integers(1, 1 << 62, count, dtype=np.uint64)

    systems = [blocks(SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    none = np.zeros(0, dtype=np.int64)
    conversations: list[Any] = []
    drawn: list[TraceRequest] = []
    arrival = 0.0
    for number in range(requests):
        arrival += float(rng.exponential(1.0 / instances))
        if conversations and rng.random() < GOES_ON:
            latest = max(0, len(conversations) - 20 * instances)
            which = int(rng.integers(latest, len(conversations)))
            hashes = np.concatenate([conversations[which], blocks(int(rng.integers(1, 8)))])
            if len(hashes) < MOST_BLOCKS:
                conversations[which] = hashes
        else:
            system = systems[int(rng.integers(SYSTEM_PROMPTS))]
            hashes = np.concatenate([system, blocks(int(rng.integers(2, 30)))])
            conversations.append(hashes)
        prompt_tokens = BLOCK_SIZE * len(hashes) + int(rng.integers(1, BLOCK_SIZE))
        output_tokens = int(rng.integers(16, 400))
        drawn.append(
            TraceRequest(
                *(f"r{number}", number + 1, arrival, prompt_tokens, output_tokens, none, hashes)
            )
        )
    return Trace(drawn, BLOCK_SIZE)


class Stopwatch:
    """Adds up the processor time of calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def of(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        """The same call, timed."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += process_time() - begun
                self.calls[name] += 1

        return timed


class GroupedScheduler(KvScheduler):
    """The schedulers of routers by group, and of the one before them that chooses a group.

    That one guesses what each group holds, as a front end does before several `RouterActor`s.
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, engine: MockConfig, groups: int, seed: int
    ) -> None:
        before = replace(config, exact=False, approximate_ttl=None)
        super().__init__(before, random=Random(seed))
        self._groups = [
            KvScheduler(config, follower=fleet.index, random=Random(seed + 1 + number))
            for number in range(groups)
        ]
        self._config, self._engine = config, engine
        # By the number of its own decision, and by that of who chose its group.
        self._of_group: dict[int, tuple[KvScheduler, int]] = {}
        self._routers: list[InstanceProfile] = []
        self._parts: list[list[InstanceProfile]] = []

    def submit(self, request: SchedulingRequest, now: float) -> Decision | Ticket:
        if not self._parts:
            count, engine = len(self._groups), self._engine
            self._parts = [list(request.profiles[number::count]) for number in range(count)]
            self._routers = [
                read_profile(
                    f"{number}",
                    {
                        BLOCK_SIZE_KEY: str(engine.block_size),
                        TOTAL_BLOCKS_KEY: str(engine.blocks * len(part)),
                        ROUTES_KEY: str(len(part)),
                    },
                )
                for number, part in enumerate(self._parts)
            ]
        asked = replace(request, profiles=self._routers)
        before = super().submit(asked, now)
        assert isinstance(before, Decision), "a router that says no limit lets none wait"
        group = int(before.chosen.instance)
        decision = self._groups[group].submit(replace(request, profiles=self._parts[group]), now)
        assert isinstance(decision, Decision), "the fleet's own settings let none wait"
        self._of_group[before.number] = self._groups[group], decision.number
        return replace(decision, number=before.number)

    def first_item(self, number: int, now: float) -> None:
        super().first_item(number, now)
        scheduler, own = self._of_group[number]
        scheduler.first_item(own, now)

    def note_reused(self, number: int, tokens: int, now: float) -> Decision | None:
        scheduler, own = self._of_group[number]
        return scheduler.note_reused(own, tokens, now)

    def ended(self, number: int, now: float, error: str = "") -> None:
        super().ended(number, now, error)
        scheduler, own = self._of_group.pop(number)
        scheduler.ended(own, now, error)


def measure(instances: int, requests: int, seed: int, groups: int = 1) -> Figures:
    """Play drawn requests to a fleet, and see what took the time."""
    trace = draw_trace(instances, requests, seed)
    simulation = Simulation(instances)
    config = simulation.config(POLICY)
    fleet = Fleet(simulation.names, config, simulation.engine, seed=seed)
    if groups > 1:
        fleet.scheduler = GroupedScheduler(config, fleet, simulation.engine, groups, seed)
    watch, scheduler = Stopwatch(), fleet.scheduler
    for name in ("submit", "first_item", "note_reused", "ended", "release"):
        setattr(scheduler, name, watch.of("router", getattr(scheduler, name)))
    said, apply = 0, RadixIndex.apply

    def noted(self: RadixIndex, instance: str, message: bytes) -> Applied:
        nonlocal said
        said += len(message)
        return apply(self, instance, message)

    gc.collect()
    gc.freeze()
    setattr(RadixIndex, "apply", watch.of("index", noted))  # noqa: B010 - it is a method
    begun = process_time()
    try:
        result = fleet.run(trace)
    finally:
        setattr(RadixIndex, "apply", apply)  # noqa: B010 - it is a method
    spent = process_time() - begun
    router, index = watch.seconds["router"], watch.seconds["index"]
    report = summarize(POLICY, result)
    return Figures(
        instances,
        requests,
        1e6 * router / requests,
        1e6 * index / requests,
        1e6 * (spent - router - index) / requests,
        requests / (router + index),
        requests / spent,
        watch.calls["index"] / requests,
        said / requests,
        report.hit_rate,
        report.ttft_ms.mean,
    )


@click.command()
@click.option("--instances", default="100,1000,10000", show_default=True, metavar="N[,N...]")
@click.option("--requests", type=click.IntRange(100), default=10_000, show_default=True)
@click.option(
    "--groups",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Routers that have a part of the engines each, and one before them that guesses.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(instances: str, requests: int, groups: int, seed: int, as_json: bool) -> None:
    """Measure what a request costs a router of fleets of some sizes."""
    all_figures = [measure(int(count), requests, seed, groups) for count in instances.split(",")]
    if as_json:
        click.echo(json.dumps([figures._asdict() for figures in all_figures]))
        return
    table = Table("", *(f"{figures.instances:,}" for figures in all_figures), title="of a request")
    for name, label in (
        ("router", "router, us"),
        ("its_index", "its index, us"),
        ("engines", "the simulated engines, us"),
        ("requests_per_s", "requests/s of a router on one core"),
        ("simulated_per_s", "requests/s of the simulation"),
        ("messages", "messages of events"),
        ("bytes", "bytes of events"),
        ("hit_rate", "hit rate, %"),
        ("ttft_ms", "mean time to the first token, ms"),
    ):
        unit = 100.0 if name == "hit_rate" else 1.0
        table.add_row(label, *(f"{unit * getattr(figures, name):,.1f}" for figures in all_figures))
    Console().print(table)


if __name__ == "__main__":
    main()
