"""What the figures of instances say of their pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dynbus.bus.commands.survey import Counts, Held, HeldRequest, InstanceReport
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_view import Instance
from dynbus.llm.scaling.observation import PoolLoad, PoolState
from dynbus.llm.scaling.observing import PoolObserver

POOL = ComponentName("llm", "Engine")
FIGURES: Mapping[str, float] = {
    "block_size": 16,
    "kv_blocks": 100,
    "kv_blocks_used": 30,
    "slots": 64,
    "running": 3,
    "waiting": 1,
    "requests": 10,
    "requests_ended": 6,
    "prompt_tokens": 5000,
    "cached_tokens": 1000,
    "output_tokens": 600,
    "first_tokens": 9,
    "first_token_seconds": 4.5,
    "decoded_tokens": 500,
    "decode_seconds": 10.0,
    "prompts_turned_away": 3,
}


def instance(name: str, *, draining: bool = False, component: str = "Engine") -> Instance:
    record = InstanceRecord(
        namespace="llm",
        component=component,
        instance_id=name,
        incarnation="1",
        endpoints={"generate": "stream"},
        started=0.0,
        draining=draining,
    )
    return Instance(record, 0.0)


def report(
    name: str, figures: Mapping[str, float], component: str = "Engine", held: Held | None = None
) -> InstanceReport:
    counts = Counts(0.0, 0, 0, 0, 0, 0.0, figures)
    return InstanceReport("llm", component, name, answers=True, counts=counts, held=held)


def changed(**changes: float) -> Mapping[str, float]:
    """The figures, so much later."""
    return {name: value + changes.get(name, 0) for name, value in FIGURES.items()}


def observe(observer: PoolObserver, instances: list[Instance], *reports: Any) -> PoolState:
    return observer.observe(1.0, instances, reports).pools["llm.Engine"]


def test_the_load_is_what_came_since_the_last_look() -> None:
    observer = PoolObserver([POOL])
    there = [instance("a"), instance("b", draining=True), instance("c", component="Other")]
    first = observe(observer, there, report("a", FIGURES), report("b", FIGURES))

    later = changed(
        requests=4,
        requests_ended=2,
        prompt_tokens=900,
        cached_tokens=100,
        output_tokens=50,
        first_tokens=4,
        first_token_seconds=2.0,
        decoded_tokens=40,
        decode_seconds=1.0,
        prompts_turned_away=2,
    )
    second = observe(observer, there, report("a", later), report("b", FIGURES))

    assert first == PoolState(1, 1, PoolLoad(2, 6, 960.0, 1600, 64))
    assert second == PoolState(
        1,
        1,
        PoolLoad(2, 6, 960.0, 1600, 64, 4, 2, 800, 50, 4, 0.5, 0.025, 2),
    )


def test_an_instance_that_is_new_counts_from_its_beginning() -> None:
    observer = PoolObserver([POOL])
    observe(observer, [instance("a")], report("a", FIGURES))

    there = [instance("a"), instance("b")]
    state = observe(observer, there, report("a", FIGURES), report("b", FIGURES))

    assert state.load is not None
    assert (state.ready, state.load.arrivals, state.load.output_tokens) == (2, 10, 600)


def test_an_engine_that_began_anew_takes_nothing_away() -> None:
    observer = PoolObserver([POOL])
    observe(observer, [instance("a")], report("a", FIGURES))

    state = observe(observer, [instance("a")], report("a", {**FIGURES, "requests": 2}))

    assert state.load is not None
    assert state.load.arrivals == 0


def test_without_the_answer_of_one_nothing_is_known_of_the_pool() -> None:
    observer = PoolObserver([POOL])
    there = [instance("a"), instance("b")]
    observe(observer, there, report("a", FIGURES), report("b", FIGURES))

    assert observe(observer, there, report("a", FIGURES)) == PoolState(2, missing="b")
    # What came meanwhile is left out: of which time it is is not known.
    after = observe(observer, there, report("a", changed(requests=50)), report("b", FIGURES))
    assert after.load is not None
    assert after.load.arrivals == 50


def test_an_answer_that_has_no_figures_of_an_engine_is_none() -> None:
    state = observe(PoolObserver([POOL]), [instance("a")], report("a", {}))

    assert state == PoolState(1, missing="a")


def test_a_drain_that_does_not_answer_is_nothing_to_wait_for() -> None:
    there = [instance("a"), instance("b", draining=True)]

    state = observe(PoolObserver([POOL]), there, report("a", FIGURES))

    assert state.load is not None


def test_held_requests_wait_for_the_pools_that_they_name() -> None:
    held = Held(
        "12345678",
        3,
        (
            HeldRequest("x", 1.0, ("llm.Engine", "llm.Other")),
            HeldRequest("y", 1.0, ("llm.Engine",)),
            HeldRequest("z", 1.0, ("llm.Other",)),
        ),
    )
    # Two instances of one process tell of the same requests.
    reports = [report(name, {}, "http", held) for name in ("f", "g")]

    state = observe(PoolObserver([POOL]), [], *reports)

    assert state == PoolState(0, load=PoolLoad(waiting=2))


def test_held_requests_that_are_too_many_to_be_named_count_as_those_that_are() -> None:
    ours, others = (HeldRequest("x", 1.0, (name,)) for name in ("llm.Engine", "llm.Other"))
    held = Held("12345678", 500, (ours, ours, ours, others))

    state = observe(PoolObserver([POOL]), [], report("f", {}, "http", held))

    assert state.load is not None
    assert state.load.waiting == 375


@pytest.mark.parametrize("there", [[instance("b", draining=True)], []], ids=["drains", "is away"])
def test_an_instance_that_was_not_heard_for_a_time_counts_on(there: list[Instance]) -> None:
    observer = PoolObserver([POOL])
    both = [instance("a"), instance("b")]
    observe(observer, both, report("a", FIGURES), report("b", FIGURES))
    observe(observer, [instance("a"), *there], report("a", FIGURES))

    state = observe(observer, both, report("a", FIGURES), report("b", changed(requests=3)))

    assert state.load is not None
    assert state.load.arrivals == 3


@pytest.mark.parametrize("value", [1e308, -1.0])
def test_an_answer_with_figures_that_cannot_be_is_none(value: float) -> None:
    there = [instance("a"), instance("b")]
    odd = {**FIGURES, "waiting": value}

    state = observe(PoolObserver([POOL]), there, report("a", odd), report("b", odd))

    assert state == PoolState(2, missing="a, b")
