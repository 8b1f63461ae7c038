"""Work that waits is begun by its tenants in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import eventually

from dynbus.bus.context import Context
from dynbus.llm.turns import TenantThreads, Turns


def test_owners_come_in_turn_and_what_is_ones_in_its_order() -> None:
    turns = Turns[int]()
    for item in range(4):
        turns.put("ada", item)
    turns.put("bob", 10)
    turns.put("bob", 11)

    found = [turns.pop() for _ in range(7)]

    assert [one and one[1] for one in found] == [0, 10, 1, 11, 2, 3, None]


def test_an_owner_that_may_not_is_passed_over_and_keeps_its_place() -> None:
    turns = Turns[int]()
    turns.put("ada", 1)
    turns.put("bob", 2)

    assert turns.pop(lambda owner: owner != "ada") == ("bob", 2)
    assert turns.pop(lambda owner: owner != "ada") is None
    assert turns.pop() == ("ada", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_nobody_waits_for_more_than_one_turn_of_each_other(steps: list[tuple[str, bool]]) -> None:
    turns = Turns[int]()
    waits: dict[str, list[int]] = {}
    passed: dict[str, list[str]] = {}
    for number, (owner, takes) in enumerate(steps):
        if not takes:
            turns.put(owner, number)
            waits.setdefault(owner, []).append(number)
            passed.setdefault(owner, [])
            continue
        taken = turns.pop()
        if taken is None:
            assert not waits
            continue
        served, item = taken
        assert item == waits[served].pop(0)
        passed.pop(served)
        for other in passed.values():
            assert served not in other
            other.append(served)
        if waits[served]:
            passed[served] = []
        else:
            del waits[served]
    assert len(turns) == sum(map(len, waits.values()))


async def run_for(tenant: str, threads: TenantThreads, function: Callable[[], str]) -> str:
    Context("r", metadata={Context.TENANT_KEY: tenant}).enter()
    return await threads.run(function)


@pytest.mark.anyio
async def test_a_tenant_that_takes_all_its_threads_leaves_one_to_others() -> None:
    goes_on = threading.Event()
    running: list[str] = []

    def work() -> str:
        running.append("ada")
        goes_on.wait(30)
        return "ada's"

    with ThreadPoolExecutor(2) as pool:
        threads = TenantThreads(pool, 1)
        long = [asyncio.create_task(run_for("ada", threads, work)) for _ in range(20)]
        await eventually(lambda: running)
        async with asyncio.timeout(10):
            found = await asyncio.create_task(run_for("bob", threads, lambda: "bob's"))
        were_running = len(running)
        cancelled = long.pop()
        cancelled.cancel()
        await eventually(cancelled.done)
        goes_on.set()
        ended = await asyncio.gather(*long)

    assert found == "bob's"
    assert were_running == 1
    assert set(ended) == {"ada's"}
    assert len(running) == 19


@pytest.mark.anyio
async def test_what_work_raises_is_raised_where_it_was_asked_for() -> None:
    def fail() -> str:
        raise ValueError("no such work")

    with ThreadPoolExecutor(1) as pool:
        threads = TenantThreads(pool, 1)
        with pytest.raises(ValueError, match="no such work"):
            await run_for("ada", threads, fail)
        assert await run_for("ada", threads, lambda: "done") == "done"
