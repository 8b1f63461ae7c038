"""An index follows what instances publish, heals by asking, and says how far it can be trusted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from tests.kvrouter.event_bus import (
    STREAM,
    Engine,
    EventBus,
    event_subject,
    eventually,
    publish,
    resync_subject,
    stored,
)

from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import ConfigError
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    KvEvent,
    encode_events,
)
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.radix.snapshot import dump_index, load_index
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.event_stream import EventStream, latest_epoch
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.membership import Group
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.testing import TestKit, run


async def store(at: EventBus, subject: str, *events: KvEvent | CacheDigest, **ids: int) -> None:
    """Publish a message of events as any holder of a connection can."""
    connection = await at.bus.connect()
    numbering = {"event_epoch": 1, "first_id": 0, "dp_rank": 0} | ids
    await connection.jetstream.publish(subject, encode_events(events, **numbering))
    await connection.close()


def test_what_is_published_is_found() -> None:
    async def story() -> dict[str, int]:
        at = EventBus()
        async with (
            at.follower() as follower,
            at.publisher("a") as a,
            at.publisher("b") as b,
        ):
            a.publish([stored(1, 2, 3)])
            b.publish([stored(1), stored(2, parent=1)])
            await eventually(lambda: len(follower.lookup([1, 2, 3])) == 2)
            await at.settled(follower)
            return follower.lookup([1, 2, 3])

    assert run(story()) == {"a": 3, "b": 2}


def test_a_follower_that_comes_late_reads_all_that_the_stream_holds() -> None:
    async def story() -> tuple[dict[str, int], int]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            async with at.follower() as follower:
                await at.settled(follower)
                return follower.lookup([1, 2]), follower.status().requests

    assert run(story()) == ({"a": 2}, 0)


def test_a_follower_goes_on_from_an_index_and_its_position() -> None:
    async def story() -> tuple[dict[str, int], int]:
        at = EventBus()
        async with at.publisher() as publisher:
            async with at.follower() as first:
                publisher.publish([stored(1, 2)])
                await at.settled(first)
            await publish(publisher, stored(3, parent=2))
            connection = await at.bus.connect()
            async with IndexFollower(
                connection, "demo", "Engine", index=first.index, position=first.position
            ) as second:
                await eventually(lambda: second.lookup([1, 2, 3]) == {"a": 3})
                return second.lookup([1, 2, 3]), second.status().requests

    assert run(story()) == ({"a": 3}, 0)


def test_a_follower_of_a_group_passes_over_the_events_of_others() -> None:
    async def story() -> None:
        at = EventBus()
        other = next(one for one in "bcdefgh" if Group(0, 2).has(one) != Group(0, 2).has("a"))
        group = next(each for each in (Group(0, 2), Group(1, 2)) if each.has("a"))
        async with (
            at.publisher("a") as a,
            at.publisher(other) as b,
            IndexFollower(await at.bus.connect(), "demo", "Engine", group=group) as follower,
        ):
            await publish(b, stored(1, 2))
            await publish(a, stored(1, 2, 3))
            await eventually(lambda: follower.lookup([1, 2, 3]) == {"a": 3})
            assert {rank.instance for rank in follower.index.ranks} == {"a"}
            assert follower.awareness().level is AwarenessLevel.EXACT

    run(story())


def test_a_message_that_the_limits_dropped_before_it_was_read_is_asked_for() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            connection = await at.bus.connect()
            await connection.jetstream.purge(STREAM)
            await publish(publisher, stored(3, parent=2))
            async with at.follower() as follower:
                await at.settled(follower)
                # Asked a second time when the rank, which has just begun an epoch, took its time.
                assert follower.status().requests in (1, 2)
                return publisher.status().ranks[0].statistics.resyncs

    assert run(story()) == 1


def test_two_followers_that_lack_the_same_message_cost_one_resend() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            await (await at.bus.connect()).jetstream.purge(STREAM)
            await publish(publisher, stored(3, parent=2))
            async with at.follower() as one, at.follower() as other:
                await at.settled(one, other)
                return publisher.status().ranks[0].statistics.resyncs

    assert run(story()) == 1


def test_a_lost_request_is_repeated() -> None:
    async def story() -> float:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            await (await at.bus.connect()).jetstream.purge(STREAM)
            await publish(publisher, stored(3, parent=2))
            with at.bus.drop(resync_subject("a"), 1) as lost:
                async with at.follower() as follower:
                    took = await at.settled(follower)
                    assert lost.hits == 1
                    return took

    assert 0.3 < run(story()) < 1.5


def test_a_diverged_index_is_found_by_the_next_digest_and_healed() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            await at.settled(follower)
            mine = follower.index.ranks[Rank("a", 0)].next_id
            broken = encode_events([BlockRemoved([2])], event_epoch=1, first_id=mine)
            follower.index.apply("a", broken)
            follower.index.ranks[Rank("a", 0)].next_id = mine
            assert not at.agrees(follower)
            publisher.publish([stored(9)])

            await eventually(lambda: at.agrees(follower), within=3.0)
            await at.settled(follower)
            return follower.status().mismatches

    assert run(story()) == 1


def test_a_digest_tells_blocks_apart_of_which_there_are_as_many() -> None:
    async def story() -> bool:
        at = EventBus()
        async with at.follower() as follower:
            await store(at, event_subject("a"), stored(1), CacheDigest(1, 12345))
            await eventually(lambda: follower.status().mismatches == 1)
            return follower.awareness().reason == "1 of 1 ranks being resent: a/0: digest mismatch"

    assert run(story())


def test_an_instance_whose_digest_is_always_wrong_is_asked_less_and_less() -> None:
    async def story() -> tuple[int, str]:
        at = EventBus()
        async with at.follower() as follower:
            connection = await at.bus.connect()
            answers = 0

            def answer() -> None:
                nonlocal answers
                answers += 1
                message = encode_events(
                    [stored(1), CacheDigest(2, 0)], event_epoch=1 + answers, first_id=0
                )
                connection.publish(event_subject("a"), message)

            connection.subscribe(resync_subject("a"), lambda _: answer())
            await connection.barrier()
            answer()
            await asyncio.sleep(60.0)
            return answers, follower.awareness().level.value

    answers, level = run(story())

    assert 4 <= answers <= 9
    assert level == "degraded"


def test_events_speak_for_the_rank_of_their_subject_alone() -> None:
    async def story() -> tuple[dict[str, int], int]:
        at = EventBus()
        async with at.follower() as follower:
            await store(at, event_subject("a"), stored(1))
            await store(at, event_subject("x"), AllBlocksCleared(), stored(9), event_epoch=9)
            await store(at, event_subject("x"), AllBlocksCleared(), event_epoch=9, dp_rank=1)
            await store(at, "demo.Engine._kv.x.00", stored(9), event_epoch=9)
            await store(at, "demo.Other._kv.a.0", AllBlocksCleared(), event_epoch=9)
            await eventually(lambda: follower.status().refused == 2)
            return follower.lookup([1]), follower.status().refused

    assert run(story()) == ({"a": 1}, 2)


def test_bytes_that_are_no_events_are_counted_and_the_rest_goes_on() -> None:
    async def story() -> tuple[int, dict[str, int]]:
        at = EventBus()
        async with at.follower() as follower:
            connection = await at.bus.connect()
            for data in (b"", b"\x01" * 39, b"\x01" * 60, bytes(40)):
                await connection.jetstream.publish(event_subject("a"), data)
            headers = {"Dynbus-Published": "soon"}
            good = encode_events([stored(1)], event_epoch=1, first_id=0)
            await connection.jetstream.publish(event_subject("a"), good, headers=headers)
            await eventually(lambda: follower.lookup([1]) == {"a": 1})
            return follower.status().refused, follower.lookup([1])

    refused, found = run(story())

    assert refused == 5
    assert found == {"a": 1}


def test_a_message_that_cannot_be_read_makes_its_rank_doubtful_until_a_digest_agrees() -> None:
    async def story() -> tuple[str, int]:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            publisher.publish([stored(1, 2)])
            await at.settled(follower)
            connection = await at.bus.connect()
            newer = b"\x02" + encode_events([stored(9)], event_epoch=1, first_id=2)[1:]
            await connection.jetstream.publish(event_subject("a"), newer)
            await eventually(lambda: follower.status().refused == 1)
            seen = str(follower.awareness())
            await at.settled(follower)
            return seen, follower.status().requests

    seen, requests = run(story())

    assert seen == (
        "degraded (1 of 1 ranks being resent: a/0: a message that this version cannot read)"
    )
    assert requests in (1, 2)


def test_an_engine_whose_messages_are_never_understood_is_asked_less_and_less() -> None:
    async def story() -> tuple[int, AwarenessLevel]:
        at = EventBus()
        async with at.follower() as follower:
            await store(at, event_subject("a"), stored(1))
            connection = await at.bus.connect()
            asked = 0

            def answer() -> None:
                nonlocal asked
                asked += 1
                for _ in range(3):
                    connection.publish(event_subject("a"), b"\x02" + bytes(47))

            connection.subscribe(resync_subject("a"), lambda _: answer())
            await connection.barrier()
            connection.publish(event_subject("a"), b"\x02" + bytes(47))
            await asyncio.sleep(60.0)
            return asked, follower.awareness().level

    asked, level = run(story())

    assert 4 <= asked <= 9
    assert level is AwarenessLevel.DEGRADED


def test_messages_that_cannot_be_read_make_no_rank_known_that_was_not() -> None:
    async def story() -> tuple[int, int]:
        at = EventBus()
        async with at.follower() as follower:
            connection = await at.bus.connect()
            for dp_rank in range(100):
                await connection.jetstream.publish(event_subject("a", dp_rank), bytes(60))
            await eventually(lambda: follower.status().refused == 100)
            await asyncio.sleep(1.0)
            return follower.status().ranks, follower.status().requests

    assert run(story()) == (0, 0)


def test_an_epoch_of_the_far_future_is_refused_and_does_not_hide_its_rank() -> None:
    async def story() -> tuple[dict[str, int], int]:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            publisher.publish([stored(1)])
            await at.settled(follower)
            for epoch in (latest_epoch(unix_time() + 60.0), (1 << 63) - 1):
                await store(at, event_subject("a"), stored(666), event_epoch=epoch)
            await eventually(lambda: follower.status().refused == 2)
            publisher.publish([stored(2, parent=1)])
            await eventually(lambda: follower.lookup([1, 2]) == {"a": 2})
            await at.settled(follower)
            return follower.lookup([666]), follower.status().refused

    assert run(story()) == ({}, 2)


def test_a_forged_epoch_of_a_near_future_is_outdone_by_the_rank_itself() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.follower() as follower:
            connection = await at.bus.connect()
            async with KvEventPublisher(connection, "demo", "Engine", "a") as publisher:
                publisher.publish([stored(1)])
                await eventually(lambda: follower.lookup([1]) == {"a": 1})
                forged = latest_epoch(unix_time())
                await store(at, event_subject("a"), stored(666), event_epoch=forged)
                await eventually(lambda: follower.lookup([666]) == {"a": 1})
                await eventually(
                    lambda: follower.awareness().level is AwarenessLevel.EXACT, within=40.0
                )
                assert follower.lookup([1]) == {"a": 1}
                return publisher.status().ranks[0].event_epoch - forged

    assert run(story()) == 1


def test_who_died_long_ago_leaves_the_index_of_a_new_follower_soon() -> None:
    async def story() -> tuple[float, set[str]]:
        at = EventBus()
        async with at.publisher("dead") as dead, at.publisher("late") as late:
            await publish(dead, stored(1))
            await dead.close()
            await asyncio.sleep(60.0)
            await publish(late, stored(1))
            async with at.follower(frozenset) as follower:
                await eventually(lambda: len(follower.index.lookup([1])) == 2)
                took = await eventually(lambda: len(follower.index.lookup([1])) == 1)
                return took, {rank.instance for rank in follower.index.ranks}

    took, left = run(story())

    assert 0.9 < took < 1.3
    assert left == {"late"}


def test_a_server_s_clock_that_is_behind_costs_no_newcomer_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynbus.bus.memory.jetstream.unix_time", lambda: unix_time() - 3600.0)

    async def story() -> float:
        at = EventBus()
        async with at.follower(frozenset) as follower, at.publisher() as publisher:
            publisher.publish([stored(1)])
            await eventually(lambda: follower.index.lookup([1]) == {"a": 1})
            return await eventually(lambda: follower.index.lookup([1]) == {}, within=30.0)

    assert run(story()) > 14.0


def test_what_a_purge_took_of_an_idle_instance_with_a_lease_is_asked_for_soon() -> None:
    async def story() -> float:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            await asyncio.sleep(2.0)
            await (await at.bus.connect()).jetstream.purge(STREAM)
            async with at.follower(lambda: frozenset({"a"})) as follower:
                return await at.settled(follower, within=15.0)

    assert run(story()) < 2.0


def test_an_instance_without_a_lease_is_not_offered_and_goes_when_its_lease_does() -> None:
    async def story() -> tuple[list[dict[str, int]], int]:
        at = EventBus()
        instances: set[str] = {"a"}
        async with (
            at.follower(lambda: frozenset(instances)) as follower,
            at.publisher("a") as a,
            at.publisher("b") as b,
        ):
            a.publish([stored(1)])
            b.publish([stored(1)])
            await eventually(lambda: len(follower.index.lookup([1])) == 2)
            found = [follower.lookup([1])]
            instances.add("b")
            await eventually(lambda: len(follower.lookup([1])) == 2)
            found.append(follower.lookup([1]))
            instances.remove("a")
            await eventually(lambda: "a" not in follower.index.lookup([1]))
            found.append(follower.lookup([1]))
            return found, follower.status().ranks

    assert run(story()) == ([{"a": 1}, {"a": 1, "b": 1}, {"b": 1}], 1)


def test_blocks_of_an_instance_that_never_gets_a_lease_are_given_up() -> None:
    async def story() -> float:
        at = EventBus()
        async with at.follower(frozenset) as follower:
            await store(at, event_subject("ghost"), stored(1))
            await eventually(lambda: follower.index.lookup([1]) == {"ghost": 1})
            return await eventually(lambda: follower.index.lookup([1]) == {}, within=30.0)

    assert 14.0 < run(story()) < 16.0


def test_an_instance_that_sends_nothing_is_asked_and_named_as_silent() -> None:
    async def story() -> tuple[str, int]:
        at = EventBus()
        asked: list[bytes] = []
        connection = await at.bus.connect()
        connection.subscribe(resync_subject("a"), lambda message: asked.append(message.data))
        async with at.follower(lambda: frozenset({"a"})) as follower:
            await eventually(lambda: asked)
            return str(follower.awareness()), len(asked)

    assert run(story()) == ("off (no events from a: open a KvEventPublisher in each engine)", 1)


def test_an_instance_whose_events_are_all_refused_is_named_with_the_reason() -> None:
    async def story() -> str:
        at = EventBus()
        ahead = latest_epoch(unix_time() + 3600.0)
        async with at.follower(lambda: frozenset({"a"})) as follower:
            await store(at, event_subject("a"), stored(1), event_epoch=ahead)
            await eventually(lambda: follower.status().refused)
            return str(follower.awareness())

    assert "no events from a: those of a are refused, an epoch " in run(story())


def test_an_instance_whose_publisher_died_is_asked_and_named_as_silent() -> None:
    async def story() -> tuple[str, AwarenessLevel]:
        at = EventBus()
        async with at.follower(instances=lambda: ["a"]) as follower:
            async with at.publisher() as publisher:
                publisher.publish([stored(1, 2)])
                await at.settled(follower)
                # An idle one is heard all the same.
                await asyncio.sleep(60.0)
                assert follower.status().requests == 0
            await eventually(
                lambda: follower.awareness().level is AwarenessLevel.DEGRADED, within=30.0
            )
            dead = follower.awareness()
            await eventually(lambda: follower.status().requests > 1)
            async with at.publisher() as publisher:
                await at.settled(follower)
            return dead.reason, follower.awareness().level

    reason, level = run(story())

    assert reason == "1 of 1 ranks being resent: a/0: nothing heard for 25 s"
    assert level is AwarenessLevel.EXACT


def test_a_follower_says_that_the_server_is_out_of_reach_and_heals_after_it() -> None:
    async def story() -> tuple[str, float]:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            publisher.publish([stored(1)])
            await at.settled(follower)
            at.bus.stop()
            publisher.publish([stored(2, parent=1)])
            await asyncio.sleep(1.0)
            seen = str(follower.awareness())
            at.bus.start()
            await eventually(lambda: follower.lookup([1, 2]) == {"a": 2})
            return seen, await at.settled(follower)

    seen, took = run(story())

    assert seen == "degraded (the server is out of reach)"
    assert took < 2.0


def test_a_follower_says_within_three_seconds_that_a_silent_server_is_out_of_reach() -> None:
    async def story() -> list[str]:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            publisher.publish([stored(1)])
            await at.settled(follower)
            seen = [str(follower.awareness())]
            # The connection stays, as over a link that is cut in silence.
            at.bus.jetstream.stall()
            await asyncio.sleep(3.0)
            seen.append(str(follower.awareness()))
            at.bus.jetstream.stall(False)
            await at.settled(follower)
            await asyncio.sleep(1.5)
            return [*seen, str(follower.awareness())]

    assert run(story()) == ["exact", "degraded (the server is out of reach)", "exact"]


def test_a_stream_made_again_is_followed_from_its_beginning() -> None:
    async def story() -> tuple[int, float]:
        at = EventBus()
        async with at.follower() as follower, at.publisher("a") as a, at.publisher("b") as b:
            a.publish([stored(1, 2)])
            b.publish([stored(1)])
            await at.settled(follower)
            at.bus.stop()
            at.bus.jetstream.delete(STREAM)
            at.bus.start()
            await eventually(lambda: follower.status().recreations == 1)
            took = await at.settled(follower)
            assert follower.lookup([1, 2]) == {"a": 2, "b": 1}
            return follower.status().recreations, took

    recreations, took = run(story())

    assert recreations == 1
    assert took < 2.0


def test_staleness_is_the_age_of_events_when_they_were_applied() -> None:
    async def story() -> tuple[float, float]:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            await at.settled(follower)
            for number in range(1, 50):
                publisher.publish([stored(number)])
                await asyncio.sleep(0.01)
            quick = follower.status().staleness.p99
            with at.bus.delay(event_subject("a"), 0.5):
                publisher.publish([stored(99)])
                await eventually(lambda: follower.lookup([99]) == {"a": 1})
            return quick, follower.status().staleness.worst

    quick, worst = run(story())

    assert 0.0 < quick < 0.01
    assert 0.5 <= worst < 0.6


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "steps", "fault_chance"),
    [
        *((seed, 400, 0.1) for seed in range(12)),
        pytest.param(99, 1_000_000, 0.001, marks=pytest.mark.soak),
    ],
)
def test_after_any_faults_two_followers_and_the_engines_agree_within_two_seconds(
    seed: int, steps: int, fault_chance: float
) -> None:
    async def story() -> float:
        chance = random.Random(seed)
        at = EventBus()
        at.bus.random.seed(seed)
        async with (
            at.follower() as one,
            at.follower() as other,
            at.publisher("a", max_waiting_bytes=3000) as a,
            at.publisher("b", ranks=(0, 1)) as b,
        ):
            held: dict[tuple[str, int], list[int]] = {}
            faults: list[Callable[[], object]] = [
                lambda: at.bus.drop(">", chance.randrange(1, 4), when=has_events),
                lambda: at.bus.duplicate(">", chance.randrange(1, 4)),
                lambda: at.bus.drop("demo.Engine._kv_resync.>", 1),
                lambda: at.bus.jetstream.stall(),
                lambda: at.bus.jetstream.stall(False),
                lambda: disconnect(chance.choice(at.bus.connections)),
                lambda: at.bus.stop(),
                lambda: at.bus.start(),
                lambda: at.bus.jetstream.delete(STREAM),
                lambda: purge(at),
            ]
            for _ in range(steps):
                publisher, name, rank = chance.choice([(a, "a", 0), (b, "b", 0), (b, "b", 1)])
                publisher.publish(
                    random_events(chance, held.setdefault((name, rank), [])), dp_rank=rank
                )
                if chance.random() < fault_chance:
                    chance.choice(faults)()
                await asyncio.sleep(chance.choice([0.0, 0.001, 0.02]))
            for fault in list(at.bus._faults):  # pyright: ignore[reportPrivateUsage]
                fault.remove()
            at.bus.jetstream.stall(False)
            at.bus.start()
            for connection in at.bus.connections:
                connection.reconnect()

            took = await eventually(lambda: at.agrees(one) and at.agrees(other))
            await at.settled(one, other, within=15.0)
            return took

    assert run(story()) < 2.0


def has_events(message: object) -> bool:
    return "._kv." in getattr(message, "subject", "")


def disconnect(connection: MemoryConnection) -> None:
    connection.disconnect()
    asyncio.get_running_loop().call_later(0.05, connection.reconnect)


def purge(at: EventBus) -> None:
    if STREAM in at.bus.jetstream.streams:
        at.bus.jetstream.streams[STREAM].purge(">")


def random_events(chance: random.Random, held: list[int]) -> list[KvEvent]:
    """Events of an engine that holds `held`, which they change."""
    draw = chance.random()
    if draw < 0.03:
        held.clear()
        return [AllBlocksCleared()]
    if held and draw < 0.35:
        gone = chance.sample(held, min(len(held), 3))
        held[:] = [one for one in held if one not in gone]
        return [BlockRemoved(gone)]
    parent = chance.choice(held) if held and chance.random() < 0.7 else None
    fresh = [chance.randrange(1, 1 << 63) for _ in range(chance.randrange(1, 6))]
    held += fresh
    return [stored(*fresh, parent=parent)]


def test_an_actor_s_blocks_come_with_its_lease_and_go_with_it_but_not_with_its_connection() -> None:
    async def story() -> list[dict[str, int]]:
        async with TestKit() as kit:
            router = await kit.runtime()
            async with IndexFollower.over(router, "demo", "Engine") as follower:
                engine = await kit.start(Engine, instance_id="e1")
                await eventually(lambda: follower.lookup([1, 2]) == {"e1": 2})
                found = [follower.lookup([1, 2])]
                for connection in (
                    engine.actor.runtime.bus.data,
                    engine.actor.runtime.bus.lane.connection,
                ):
                    connection.disconnect()  # type: ignore[attr-defined]
                await asyncio.sleep(2.0)
                found.append(follower.lookup([1, 2]))
                for connection in (
                    engine.actor.runtime.bus.data,
                    engine.actor.runtime.bus.lane.connection,
                ):
                    connection.reconnect()  # type: ignore[attr-defined]
                await asyncio.sleep(12.0)
                found.append(follower.lookup([1, 2]))
                await engine.stop()
                await eventually(lambda: follower.index.lookup([1, 2]) == {})
                found.append(follower.lookup([1, 2]))
                return found

    assert run(story()) == [{"e1": 2}, {"e1": 2}, {"e1": 2}, {}]


def test_a_follower_that_was_closed_says_that_nothing_is_known() -> None:
    async def story() -> str:
        at = EventBus()
        async with at.follower() as follower:
            assert follower.awareness().level is AwarenessLevel.EXACT
        return str(follower.awareness())

    assert run(story()) == "off (no events are followed)"


def test_a_stream_of_another_namespace_is_refused() -> None:
    async def story() -> None:
        connection = await EventBus().bus.connect()
        IndexFollower(connection, "demo", "Engine", stream=EventStream("other"))

    with pytest.raises(ConfigError, match="namespace demo are not in the stream of other"):
        run(story())


def test_each_rank_is_compared_in_its_turn_however_busy_another_one_is() -> None:
    async def story() -> float:
        at = EventBus()
        async with at.follower() as follower, at.publisher("a") as busy, at.publisher("b") as idle:
            busy.publish([stored(*range(1, 22_001))])
            idle.publish([stored(1, 2)])
            await busy.flush()
            await idle.flush()
            await at.settled(follower)
            rank = Rank("b", 0)
            mine, epoch = follower.index.ranks[rank].next_id, follower.index.ranks[rank].event_epoch
            swapped: list[KvEvent] = [BlockRemoved([2]), BlockStored(1, [3], [3])]
            follower.index.apply("b", encode_events(swapped, event_epoch=epoch, first_id=mine))
            follower.index.ranks[rank].next_id = mine

            begun, block = monotonic(), 22_000
            while not follower.status().mismatches and monotonic() - begun < 120.0:
                block += 1
                busy.publish([stored(block)])
                await asyncio.sleep(0.1)
            return monotonic() - begun

    # Each has its turn after 11 s, and a digest of an idle rank comes within 10 s.
    assert run(story()) < 21.0


def test_what_ranks_say_of_themselves_is_in_snapshots_and_keeps_nobody_from_taking_one() -> None:
    async def story() -> tuple[str, str, str]:
        at = EventBus()
        async with at.publisher() as publisher, at.follower() as follower:
            publisher.set_awareness(CacheAwareness(AwarenessLevel.DEGRADED, "lost"))
            publisher.publish([stored(1)])
            await eventually(lambda: follower.awareness().level is AwarenessLevel.DEGRADED)
            data = dump_index(follower.index, follower.position.sequence)
            loaded, _ = load_index(data, max_blocks=100)
            return (
                str(follower.awareness()),
                str(follower.awareness(with_stated=False)),
                loaded.ranks[Rank("a", 0)].stated,
            )

    assert run(story()) == ("degraded (a/0: lost)", "exact", "degraded (lost)")
