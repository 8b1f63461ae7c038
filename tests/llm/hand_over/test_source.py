"""What a source lends stays in place until it is read, and no longer than it was lent for."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.llm.hand_over.lists import SIZE, Engine, Memory, Noted, source_of

from dynbus.bus.context import Context
from dynbus.bus.errors import DynbusError, InvalidRequest, Overloaded
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.hand_over.messages import LendRequest, PrefillRequest
from dynbus.llm.hand_over.source import MAX_LOANS, MAX_SECONDS
from dynbus.testing import run
from dynbus.transfer.settling import Settlement, Settling


class Lending:
    """A source of which 8 blocks of every prompt are cached."""

    def __init__(self, most_lent: int = 16, model: str = "") -> None:
        self.engine = Engine(range(5, 16), 8)
        self.memory = Memory("agent of b", [f"b{at}" for at in range(20)])
        self.settling = Settling(cast(Any, self.memory), self.memory.leases)
        self.noted: list[Noted] = []
        self.source = source_of(
            self.engine,
            self.memory,
            self.settling,
            most_lent=most_lent,
            model=model,
            events=self.noted,
        )


def test_a_reader_with_another_model_is_refused_and_one_that_names_none_is_believed() -> None:
    async def story() -> None:
        source, call = Lending(model="mine").source, Context("c")
        for theirs in ("mine", ""):
            lending = source.lend(LendRequest([1] * 16, 1.0, model=theirs), call)
            assert (await anext(lending)).tokens == 16
            await lending.aclose()
        with pytest.raises(InvalidRequest, match="give both the same files"):
            await anext(source.lend(LendRequest([1] * 16, 1.0, model="theirs"), call))
        wanted = PrefillRequest("one", GenerateRequest([1] * 16), model="theirs")
        with pytest.raises(InvalidRequest, match="give both the same files"):
            await anext(source.prefill("r", wanted, call))

    run(story())


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
        lender = Lending().source
        try:
            await anext(lender.lend(request_, Context("c")))
        except DynbusError as error:
            assert lender.loans == 0
            return f"{error.code} {error}"
        return ""

    refused = run(story())
    assert refused.startswith("InvalidRequest")
    assert told_ in refused


def test_a_bounded_number_of_prefixes_is_lent_at_a_time() -> None:
    async def story() -> None:
        lender = Lending().source
        loans = [lender.lend(LendRequest([1] * 32, 5.0), Context("c")) for _ in range(MAX_LOANS)]
        for loan in loans:
            await anext(loan)
        with pytest.raises(Overloaded, match="lent already"):
            await anext(lender.lend(LendRequest([1] * 32, 5.0), Context("c")))
        for loan in loans:
            await loan.aclose()
        assert lender.loans == 0

    run(story())


def test_peers_keep_no_more_blocks_in_place_than_they_may_and_shared_ones_count_once() -> None:
    async def story() -> None:
        told = Lending(most_lent=4)
        lender = told.source
        # More than that is not lent even to one.
        loans = [lender.lend(LendRequest([1] * 8 * SIZE, 5.0), Context("c")) for _ in range(2)]
        lent = [await anext(loan) for loan in loans]
        assert [each.tokens for each in lent] == [4 * SIZE, 4 * SIZE]
        assert lender.pinned == 4

        told.engine.blocks = tuple(range(40, 50))
        with pytest.raises(Overloaded, match="4 of 4 blocks that may be are lent already"):
            await anext(lender.lend(LendRequest([2] * SIZE, 5.0), Context("c")))
        # What was refused is held no longer.
        assert told.engine.released == ["lent.2"]

        for loan in loans:
            assert lender.pinned == 4
            await loan.aclose()
        assert lender.pinned == 0
        await anext(lender.lend(LendRequest([2] * SIZE, 5.0), Context("c")))
        assert lender.pinned == 1

    run(story())


def test_a_lease_that_nobody_settles_ends_with_its_time_and_cannot_be_settled_then() -> None:
    async def story() -> None:
        told = Lending()
        lending = told.source.lend(LendRequest([1] * 32, 2.0), Context("c"))
        lent = await anext(lending)
        assert lent.ticket is not None
        with pytest.raises(StopAsyncIteration):
            await anext(lending)
        late = await told.settling.settle(Settlement(lent.ticket.lease_id, lent.ticket.epoch))
        assert not late.held
        assert told.engine.released == ["lent.0"]
        assert not len(told.memory.leases)

    run(story())


def test_a_caller_that_leaves_has_its_blocks_freed_at_once() -> None:
    async def story() -> None:
        told = Lending()
        call = Context("c")
        lending = told.source.lend(LendRequest([1] * 32, 50.0), call)
        await anext(lending)
        call.stop_generating()
        with pytest.raises(StopAsyncIteration):
            await anext(lending)
        assert told.source.loans == 0

    run(story())


def test_a_lease_is_settled_once_and_by_its_epoch_alone() -> None:
    async def story() -> list[bool]:
        told = Lending()
        lending = told.source.lend(LendRequest([1] * 32, 2.0), Context("c"))
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
