"""Streams that have lost their instance move a few at a time, and none waits for long."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.calling.migration_line import (
    AT_A_TIME,
    LINE_SECONDS,
    MigrationLine,
    Migrations,
)
from dynbus.bus.protocol.names import ComponentName
from dynbus.testing import run

WORKERS = ComponentName("demo", "Worker")


def joined(count: int, *, instances: int, now: float = 0.0) -> MigrationLine[int]:
    """A line that so many streams have joined at once."""
    line: MigrationLine[int] = MigrationLine()
    for stream in range(count):
        line.join(stream, instances, now)
    return line


def test_as_many_streams_are_sent_at_once_as_the_instances_take() -> None:
    line: MigrationLine[int] = MigrationLine()

    sent = [line.join(stream, 2, 0.0) for stream in range(2 * AT_A_TIME + 3)]

    assert sent == [True] * 2 * AT_A_TIME + [False] * 3
    assert repr(line) == "<MigrationLine [16 on their way, 3 wait]>"


def test_the_next_goes_when_one_has_its_first_item() -> None:
    line = joined(AT_A_TIME + 2, instances=1)
    assert line.go(0.1) == []

    line.leave(0)

    assert line.go(0.1) == [AT_A_TIME]
    assert line.go(0.1) == []


def test_a_line_that_does_not_move_is_let_go_evenly() -> None:
    line = joined(AT_A_TIME + 3, instances=1)
    went: list[float] = []
    while (at := line.next_at()) is not None:
        went += [at] * len(line.go(at))

    assert went == pytest.approx([LINE_SECONDS / 3, 2 * LINE_SECONDS / 3, LINE_SECONDS])


def test_who_leaves_the_line_is_not_sent() -> None:
    line = joined(AT_A_TIME + 2, instances=1)

    line.leave(AT_A_TIME)
    line.leave(0)

    assert line.go(0.0) == [AT_A_TIME + 1]


def test_without_a_known_instance_streams_go_as_with_one() -> None:
    assert joined(AT_A_TIME, instances=0).next_at() is None
    assert joined(AT_A_TIME + 1, instances=0).next_at() == LINE_SECONDS


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "join", "answered", "left"]),
            st.integers(0, 3),
            st.floats(0.0, 0.4),
        ),
        max_size=120,
    )
)
def test_each_goes_once_in_turn_and_in_time_and_no_more_than_have_room_before_their_time(
    steps: list[tuple[str, int, float]],
) -> None:
    line: MigrationLine[int] = MigrationLine()
    waiting: dict[int, float] = {}
    on_the_way: list[int] = []
    now, instances = 0.0, 1

    def let_go(at: float) -> None:
        due = line.next_at()
        for stream in line.go(at):
            assert stream == next(iter(waiting))
            had_room = len(on_the_way) < AT_A_TIME * instances
            assert had_room or (due is not None and due <= at)
            assert at - waiting.pop(stream) <= LINE_SECONDS + 1e-6
            on_the_way.append(stream)
            due = line.next_at() if line.next_at() is not None else at

    for number, (step, given_instances, pause) in enumerate(steps):
        later = now + pause
        while (at := line.next_at()) is not None and at <= later:
            let_go(max(at, now))
        now = later
        if step == "join":
            instances = max(1, given_instances)
            if line.join(number, given_instances, now):
                assert not waiting
                on_the_way.append(number)
                assert len(on_the_way) <= AT_A_TIME * instances
            else:
                waiting[number] = now
        elif step == "answered" and on_the_way:
            line.leave(on_the_way.pop(0))
        elif step == "left" and waiting:
            line.leave(waiting.popitem()[0])
        let_go(now)

    for stream in (*on_the_way, *waiting):
        line.leave(stream)
    assert line.is_empty
    assert line.next_at() is None


def test_a_storm_of_streams_waits_its_turn_and_nothing_is_left_of_it() -> None:
    async def story() -> tuple[list[int], float]:
        migrations = Migrations()
        loop = asyncio.get_running_loop()
        on_the_way = 0
        seen: list[int] = []

        async def move() -> None:
            nonlocal on_the_way
            answered = await migrations.turn(WORKERS, 2)
            on_the_way += 1
            seen.append(on_the_way)
            await asyncio.sleep(0.05)
            on_the_way -= 1
            answered()
            answered()

        begun = loop.time()
        await asyncio.gather(*[move() for _ in range(100)])
        assert repr(migrations) == "<Migrations {}>"
        return seen, loop.time() - begun

    seen, took = run(story())

    # And those that go although none was answered, one every 18 ms.
    assert 2 * AT_A_TIME <= max(seen) <= 2 * AT_A_TIME + 4
    assert took < 100 / (2 * AT_A_TIME) * 0.05 + 0.1


def test_a_stream_that_is_left_in_the_line_makes_place_for_the_others() -> None:
    async def story() -> None:
        migrations = Migrations()
        first = [await migrations.turn(WORKERS, 1) for _ in range(AT_A_TIME)]
        tasks = [asyncio.ensure_future(migrations.turn(WORKERS, 1)) for _ in range(3)]
        await asyncio.sleep(0)

        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        first[0]()
        done = await asyncio.wait_for(tasks[1], 0.01)
        for answered in (*first[1:], done, await tasks[2]):
            answered()

        assert repr(migrations) == "<Migrations {}>"

    run(story())
