"""Faults decide about the arrivals of a message; what they do to a bus is in `test_memory.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from dynbus.bus.clock import JumpingLoop, monotonic
from dynbus.bus.memory.faults import Delay, Drop, Duplicate, Fault, Partition
from dynbus.bus.transport import Message

MESSAGE = Message("a.b", "", b"", b"data")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("asyncio", {"loop_factory": JumpingLoop})


def arrivals(fault: Fault, count: int, log: list[int]) -> None:
    """Let `count` messages arrive through a fault."""
    for number in range(count):
        actions: list[Callable[[], None]] = [lambda number=number: log.append(number)]  # type: ignore[misc]
        for action in fault.apply(actions) if fault.matches(MESSAGE) else actions:
            action()


def active(fault_of: Callable[[list[Fault]], Fault]) -> tuple[list[Fault], Fault]:
    faults: list[Fault] = []
    fault = fault_of(faults)
    faults.append(fault)
    return faults, fault


def test_a_counted_fault_acts_so_often_and_is_gone() -> None:
    faults, drop = active(lambda faults: Drop(faults, "a.>", 2))

    first, second = drop.apply([lambda: None]), drop.apply([lambda: None])

    assert (first, second, faults, drop.hits) == ([], [], [], 2)


def test_what_another_fault_has_taken_is_not_counted() -> None:
    faults, drop = active(lambda faults: Drop(faults, "a.>", 1))

    assert drop.apply([]) == []
    assert (faults, drop.hits) == ([drop], 0)


def test_a_fault_ends_with_its_block_and_a_second_end_changes_nothing() -> None:
    faults, drop = active(lambda faults: Drop(faults, "a.>"))

    with drop:
        inside = list(faults)
    drop.remove()

    assert (inside, faults) == ([drop], [])


def test_a_fault_acts_on_what_its_pattern_and_its_predicate_name() -> None:
    drop = Drop([], "a.*", None, lambda message: message.data == b"data")

    assert drop.matches(MESSAGE)
    assert not drop.matches(replace(MESSAGE, data=b"other"))
    assert not drop.matches(replace(MESSAGE, subject="b.b"))


def test_a_duplicate_of_a_duplicate_arrives_four_times() -> None:
    log: list[str] = []
    one, two = Duplicate([], ">"), Duplicate([], ">")

    for action in two.apply(one.apply([lambda: log.append("x")])):
        action()

    assert log == ["x"] * 4


@pytest.mark.anyio
async def test_a_delay_that_loses_what_it_holds_works_on() -> None:
    log: list[int] = []
    _, delay = active(lambda faults: Delay(faults, ">", 1.0))
    assert isinstance(delay, Delay)

    arrivals(delay, 3, log)
    await asyncio.sleep(0.5)
    delay.lose_held()
    arrivals(delay, 1, log)
    await asyncio.sleep(1.5)

    assert log == [0]


@pytest.mark.anyio
async def test_a_delay_lets_each_message_go_in_its_own_time() -> None:
    log: list[float] = []
    _, delay = active(lambda faults: Delay(faults, ">", 1.0))
    began = monotonic()

    for _ in range(3):
        assert delay.apply([lambda: log.append(monotonic() - began)]) == []
        await asyncio.sleep(0.25)
    await asyncio.sleep(2.0)

    assert log == pytest.approx([1.0, 1.25, 1.5])


class Link:
    """What a partition does to a connection."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def partition(self, partitioned: bool) -> None:
        self.calls.append(f"partition {partitioned}")

    def take_unsent(self) -> list[Callable[[], None]]:
        self.calls.append("take unsent")
        return [partial(self.calls.append, "arrive")]

    def lose(self) -> None:
        self.calls.append("lose")

    def restore(self) -> None:
        self.calls.append("restore")


@pytest.mark.anyio
async def test_a_partition_that_heals_in_time_is_not_noticed() -> None:
    link = Link()

    with Partition([link], 6.0):
        await asyncio.sleep(5.9)
    await asyncio.sleep(10.0)

    assert link.calls == ["partition True", "partition False", "restore"]


@pytest.mark.anyio
async def test_what_a_link_held_that_was_left_arrives_once_it_heals() -> None:
    link = Link()

    partition = Partition([link], 6.0, arrives_late=True)
    await asyncio.sleep(6.1)
    partition.heal()
    partition.heal()

    left = ["partition True", "take unsent", "lose", "partition False", "restore"]
    healed = ["partition False", "restore"]
    assert link.calls == [*left, *healed, "arrive", *healed]


@pytest.mark.anyio
async def test_a_partition_that_lasts_is_noticed_on_every_link() -> None:
    links = [Link(), Link()]

    partition = Partition(links, 6.0)
    await asyncio.sleep(6.1)
    partition.heal()

    expected = ["partition True", "lose", "partition False", "restore"]
    assert [link.calls for link in links] == [expected, expected]
