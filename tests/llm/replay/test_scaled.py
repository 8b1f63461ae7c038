"""A fleet whose instances come and go: no request is lost, and each instance is paid for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.llm.mock import engine
from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.replay.fleet import Fleet, ReplayResult
from dynbus.llm.replay.policies import with_policy
from dynbus.llm.replay.report import Objective
from dynbus.llm.replay.scaled import Fault, ScaledFleet, ScaledResult
from dynbus.llm.replay.simulation import POOL, Simulation
from dynbus.llm.replay.trace import Trace, TraceRequest
from dynbus.llm.scaling.observation import Observation, PoolTarget

ROUTER = with_policy(RouterConfig(), "round_robin")


def trace(count: int, every: float, output: int = 20) -> Trace:
    """Requests of 640 tokens that share nothing."""
    made = [
        TraceRequest(
            f"r{number}",
            number + 1,
            number * every,
            640,
            output,
            np.zeros(0, np.int64),
            np.arange(10, dtype=np.uint64) + np.uint64(100 * number + 1),
        )
        for number in range(count)
    ]
    return Trace(made, 64)


def always(count: int) -> dict[str, PoolTarget]:
    return {POOL: PoolTarget(count, "always")}


def replay(
    seen: Trace, targets: dict[float, int], *faults: Fault, first: int = 1, interval: float = 1.0
) -> ScaledResult:
    """A replay with these targets from these times on."""

    def decide(observation: Observation) -> dict[str, PoolTarget]:
        due = [count for at, count in targets.items() if at <= observation.time]
        return always(due[-1] if due else first)

    fleet = ScaledFleet(
        Simulation(1),
        "round_robin",
        decide,
        cold_start=10.0,
        interval=interval,
        faults=faults,
        first={POOL: first},
    )
    return fleet.run(seen)


@pytest.mark.parametrize("killed_at", [0.01, 0.3, 0.38, 1.1])
def test_a_killed_instance_has_told_what_ended_before(
    killed_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> ReplayResult:
        faults = [Fault("dies", killed_at), Fault("dies", 1e6)]
        fleet = ScaledFleet(Simulation(2), "round_robin", None, cold_start=0.0, faults=faults)
        result = fleet.run(trace(1, 1.0, output=400))
        assert result.missed == [faults[1]]
        return result.replay

    together = killed()
    monkeypatch.setattr(engine, "QUIET_STEPS", 1)
    one_by_one = killed()

    [request], [same] = together.requests, one_by_one.requests
    assert request.last_token == pytest.approx(same.last_token)
    assert sum(together.busy) == pytest.approx(sum(one_by_one.busy))
    assert together.intervals[1].sum() == one_by_one.intervals[1].sum() == 399


def test_a_fleet_that_is_set_to_nothing_says_so_at_once() -> None:
    fleet = ScaledFleet(
        Simulation(1), "round_robin", None, cold_start=0.0, faults=[Fault("hand", 0.0, instances=0)]
    )

    with pytest.raises(ValueError, match="2 requests wait for an instance, and none comes"):
        fleet.run(trace(2, 1.0))


def test_requests_without_an_instance_are_held_until_one_is_there() -> None:
    fleet = Fleet([], ROUTER, MockConfig())
    request = fleet.arrive(trace(1, 1.0).requests[0], 0.0)
    fleet.advance(100.0)
    assert (fleet.held, math.isnan(request.first_token)) == (1, True)

    fleet.add("a", 100.0)
    fleet.finish()

    assert fleet.held == 0
    assert 100.0 < request.first_token < request.last_token


def test_what_an_instance_had_when_it_died_goes_on_behind_its_tokens_elsewhere() -> None:
    fleet = Fleet(["a", "b"], ROUTER, MockConfig())
    lives = [fleet.arrive(one, one.arrival) for one in trace(4, 0.01, output=500).requests]
    fleet.advance(2.0)
    before = [life.first_token for life in lives]

    fleet.kill("a", 2.0)
    fleet.finish()

    assert {life.instance for life in lives} == {1}
    assert [life.first_token for life in lives] == before
    # What the lost one had told is gone with it.
    assert fleet.figures("b")["output_tokens"] < 4 * 500


def test_an_instance_that_drains_finishes_what_it_has_and_gets_no_more() -> None:
    fleet = Fleet(["a", "b"], ROUTER, MockConfig())
    requests = trace(6, 0.01, output=500).requests
    early = [fleet.arrive(one, one.arrival) for one in requests[:2]]
    fleet.drain("a", 0.02)
    late = [fleet.arrive(one, one.arrival) for one in requests[2:]]
    fleet.finish()

    assert {life.instance for life in early} == {0, 1}
    assert {life.instance for life in late} == {1}


def test_instances_are_paid_for_from_their_start_to_their_end() -> None:
    result = replay(trace(101, 1.0), {20.0: 3, 60.0: 1}, first=1)

    assert max(sample.ready for sample in result.samples) == 3
    # One for all of it, and two from 20 to 60.
    assert result.instance_seconds == pytest.approx(101 + 2 * 40, abs=3)
    assert result.goodput(Objective()) == 1.0


def test_an_instance_serves_when_its_cold_start_is_over() -> None:
    result = replay(trace(41, 1.0), {20.0: 2})

    by_time = {sample.time: (sample.ready, sample.starting) for sample in result.samples}
    assert (by_time[19.0], by_time[20.0], by_time[31.0]) == ((1, 0), (1, 1), (2, 0))


def test_one_that_dies_is_replaced_and_one_that_is_stuck_never_serves() -> None:
    stuck, dies = Fault("stuck", 5.0, 30.0), Fault("dies", 20.0)

    result = replay(trace(61, 1.0), {}, dies, stuck, first=2)

    by_time = {sample.time: (sample.ready, sample.starting) for sample in result.samples}
    assert by_time[19.0] == (2, 0)
    assert by_time[60.0] == (1, 1)


def test_a_number_that_was_set_by_hand_stays_until_another_one_is_asked_for() -> None:
    result = replay(trace(61, 1.0), {40.0: 1}, Fault("hand", 10.0, 0.0, 3), first=2)

    by_time = {sample.time: sample.set_to for sample in result.samples}
    assert (by_time[9.0], by_time[15.0], by_time[39.0], by_time[41.0]) == (2, 3, 3, 1)


def test_metrics_that_are_lost_are_not_shown() -> None:
    seen: list[bool] = []

    def decide(observation: Observation) -> dict[str, PoolTarget]:
        seen.append(observation.pools[POOL].load is None)
        return always(1)

    lost = Fault("lost", 5.0, 3.0)
    ScaledFleet(
        Simulation(1), "round_robin", decide, cold_start=10.0, interval=1.0, faults=[lost]
    ).run(trace(10, 1.0))

    assert [number + 1 for number, is_lost in enumerate(seen) if is_lost] == [5, 6, 7]


def test_requests_that_nothing_will_ever_serve_are_no_endless_replay() -> None:
    with pytest.raises(ValueError, match="none comes"):
        replay(trace(1, 1.0), {}, first=0, interval=3600.0)
