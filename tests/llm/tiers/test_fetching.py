"""A prefix is fetched whole and proven, or computed; whatever fails, the engine goes on once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import anyio
import pytest
from tests.llm.hand_over.lists import (
    EPOCH,
    SIZE,
    Ending,
    Engine,
    Memory,
    Noted,
    events_into,
    source_of,
)

from dynbus.bus.background import Background
from dynbus.bus.context import Context, context
from dynbus.bus.errors import Cancelled, DynbusError, InvalidRequest, NoInstances, Overloaded
from dynbus.bus.protocol.names import InstanceName
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.hand_over.messages import LendRequest, Lent
from dynbus.llm.hand_over.observing import TransferSpans
from dynbus.llm.hand_over.part_reader import LeasedPartReader
from dynbus.llm.hand_over.sink import Sink
from dynbus.llm.tiers.cost import Rates, Verdict
from dynbus.llm.tiers.fetching import MAX_FETCHES, Fetch, PrefixFetcher
from dynbus.testing import run
from dynbus.transfer.errors import TransferFailed
from dynbus.transfer.leases import Ticket
from dynbus.transfer.settling import Settled, Settlement, Settling

PROMPT = GenerateRequest(list(range(10 * SIZE + 5)))


class Story:
    """Two instances: `b` holds the first blocks of the prompt, and `a` wants them."""

    def __init__(self, background: Background, *, own: int = 0, held: int = 8) -> None:
        self.engine = Engine(range(20, 31), own)
        self.memory = Memory("agent of a")
        self.memory.source = self.source = Memory("agent of b", [f"b{at}" for at in range(20)])
        self.lending = Engine(range(5, 16), held)
        self.settling = Settling(cast(Any, self.source), self.source.leases)
        self.lender = source_of(self.lending, self.source, self.settling)
        self.rates = Rates(SIZE, 1 << 20)
        self.rates.note_prefill(512, 1.0)
        self.settles = True
        self.error: DynbusError | None = None
        self.stalls = False
        self.lie: Any = None
        spans = TransferSpans(None, InstanceName("test", "a", "a"))
        memory: Any = self.memory
        self.fetcher = PrefixFetcher(
            LeasedPartReader(memory, memory, self.settle, patience=60.0),
            self.rates,
            peer=lambda _: self,
            mover_of=lambda name: f"agent of {name}",
            model="of a",
        )
        self.avoided: set[str] = set()
        self.noted: list[Noted] = []
        self.sink = Sink(
            cast(Any, self.engine),
            background,
            spans,
            self.fetcher,
            events=events_into(self.noted, "a"),
            avoids=self.avoids,
        )

    def avoids(self, instance: str) -> bool:
        return instance in self.avoided

    async def lend_prefix(self, request: LendRequest) -> AsyncGenerator[Lent]:
        assert request.model == "of a"
        if self.error is not None:
            raise self.error
        if self.stalls:
            await anyio.sleep_forever()
        lending = self.lender.lend(request, context())
        try:
            async for lent in lending:
                yield lent if self.lie is None else self.lie(lent)
        finally:
            await lending.aclose()

    async def settle(self, settlement: Settlement, instance: str) -> Settled:
        assert instance == "b"
        return await self.settling.settle(settlement) if self.settles else Settled(held=False)

    async def fetch(self) -> None:
        metadata = {"kv_peer": "b", "kv_peer_blocks": "8", "kv_overlap_blocks": "0"}
        Context("r", metadata=metadata).enter()

        async def here() -> None:
            raise AssertionError("it is fetched")

        await self.sink.serve("r", PROMPT, cast(Any, Ending()), here)

    def check_nothing_is_left(self) -> None:
        assert self.lender.loans == 0
        assert not len(self.source.leases)
        assert self.lending.released == [f"lent.{at}" for at in range(len(self.lending.released))]
        assert self.fetcher.figures.open == self.fetcher.figures.quarantined == 0
        assert self.engine.released == ["r"]


async def told(**options: Any) -> Story:
    async with Background("test") as background:
        story = Story(background, **options)
        await story.fetch()
    story.check_nothing_is_left()
    return story


def test_the_blocks_that_the_engine_lacks_are_read_and_no_others() -> None:
    story = run(told(own=3))

    assert story.engine.delivered == [8 * SIZE]
    assert story.engine.sources == ["b"]
    assert story.memory.contents == {20 + at: f"b{5 + at}" for at in range(3, 8)}
    assert story.fetcher.statistics.results == {"fetched": 1}
    assert (story.fetcher.statistics.blocks, story.lender.lent_blocks) == (5, 5)
    assert story.rates.peer("b").latency.measured
    [(event, details)] = story.noted
    assert event == ("test", "hand_over.done", "test.a@a", "r")
    assert 0 < details["answered"] + 0.01 <= details["read"] <= details["seconds"]
    known = {name: details[name] for name in ("kind", "source", "blocks")}
    assert known == {"kind": "cache", "source": "b", "blocks": 5}


def test_a_peer_that_holds_less_by_now_lends_what_it_has() -> None:
    story = run(told(held=4))

    assert story.engine.delivered == [4 * SIZE]


@pytest.mark.parametrize("held", [0, 3])
def test_a_peer_that_has_no_more_than_is_here_lends_nothing(held: int) -> None:
    story = run(told(own=3, held=held))

    assert story.engine.delivered == [3 * SIZE]
    assert not story.memory.started
    assert story.fetcher.statistics.results == {"gone": 1}


async def failing(what: str, problem: Any) -> Story:
    async with Background("test") as background:
        story = Story(background, own=2)
        setattr(story.memory if what == "takes" else story, what, problem)
        if what == "transfer":
            story.memory.error = problem
        await story.fetch()
        await anyio.sleep(3.1)
    story.check_nothing_is_left()
    return story


@pytest.mark.parametrize(
    ("what", "problem", "code", "why"),
    [
        ("error", NoInstances("b is gone"), "NoInstances", "no_instances"),
        ("error", Overloaded("too much"), "Overloaded", "refused"),
        ("stalls", True, "DeadlineExceeded", "too_slow"),
        ("transfer", TransferFailed("cut"), "TransferFailed", "transfer_failed"),
        ("takes", 60.0, "DeadlineExceeded", "too_slow"),
        ("settles", False, "LeaseLost", "lease_lost"),
    ],
)
def test_what_cannot_be_fetched_is_computed_and_the_peer_is_left_in_peace(
    what: str, problem: Any, code: str, why: str
) -> None:
    story = run(failing(what, problem))

    assert story.engine.delivered == [2 * SIZE]
    assert story.fetcher.statistics.results == {code: 1}
    assert "asked again" in story.rates.fetches("b", 8, now=paused(story)).reason
    faults = [one for one in story.noted if one[0][1] == "hand_over.failed"]
    [(event, details)] = faults
    assert event[2:] == ("test.a@a", "r")
    assert (details["why"], details["error"], details["blocks"]) == (why, code, 0)
    assert details["computed_here"] == 6 * SIZE
    given_up = [one for one in story.noted if one[0][1] == "hand_over.given_up"]
    assert [details["blocks"] for _, details in given_up] == [6] * (what in ("takes", "transfer"))


def paused(story: Story) -> float:
    """Some time within the pause of the peer."""
    return story.rates.peer("b").paused_until - 0.1


def lies(lent: Lent) -> list[Lent]:
    ticket = lent.ticket
    assert ticket is not None
    other = Ticket("agent of c", EPOCH, 1, ticket.blocks, ticket.tokens, 1.0)
    short = Ticket(ticket.agent, EPOCH, ticket.lease_id, ticket.blocks[:1], SIZE, 1.0)
    return [
        Lent(lent.tokens, other),
        Lent(lent.tokens, short),
        Lent(lent.tokens - 3, ticket),
        Lent(0, ticket),
        Lent(-SIZE, ticket),
    ]


@pytest.mark.parametrize("number", range(5))
def test_a_peer_that_lends_what_cannot_be_is_not_read_from(number: int) -> None:
    def lie(lent: Lent) -> Lent:
        return lies(lent)[number]

    story = run(failing("lie", lie))

    assert story.engine.delivered == [2 * SIZE]
    assert not story.memory.started
    assert story.fetcher.statistics.results == {"BadDescription": 1}


def test_blocks_into_which_a_given_up_transfer_may_write_stay_held_until_it_is_quiet() -> None:
    async def story() -> None:
        async with Background("test") as background:
            told = Story(background)
            told.memory.takes = 60.0
            await told.fetch()
            assert told.engine.delivered == [0]
            assert told.memory.started[0].was_cancelled
            assert not told.engine.released
            await anyio.sleep(3.1)
            assert told.engine.released == ["r"]

    run(story())


def test_whoever_is_cancelled_in_the_middle_leaves_nothing_behind() -> None:
    async def story() -> None:
        async with Background("test") as background:
            told = Story(background)
            told.memory.takes = 60.0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(told.fetch)
                await anyio.sleep(0.1)
                assert told.lender.loans == 1
                tasks.cancel_scope.cancel()
            assert told.lender.loans == 0
            await anyio.sleep(3.1)
        assert not told.engine.delivered
        told.check_nothing_is_left()

    run(story())


@pytest.mark.parametrize(
    "error", [Cancelled("the request was cancelled"), InvalidRequest("it is too long")]
)
def test_a_request_that_ends_before_it_has_blocks_is_no_failure_of_the_peer(
    error: DynbusError,
) -> None:
    async def story() -> Story:
        async with Background("test") as background:
            told = Story(background)
            told.engine.error = error
            await told.fetch()
            return told

    told = run(story())
    assert not told.fetcher.statistics.results
    assert told.rates.peer("b").failures == 0


@pytest.mark.parametrize(
    ("compute_s", "move_s", "patience", "transfer"),
    [
        (0.3, 0.1, 0.5, 0.5),
        (2.0, 0.4, 2.0, 1.6),
        (2.0, 1.0, 2.0, 2.0),
        # The peer may be in the middle of a long step, and answers when that has ended.
        (7.0, 0.2, 7.0, 0.8),
        (200.0, 10.0, 30.0, 30.0),
    ],
)
def test_a_peer_may_take_as_long_as_computing_and_a_transfer_four_times_what_is_expected(
    compute_s: float, move_s: float, patience: float, transfer: float
) -> None:
    verdict = Verdict(compute_s, move_s)
    fetch, hurried = Fetch("b", 16, verdict), Fetch("b", 16, verdict, spare=0.2)

    assert (fetch.patience, fetch.transfer_patience) == pytest.approx((patience, transfer))
    assert (hurried.patience, hurried.transfer_patience) == (0.2, 0.2)


# Plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"kv_peer": "", "kv_peer_blocks": "8"},
        {"kv_peer": "b"},
        {"kv_peer": "b", "kv_peer_blocks": "many"},
        {"kv_peer": "b", "kv_peer_blocks": "-8"},
        {"kv_peer": "b", "kv_peer_blocks": "٣"},
        {"kv_peer": "b", "kv_peer_blocks": "8", "kv_overlap_blocks": "8"},
    ],
)
def test_nothing_is_fetched_where_nobody_is_said_to_hold_more(metadata: dict[str, str]) -> None:
    async def story() -> Fetch | None:
        async with Background("test") as background:
            return Story(background).fetcher.choose(PROMPT, metadata, None)

    assert run(story()) is None


def test_of_a_prompt_whose_blocks_are_all_held_the_last_token_is_computed() -> None:
    async def story() -> Fetch | None:
        async with Background("test") as background:
            told = Story(background)
            metadata = {"kv_peer": "b", "kv_peer_blocks": "1000"}
            return told.fetcher.choose(GenerateRequest([1] * 8 * SIZE), metadata, None)

    plan = run(story())
    assert plan is not None
    assert plan.tokens == 7 * SIZE


def test_a_request_with_several_continuations_and_more_than_some_at_a_time_compute() -> None:
    async def story() -> list[Fetch | None]:
        async with Background("test") as background:
            told = Story(background)
            metadata = {"kv_peer": "b", "kv_peer_blocks": "8"}
            several = GenerateRequest(PROMPT.token_ids, n=2)
            plans = [told.fetcher.choose(several, metadata, None)]
            told.fetcher.figures.open = MAX_FETCHES
            return [*plans, told.fetcher.choose(PROMPT, metadata, None)]

    assert run(story()) == [None, None]


def test_blocks_of_an_instance_that_has_lied_meanwhile_are_not_read() -> None:
    async def story() -> Story:
        async with Background("test") as background:
            made = Story(background)
            made.avoided = {"b"}
            await made.fetch()
        made.check_nothing_is_left()
        return made

    made = run(story())

    assert made.engine.delivered == [0]
    assert not made.memory.started
