"""`ScalingPolicy`: how many instances each pool is to have. No I/O, no clock.

Its user, an actor or a simulation in virtual time, shows it what is there and has its targets
carried out by others: it starts and places nothing, and learns of what became of its targets only
by what it sees next.

    policy = ScalingPolicy(ScalingConfig(pools={"llm.Engine": PoolConfig(least=1, most=8)}))
    targets = policy.decide(Observation(now, {"llm.Engine": PoolState(1, load=load)}))

A pool goes up at once, to what the demand needs that is expected when a new instance is ready, and
down to the most that it needed within `down_after`. What it asked for and what is there may differ
for as long as a start or a drain takes. If they differ for longer, others have their reasons, and
what is there counts: instances that came or went by hand stay so for `hold`; instances that did not
start are asked for again, later each time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import msgspec

from dynbus import ConfigError

from .capacity import (
    BUSIEST,
    Demand,
    EngineSpeed,
    Limits,
    Need,
    ProfileLearner,
    need,
    predict,
    streams_need,
)
from .observation import Observation, PoolKind, PoolLoad, PoolState, PoolTarget

SMOOTH: Final = 60.0
"""Seconds over which the rate of arrivals is smoothed."""
SMOOTH_SIZES: Final = 600.0
"""Seconds over which sizes of requests are."""
MOST_GROWTH: Final = 1.0
"""The most by which the rate of arrivals is expected to grow until an instance has started, as a
share of it."""
DOWN_MARGIN: Final = 0.1
"""The share by which the demand may grow before fewer instances would be too few again."""
LEARNING_BUSY: Final = 0.6
"""An engine that is busier than this tells more of its queue than of its speed."""
REGRET: Final = 2.0
"""Instances that are missed within so many times the patience after they went, went too early."""
CALM: Final = 8.0
"""Times the patience without that, after which it is halved."""
MOST_PATIENCE: Final = 3600.0
"""Seconds."""
MOST_INSTANCES: Final = 1024


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The bounds of a pool.

    Attributes:
        least, most: instances. With `least` 0 the pool goes when nothing is asked, and comes with
            the first request that is held for it.
        gpus: of one instance, that the budget counts.

    Raises:
        ConfigError: no number of instances is within the bounds.
    """

    kind: PoolKind = "aggregated"
    least: int = 1
    most: int = 8
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= MOST_INSTANCES or self.most < 1 or self.gpus < 0:
            raise ConfigError(
                f"a pool of {self.least} to {self.most} instances with {self.gpus} GPUs each: give "
                f"0 <= least <= most <= {MOST_INSTANCES}, and most of 1 at least"
            )


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """The settings of a policy. Times are in seconds.

    Attributes:
        pools: by name.
        ttft, itl: the objectives: the most until a request's first token, and the most between two
            of its tokens, on average.
        budget: GPUs of all pools together; None for no limit.
        cold_start: from asking for an instance until it serves.
        drain: that the streams of an instance have to end or move when it is to go.
        down_after: for which fewer instances must have been enough before some are given up.
        hold: for which a change by hand stays.
        headroom: share of its capacity that an instance is to have left.
        profile: the speed of an engine, as far as it is known before it is measured.

    Raises:
        ConfigError: a value is not usable.
    """

    pools: Mapping[str, PoolConfig]
    ttft: float = 2.0
    itl: float = 0.05
    budget: int | None = None
    cold_start: float = 60.0
    drain: float = 30.0
    down_after: float = 180.0
    hold: float = 900.0
    headroom: float = 0.1
    profile: EngineSpeed = field(default_factory=EngineSpeed)

    def __post_init__(self) -> None:
        for name in ("ttft", "itl", "cold_start", "drain", "down_after", "hold"):
            value: float = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ConfigError(f"{name} = {value}: give seconds above 0")
        if not 0.0 <= self.headroom < 1.0:
            raise ConfigError(f"headroom = {self.headroom}: give a share from 0 to below 1")
        if not self.pools:
            raise ConfigError("there is no pool to scale: name one")
        if self.budget is not None and self.budget < self.least_budget:
            least = sum(pool.least * pool.gpus for pool in self.pools.values())
            raise ConfigError(
                f"budget = {self.budget}: the pools have {least} GPUs at least, and "
                f"{self.least_budget} with an instance of one that comes from 0: give so many"
            )

    @property
    def least_budget(self) -> int:
        """GPUs with which each pool can have an instance, beside the least ones of all others."""
        pools = self.pools.values()
        least = sum(pool.least * pool.gpus for pool in pools)
        return least + max((pool.gpus for pool in pools if not pool.least), default=0)

    @property
    def settled_after(self) -> float:
        """Seconds after which a target is carried out, unless something speaks against it."""
        return 2.0 * self.cold_start + self.drain


