"""A handler runs as many calls as it allows, its clients by turns, and refuses what is in vain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.serving.admission import CONTINUED, Admission, Admittance, Entry, Turn

from .virtual_handler import Call, VirtualHandler, outcomes

RUN, WAIT, FULL, LATE = Admittance


def enter(admission: Admission[str], *calls: str) -> list[Admittance]:
    """Let calls in that have no deadline; each begins with its client's letter."""
    return [admission.enter(call, call[0], 0.0, None).admittance for call in calls]


def leave_all(admission: Admission[str], call: str) -> list[str]:
    """The order in which calls run when each ends before the next begins."""
    order: list[str] = []
    turn = admission.leave(call, 0.0, whole=True)
    while turn.begins is not None:
        order.append(turn.begins)
        turn = admission.leave(turn.begins, 0.0, whole=True)
    return order


def test_calls_run_then_wait_then_are_refused() -> None:
    admission: Admission[str] = Admission(2, 1)

    verdicts = enter(admission, "a1", "a2", "a3", "a4")

    assert verdicts == [RUN, RUN, WAIT, FULL]
    assert repr(admission) == "<Admission [2 running, 1 waiting]>"


def test_a_concurrency_of_one_is_a_mailbox_in_arrival_order_whoever_calls() -> None:
    admission: Admission[str] = Admission(1, None)
    enter(admission, "a1", "a2", "a3", "b1", "a4", "c1")

    order = leave_all(admission, "a1")

    assert order == ["a2", "a3", "b1", "a4", "c1"]
    assert (admission.running, admission.waiting) == (0, 0)


def test_no_concurrency_limit_means_that_nobody_waits() -> None:
    admission: Admission[str] = Admission(None, 0)

    assert set(enter(admission, *[f"a{number}" for number in range(1000)])) == {RUN}


def test_no_queue_limit_means_that_nobody_is_refused() -> None:
    admission: Admission[str] = Admission(1, None)

    verdicts = enter(admission, *[f"a{number}" for number in range(1000)])

    assert verdicts == [RUN] + [WAIT] * 999


def test_a_queue_of_zero_refuses_at_once() -> None:
    admission: Admission[str] = Admission(1, 0)

    assert enter(admission, "a1", "b1") == [RUN, FULL]


def test_a_withdrawn_call_does_not_run() -> None:
    admission: Admission[str] = Admission(1, None)
    enter(admission, "a1", "a2", "a3")

    assert admission.withdraw("a2")
    assert admission.leave("a1", 0.0, whole=True) == Turn("a3", [])


@pytest.mark.parametrize("call", ["a1", "z1"])
def test_only_a_waiting_call_can_be_withdrawn(call: str) -> None:
    admission: Admission[str] = Admission(1, None)
    enter(admission, "a1")

    assert not admission.withdraw(call)
    assert admission.running == 1


# Turns ------------------------------------------------------------------------------------


def test_clients_take_turns_and_the_calls_of_each_run_in_the_order_of_their_arrival() -> None:
    admission: Admission[str] = Admission(2, None)
    enter(admission, "a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")

    order = leave_all(admission, "a1")

    assert order == ["a3", "b1", "c1", "a4", "b2", "a5"]


def test_a_client_that_comes_again_has_its_turn_after_the_others() -> None:
    admission: Admission[str] = Admission(2, None)
    enter(admission, "a1", "a2", "a3", "a4", "b1")
    assert admission.leave("a1", 0.0, whole=True).begins == "a3"
    assert admission.leave("a2", 0.0, whole=True).begins == "b1"
    enter(admission, "b2")

    assert admission.leave("a3", 0.0, whole=True).begins == "a4"
    assert admission.leave("b1", 0.0, whole=True).begins == "b2"


@pytest.mark.parametrize("concurrency", [1, 2])
def test_in_a_full_queue_the_newest_call_of_who_has_most_makes_place(concurrency: int) -> None:
    admission: Admission[str] = Admission(concurrency, 4)
    enter(admission, *[f"a{number}" for number in range(concurrency + 4)])
    newest = f"a{concurrency + 3}"

    first, second, third = (
        admission.enter(call, call[0], 0.0, None) for call in ("b1", "b2", "b3")
    )

    assert first == Entry(WAIT, newest)
    assert second.admittance is WAIT
    # Both have two places now.
    assert third == Entry(FULL)
    assert admission.waiting == 4


