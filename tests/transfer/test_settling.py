"""A lease is settled once, by who holds its ticket, and whoever keeps the blocks hears of it."""

from __future__ import annotations

import asyncio

import pytest
from tests.transfer.kv_blocks import filled, small_layout

from dynbus.bus.clock import monotonic
from dynbus.transfer.checksums import checksums, wanted
from dynbus.transfer.errors import InvalidTransfer
from dynbus.transfer.leases import LeaseTable
from dynbus.transfer.settling import Settled, Settlement, Settling

pytestmark = pytest.mark.anyio

MEMORY = filled(small_layout(blocks=8), 1)
EPOCH = "this life"


class Story:
    """A lease on two blocks, and what is heard of it."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.leases = LeaseTable(EPOCH)
        self.settling = Settling(MEMORY, self.leases)
        self.heard: list[bool] = []
        self.lease_id = self.leases.grant([3, 5], seconds, monotonic()).lease_id
        self.settling.expect(self.lease_id, self.heard.append)


async def test_a_lease_is_settled_once() -> None:
    story = Story()
    asked = Settlement(story.lease_id, EPOCH)

    first, again = await story.settling.settle(asked), await story.settling.settle(asked)

    assert (first, again) == (Settled(held=True), Settled(held=False))
    assert story.heard == [True]
    assert story.leases.blocks_held == 0


async def test_a_ticket_of_another_life_or_of_no_lease_settles_nothing() -> None:
    story = Story()

    for asked in (Settlement(story.lease_id, "another"), Settlement(99, EPOCH)):
        assert not (await story.settling.settle(asked)).held

    assert story.heard == []
    assert story.leases.blocks_held == 2


async def test_a_lease_that_has_run_out_is_not_settled_which_is_heard() -> None:
    story = Story()
    story.leases.held(story.lease_id, EPOCH, monotonic() + 120.0)

    assert not (await story.settling.settle(Settlement(story.lease_id, EPOCH))).held

    assert story.heard == [False]
    story.settling.release(story.lease_id)
    assert story.leases.blocks_held == 0


async def test_a_lease_that_is_released_while_its_checksums_are_made_is_not_settled() -> None:
    story = Story()
    tokens = 2 * MEMORY.layout.block_size
    asked = Settlement(story.lease_id, EPOCH, wanted(MEMORY, tokens, 0))

    settling = asyncio.ensure_future(story.settling.settle(asked))
    await asyncio.sleep(0)
    story.settling.release(story.lease_id)

    assert await settling == Settled(held=False)
    assert story.heard == []


async def test_checksums_are_those_of_the_blocks_that_were_held() -> None:
    story = Story()
    tokens = 2 * MEMORY.layout.block_size

    settled = await story.settling.settle(
        Settlement(story.lease_id, EPOCH, wanted(MEMORY, tokens, 0))
    )

    assert settled.vouched is not None
    assert settled.vouched.sums == checksums(MEMORY, [3, 5], tokens)


async def test_checksums_of_what_was_not_lent_are_refused_and_the_lease_goes_on() -> None:
    story = Story()
    too_many = wanted(MEMORY, 100 * MEMORY.layout.block_size, 0)

    with pytest.raises(InvalidTransfer):
        await story.settling.settle(Settlement(story.lease_id, EPOCH, too_many))

    assert (await story.settling.settle(Settlement(story.lease_id, EPOCH))).held
