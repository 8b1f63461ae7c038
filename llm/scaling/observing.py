"""The pools of an autoscaler as the bus shows them: by discovery, and by what instances say.

Every instance answers `$SRV.STATS`: engines with their load and their sums so far, front ends with
the requests that they hold until a pool has an instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import anyio
import msgspec

from dynbus import Instance, Runtime
from dynbus.llm.engine.observing import SUMS as ENGINE_SUMS
from dynbus.llm.hand_over.observing import SUMS as HAND_OVER_SUMS
from dynbus.spi import ComponentName, InstanceName, InstanceReport, Message, monotonic, random_id

from .observation import Observation, PoolLoad, PoolState

STATS: Final = "$SRV.STATS"
ANSWER_SECONDS: Final = 1.0
"""Seconds that instances have to answer."""
HELD_REQUESTS: Final = 64
"""Held requests that a front end is to name, by which it tells for which pools it holds."""
SUMS: Final = (*ENGINE_SUMS, *HAND_OVER_SUMS)
"""The figures of an instance that only grow."""
PRESENT: Final = ("running", "waiting", "block_size", "kv_blocks", "kv_blocks_used", "slots")
"""Those that say how it is now."""
MOST_FIGURE: Final = 1e15
"""The most that an engine tells; what is beyond is no figure."""
MOST_GONE: Final = 1024
"""Instances of a pool that do not answer, or are not there, of which it is remembered what they
had counted: they may be back, and count on."""

_Figures = Mapping[str, float]


class PoolCounts:
    """The sums that the engines of one pool had counted before, and what came since. Pure."""

    def __init__(self) -> None:
        # The latest ones last, also of instances that are not there at present.
        self._before: dict[str, _Figures] = {}
        self._has_seen = False

    def state(
        self,
        ready: Collection[str],
        draining: Collection[str],
        figures: Mapping[str, _Figures],
        held: int,
    ) -> PoolState:
        """The pool as it is now.

        Args:
            ready, draining: ids of its instances.
            figures: of those that have answered as engines.
            held: requests that front ends hold for it.
        """
        missing = [one for one in ready if one not in figures]
        if missing:
            # What came meanwhile is not known: the next observation begins anew.
            self._has_seen = False
            return PoolState(len(ready), len(draining), missing=", ".join(missing))
        load = self._load(figures, held)
        before = self._before
        for name, said in figures.items():
            before.pop(name, None)
            before[name] = said
        while len(before) > len(figures) + MOST_GONE:
            del before[next(iter(before))]
        self._has_seen = True
        return PoolState(len(ready), len(draining), load)

    def _load(self, figures: Mapping[str, _Figures], held: int) -> PoolLoad:
        now = dict.fromkeys((*SUMS, "running", "waiting", "context"), 0.0)
        capacity = slots = 0.0
        for name, said in figures.items():
            # Of one that was never there before all counts, but for who looks for the first time.
            before = self._before.get(name, {} if self._has_seen else said)
            for each in SUMS:
                now[each] += max(0.0, said.get(each, 0.0) - before.get(each, 0.0))
            now["running"] += said.get("running", 0.0)
            now["waiting"] += said.get("waiting", 0.0)
            block = said.get("block_size", 0.0)
            now["context"] += block * said.get("kv_blocks_used", 0.0)
            capacity = block * said.get("kv_blocks", 0.0)
            slots = said.get("slots", 0.0)
        firsts, decoded = now["first_tokens"], now["decoded_tokens"]
        return PoolLoad(
            waiting=held + int(now["waiting"]),
            running=int(now["running"]),
            context_tokens=now["context"],
            capacity_tokens=int(capacity),
            slots=int(slots),
            arrivals=int(now["requests"]),
            ended=int(now["requests_ended"]),
            prompt_tokens=int(max(0.0, now["prompt_tokens"] - now["cached_tokens"])),
            output_tokens=int(now["output_tokens"]),
            firsts=int(firsts),
            ttft=now["first_token_seconds"] / firsts if firsts else None,
            itl=now["decode_seconds"] / decoded if decoded else None,
            turned_away=int(now["prompts_turned_away"]),
        )


class PoolObserver:
    """Looks at pools as the bus shows them. Pure."""

    def __init__(self, pools: Sequence[ComponentName]) -> None:
        self._counts = {pool: PoolCounts() for pool in pools}

    def observe(
        self, now: float, instances: Iterable[Instance], reports: Iterable[InstanceReport]
    ) -> Observation:
        """The pools of instances that are known, and of what was answered."""
        known: dict[ComponentName, list[Instance]] = {pool: [] for pool in self._counts}
        for one in instances:
            pool = ComponentName(one.record.namespace, one.record.component)
            if pool in known:
                known[pool].append(one)
        answers = {InstanceName(*row[:3]): row for row in reports}
        held = _held(answers.values())
        return Observation(
            now,
            {
                str(pool): self._state(pool, there, answers, held.get(str(pool), 0))
                for pool, there in known.items()
            },
        )

    def _state(
        self,
        pool: ComponentName,
        there: Sequence[Instance],
        answers: Mapping[InstanceName, InstanceReport],
        held: int,
    ) -> PoolState:
        ready = [one.id for one in there if not one.record.draining]
        draining = [one.id for one in there if one.record.draining]
        figures: dict[str, _Figures] = {}
        for one in there:
            row = answers.get(one.record.name)
            said = None if row is None or row.counts is None else row.counts.figures
            if said is not None and _are_of_an_engine(said):
                figures[one.id] = said
        return self._counts[pool].state(ready, draining, figures, held)


def _are_of_an_engine(figures: _Figures) -> bool:
    """True if an engine has said these figures."""
    return "requests" in figures and all(
        0.0 <= figures.get(name, 0.0) <= MOST_FIGURE for name in (*SUMS, *PRESENT)
    )


def _held(reports: Iterable[InstanceReport]) -> dict[str, int]:
    """The number of requests that are held for each component."""
    by_process = {row.held.process: row.held for row in reports if row.held is not None}
    counts: dict[str, float] = {}
    for held in by_process.values():
        # It names the oldest alone: as far as is known the others wait for the same.
        each = max(1.0, held.count / max(1, len(held.requests)))
        for request in held.requests:
            for component in set(request.awaits):
                counts[component] = counts.get(component, 0.0) + each
    return {component: round(count) for component, count in counts.items()}


class PoolSurvey:
    """Asks all instances how they are, for a `PoolObserver`."""

    def __init__(self, runtime: Runtime, pools: Sequence[ComponentName]) -> None:
        self._runtime = runtime
        self._observer = PoolObserver(pools)

    async def begin(self) -> None:
        """Wait until all instances are known: those that are not would be taken for gone."""
        self._runtime.discovery.begin()
        await self._runtime.discovery.wait_synchronized(None)

    async def observe(self) -> Observation:
        """The pools as they are now; it takes `ANSWER_SECONDS` at most."""
        instances = self._runtime.discovery.view.everything()
        reports = await self._ask({one.record.name for one in instances})
        return self._observer.observe(monotonic(), instances, reports)

    async def _ask(self, wanted: set[InstanceName]) -> list[InstanceReport]:
        bus = self._runtime.bus
        reports: list[InstanceReport] = []
        missing = set(wanted)
        complete = asyncio.Event()

        def collect(message: Message) -> None:
            row = InstanceReport.read(message.data)
            if row is None:
                return
            reports.append(row)
            missing.discard(InstanceName(*row[:3]))
            if not missing:
                complete.set()

        inbox = f"{bus.replies.base}.{random_id()}"
        subscription = bus.data.subscribe(inbox, collect)
        question = msgspec.json.encode({"requests": HELD_REQUESTS})
        try:
            bus.data.publish(STATS, question, reply=inbox)
            with anyio.move_on_after(ANSWER_SECONDS):
                await complete.wait()
        finally:
            subscription.unsubscribe()
        return reports