def test_in_a_full_queue_nobody_makes_place_for_who_has_most() -> None:
    admission: Admission[str] = Admission(2, 3)
    enter(admission, "a1", "a2", "a3", "a4", "b1")

    assert admission.enter("a5", "a", 0.0, None) == Entry(FULL)


@pytest.mark.parametrize("open_calls", [500, 1500])
def test_beside_a_client_with_many_open_calls_another_waits_for_about_one_place(
    open_calls: int,
) -> None:
    handler = VirtualHandler(lambda _: 0.02)
    for _ in range(open_calls):
        handler.arrive(60.0, "greedy")
    handler.pass_to(0.03)

    others: list[Call] = []
    for _ in range(20):
        others.append(handler.arrive(60.0, "other"))
        handler.pass_to(handler.now + 0.05)

    assert outcomes(others) == {"done": 20}
    assert max(call.ended - call.arrived for call in others) < 0.045


def test_clients_with_equal_loads_get_equal_shares_whatever_one_of_them_adds() -> None:
    handler = VirtualHandler(lambda _: 0.2, queue=64)
    done: dict[str, int] = {}
    while handler.now < 20.0:
        for client in ("a", "b", "c", *["greedy"] * 20):
            handler.arrive(2.0, client)
        handler.pass_to(handler.now + 0.05)

    for call in handler.calls:
        done[call.client] = done.get(call.client, 0) + (call.outcome == "done")

    assert sum(done.values()) > 0.9 * 800
    assert min(done[client] for client in "abc") > 0.9 * 200


# Deadlines --------------------------------------------------------------------------------


def learned(seconds: float, *, concurrency: int = 2, queue: int | None = None) -> VirtualHandler:
    """A handler of which all is known, with all places just taken."""
    handler = VirtualHandler(lambda _: seconds, concurrency, queue)
    for _ in range(10):
        handler.arrive()
        handler.pass_to(handler.now + 2 * seconds)
    for _ in range(concurrency):
        handler.arrive()
    return handler


def test_nothing_is_refused_for_its_deadline_while_nothing_is_known() -> None:
    handler = VirtualHandler(lambda _: 100.0, 2)

    calls = [handler.arrive(0.001) for _ in range(50)]

    assert outcomes(calls) == {"": 50}


def test_a_call_that_would_be_done_too_late_is_refused_when_it_comes() -> None:
    handler = learned(1.0)

    calls = [handler.arrive(2.5) for _ in range(4)]

    assert [call.outcome for call in calls] == ["", "", "late", "late"]
    handler.pass_to(handler.now + 3.0)
    assert outcomes(calls) == {"done": 2, "late": 2}


def test_a_call_whose_turn_comes_too_late_is_refused_then_and_the_next_runs() -> None:
    admission: Admission[str] = Admission(1, None)
    for number in range(10):
        admission.enter("known", "a", number, None)
        admission.leave("known", number + 1.0, whole=True)
    admission.enter("a1", "a", 10.0, None)
    assert admission.enter("a2", "a", 10.0, 12.5).admittance is WAIT
    assert admission.enter("b1", "b", 10.0, 12.5).admittance is LATE
    assert admission.enter("b2", "b", 10.0, 60.0).admittance is WAIT

    # It takes longer than it ever did.
    turn = admission.leave("a1", 12.0, whole=True)

    assert turn == Turn("b2", ["a2"])


def test_a_call_without_a_deadline_is_never_refused_for_time() -> None:
    handler = learned(1000.0)

    calls = [handler.arrive() for _ in range(100)]

    assert outcomes(calls) == {"": 100}


def test_a_call_that_finds_a_free_place_begins_whatever_its_deadline() -> None:
    handler = learned(1.0, concurrency=2)
    handler.pass_to(handler.now + 1.0)

    hopeless = handler.arrive(0.1)

    assert hopeless.began == handler.now


