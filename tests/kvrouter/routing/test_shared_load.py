"""Routers know each other's load, whatever messages are lost and whoever comes and goes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing import shared_load
from dynbus.kvrouter.routing.active_load import RankLoad
from dynbus.kvrouter.routing.candidates import Offer
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.routing.shared_load import ASK_AGAIN, SILENCE, SharedLoad

from .routing_fixtures import BLOCK, HandIndex, profile, request

A, B = Rank("a", 0), Rank("b", 0)


def exchange(loads: Sequence[SharedLoad], now: float = 0.0) -> None:
    """Deliver all that any of them has to say, until nobody has."""
    for _ in range(10):
        for load in loads:
            for message in list(load.outgoing(now)):
                for other in loads:
                    other.receive(message, now)


def beat(speaker: SharedLoad, listener: SharedLoad, now: float) -> None:
    for message in speaker.outgoing(now, alive=True):
        listener.receive(message, now)


def pair() -> tuple[SharedLoad, SharedLoad]:
    one, two = SharedLoad("one"), SharedLoad("two")
    exchange((one, two))
    return one, two


def test_others_know_what_a_router_sends_where() -> None:
    one, two = pair()

    one.add("1", A, [11, 12, 13], 50, 16)
    two.add("1", A, [11, 12, 99], 48, 0)
    exchange((one, two))

    assert one.of(A) == two.of(A) == RankLoad(34 + 48, 4, 2)
    assert two.columns(Offer((profile("a"),)), [11, 12, 13, 14]).added_blocks == [1]


def test_what_ended_counts_nowhere() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    exchange((one, two))

    one.prefill_completed("1")
    exchange((one, two))
    decoding = two.of(A)
    one.free("1")
    exchange((one, two))

    assert decoding == RankLoad(0, 1, 1)
    assert two.of(A) == RankLoad(0, 0, 0)


def test_a_new_router_learns_what_runs_already() -> None:
    one, two = pair()
    one.add("1", A, [11, 12], 32, 0)
    one.add("2", B, [11], 16, 0)
    one.prefill_completed("2")
    exchange((one, two))
    late = SharedLoad("late")

    exchange((one, two, late))

    assert late.of(A) == RankLoad(32, 2, 1)
    assert late.of(B) == RankLoad(0, 1, 1)


def test_a_set_that_takes_many_messages_arrives_whole() -> None:
    one = SharedLoad("one", message_bytes=4096)
    for number in range(200):
        one.add(str(number), A, list(range(number * 100, number * 100 + 60)), 960, 0)
    late = SharedLoad("late")

    exchange((one, late))

    assert late.of(A) == one.of(A)
    assert late.of(A).requests == 200


def test_no_message_is_longer_than_it_may_be() -> None:
    one = SharedLoad("one", message_bytes=4096)
    one.add("1", A, list(range(100_000)), 1_600_000, 0)
    one.add("2", A, list(range(300)), 4800, 0)

    messages = list(one.outgoing(0.0))

    assert max(map(len, messages)) <= 4096
    assert one.of(A).blocks == 100_000


def test_a_lost_message_is_noticed_by_the_next_and_repaired() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    exchange((one, two))
    one.free("1")
    lost = list(one.outgoing(0.0))

    one.add("2", B, [12], 16, 0)
    exchange((one, two))

    assert lost
    assert two.of(A).requests == 0
    assert two.of(B).requests == 1


def test_a_lost_last_message_is_noticed_by_the_sign_of_life() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    list(one.outgoing(0.0))

    beat(one, two, 0.5)
    assert two.needs_answer
    exchange((one, two), 0.5)

    assert two.of(A).requests == 1


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    list(one.outgoing(0.0))
    beat(one, two, 0.5)
    lost = list(two.outgoing(0.5))

    beat(one, two, 0.5 + ASK_AGAIN / 2)
    silent = list(two.outgoing(0.5 + ASK_AGAIN / 2))
    exchange((one, two), 0.5 + ASK_AGAIN)

    assert lost
    assert not silent
    assert two.of(A).requests == 1


def test_a_router_that_goes_silent_takes_its_load_along_and_comes_back_with_it() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    exchange((one, two))

    assert not two.expire(SILENCE)
    assert two.expire(SILENCE + 0.1)
    gone = two.of(A).requests
    beat(one, two, SILENCE + 1)
    exchange((one, two), SILENCE + 1)

    assert gone == 0
    assert two.of(A).requests == 1


def test_long_requests_count_for_as_long_as_they_run() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    exchange((one, two))

    for second in range(1, 10_000):
        beat(one, two, float(second))
        assert not two.expire(float(second))

    assert two.of(A).requests == 1


def test_a_farewell_ends_all_of_a_router() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    exchange((one, two))

    assert two.receive(one.farewell(), 1.0).released

    assert two.of(A).requests == 0
    assert two.routers() == []


def test_a_message_that_is_refused_changes_nothing() -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)
    exchange((one, two))
    forged = [["f", 1], ["a", 2, "a", -1, 16, 0, None, b""]]

    for data in (b"", msgspec.msgpack.encode(["c", 1, "one", 1, forged])):
        with pytest.raises(ValueError, match="not a message of routers' load"):
            two.receive(data, 0.0)

    assert two.of(A) == one.of(A) == RankLoad(16, 1, 1)


@pytest.mark.parametrize("said", [2**64, 10**400, 0, -1])
def test_no_expected_output_keeps_what_ends_from_being_told(said: int) -> None:
    one, two = pair()
    one.add("1", A, [11], 1000, 0)
    exchange((one, two))

    one.free("1")
    one.add("2", A, [12], 1000, 0, said)
    one.grow("2", 32, BLOCK)
    exchange((one, two))
    seen = two.of(A).requests
    one.free("2")
    exchange((one, two))

    assert seen == 1
    assert one.of(A) == two.of(A) == RankLoad(0, 0, 0)


def test_what_could_not_be_encoded_is_still_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair()
    one.add("1", A, [11], 16, 0)

    def fail(value: object) -> bytes:
        raise OverflowError(f"{value} is too large")

    with monkeypatch.context() as patched:
        patched.setattr(shared_load, "encode_message", fail)
        with pytest.raises(OverflowError):
            list(one.outgoing(0.0))
    exchange((one, two))

    assert two.of(A).requests == 1


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("apf-"), st.integers(0, 4), st.booleans()),
    max_size=40,
)


@settings(max_examples=150)
@given(steps=STEPS)
def test_all_agree_in_the_end_however_many_messages_were_lost(
    steps: Sequence[tuple[int, str, int, bool]],
) -> None:
    loads = [SharedLoad(f"router {number}") for number in range(3)]
    now, numbers = 0.0, 0
    for who, step, which, is_lost in steps:
        now += 0.3
        speaker = loads[who]
        if step == "a":
            numbers += 1
            speaker.add(str(numbers), (A, B)[which % 2], list(range(which)), which * BLOCK, 0)
        elif step == "p":
            speaker.prefill_completed(str(which))
        elif step == "f":
            speaker.free(str(which))
        for message in list(speaker.outgoing(now, alive=True)):
            for other in loads:
                if other is speaker or not is_lost:
                    other.receive(message, now)

    for _ in range(3):
        now += ASK_AGAIN
        for speaker in loads:
            for message in list(speaker.outgoing(now, alive=True)):
                for other in loads:
                    other.receive(message, now)
        exchange(loads, now)

    for rank in (A, B):
        assert len({load.of(rank) for load in loads}) == 1


@pytest.mark.parametrize("delay", [0.002, 0.02])
def test_two_routers_stay_even_although_each_learns_late_of_the_other(delay: float) -> None:
    """Each sees the other's choices `delay` late, at 1000 requests a second each."""
    instances = [profile(f"i{number}") for number in range(8)]
    shared = [SharedLoad(f"router {number}") for number in range(2)]
    routers = [KvScheduler(load=load, random=Random(number)) for number, load in enumerate(shared)]
    exchange(shared)
    under_way: list[tuple[float, int, int, bytes]] = []
    running: Counter[str] = Counter()
    ends: list[tuple[float, int, int, str]] = []
    worst = 0
    order = 0

    for step in range(2000):
        now = step * 0.001
        while under_way and under_way[0][0] <= now:
            _, _, to, message = heapq.heappop(under_way)
            shared[to].receive(message, now)
        while ends and ends[0][0] <= now:
            _, who, number, name = heapq.heappop(ends)
            routers[who].ended(number, now)
            running[name] -= 1
        for who, router in enumerate(routers):
            decision = router.submit(request(f"{step}", instances, of=2 * step + who), now)
            assert isinstance(decision, Decision)
            running[decision.chosen.instance] += 1
            heapq.heappush(ends, (now + 0.2, who, decision.number, decision.chosen.instance))
            for message in shared[who].outgoing(now):
                order += 1
                heapq.heappush(under_way, (now + delay, order, 1 - who, message))
        if step > 500:
            worst = max(worst, max(running.values()))

    # 400 requests run, 50 on each of 8 instances when all is even. Herding would send what
    # comes within a delay, 40 requests at 20 ms, to one instance.
    assert worst <= 50 + 10


