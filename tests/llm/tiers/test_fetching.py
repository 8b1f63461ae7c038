"""A prefix is fetched whole and proven, or computed; whatever fails, the engine goes on once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, cast

import anyio
import pytest

from dynbus.bus.background import Background
from dynbus.bus.errors import Cancelled, DynbusError, InvalidRequest, NoInstances, Overloaded
from dynbus.llm.engine.interface import Held
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.tiers.cost import Rates, Verdict
from dynbus.llm.tiers.fetching import MAX_FETCHES, Fetch, PrefixFetcher
from dynbus.llm.tiers.lending import MAX_LOANS, MAX_SECONDS, Lender
from dynbus.llm.tiers.messages import LendRequest, Lent
from dynbus.testing import run
from dynbus.transfer.errors import TransferFailed
from dynbus.transfer.leases import LeaseTable, Ticket
from dynbus.transfer.settling import Settled, Settlement, Settling

SIZE = 16
PROMPT = GenerateRequest(list(range(10 * SIZE + 5)))
EPOCH = "epoch"


class Memory:
    """An agent that copies between lists: what block holds what."""

    def __init__(self, name: str, blocks: Sequence[str] = ()) -> None:
        self.name = name
        self.epoch = EPOCH
        self.contents = dict(enumerate(blocks))
        self.leases = LeaseTable(EPOCH)
        self.source: Memory | None = None
        self.error: DynbusError | None = None
        self.takes = 0.01
        self.started: list[Reading] = []

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        lease = self.leases.grant(blocks, seconds, anyio.current_time())
        return Ticket(self.name, EPOCH, lease.lease_id, lease.blocks, tokens, seconds)

    def start(
        self,
        operation: str,
        ticket: Ticket,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        tokens: int,
        deadline: float,
    ) -> Reading:
        assert operation == "read"
        assert tokens == SIZE * len(remote_blocks) == SIZE * len(local_blocks)
        reading = Reading(self, list(zip(remote_blocks, local_blocks, strict=True)))
        self.started.append(reading)
        return reading


class Reading:
    """A transfer of a `Memory`."""

    def __init__(self, memory: Memory, pairs: list[tuple[int, int]]) -> None:
        self.memory, self.pairs = memory, pairs
        self.bytes = len(pairs) << 20
        self.is_done = False
        self.was_cancelled = False

    async def result(self) -> None:
        await anyio.sleep(self.memory.takes)
        if self.memory.error is not None:
            raise self.memory.error
        assert self.memory.source is not None
        for remote, local in self.pairs:
            self.memory.contents[local] = self.memory.source.contents[remote]
        self.is_done = True

    def cancel(self) -> None:
        self.was_cancelled = not self.is_done

    async def quiet(self) -> None:
        if self.was_cancelled:
            await anyio.sleep(3.0)


class Engine:
    """A runner of an engine that has some blocks of every prompt, and waits for others."""

    def __init__(self, blocks: Sequence[int], cached: int) -> None:
        self.blocks, self.cached = tuple(blocks), cached
        self.delivered: list[int] = []
        self.released: list[str] = []
        self.error: DynbusError | None = None

    async def next_held(self, hold_id: str) -> Held:
        if self.error is not None:
            raise self.error
        return Held(hold_id, self.blocks, self.cached * SIZE, self.cached * SIZE)

    async def hold(self, hold_id: str, request: GenerateRequest) -> Held:
        held = min(self.cached, len(request.token_ids) // SIZE)
        return Held(hold_id, self.blocks[:held], held * SIZE, held * SIZE)

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        assert first is None
        self.delivered.append(computed)

    def release(self, hold_id: str) -> None:
        self.released.append(hold_id)


def stays(_: Callable[[bool], None]) -> Callable[[], None]:
    """The link of a caller that does not leave."""
    return lambda: None


class Story:
    """Two instances: `b` holds the first blocks of the prompt, and `a` wants them."""

    def __init__(self, background: Background, *, own: int = 0, held: int = 8) -> None:
        self.engine = Engine(range(20, 31), own)
        self.memory = Memory("agent of a")
        self.memory.source = self.source = Memory("agent of b", [f"b{at}" for at in range(20)])
        self.lending = Engine(range(5, 16), held)
        self.settling = Settling(cast(Any, self.source), self.source.leases)
        self.lender = Lender(self.lending, cast(Any, self.source), self.settling, SIZE, 16)
        self.rates = Rates(SIZE, 1 << 20)
        self.rates.note_prefill(512, 1.0)
        self.settles = True
        self.error: DynbusError | None = None
        self.stalls = False
        self.lie: Any = None
        self.fetcher = PrefixFetcher(
            self.engine,
            cast(Any, self.memory),
            self.rates,
            peer=lambda _: self,
            agent_of=lambda name: f"agent of {name}",
            background=background,
            model="of a",
        )

    async def lend_prefix(self, request: LendRequest) -> AsyncGenerator[Lent]:
        assert request.model == "of a"
        if self.error is not None:
            raise self.error
        if self.stalls:
            await anyio.sleep_forever()
        lending = self.lender.lend(request, stays)
        try:
            async for lent in lending:
                yield lent if self.lie is None else self.lie(lent)
        finally:
            await lending.aclose()

    async def settle(self, settlement: Settlement) -> Settled:
        return await self.settling.settle(settlement) if self.settles else Settled(held=False)

    async def fetch(self) -> None:
        metadata = {"kv_peer": "b", "kv_peer_blocks": "8", "kv_overlap_blocks": "0"}
        plan = self.fetcher.plan(PROMPT, metadata, None)
        assert plan is not None
        await self.fetcher.fetch("r", PROMPT, plan)

    def check_nothing_is_left(self) -> None:
        assert self.lender.loans == 0
        assert not len(self.source.leases)
        assert self.lending.released == [f"lent.{at}" for at in range(len(self.lending.released))]
        assert self.fetcher.statistics.running == 0
        assert self.engine.released == ["r"]
        assert len(self.engine.delivered) == 1


async def told(**options: Any) -> Story:
    async with Background("test") as background:
        story = Story(background, **options)
        await story.fetch()
    story.check_nothing_is_left()
    return story


def test_the_blocks_that_the_engine_lacks_are_read_and_no_others() -> None:
    story = run(told(own=3))

    assert story.engine.delivered == [8 * SIZE]
    assert story.memory.contents == {20 + at: f"b{5 + at}" for at in range(3, 8)}
    assert story.fetcher.statistics.results == {"fetched": 1}
    assert (story.fetcher.statistics.blocks, story.lender.lent_blocks) == (5, 5)
    assert story.rates.peer("b").latency.measured


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
    story.check_nothing_is_left()
    return story


@pytest.mark.parametrize(
    ("what", "problem", "code"),
    [
        ("error", NoInstances("b is gone"), "NoInstances"),
        ("error", Overloaded("too much"), "Overloaded"),
        ("stalls", True, "DeadlineExceeded"),
        ("transfer", TransferFailed("cut"), "TransferFailed"),
        ("takes", 60.0, "DeadlineExceeded"),
        ("settles", False, "LeaseLost"),
    ],
)
def test_what_cannot_be_fetched_is_computed_and_the_peer_is_left_in_peace(
    what: str, problem: Any, code: str
) -> None:
    story = run(failing(what, problem))

    assert story.engine.delivered == [2 * SIZE]
    assert story.fetcher.statistics.results == {code: 1}
    assert "asked again" in story.rates.fetches("b", 8, now=paused(story)).reason


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
            return Story(background).fetcher.plan(PROMPT, metadata, None)

    assert run(story()) is None


def test_of_a_prompt_whose_blocks_are_all_held_the_last_token_is_computed() -> None:
    async def story() -> Fetch | None:
        async with Background("test") as background:
            told = Story(background)
            metadata = {"kv_peer": "b", "kv_peer_blocks": "1000"}
            return told.fetcher.plan(GenerateRequest([1] * 8 * SIZE), metadata, None)

    plan = run(story())
    assert plan is not None
    assert plan.tokens == 7 * SIZE


def test_a_request_with_several_continuations_and_more_than_some_at_a_time_compute() -> None:
    async def story() -> list[Fetch | None]:
        async with Background("test") as background:
            told = Story(background)
            metadata = {"kv_peer": "b", "kv_peer_blocks": "8"}
            several = GenerateRequest(PROMPT.token_ids, n=2)
            plans = [told.fetcher.plan(several, metadata, None)]
            told.fetcher.statistics.running = MAX_FETCHES
            return [*plans, told.fetcher.plan(PROMPT, metadata, None)]

    assert run(story()) == [None, None]


# Lending ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "told_"),
    [
        (LendRequest([1] * 32, 0.0), "seconds = 0.0"),
        (LendRequest([1] * 32, float("nan")), "seconds = nan"),
        (LendRequest([1] * 32, MAX_SECONDS + 1), "seconds = 61"),
        (LendRequest([1] * 32, 1.0, 5), "start = 5"),
        (LendRequest([1] * 32, 1.0, 32), "start = 32"),
        (LendRequest([1] * 32, 1.0, -16), "start = -16"),
        (LendRequest([], 1.0), "start = 0"),
    ],
)
def test_a_request_to_lend_that_makes_no_sense_is_refused(
    request_: LendRequest, told_: str
) -> None:
    async def story() -> str:
        async with Background("test") as background:
            lender = Story(background).lender
            try:
                await anext(lender.lend(request_, stays))
            except DynbusError as error:
                assert lender.loans == 0
                return f"{error.code} {error}"
            return ""

    refused = run(story())
    assert refused.startswith("InvalidRequest")
    assert told_ in refused


def test_a_bounded_number_of_prefixes_is_lent_at_a_time() -> None:
    async def story() -> None:
        async with Background("test") as background:
            lender = Story(background).lender
            loans = [lender.lend(LendRequest([1] * 32, 5.0), stays) for _ in range(MAX_LOANS)]
            for loan in loans:
                await anext(loan)
            with pytest.raises(Overloaded, match="lent already"):
                await anext(lender.lend(LendRequest([1] * 32, 5.0), stays))
            for loan in loans:
                await loan.aclose()
            assert lender.loans == 0

    run(story())


def test_peers_keep_no_more_blocks_in_place_than_they_may_and_shared_ones_count_once() -> None:
    async def story() -> None:
        async with Background("test") as background:
            told = Story(background)
            lender = Lender(
                told.lending, cast(Any, told.source), told.settling, SIZE, most_blocks=4
            )
            # More than that is not lent even to one.
            loans = [lender.lend(LendRequest([1] * 8 * SIZE, 5.0), stays) for _ in range(2)]
            lent = [await anext(loan) for loan in loans]
            assert [each.tokens for each in lent] == [4 * SIZE, 4 * SIZE]
            assert lender.pinned == 4

            told.lending.blocks = tuple(range(40, 50))
            with pytest.raises(Overloaded, match="4 of 4 blocks that may be are lent already"):
                await anext(lender.lend(LendRequest([2] * SIZE, 5.0), stays))
            # What was refused is held no longer.
            assert told.lending.released == ["lent.2"]

            for loan in loans:
                assert lender.pinned == 4
                await loan.aclose()
            assert lender.pinned == 0
            await anext(lender.lend(LendRequest([2] * SIZE, 5.0), stays))
            assert lender.pinned == 1

    run(story())


def test_a_lease_that_nobody_settles_ends_with_its_time_and_cannot_be_settled_then() -> None:
    async def story() -> None:
        async with Background("test") as background:
            told = Story(background)
            lending = told.lender.lend(LendRequest([1] * 32, 2.0), stays)
            lent = await anext(lending)
            assert lent.ticket is not None
            with pytest.raises(StopAsyncIteration):
                await anext(lending)
            late = await told.settling.settle(Settlement(lent.ticket.lease_id, lent.ticket.epoch))
            assert not late.held
            assert told.lending.released == ["lent.0"]
            assert not len(told.source.leases)

    run(story())


def test_a_caller_that_leaves_has_its_blocks_freed_at_once() -> None:
    async def story() -> None:
        async with Background("test") as background:
            told = Story(background)
            listeners: list[Callable[[bool], None]] = []

            def link(listener: Callable[[bool], None]) -> Callable[[], None]:
                listeners.append(listener)
                return listeners.clear

            lending = told.lender.lend(LendRequest([1] * 32, 50.0), link)
            await anext(lending)
            listeners[0](False)
            with pytest.raises(StopAsyncIteration):
                await anext(lending)
            assert told.lender.loans == 0
            assert not listeners

    run(story())


def test_a_lease_is_settled_once_and_by_its_epoch_alone() -> None:
    async def story() -> list[bool]:
        async with Background("test") as background:
            told = Story(background)
            lending = told.lender.lend(LendRequest([1] * 32, 2.0), stays)
            ticket = (await anext(lending)).ticket
            assert ticket is not None
            epochs = ["another", ticket.epoch, ticket.epoch]
            found = [
                (await told.settling.settle(Settlement(ticket.lease_id, epoch))).held
                for epoch in epochs
            ]
            await lending.aclose()
            return found

    assert run(story()) == [False, True, False]