def test_a_call_that_waits_behind_a_client_with_many_is_judged_by_its_own_turn() -> None:
    handler = learned(0.1)
    greedy = [handler.arrive(60.0, "greedy") for _ in range(200)]

    other = handler.arrive(0.5, "other")
    handler.pass_to(handler.now + 0.5)

    assert other.outcome == "done"
    assert outcomes(greedy)["late"] == 0


# When to come back ------------------------------------------------------------------------


def test_while_nothing_is_known_a_call_is_thought_to_take_as_long_again_as_it_has() -> None:
    handler = VirtualHandler(lambda _: 1.0, 1, 0)
    handler.arrive()

    assert handler.admission.retry_after("c", 0.5, None) == 0.5


@pytest.mark.parametrize("seconds", [0.002, 0.2, 300.0])
@pytest.mark.parametrize("concurrency", [1, 2, 8, 300])
@pytest.mark.parametrize("queue", [0, 8])
@pytest.mark.parametrize("together", [False, True])
def test_who_is_refused_by_a_full_queue_is_told_when_there_is_a_place(
    seconds: float, concurrency: int, queue: int, together: bool
) -> None:
    handler = learned(seconds, concurrency=1, queue=queue)
    admission = handler.admission
    admission.concurrency = handler.concurrency = concurrency
    for _ in range(concurrency - 1 + queue):
        if not together:
            handler.pass_to(handler.now + 0.9 * seconds / (concurrency + queue))
        handler.arrive()
    refused = handler.arrive()
    said = admission.retry_after("c", handler.now, None)

    truth = handler.taken_after(float("inf"), step=seconds / 1000)

    assert refused.outcome == "full"
    assert truth / 2 - 0.01 * seconds <= said <= 2 * truth + 0.01 * seconds


@pytest.mark.parametrize("concurrency", [1, 2, 8])
@pytest.mark.parametrize("allowed", [1.0, 2.0, 10.0])
def test_who_would_be_late_is_told_when_it_would_be_in_time(
    concurrency: int, allowed: float
) -> None:
    handler = learned(0.2, concurrency=concurrency)
    # None of these has a deadline, so the queue is far too long for one that has.
    for _ in range(20 * concurrency * int(allowed)):
        handler.arrive()
    late = handler.arrive(allowed)
    said = handler.admission.retry_after("c", handler.now, allowed)

    truth = handler.taken_after(allowed, step=0.01)

    assert late.outcome == "late"
    assert truth / 2 <= said <= 2 * truth


# Whatever happens -------------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "withdraw"]),
            st.sampled_from("abc"),
            st.sampled_from([None, 0.5, 3.0]),
            st.booleans(),
        ),
        max_size=80,
    ),
)
def test_the_limits_hold_and_every_call_is_told_of_once_whatever_happens(
    concurrency: int, queue: int, steps: list[tuple[str, str, float | None, bool]]
) -> None:
    admission: Admission[int] = Admission(concurrency, queue)
    running: list[int] = []
    waiting: dict[int, str] = {}
    for number, (step, client, allowed, whole) in enumerate(steps):
        now = 0.3 * number
        if step == "enter":
            deadline = None if allowed is None else now + allowed
            verdict, displaced = admission.enter(number, client, now, deadline)
            if displaced is not None:
                held = [client for client in waiting.values() if client == waiting[displaced]]
                assert len(held) >= 2
                assert max(n for n, c in waiting.items() if c == held[0]) == displaced
                del waiting[displaced]
            if verdict is RUN:
                running.append(number)
            elif verdict is WAIT:
                waiting[number] = client
            assert allowed is not None or verdict is not LATE
            assert admission.retry_after(client, now, allowed) >= 0
        elif step == "leave" and running:
            begins, late = admission.leave(running.pop(0), now, whole=whole)
            for call in late:
                del waiting[call]
            if begins is not None:
                assert begins == min(n for n, c in waiting.items() if c == waiting[begins])
                assert concurrency > 1 or begins == min(waiting)
                del waiting[begins]
                running.append(begins)
        elif step == "withdraw" and waiting:
            assert admission.withdraw(waiting.popitem()[0])

        assert (admission.running, admission.waiting) == (len(running), len(waiting))
        assert len(running) <= concurrency
        assert len(waiting) <= queue
        assert len(running) == concurrency or not waiting