@pytest.mark.parametrize("number", [2, 8])
@pytest.mark.parametrize("shares", [True, False])
def test_routers_under_the_same_traffic_herd_unless_they_share_their_load(
    shares: bool, number: int
) -> None:
    """Large prompts with one prefix, which one instance holds, come to the routers in turn. To
    each that instance looks like the best place, until it knows what the others sent there."""
    instances = [profile(f"i{at}") for at in range(8)]
    loads = [SharedLoad(f"router {at}") for at in range(number)]
    routers = [
        KvScheduler(load=load, follower=HandIndex(i0=100), random=Random(at))
        for at, load in enumerate(loads)
    ]
    exchange(loads)

    running: Counter[str] = Counter()
    for step in range(8):
        wanted = request(f"r{step}", instances, blocks=400, of=step)
        decision = routers[step % number].submit(wanted, step * 0.005)
        assert isinstance(decision, Decision)
        running[decision.chosen.instance] += 1
        if shares:
            exchange(loads)

    most = max(running.values())
    assert most == 1 if shares else most >= number


@pytest.mark.parametrize("knows", [True, False])
def test_a_router_keeps_away_from_what_another_has_loaded(knows: bool) -> None:
    instances = [profile(f"i{number}") for number in range(8)]
    one, two = pair()
    giants = KvScheduler(load=one, random=Random(1))
    small = KvScheduler(load=two, random=Random(2))
    loaded = instances[:4]
    for number in range(4):
        giants.submit(request(f"g{number}", [loaded[number]], blocks=2000, of=number), 0.0)
    if knows:
        exchange((one, two))

    chosen: Counter[bool] = Counter()
    for number in range(40):
        decision = small.submit(request(f"s{number}", instances, of=50 + number), 0.0)
        assert isinstance(decision, Decision)
        chosen[decision.chosen.instance in {giant.instance for giant in loaded}] += 1

    assert chosen[True] == (0 if knows else 20)