class _Rate:
    """A rate with its trend: Holt's linear method (Holt 1957), with a weight for each observation
    by the time that it is of."""

    def __init__(self, slow: float) -> None:
        self._slow = slow
        self._has_begun = False
        self.level = 0.0
        self.trend = 0.0

    def note(self, count: int, seconds: float) -> None:
        """So many came in the last seconds."""
        rate = count / seconds
        if not self._has_begun:
            self._has_begun, self.level = True, rate
            return
        weight = -math.expm1(-seconds / SMOOTH)
        expected = max(0.0, self.level + self.trend * seconds)
        level = expected + weight * (rate - expected)
        change = -math.expm1(-seconds / self._slow)
        self.trend += change * ((level - self.level) / seconds - self.trend)
        self.level = level

    def after(self, seconds: float) -> float:
        """The rate that is expected after so many seconds, as far as it grows until then."""
        growth = max(0.0, self.trend * seconds)
        return self.level + min(growth, MOST_GROWTH * self.level)


class _Mean:
    """The mean size of what came lately; 0 before anything has."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def note(self, total: float, count: float, seconds: float) -> None:
        kept = math.exp(-seconds / SMOOTH_SIZES)
        self._sum = kept * self._sum + total
        self._count = kept * self._count + count

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0


class _Patience:
    """Seconds for which fewer instances must have been enough: twice as many each time that some
    were given up too early, and again fewer when that has not happened for long.

    Args:
        least: seconds.
    """

    def __init__(self, least: float) -> None:
        self._least = self.seconds = least
        self._down_at = self._regretted_at = -math.inf

    def note(self, change: int, now: float) -> None:
        """The pool goes up or down by so many instances."""
        if change < 0:
            if now - self._regretted_at > CALM * self.seconds:
                self.seconds = max(self._least, self.seconds / 2)
            self._down_at = now
        elif now - self._down_at < REGRET * self.seconds:
            self.seconds = min(2 * self.seconds, max(self._least, MOST_PATIENCE))
            self._regretted_at = now


@dataclass(slots=True)
class _Asked:
    """The number of instances that a pool was asked to have, and what came of it.

    Attributes:
        count: instances.
        since: when that was last another number, or was last there.
        is_settled: whether so many were there since: what differs then is not on its way.
        reached: the most instances that were ready since it was asked for.
        held_until: until when what others made of it stays; with what they made.
        failures: how often in a row instances did not start; with how many were there then.
    """

    count: int
    since: float
    is_settled: bool = False
    reached: int = 0
    held_until: float = -math.inf
    reason: str = ""
    failures: int = 0
    failed_at: int = 0


class PoolPolicy:
    """Decides for one pool, as if it had all GPUs.

    Args:
        first_seen: the ready instances at the first observation; they are taken over.

    Attributes:
        floor: the instances that no other pool may have in place of it: what others have made of it
            for as long as that stays, and else those without which open streams would suffer.
    """

    def __init__(
        self, config: ScalingConfig, pool: PoolConfig, first_seen: int, now: float
    ) -> None:
        self._config = config
        self._pool = pool
        self._learner = ProfileLearner(config.profile)
        self._rate = _Rate(max(5 * SMOOTH, 4 * config.cold_start))
        self._prompt, self._output, self._context = _Mean(), _Mean(), _Mean()
        self._seen_at: float | None = None
        self._queued_since: float | None = None
        self._idle_since: float | None = None
        self._asked = _Asked(first_seen, now, reached=first_seen)
        # (time, instances that were enough); what is before the oldest is not known.
        self._enough: deque[tuple[float, int]] = deque()
        self._known_since = now
        self._patience = _Patience(config.down_after)
        self.floor = 0

    @property
    def asked(self) -> int:
        """The number of instances that was last asked for."""
        return self._asked.count

    @property
    def profile(self) -> EngineSpeed:
        """The speed of its engines as it was learned."""
        return self._learner.profile

    # Seeing -------------------------------------------------------------------------------

    def wish(self, state: PoolState, now: float) -> PoolTarget:
        """The number of instances that it would have; `ask` says which ones it gets."""
        load = state.load
        if load is None:
            self._seen_at = None
            self._asked.since = now
            # Nothing is known of its streams.
            self.floor = self._asked.count
            by = f" of {state.missing}" if state.missing else ""
            return PoolTarget(self._asked.count, f"frozen: a metric is missing{by}")
        if self._seen_at is None:
            # Nothing is known of the time before.
            self._known_since = now
            self._idle_since = None
            self._enough.clear()
        else:
            self._note(load, state.ready, now - self._seen_at)
        self._seen_at = now
        if not load.waiting:
            self._queued_since = None
        elif self._queued_since is None:
            self._queued_since = now
        asked = self._asked
        self._compare(state, now)
        wanted, reason = self._wanted(state, load, now)
        if now < asked.held_until:
            self.floor = asked.count
            return PoolTarget(asked.count, asked.reason)
        if asked.is_settled and state.ready != asked.count:
            self.floor = asked.count
            others = f"waits: others have made it {state.ready} instances of {asked.count}"
            return PoolTarget(asked.count, others)
        return PoolTarget(wanted, reason)

    def ask(self, count: int, now: float) -> None:
        """So many instances are asked for."""
        asked = self._asked
        if count != asked.count:
            self._patience.note(count - asked.count, now)
            asked.count, asked.since = count, now
            asked.reached, asked.is_settled = 0, False

    def _note(self, load: PoolLoad, ready: int, passed: float) -> None:
        """Learn from what came since the last observation."""
        self._rate.note(load.arrivals, passed)
        self._prompt.note(load.prompt_tokens, load.firsts, passed)
        self._output.note(load.output_tokens, load.ended, passed)
        self._context.note(load.context_tokens, load.running, passed)
        if not ready:
            return
        kind, profile = self._pool.kind, self.profile
        state = predict(kind, profile, self._demand(self._rate.level), ready)
        if load.ttft is not None and load.firsts and kind != "decode":
            prompt = load.prompt_tokens / load.firsts
            known = profile.prefill.at(prompt)
            was_queued = self._queued_since is not None
            is_queued = load.waiting > 0 or was_queued or state.busy > LEARNING_BUSY
            # Not even a queue lets a prompt take longer than until its first token.
            if load.ttft < known or not is_queued:
                waited = 0.0 if is_queued else known * state.busy / (1.0 - state.busy) / ready
                seconds = max(load.ttft / 5, load.ttft - waited)
                self._learner.note_first_tokens(prompt, seconds, load.firsts, passed)
        if load.itl is not None and load.running and kind != "prefill":
            seconds = load.itl * (1.0 - min(state.busy, BUSIEST))
            context = load.context_tokens / ready
            is_stalled = kind != "decode" and (load.waiting > 0 or self._queued_since is not None)
            # Prompts that queue take more of its time than is reckoned here.
            if not is_stalled or seconds < profile.decode.at(context):
                self._learner.note_steps(context, seconds, load.running, passed)

    def _compare(self, state: PoolState, now: float) -> None:
        """Compare what is there with what was asked for."""
        asked, config = self._asked, self._config
        asked.reached = max(asked.reached, state.ready)
        if state.ready == asked.count:
            asked.since, asked.is_settled = now, True
            if state.ready > asked.failed_at:
                asked.failures = asked.failed_at = 0
            return
        if now - asked.since < config.settled_after:
            return
        if state.ready > asked.count:
            text = f"held: {state.ready} are there and {asked.count} were asked for"
            pause = config.hold
        elif asked.reached >= asked.count and state.ready >= self._pool.least:
            text = f"held: {state.ready} are left of {asked.count}"
            pause = config.hold
        else:
            missing = asked.count - state.ready
            text = f"paused: {missing} did not start within {config.settled_after:.0f} s"
            if asked.reached >= asked.count:
                # Fewer than there may be at least are lost, and not what somebody wants.
                text = f"paused: {state.ready} are left of {asked.count}"
            asked.failures, asked.failed_at = asked.failures + 1, state.ready
            pause = min(config.hold, config.cold_start * 2.0 ** (asked.failures - 1))
        asked.count = asked.reached = state.ready
        asked.since = now
        asked.held_until = now + pause
        asked.reason = text

    # Deciding -----------------------------------------------------------------------------

    def _demand(self, rate: float) -> Demand:
        return Demand(rate, self._prompt.value, self._output.value, self._context.value)

    def _need(self, rate: float, load: PoolLoad) -> Need:
        config, pool = self._config, self._pool
        demand = self._demand(rate / (1.0 - config.headroom))
        limits = Limits(config.ttft, config.itl, load.capacity_tokens, load.slots)
        return need(pool.kind, self.profile, demand, limits, pool.most)

    def _wanted(self, state: PoolState, load: PoolLoad, now: float) -> tuple[int, str]:
        config, pool = self._config, self._pool
        limits = Limits(config.ttft, config.itl, load.capacity_tokens, load.slots)
        streams = streams_need(pool.kind, self.profile, load.running, load.context_tokens, limits)
        self.floor = min(state.ready, streams)
        level, expected = self._rate.level, self._rate.after(config.cold_start)
        backlog = self._backlog(state, load, now)
        is_asked = bool(load.arrivals or load.running or load.waiting)
        if is_asked:
            up = self._need(expected + backlog, load)
            # A rate that was smoothed is off by chance, as that of a Poisson process.
            chance = 1.0 / math.sqrt(max(1.0, 2.0 * SMOOTH * level))
            enough = self._need((level + backlog) * (1.0 + DOWN_MARGIN + chance), load)
            up = up._replace(instances=max(1, streams, up.instances))
            least = max(1, streams, enough.instances, up.instances)
        else:
            # However long the memory of a demand is: none takes no instance.
            up, least = Need(0), 0
        # Nothing at all is no reason to wait for longer than is said.
        if is_asked:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_idle = self._idle_since is not None and now - self._idle_since >= config.down_after
        patience = config.down_after if is_idle else self._patience.seconds
        self._enough.append((now, least))
        while self._enough[0][0] < now - patience:
            self._enough.popleft()
        lately = max(count for _, count in self._enough)
        text = f"{expected:.3g} requests/s expected, {load.running} run, {load.waiting} wait"
        if up.out_of_reach:
            text += f"; {' and '.join(up.out_of_reach)} out of reach of any number"
        current = self._asked.count
        if up.instances > current:
            wanted, why = up.instances, f"up: {text}"
        elif lately < current and now - self._known_since >= patience:
            wanted, why = lately, f"down: {text}, for {patience:.0f} s"
        else:
            wanted, why = current, text
        bounded = min(max(wanted, pool.least), pool.most)
        if bounded != wanted:
            why += f"; {wanted} are out of the bounds {pool.least} to {pool.most}"
        return bounded, why

    def _backlog(self, state: PoolState, load: PoolLoad, now: float) -> float:
        """Requests per second that come beside the arrivals: those that wait and will wait still
        when a new instance is ready."""
        config = self._config
        if not load.waiting:
            return 0.0
        spare = 0.0
        # A queue that stays shows that there is nothing to spare, whatever is reckoned.
        since = self._queued_since
        is_new = since is None or now - since < config.ttft
        if is_new and state.ready and self._pool.kind != "decode":
            busy = self._rate.level * self.profile.prefill.at(self._prompt.value) / state.ready
            spare = state.ready * max(0.0, 1.0 - busy)
            spare /= self.profile.prefill.at(self._prompt.value)
        left = load.waiting - spare * config.cold_start
        return max(0.0, left) / config.cold_start


class ScalingPolicy:
    """Decides for all pools, within the budget.

    Attributes:
        config: its settings.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self.config = config
        self._pools: dict[str, PoolPolicy] = {}

    def __repr__(self) -> str:
        pools = ", ".join(f"{name}: {pool.asked}" for name, pool in self._pools.items())
        return f"<ScalingPolicy [{pools}]>"

    def profile_of(self, pool: str) -> EngineSpeed:
        """The speed of the engines of a pool, as far as it is known by now."""
        known = self._pools.get(pool)
        return self.config.profile if known is None else known.profile

    def decide(self, observation: Observation) -> dict[str, PoolTarget]:
        """The targets of all pools; a pool that is not observed has none."""
        now = observation.time
        seen = self._with_turned_away(observation)
        wishes: dict[str, PoolTarget] = {}
        for name, pool in self.config.pools.items():
            state = seen.get(name)
            if state is None:
                continue
            known = self._pools.get(name)
            if known is None:
                known = self._pools[name] = PoolPolicy(self.config, pool, state.ready, now)
            wishes[name] = known.wish(state, now)
        targets = self._within_budget(wishes)
        for name, target in targets.items():
            self._pools[name].ask(target.desired, now)
        return targets

    def _with_turned_away(self, observation: Observation) -> dict[str, PoolState]:
        """The pools, those of prompts with what came to them in vain.

        A request is no matter of a prefill instance before a decode instance asks it, which it does
        not where none is there, or all have too much: what is not asked is demand all the same.
        """
        seen = dict(observation.pools)
        pools = self.config.pools
        turned_away = Counter[str]()
        for name, state in seen.items():
            if name in pools and state.load is not None:
                turned_away[_namespace(name)] += state.load.turned_away
        for name, state in seen.items():
            load, more = state.load, turned_away[_namespace(name)]
            if more and load is not None and name in pools and pools[name].kind == "prefill":
                load = msgspec.structs.replace(load, arrivals=load.arrivals + more)
                seen[name] = msgspec.structs.replace(state, load=load)
        return seen

    def _within_budget(self, wishes: dict[str, PoolTarget]) -> dict[str, PoolTarget]:
        """The wishes, each cut to about the same share of what it is where GPUs are too few."""
        budget = self.config.budget
        if budget is None:
            return wishes
        pools = self.config.pools
        granted = {name: wish.desired for name, wish in wishes.items()}
        total = sum(count * pools[name].gpus for name, count in granted.items())
        # The first is the one that is left the greatest share of its wish.
        takeable: list[tuple[float, bool, int, str]] = []

        def offer(number: int, name: str) -> None:
            floor = max(pools[name].least, self._pools[name].floor)
            if granted[name] > floor and pools[name].gpus:
                share = (granted[name] - 1) / wishes[name].desired
                # Without instances that decode nobody asks those that compute prompts.
                heappush(takeable, (-share, pools[name].kind != "prefill", number, name))

        for number, name in enumerate(granted):
            offer(number, name)
        while total > budget and takeable:
            _, _, number, name = heappop(takeable)
            granted[name] -= 1
            total -= pools[name].gpus
            offer(number, name)
        return {
            name: wish
            if granted[name] == wish.desired
            else PoolTarget(
                granted[name], f"{wish.desired} do not fit into {budget} GPUs; {wish.reason}"
            )
            for name, wish in wishes.items()
        }


def _namespace(pool: str) -> str:
    """The namespace of a pool; pools of prompts and of outputs that go together have one."""
    return pool.rpartition(".")[0]