def test_a_call_whose_turn_came_and_that_does_not_begin_leaves_it_to_the_next() -> None:
    admission: Admission[str] = Admission(1, None)
    admission.enter("a", "one", 0.0, None)
    for call in ("b", "c"):
        admission.enter(call, "one", 0.0, None)
    assert admission.leave("a", 1.0, whole=True).begins == "b"

    turn = admission.skip("b", 1.0)

    assert turn == Turn("c", [])
    assert (admission.running, admission.waiting) == (1, 0)
    assert len(admission.durations) == 1


# Continued calls --------------------------------------------------------------------------


def enter_continued(admission: Admission[str], *calls: str) -> list[Entry[str]]:
    """Let calls in that go on with streams of other instances, and have no time at all."""
    return [admission.enter(call, call[0], 0.0, 1e-9, continued=True) for call in calls]


def test_a_continued_call_is_refused_neither_for_a_full_queue_nor_for_its_time() -> None:
    admission: Admission[str] = Admission(2, 1)
    for number in range(16):
        enter(admission, f"z{number}")
        admission.leave(f"z{number}", 1.0, whole=True)
    enter(admission, "a1", "a2", "a3")

    entries = enter_continued(admission, "b1", "a4")

    assert entries == [Entry(WAIT), Entry(WAIT)]
    assert enter(admission, "a5") == [FULL]


def test_a_continued_call_takes_no_place_of_the_queue_from_others() -> None:
    admission: Admission[str] = Admission(1, 2)
    enter(admission, "a1")
    enter_continued(admission, "b1", "b2", "b3")

    assert enter(admission, "a2", "a3", "a4") == [WAIT, WAIT, FULL]


def test_a_continued_call_makes_no_place_for_a_client_with_fewer_calls() -> None:
    admission: Admission[str] = Admission(1, 1)
    enter(admission, "a1", "a2")
    enter_continued(admission, "a3", "a4", "a5")

    assert admission.enter("b1", "b", 0.0, None) == Entry(FULL)


def test_a_continued_call_has_every_second_turn_and_takes_none_of_its_client() -> None:
    admission: Admission[str] = Admission(2, None)
    enter(admission, "a1", "a2", "a3", "b1", "a4", "b2")
    enter_continued(admission, "a5", "a6", "b3", "b4", "b5")

    order = leave_all(admission, "a1")

    assert order == ["a5", "a3", "a6", "b1", "b3", "a4", "b4", "b2", "b5"]


def test_a_mailbox_runs_continued_calls_too_in_the_order_of_their_arrival() -> None:
    admission: Admission[str] = Admission(1, None)
    enter(admission, "a1", "a2")
    enter_continued(admission, "b1")
    enter(admission, "a3")

    assert leave_all(admission, "a1") == ["a2", "b1", "a3"]


def test_a_client_that_says_continued_of_all_its_calls_fills_no_more_than_its_share() -> None:
    admission: Admission[str] = Admission(1, 0)
    enter(admission, "a1")

    entries = enter_continued(admission, *[f"b{number}" for number in range(CONTINUED + 1)])

    assert [entry.admittance for entry in entries] == [WAIT] * CONTINUED + [FULL]
    assert admission.withdraw("b0")
    assert enter_continued(admission, "b999") == [Entry(WAIT)]


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40),
)
def test_continued_calls_change_the_order_of_no_others(
    concurrency: int, calls: list[tuple[str, bool]]
) -> None:
    mixed: Admission[str] = Admission(concurrency, None)
    ordinary: Admission[str] = Admission(concurrency, None)
    running = [f"z{number}" for number in range(concurrency)]
    enter(mixed, *running)
    enter(ordinary, *running)
    names = {f"{client}{number}": of for number, (client, of) in enumerate(calls)}
    for name, continued in names.items():
        assert mixed.enter(name, name[0], 0.0, None, continued=continued).admittance is WAIT
        if not continued:
            enter(ordinary, name)

    order = leave_all(mixed, "z0")

    assert sorted(order) == sorted(names)
    assert [name for name in order if not names[name]] == leave_all(ordinary, "z0")
    assert [name for name in order if names[name]] == [name for name, of in names.items() if of]
