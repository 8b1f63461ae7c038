"""What a hand-over of a prompt promises, whatever happens in whatever order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.llm.generation import Generated
from dynbus.llm.hand_over.machine import (
    Abandon,
    Action,
    Call,
    Deliver,
    EndCall,
    Enqueue,
    HandOver,
    Phase,
    Read,
    Release,
    Settle,
    Show,
)
from dynbus.llm.hand_over.messages import Prefilled
from dynbus.transfer.leases import Ticket

FIRST = Generated([7], finish_reason="length")
PROMPT = 48
VOCABULARY = 160


def ticket(start: int, stop: int) -> Ticket:
    blocks = tuple(range(start // 16, -(-stop // 16)))
    return Ticket("prefill", "epoch", 1 + start, blocks, stop - start, 30.0)


def chunk(start: int, stop: int, first: Generated | None = None) -> Prefilled:
    return Prefilled(stop, start, ticket(start, stop), first=first)


def began(*, cached: int = 0, queued: bool = False) -> HandOver:
    one = HandOver(PROMPT, queued=queued, vocabulary=VOCABULARY)
    one.reserved(cached)
    return one


def at(one: HandOver) -> Phase:
    return one.phase


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_a_prompt_that_comes_in_two_parts_is_delivered_when_both_are_settled() -> None:
    one = HandOver(PROMPT)

    assert one.reserved(16) == [Call("", 16)]
    assert one.came(chunk(16, 32)) == [Read(0, chunk(16, 32))]
    assert at(one) is Phase.PREFILLING
    assert one.read(0) == [Settle(0)]
    assert one.answered(0, held=True) == []
    assert one.settled == 32
    last = chunk(32, PROMPT, FIRST)
    assert one.came(last) == [Show(FIRST), Read(1, last)]
    assert at(one) is Phase.READING
    assert one.read(1) == [Settle(1)]
    assert at(one) is Phase.SETTLING
    assert one.answered(1, held=True) == [Deliver(PROMPT, FIRST), EndCall(), Release()]
    assert at(one) is Phase.DECODING
    assert one.call_ended() == []
    assert one.ended() == []
    assert at(one) is Phase.ENDED


def test_what_was_settled_before_a_failure_is_kept() -> None:
    one = began()
    one.came(chunk(0, 32))
    one.read(0)
    one.answered(0, held=True)

    assert one.call_ended("prefill_lost", "it is gone") == [Deliver(32, None), Release()]
    assert at(one) is Phase.FALLING_BACK
    assert one.reason == "prefill_lost"


def test_the_first_token_that_was_shown_is_the_first_token_after_a_failure() -> None:
    one = began()
    one.came(chunk(0, PROMPT, FIRST))

    actions = one.call_ended("prefill_lost", "it is gone")

    assert actions == [Deliver(0, FIRST), Abandon(0)]


def test_blocks_are_released_when_an_abandoned_transfer_is_quiet() -> None:
    one = began()
    one.came(chunk(0, PROMPT, FIRST))

    assert Release() not in one.fall_back("too_slow", "the transfer")
    assert one.read(0) == [Release()]

    two = began()
    two.came(chunk(0, PROMPT, FIRST))
    assert Release() not in two.ended()
    assert two.quiet(0) == [Release()]


def test_a_lease_that_is_over_makes_nothing_of_its_part_count() -> None:
    one = began()
    one.came(chunk(0, PROMPT, FIRST))
    one.read(0)

    actions = one.answered(0, held=False)

    assert actions == [Deliver(0, FIRST), EndCall(), Release()]
    assert one.reason == "lease_lost"


def test_a_job_is_offered_once_and_not_needed_after_that() -> None:
    one = began(cached=16, queued=True)

    assert at(one) is Phase.QUEUED
    assert one.offered("p1") == [Call("p1", 16)]
    assert one.offered("p2") == []

    two = HandOver(PROMPT, queued=True)
    assert two.reserved(0) == [Enqueue(0)]
    assert two.fall_back("too_slow", "nobody took it") == [Deliver(0, None), Release()]
    assert two.offered("p1") == []


def test_a_prompt_that_is_cached_after_all_is_computed_here() -> None:
    one = HandOver(PROMPT)

    assert one.reserved(32, is_worth=False) == [Deliver(32, None), Release()]
    assert one.reason == "cached"


@pytest.mark.parametrize(
    "item",
    [
        Prefilled(32, 16, ticket(16, 32)),
        Prefilled(0, 0, ticket(0, 32)),
        Prefilled(PROMPT + 16, 0, ticket(0, PROMPT + 16)),
        Prefilled(32, 0, ticket(0, 32), first=FIRST),
        Prefilled(PROMPT, 0, ticket(0, PROMPT), first=Generated([])),
        Prefilled(PROMPT, 0, ticket(0, PROMPT), first=Generated([1, 2])),
        Prefilled(PROMPT, 0, ticket(0, PROMPT), first=Generated([VOCABULARY])),
        Prefilled(PROMPT, 0, ticket(0, PROMPT), first=Generated([-1])),
        Prefilled(PROMPT, 0, first=FIRST),
    ],
)
def test_an_answer_that_cannot_be_is_used_for_nothing(item: Prefilled) -> None:
    one = began()

    actions = one.came(item)

    assert actions == [Deliver(0, None), EndCall(), Release()]
    assert one.reason == "bad_answer"


PHASES: dict[Phase, Callable[[], HandOver]] = {
    Phase.RESERVING: lambda: HandOver(PROMPT),
    Phase.QUEUED: lambda: began(),
    Phase.PREFILLING: lambda: _after(lambda one: one.came(chunk(0, 32)), began()),
    Phase.READING: lambda: _after(lambda one: one.came(chunk(0, PROMPT, FIRST)), began()),
    Phase.SETTLING: lambda: _after(lambda one: one.read(0), PHASES[Phase.READING]()),
    Phase.DECODING: lambda: _after(
        lambda one: one.answered(0, held=True), PHASES[Phase.SETTLING]()
    ),
    Phase.FALLING_BACK: lambda: _after(lambda one: one.fall_back("too_slow", ""), began()),
}


def _after(event: Callable[[HandOver], object], one: HandOver) -> HandOver:
    event(one)
    return one


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_a_request_can_end_in_each_phase_and_leaves_nothing(phase: Phase) -> None:
    one = PHASES[phase]()
    assert at(one) is phase

    actions = one.ended()
    parts = [action.part for action in actions if isinstance(action, Abandon)]
    for part in parts:
        actions += one.quiet(part)
    actions += one.call_ended()

    assert at(one) is Phase.ENDED
    assert Deliver not in kinds(actions)
    assert not parts or actions.index(Release()) > max(map(actions.index, map(Abandon, parts)))


EVENTS = [
    *("reserved", "cached", "offered", "part", "last", "odd", "read", "read_failed", "quiet"),
    *("held", "lost", "call_ended", "call_failed", "late", "ended"),
]


@settings(max_examples=200)
@given(
    st.booleans(),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=30),
)
def test_the_promises_hold_whatever_comes_in_whatever_order(
    queued: bool, cached: int, events: list[tuple[str, int]]
) -> None:
    one = HandOver(PROMPT, queued=queued)
    done: list[Action] = []
    reads: list[Read] = []
    quiet: set[int] = set()
    proven: set[int] = set(range(16 * cached))
    asked: set[int] = set()
    ended = False

    def take(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Read():
                    assert Release() not in done, "nothing is read into blocks that are released"
                    reads.append(action)
                case Settle(part):
                    asked.add(part)
                case Deliver(computed):
                    assert set(range(computed)) <= proven, "only what is proven is used"
                    assert not ended
                case Release():
                    assert quiet >= set(range(len(reads))), "nothing can arrive any more"
                case _:
                    pass
            done.append(action)

    for event, number in events:
        part = reads[number % len(reads)].part if reads else None
        match event:
            case "reserved":
                take(one.reserved(16 * cached))
            case "cached":
                take(one.reserved(16 * cached, is_worth=False))
            case "offered":
                take(one.offered("p"))
            case "part" | "last":
                start = reads[-1].item.computed if reads else 16 * cached
                stop = PROMPT if event == "last" else start + 16
                if start < stop <= PROMPT:
                    take(one.came(chunk(start, stop, FIRST if event == "last" else None)))
            case "odd":
                take(one.came(chunk(16 * number, 16 * number + 16)))
            case "read" if part is not None:
                # A transfer tells once how it has gone.
                if part not in quiet:
                    quiet.add(part)
                    take(one.read(part))
            case "read_failed" if part is not None:
                take(one.fall_back("transfer_failed", "the link"))
            case "quiet" if part is not None and Abandon(part) in done:
                quiet.add(part)
                take(one.quiet(part))
            case "held" if part is not None and part in asked:
                proven |= set(range(reads[part].item.start, reads[part].item.computed))
                take(one.answered(part, held=True))
            case "lost" if part is not None and part in asked:
                take(one.answered(part, held=False))
            case "call_ended":
                take(one.call_ended())
            case "call_failed":
                take(one.call_ended("prefill_lost", "gone"))
            case "late":
                take(one.fall_back("too_slow", "late"))
            case "ended":
                actions = one.ended()
                ended = True
                take(actions)
            case _:
                pass

    if not ended:
        take(one.fall_back("too_slow", "its time is over"))
        assert kinds(done).count(Deliver) == 1, "the engine goes on"
        actions = one.ended()
        ended = True
        take(actions)
    take(one.call_ended())
    for read in reads:
        if read.part not in quiet:
            quiet.add(read.part)
            take(one.quiet(read.part))

    counts = Counter(kinds(done))
    assert at(one) is Phase.ENDED
    assert counts[Release] == 1
    assert counts[Show] <= 1
    assert counts[Deliver] <= 1
    assert counts[EndCall] <= counts[Call] <= 1
    shown: list[Generated | None] = [action.first for action in done if isinstance(action, Show)]
    delivered = [action for action in done if isinstance(action, Deliver)]
    if delivered:
        assert [delivered[0].first] == (shown or [None]), "one first token"
