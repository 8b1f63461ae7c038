"""Requests wait while all that may serve them are busy, and go on in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dynbus.bus.errors import ConfigError, Overloaded
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.requests import Constraints
from dynbus.kvrouter.routing.scheduler import KvScheduler

from .routing_fixtures import HandIndex, decide, profile, request, wait

A = profile("a")
SMALL = [profile("a", max_batched_tokens=64), profile("b", max_batched_tokens=64)]
QUEUE = RouterConfig(queue_threshold=1.0, queue_limit=3)


def fill(scheduler: KvScheduler) -> list[Decision]:
    """Both instances have more to compute than a step takes."""
    return [decide(scheduler, request(f"fill {n}", SMALL, blocks=5, of=90 + n)) for n in range(2)]


def test_requests_wait_while_all_instances_are_busy_and_go_on_by_priority_then_arrival() -> None:
    scheduler = KvScheduler(QUEUE)
    running = fill(scheduler)
    first = wait(scheduler, request("first", SMALL, of=1, blocks=5), 1.0)
    second = wait(scheduler, request("second", SMALL, of=2, blocks=5), 2.0)
    urgent = wait(scheduler, request("urgent", SMALL, of=3, blocks=5, priority=5), 3.0)
    assert scheduler.release(3.5) == []

    scheduler.first_item(running[0].number, 4.0)
    ((ticket, decision),) = scheduler.release(4.0)
    scheduler.ended(running[1].number, 5.0)
    ((next_ticket, _),) = scheduler.release(5.0)

    assert (ticket, next_ticket) == (urgent, first)
    assert isinstance(decision, Decision)
    assert decision.chosen == running[0].chosen
    assert decision.waited_s == 4.0
    assert scheduler.withdraw(second)
    assert scheduler.statistics().waiting == 0


def test_who_comes_later_does_not_overtake_who_waits() -> None:
    scheduler = KvScheduler(QUEUE)
    running = fill(scheduler)
    wait(scheduler, request("first", SMALL, of=1))

    scheduler.ended(running[0].number, 1.0)
    wait(scheduler, request("second", SMALL, of=2))

    assert scheduler.statistics().waiting == 2


def test_who_may_go_anywhere_does_not_wait_behind_who_waits_for_one_instance() -> None:
    scheduler = KvScheduler(QUEUE)
    tagged = profile("a", max_batched_tokens=64, tags="eu")
    decide(scheduler, request("busy", [tagged], blocks=5))
    narrow = Constraints(required=frozenset({"eu"}))
    wait(scheduler, request("eu", [tagged, SMALL[1]], of=1, constraints=narrow))

    decision = decide(scheduler, request("any", [tagged, SMALL[1]], of=2))

    assert decision.chosen.instance == "b"


def test_who_waits_for_one_instance_does_not_wait_behind_who_waits_for_any() -> None:
    scheduler = KvScheduler(QUEUE)
    tagged = profile("c", max_batched_tokens=64, tags="eu")
    busy = decide(scheduler, request("busy", [tagged], blocks=5))
    fill(scheduler)
    wait(scheduler, request("any", SMALL, of=1, priority=1))
    narrow = Constraints(required=frozenset({"eu"}))
    eu = wait(scheduler, request("eu", [*SMALL, tagged], of=2, constraints=narrow))

    scheduler.ended(busy.number, 1.0)

    assert [ticket for ticket, _ in scheduler.release(1.0)] == [eu]


def test_a_policy_that_fails_for_one_that_waits_fails_for_it_alone() -> None:
    def moody(request: RequestShape, candidates: Sequence[Candidate]) -> Sequence[float]:
        loads = [float(one.active_prefill_tokens) for one in candidates]
        unordered: Any = set(loads)
        return unordered if request.prompt_blocks == 7 else loads

    scheduler = KvScheduler(replace(QUEUE, policy=moody))
    running = fill(scheduler)
    tickets = [
        wait(scheduler, request(str(blocks), SMALL, of=blocks, blocks=blocks))
        for blocks in (1, 7, 2)
    ]
    for decision in running:
        scheduler.ended(decision.number, 1.0)

    released = dict(scheduler.release(1.0))

    assert list(released) == tickets
    assert isinstance(released[tickets[1]], ConfigError)
    assert scheduler.statistics().running == 2
    assert scheduler.statistics().waiting == 0


def test_what_breaks_inside_a_decision_is_told_to_the_one_that_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(HandIndex):
        def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
            if len(block_hashes) == 7:
                raise IndexError("no such block")
            return {}

    scheduler = KvScheduler(QUEUE, follower=Broken())
    running = fill(scheduler)
    tickets = [wait(scheduler, request(str(n), SMALL, of=n, blocks=n)) for n in (7, 1)]
    for decision in running:
        scheduler.ended(decision.number, 1.0)

    (broken, error), (other, answer) = scheduler.release(1.0)

    assert [broken, other] == tickets
    assert isinstance(error, ConfigError)
    assert "IndexError: no such block" in error.message
    assert isinstance(answer, Decision)
    assert "request 7 cannot be routed" in caplog.text


def test_a_full_queue_refuses() -> None:
    scheduler = KvScheduler(QUEUE)
    fill(scheduler)
    for number in range(3):
        wait(scheduler, request(f"w{number}", SMALL, of=number))

    with pytest.raises(Overloaded, match="all 2 instances are busy and 3 requests wait") as refused:
        scheduler.submit(request("one more", SMALL, of=50), 0.0)

    assert refused.value.retry_after > 0
    assert scheduler.statistics().refused == 1


def test_an_instance_that_does_not_say_its_limit_is_never_busy() -> None:
    scheduler = KvScheduler(QUEUE)

    for number in range(5):
        decide(scheduler, request(str(number), [A], blocks=50, of=number))

    assert scheduler.statistics().waiting == 0


def test_a_new_instance_takes_who_waits() -> None:
    scheduler = KvScheduler(QUEUE)
    fill(scheduler)
    ticket = wait(scheduler, request("first", SMALL, of=1))

    scheduler.refresh([*SMALL, profile("c", max_batched_tokens=64)])
    ((released, decision),) = scheduler.release(1.0)

    assert released is ticket
    assert isinstance(decision, Decision)
    assert decision.chosen.instance == "c"


def test_whom_constraints_hold_back_does_not_hold_back_others() -> None:
    instances = [profile("a", max_batched_tokens=64, tags="eu"), SMALL[1]]
    only_a = Constraints(frozenset({"eu"}))
    scheduler = KvScheduler(QUEUE)
    for number in range(2):
        decide(scheduler, request(f"fill {number}", [instances[number]], blocks=5, of=90 + number))
    held = wait(scheduler, request("held", instances, of=1, constraints=only_a, priority=9))
    free = wait(scheduler, request("free", instances, of=2))

    scheduler.ended(2, 1.0)
    ((released, _),) = scheduler.release(1.0)

    assert released is free
    assert scheduler.withdraw(held)


def test_the_queue_serves_the_urgent_first_and_then_by_arrival() -> None:
    scheduler = KvScheduler(QUEUE)
    running = fill(scheduler)
    tickets = {
        name: wait(scheduler, request(name, SMALL, of=of, blocks=0, priority=priority))
        for of, (name, priority) in enumerate((("a", 0), ("b", 5), ("c", 0)))
    }
    for decision in running:
        scheduler.ended(decision.number, 1.0)

    released = [ticket for ticket, _ in scheduler.release(1.0)]

    assert released == [tickets["b"], tickets["a"], tickets["c"]]
    assert not scheduler.withdraw(tickets["b"])
