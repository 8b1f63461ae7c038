"""How many instances a pool is to have, and the faults that Dynamo's planner had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynbus.bus.errors import ConfigError
from dynbus.llm.scaling.capacity import EngineSpeed, Line
from dynbus.llm.scaling.observation import Observation, PoolKind, PoolLoad, PoolState, PoolTarget
from dynbus.llm.scaling.policy import PoolConfig, ScalingConfig, ScalingPolicy

POOL = "llm.Engine"
PROFILE = EngineSpeed(Line(0.1, 1e-4), Line(0.02, 1e-7))
"""A prompt of 1000 tokens takes 0.2 s."""
INTERVAL = 5.0
IDLE = PoolLoad(capacity_tokens=100_000)


def config(**changes: Any) -> ScalingConfig:
    settings: dict[str, Any] = {
        "pools": {POOL: PoolConfig(least=1, most=10)},
        "cold_start": 30.0,
        "drain": 10.0,
        "down_after": 60.0,
        "hold": 300.0,
        "profile": PROFILE,
        **changes,
    }
    return ScalingConfig(**settings)


def busy(rate: float, running: int | None = None, **changes: Any) -> PoolLoad:
    """The load of so many requests each second, of 1000 tokens and 100 of output, for which this
    is what an engine takes."""
    count = round(rate * INTERVAL)
    running = round(rate * 3) if running is None else running
    load = PoolLoad(
        running=running,
        context_tokens=1050.0 * running,
        capacity_tokens=100_000,
        arrivals=count,
        ended=count,
        prompt_tokens=1000 * count,
        output_tokens=100 * count,
        firsts=count,
        ttft=0.25,
        itl=0.025,
    )
    return msgspec.structs.replace(load, **changes)


class Pool:
    """One pool, whose instances come and go as the test says."""

    def __init__(self, ready: int = 1, settings: ScalingConfig | None = None) -> None:
        self.policy = ScalingPolicy(settings or config())
        self.now = 0.0
        self.ready = ready

    def see(self, load: PoolLoad | None, seconds: float = INTERVAL) -> PoolTarget:
        """The last target after so many seconds with this load."""
        target = PoolTarget(0, "")
        for _ in range(max(1, round(seconds / INTERVAL))):
            self.now += INTERVAL
            seen = Observation(self.now, {POOL: PoolState(self.ready, load=load)})
            target = self.policy.decide(seen)[POOL]
        return target

    def follow(self, load: PoolLoad | None, seconds: float) -> PoolTarget:
        """The same, with all instances there at once."""
        target = PoolTarget(self.ready, "")
        for _ in range(round(seconds / INTERVAL)):
            target = self.see(load)
            self.ready = target.desired
        return target


def test_a_pool_goes_up_with_its_load_and_down_after_it() -> None:
    pool = Pool()

    high = pool.follow(busy(16.0), 300.0).desired
    low = pool.follow(busy(2.0), 300.0).desired

    # 3.2 instances' time of prompts.
    assert 4 <= high <= 7
    assert low == 1


def test_down_comes_after_its_time_and_not_before() -> None:
    pool = Pool()
    high = pool.follow(busy(16.0), 300.0).desired

    # What was smoothed needs as many for a while yet.
    assert pool.follow(IDLE, 55.0).desired == high
    assert pool.follow(IDLE, 15.0).desired == 1


def test_without_a_load_dynamo_6985_a_pool_goes_to_its_least() -> None:
    """Figures of no requests are none, which is not the same as figures that are missing."""
    pool = Pool()
    pool.follow(busy(16.0), 300.0)

    nothing = msgspec.structs.replace(IDLE, ttft=None, itl=None)
    target = pool.follow(nothing, 70.0)

    assert target.desired == 1
    assert "frozen" not in target.reason


def test_instances_that_do_not_start_dynamo_14251_keep_no_pool_from_going_down() -> None:
    pool = Pool()
    pool.see(busy(1.0), 60.0)
    wanted = pool.see(busy(16.0, waiting=40), 30.0).desired
    assert wanted > 1

    # No GPU is free, and the test is over.
    target = pool.see(IDLE, 70.0)

    assert pool.ready == 1
    assert target.desired == 1


def test_instances_that_do_not_start_are_not_waited_for_in_vain() -> None:
    pool = Pool()
    pool.see(busy(1.0), 60.0)
    load = busy(8.0)
    assert pool.see(load, 60.0).desired > 1

    reasons = [pool.see(load) for _ in range(40)]

    paused = [each for each in reasons if "did not start" in each.reason]
    assert {each.desired for each in paused} == {1}
    assert reasons[-1].desired > 1 or "did not start" in reasons[-1].reason


def test_an_overload_makes_no_engine_slow() -> None:
    """Tokens that prompts in a queue hold up say nothing of how long a step takes."""
    pool = Pool()
    before = pool.follow(busy(4.0), 1800.0).desired

    stalled = busy(4.0, waiting=20, running=40, itl=0.4)
    for _ in range(24):
        pool.see(stalled)
    after = pool.follow(busy(4.0), 600.0).desired

    assert (before, after) == (2, 2)


@pytest.mark.parametrize("rate", [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0])
def test_what_is_left_dynamo_pr_9294_bears_the_load_of_those_that_go(rate: float) -> None:
    """A pool of two whose instances are each below the objective is no pool of one."""
    pool = Pool()
    pool.follow(busy(rate), 1800.0)

    targets = {pool.follow(busy(rate), INTERVAL).desired for _ in range(200)}

    assert len(targets) == 1


def test_an_objective_out_of_reach_dynamo_pr_11624_is_no_floor() -> None:
    """Prompts that take longer than the objective are not faster with more instances."""
    slow = config(ttft=0.1)
    pool = Pool(settings=slow)

    some = pool.follow(busy(1.0), 300.0)
    none = pool.follow(IDLE, 70.0)

    assert some.desired == 1
    assert "ttft out of reach" in some.reason
    assert none.desired == 1

    zero = Pool(settings=config(ttft=0.1, pools={POOL: PoolConfig(least=0, most=10)}))
    zero.follow(busy(1.0), 300.0)
    assert zero.follow(IDLE, 70.0).desired == 0


@pytest.mark.parametrize("by_hand", [5, 1])
def test_a_change_by_hand_dynamo_4420_stays_for_its_time_and_is_then_ended(by_hand: int) -> None:
    pool = Pool(2)
    load = busy(4.0)
    asked = pool.follow(load, 300.0).desired
    assert asked == 2

    pool.ready = by_hand
    targets = [pool.see(load) for _ in range(int((70 + 300) / INTERVAL) - 2)]

    # Nothing else is asked for meanwhile; from when it is clear, what is there is wanted.
    assert {each.desired for each in targets[:13]} == {asked}
    assert {each.desired for each in targets[16:]} == {by_hand}
    assert targets[-1].reason.startswith("held: ")
    assert pool.follow(load, 120.0).desired in (2, 3)


def test_a_missing_metric_freezes_a_pool_and_its_time_of_waiting() -> None:
    pool = Pool()
    high = pool.follow(busy(16.0), 300.0).desired

    assert pool.follow(None, 600.0) == PoolTarget(high, "frozen: a metric is missing")
    # The low load of before the gap is not one of all the time.
    assert pool.follow(IDLE, 55.0).desired == high
    assert pool.follow(IDLE, 15.0).desired == 1


def test_a_pool_at_zero_comes_with_a_request_that_waits_and_goes_without_any() -> None:
    pool = Pool(0, config(pools={POOL: PoolConfig(least=0, most=10)}))

    assert pool.follow(IDLE, 300.0).desired == 0
    assert pool.follow(PoolLoad(waiting=1), INTERVAL).desired == 1
    assert pool.follow(IDLE, 70.0).desired == 0


def test_open_streams_keep_their_instances() -> None:
    pool = Pool()
    pool.follow(busy(16.0), 300.0)

    # Nothing comes any more, and what runs fills three caches.
    streams = PoolLoad(running=100, context_tokens=260_000, capacity_tokens=100_000)
    target = pool.follow(streams, 600.0)

    assert target.desired == 3


def test_pools_of_prompts_and_of_outputs_go_each_by_what_it_does() -> None:
    pools = {"llm.P": PoolConfig("prefill", 1, 10), "llm.D": PoolConfig("decode", 1, 10)}

    def settle(load: PoolLoad) -> tuple[int, int]:
        policy = ScalingPolicy(config(pools=pools))
        ready = dict.fromkeys(pools, 1)
        for number in range(100):
            seen = {name: PoolState(count, load=load) for name, count in ready.items()}
            targets = policy.decide(Observation(number * INTERVAL, seen))
            ready = {name: target.desired for name, target in targets.items()}
        return ready["llm.P"], ready["llm.D"]

    of_prompts = settle(busy(16.0, 30, output_tokens=80, itl=None))
    of_outputs = settle(busy(1.0, 300, output_tokens=20_000, context_tokens=315_000.0))

    assert of_prompts[0] > of_prompts[1] == 1
    assert of_outputs[1] > of_outputs[0] == 1


def test_a_budget_is_shared_by_what_the_pools_need() -> None:
    pools = {
        "llm.P": PoolConfig("prefill", 1, 10, 1),
        "llm.D": PoolConfig("decode", 1, 10, 2),
    }
    policy = ScalingPolicy(config(pools=pools, budget=8))
    load = busy(40.0, 400, context_tokens=420_000.0)
    seen_targets: list[PoolTarget] = []

    for number in range(20):
        seen = {"llm.P": PoolState(1, load=load), "llm.D": PoolState(1, load=load)}
        targets = policy.decide(Observation(number * INTERVAL, seen))

        seen_targets += targets.values()
        assert targets["llm.P"].desired + 2 * targets["llm.D"].desired <= 8
    assert min(each.desired for each in seen_targets) >= 1
    assert any("do not fit into 8 GPUs" in each.reason for each in seen_targets)


@pytest.mark.parametrize("names", [("llm.P", "llm.D"), ("llm.D", "llm.P")])
def test_a_budget_of_one_instance_goes_to_the_pool_that_decodes(names: tuple[str, str]) -> None:
    kinds: dict[str, PoolKind] = {"llm.P": "prefill", "llm.D": "decode"}
    pools = {name: PoolConfig(kinds[name], 0, 8) for name in names}
    policy = ScalingPolicy(config(pools=pools, budget=1))
    held = PoolLoad(waiting=5)

    seen = {name: PoolState(0, load=held) for name in names}
    targets = policy.decide(Observation(0.0, seen))

    assert {name: target.desired for name, target in targets.items()} == {"llm.P": 0, "llm.D": 1}


def test_prompts_that_were_turned_away_bring_prefill_instances_of_their_namespace() -> None:
    kinds: dict[str, PoolKind] = {"a.P": "prefill", "a.D": "decode", "b.P": "prefill"}
    pools = {name: PoolConfig(kind, 0, 10) for name, kind in kinds.items()}
    policy = ScalingPolicy(config(pools=pools))
    targets: dict[str, PoolTarget] = {}

    for number in range(3):
        loads = dict.fromkeys(pools, IDLE) | {"a.D": busy(16.0, turned_away=80)}
        seen = {name: PoolState(0 if "P" in name else 1, load=each) for name, each in loads.items()}
        targets = policy.decide(Observation(number * INTERVAL, seen))

    assert targets["a.P"].desired >= 1
    assert targets["b.P"].desired == 0


def test_a_budget_takes_nothing_from_a_pool_that_is_frozen() -> None:
    pools = {"llm.A": PoolConfig(least=0, most=8), "llm.B": PoolConfig(least=0, most=8)}
    policy = ScalingPolicy(config(pools=pools, budget=8))
    load = busy(40.0, 400, waiting=100)

    for number in range(5):
        seen = {"llm.A": PoolState(4, missing="it"), "llm.B": PoolState(2, load=load)}
        targets = policy.decide(Observation(number * INTERVAL, seen))

        assert targets["llm.A"].desired == 4
    assert targets["llm.B"].desired == 4


def test_a_change_by_hand_beyond_the_budget_stays_for_its_time_and_is_then_ended() -> None:
    pools = {"llm.A": PoolConfig(least=0, most=8), "llm.B": PoolConfig(least=1, most=8)}
    policy = ScalingPolicy(config(pools=pools, budget=4))
    ready = {"llm.A": 1, "llm.B": 1}
    seen_targets: list[PoolTarget] = []

    for number in range(120):
        if number == 10:
            ready["llm.A"] = 5
        seen = {name: PoolState(count, load=busy(1.0)) for name, count in ready.items()}
        targets = policy.decide(Observation(number * INTERVAL, seen))
        ready["llm.B"] = targets["llm.B"].desired
        if targets["llm.A"].reason.startswith("down"):
            ready["llm.A"] = targets["llm.A"].desired
        seen_targets.append(targets["llm.A"])

    held = [each for each in seen_targets if each.reason.startswith("held")]
    assert {each.desired for each in held} == {5}
    assert len(held) == pytest.approx(300 / INTERVAL, abs=1)
    assert seen_targets[-1].desired == ready["llm.B"] == 1


@pytest.mark.parametrize("left", [0, 1])
def test_a_pool_that_has_lost_more_than_may_be_is_asked_for_again_soon(left: int) -> None:
    pool = Pool(3, config(pools={POOL: PoolConfig(least=2, most=10)}))
    pool.see(busy(4.0), 30.0)
    pool.ready = left

    # Two cold starts and a drain; and a pause, which is shorter than what stays by hand.
    targets = [pool.see(PoolLoad(waiting=50)) for _ in range(30)]

    assert f"paused: {left} are left of 3" in [each.reason for each in targets]
    assert targets[-1].desired >= 2


def test_the_speed_of_an_engine_is_learned_from_its_requests() -> None:
    pool = Pool(settings=config(profile=EngineSpeed()))

    pool.follow(busy(2.0, ttft=1.2, itl=0.04), 1800.0)

    learned = pool.policy.profile_of(POOL)
    assert learned.prefill.at(1000) == pytest.approx(1.2, rel=0.35)
    assert learned.decode.at(6300) == pytest.approx(0.04, rel=0.5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ttft": 0.0}, "ttft = 0.0"),
        ({"cold_start": -1.0}, "cold_start = -1.0"),
        ({"headroom": 1.0}, "headroom = 1.0"),
        ({"pools": {}}, "there is no pool"),
        ({"budget": 0}, "the pools have 1 GPUs at least"),
        (
            {"pools": {"llm.A": PoolConfig(least=1), "llm.B": PoolConfig(least=0)}, "budget": 1},
            "and 2 with an instance of one that comes from 0",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(**changes)


@pytest.mark.parametrize("bounds", [(-1, 4), (5, 4), (0, 0), (1, 5000)])
def test_bounds_that_cannot_be_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="give 0 <= least <= most"):
        PoolConfig("aggregated", *bounds)
