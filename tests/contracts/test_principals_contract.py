"""What `allow=` promises, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from dynbus import Actor, PermissionDenied, Runtime, context, handler
from dynbus.bus.bus import Bus as Presence
from dynbus.bus.config import BusConfig

from .conftest import Bus

pytestmark = pytest.mark.anyio


class Desk(Actor, abstract=True):
    """A desk at which few may ask for everything."""

    @handler(allow=("billing", "audit"))
    async def refund(self, amount: int) -> str:
        return f"{amount} for {context().principal}"

    @handler(allow=("*",), concurrency=1)
    async def whoami(self) -> str:
        return context().principal

    @handler(allow=("billing",))
    async def ledger(self, count: int) -> AsyncGenerator[str, None]:
        for number in range(count):
            yield f"{number} for {context().principal}"

    @handler
    async def look(self) -> str:
        return context().principal


StartRuntime = Callable[..., Awaitable[Runtime]]


@pytest.fixture
def desk() -> type[Desk]:
    class OwnDesk(Desk, namespace=f"n{secrets.token_hex(6)}", component="Desk"):
        pass

    return OwnDesk


@pytest.fixture
async def of(bus: Bus) -> AsyncIterator[StartRuntime]:
    """Starts the runtime of a process of a principal."""
    async with AsyncExitStack() as runtimes:

        async def start(principal: str = "-") -> Runtime:
            presence = await Presence.over(
                BusConfig(principal=principal), await bus.connect(), await bus.connect()
            )
            runtime = await Runtime.over(presence)
            runtimes.push_async_callback(runtime.close)
            return runtime

        yield start


async def serve(runtime: Runtime, desk: type[Desk], *clients: Runtime) -> str:
    """Start a desk, and wait until all know it; its id."""
    instance = await runtime.start(desk)
    for client in clients:
        await client.discovery.wait_for_instance(instance.name)
    return instance.name.instance_id


async def test_a_handler_knows_who_calls_it_and_refuses_who_may_not(
    of: StartRuntime, desk: type[Desk]
) -> None:
    server, billing, sales = await of("desk"), await of("billing"), await of("sales")
    await serve(server, desk, billing, sales)

    assert await billing.client(desk).refund(7) == "7 for billing"
    assert [item async for item in billing.client(desk).ledger(2)] == [
        "0 for billing",
        "1 for billing",
    ]
    with pytest.raises(PermissionDenied, match="sales may not call this: only audit or billing"):
        await sales.client(desk).refund(7)
    assert await sales.client(desk).whoami() == "sales"
    assert await sales.client(desk).look() == ""


async def test_without_a_user_nobody_is_allowed(of: StartRuntime, desk: type[Desk]) -> None:
    server, anonymous = await of("desk"), await of()
    await serve(server, desk, anonymous)

    with pytest.raises(PermissionDenied, match="the caller has no user of the server"):
        await anonymous.client(desk).whoami()


async def test_an_instance_without_a_user_believes_nobody(
    of: StartRuntime, desk: type[Desk]
) -> None:
    server, billing = await of(), await of("billing")
    await serve(server, desk, billing)

    with pytest.raises(PermissionDenied, match="its instance has no user of the server"):
        await billing.client(desk).refund(7)


async def test_calls_that_came_before_the_proof_go_on_with_it(
    of: StartRuntime, desk: type[Desk]
) -> None:
    server, billing = await of("desk"), await of("billing")
    await serve(server, desk, billing)
    client = billing.client(desk)

    answers = await asyncio.gather(*(client.refund(number) for number in range(20)))

    assert answers == [f"{number} for billing" for number in range(20)]
