"""Tenants that are counted by several front ends on a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.conditions import eventually

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.answers import Usage
from dynbus.llm.openai.errors import RateLimited
from dynbus.llm.tenants import ledger, purse
from dynbus.llm.tenants.admission import Admission
from dynbus.llm.tenants.counting import COUNTS_STREAM, SharedCounts, count_subject
from dynbus.llm.tenants.ledger import LEASE_SECONDS, window_of
from dynbus.llm.tenants.limits import (
    BUDGET,
    REQUESTS,
    RUNNING,
    Limits,
    Quota,
    key_quota,
    tenant_quota,
)
from dynbus.testing import TestKit

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_window")]


@asynccontextmanager
async def counting(server: RunningServer, count: int) -> AsyncGenerator[list[SharedCounts]]:
    """So many front ends, as far as they count."""
    async with AsyncExitStack() as exits:
        runtimes = [
            await exits.enter_async_context(Runtime.connect(server.url)) for _ in range(count)
        ]
        yield [await exits.enter_async_context(SharedCounts(one)) for one in runtimes]


async def take(counts: SharedCounts, limits: Limits, name: str, amount: int = 1) -> bool:
    try:
        await counts.take(tenant_quota("ada", limits), {name: amount})
    except RateLimited:
        return False
    return True


async def take_all(counts: SharedCounts, limits: Limits, name: str, amount: int) -> int:
    """What one is granted until it is refused."""
    granted = 0
    while await take(counts, limits, name, amount):
        granted += amount
    return granted


async def test_front_ends_are_granted_the_limit_together_and_not_more(
    own_server: RunningServer,
) -> None:
    limits = Limits(tokens_per_month=1000)
    async with counting(own_server, 3) as fronts:
        granted = 0

        async def take_in_turn() -> int:
            return sum([await take_all(one, limits, BUDGET, 7) for one in fronts])

        granted += await take_in_turn()
        purses = [one.purse("ada", limits) for one in fronts]
        # What one has beyond its need is given back in a second or two, and the rest is taken.
        await eventually(lambda: all(one.remaining(BUDGET) == 1000 - granted for one in purses))
        left = min(one.remaining(BUDGET) for one in purses)

        assert granted + left == 1000
        await eventually(
            lambda: all(one.may_ask({BUDGET: left}, fronts[0].now()) for one in purses)
        )
        assert await take(fronts[0], limits, BUDGET, left)
        assert not await take(fronts[1], limits, BUDGET)


async def test_a_request_from_before_other_limits_were_stated_is_held_to_these(
    own_server: RunningServer,
) -> None:
    async with counting(own_server, 1) as [front]:
        early = Admission(front, tenant_quota("ada", Limits(requests_per_minute=100)))
        Admission(front, tenant_quota("ada", Limits(requests_per_minute=1)))

        await early.enter()
        with pytest.raises(RateLimited, match="requests_per_minute=1 "):
            await early.enter()


async def test_a_request_takes_of_its_key_and_its_tenant_or_of_neither(
    own_server: RunningServer,
) -> None:
    limits = Limits(requests_per_minute=3, tokens_per_month=100)
    mine, other = (
        key_quota("ada", key, Limits(requests_per_minute=2, tokens_per_month=95)) for key in "ab"
    )
    of_tenant = tenant_quota("ada", limits)
    async with counting(own_server, 1) as [front]:

        async def begin(quota: Quota) -> Admission:
            admission = Admission(front, quota, of_tenant)
            try:
                await admission.enter()
                await admission.reserve([40], 10)
            except RateLimited:
                admission.leave()
                admission.settle(Usage(0, 0))
                raise
            return admission

        first = await begin(mine)
        first.settle(Usage(40, 1))
        first.leave()
        await begin(mine)
        with pytest.raises(RateLimited, match="requests_per_minute=2 of this key leaves 0"):
            await begin(mine)
        with pytest.raises(RateLimited, match="tokens_per_month=100 of the tenant ada leaves 9"):
            await begin(other)
        with pytest.raises(RateLimited, match="requests_per_minute=3 of the tenant ada") as full:
            await begin(other)
        told = {
            quota.name: {
                name: one.used for name, one in (await front.look(quota)).standings(0.0).items()
            }
            for quota in (mine, other, of_tenant)
        }

    assert told == {
        "ada/a": {REQUESTS: 2, BUDGET: 91},
        # That it was made counts, also where its tokens are refused.
        "ada/b": {REQUESTS: 1, BUDGET: 0},
        "ada": {REQUESTS: 3, BUDGET: 91},
    }
    assert full.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert full.value.headers["x-ratelimit-limit-requests"] == "3"


class TurningCounts(SharedCounts):
    """Counts of a front end for which a minute ends while the ledger is asked the first time."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.at = 90.0

    def now(self) -> float:
        """The time that has come."""
        return self.at

    async def _write(self, *asked: Any) -> None:
        await super()._write(*asked)
        self.at = 121.0


async def test_a_request_that_comes_at_the_turn_of_a_minute_is_granted_what_the_next_one_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (ledger, purse):
        monkeypatch.setattr(module, "window_of", window_of)
    async with TestKit() as kit:
        counts = TurningCounts(kit.caller)

        assert await take(counts, Limits(requests_per_minute=300), REQUESTS)


async def test_a_refusal_tells_as_left_what_can_be_had_now(own_server: RunningServer) -> None:
    limits = tenant_quota("ada", Limits(requests_per_minute=5))
    refused: RateLimited | None = None
    async with counting(own_server, 2) as fronts:
        for turn in range(6):
            try:
                await Admission(fronts[turn % 2], limits).enter()
            except RateLimited as error:
                refused = error

    assert refused is not None
    assert "leaves 0, and this request takes 1" in refused.message
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_requests_take_few_round_trips(own_server: RunningServer) -> None:
    limits = Limits(requests_per_minute=1_000_000, requests_at_a_time=10_000)
    async with counting(own_server, 1) as (counts,):
        for _ in range(200):
            taken = await counts.take(tenant_quota("ada", limits), {REQUESTS: 1, RUNNING: 1})
            counts.purse("ada", limits).settle(taken, {REQUESTS: 1})
        async with Runtime.connect(own_server.url) as runtime:
            last = await runtime.bus.data.jetstream.last(COUNTS_STREAM.name, count_subject("ada"))

    assert last is not None
    # One, and those that told of it.
    assert last.sequence < 10


async def test_a_partition_leaves_each_a_part_of_the_limit_and_ends(
    own_server: RunningServer,
) -> None:
    limits = Limits(tokens_per_month=1000)
    async with counting(own_server, 2) as fronts:
        purses = [one.purse("ada", limits) for one in fronts]
        for counts in fronts:
            assert await take(counts, limits, BUDGET)
        await eventually(lambda: [one.remaining(BUDGET) for one in purses] == [998, 998])
        own_server.pause()
        try:
            granted = [await take_all(one, limits, BUDGET, 10) for one in fronts]
            cut_off = [one.is_cut_off for one in purses]
        finally:
            own_server.resume()
        await eventually(lambda: not any(one.is_cut_off for one in purses))
        left = 998 - sum(granted)
        await eventually(lambda: [one.remaining(BUDGET) for one in purses] == [left, left])

    assert cut_off == [True, True]
    assert all(granted)
    assert sum(granted) <= 998


async def test_what_a_killed_front_end_held_comes_back_after_its_lease(
    own_server: RunningServer,
) -> None:
    limits = Limits(requests_at_a_time=1)
    async with counting(own_server, 1) as (counts,), Runtime.connect(own_server.url) as runtime:
        # It is not open, so that it never says that it lives.
        assert await take(SharedCounts(runtime), limits, RUNNING)
        begun = counts.now()
        refused = await take(counts, limits, RUNNING)
        purse = counts.purse("ada", limits)

        # It is looked for as a client does who asks again.
        while not await take(counts, limits, RUNNING):
            await eventually(lambda: purse.may_ask({RUNNING: 1}, counts.now()))
        after = counts.now() - begun

    assert not refused
    assert LEASE_SECONDS - 1 < after < LEASE_SECONDS + 10


async def test_a_front_end_that_ends_gives_back_what_it_did_not_use(
    own_server: RunningServer,
) -> None:
    limits = Limits(tokens_per_month=100)
    async with counting(own_server, 1) as (counts,):
        async with counting(own_server, 1) as (other,):
            assert await take(other, limits, BUDGET, 30)
        granted = await take_all(counts, limits, BUDGET, 10)

    assert granted == 70
