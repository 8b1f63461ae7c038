"""A graph whose processes have users of their own: each does all that it does, and no more."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.conditions import eventually

from dynbus import PermissionDenied, Runtime, call_options
from dynbus.actors.commands.auth import client_of_run, grants_of_role, users_of_run
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.runtime import Connecting
from dynbus.bus.identity.registry import Registry
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.llm.commands.setting_up import needed_in, set_up

from .guarded_shop import Counter, Engine, Press, Router

pytestmark = pytest.mark.anyio

RUN = PlanRequest(targets=[Press.__module__])


class Guarded:
    """A server whose users are in files, and how to be one of them."""

    def __init__(self, server: RunningServer, registry: Registry) -> None:
        self.server = server
        self.registry = registry

    def connect(self, user: str) -> Connecting:
        path = self.registry.seed_file(user)
        return Runtime.connect(self.server.url, credentials=str(path), drain_grace=1.0)

    async def reload(self) -> None:
        """Have the server read its users again."""
        self.registry.save()
        before = self._reloads()
        os.kill(self.server.pid, signal.SIGHUP)
        await eventually(lambda: self._reloads() > before, what="the server has read its users")

    def _reloads(self) -> int:
        return self.server.log.read_text().count("Reloaded server configuration")

    @property
    def refusals(self) -> list[str]:
        lines = self.server.log.read_text().splitlines()
        return [line for line in lines if "iolation" in line]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A server with users for the graph, a client of it and an operator, and with its streams."""
    registry = Registry.make(tmp_path / "auth")
    registry.put("operator", "operator", "shop", grants_of_role("operator", ["shop"], "operator"))
    for user in [*users_of_run(RUN), client_of_run("billing", RUN)]:
        registry.put(*user)
    registry.save()
    include = f'include "../auth/{registry.server_file.name}"'
    server = await run_server(store_dir=tmp_path / "nats", config=include)
    try:
        seed = registry.seed_file("operator").read_text().strip()
        operator = await connect(
            [server.url], inbox="_R.operator.setup", options={"nkeys_seed_str": seed}
        )
        try:
            needed = needed_in("shop", [], durable=["Press.book", "Press.clean"])
            await set_up(operator.jetstream, needed)
        finally:
            await operator.close()
        yield Guarded(server, registry)
    finally:
        await server.stop()


async def test_every_component_does_all_that_it_does_with_a_user_of_its_own(
    guarded: Guarded,
) -> None:
    async with AsyncExitStack() as exits:
        for actor in (Press, Counter, Engine, Router):
            runtime = await exits.enter_async_context(guarded.connect(f"shop_{actor.__name__}"))
            await runtime.start(actor)
        billing = await exits.enter_async_context(guarded.connect("billing"))
        counter, press = billing.client(Counter), billing.client(Press)
        router = billing.client(Router)
        with call_options(wait=60.0):
            ordered = await counter.order("Emma")
            items = [
                item async for item in router.generate({"token_ids": [1, 2, 3], "max_tokens": 4})
            ]
            job = await press.book.submit("Persuasion")
            cancelled = await job.cancel()
            state = await job.state()

            async def has_fired() -> bool:
                return await press.fired() > 0

            await eventually(has_fired, 30.0)

    assert ordered == "Emma bound, approved by Ada"
    assert items[-1]["finish_reason"] == "length"
    assert cancelled
    assert state.status == "cancelled"
    assert guarded.refusals == []


async def test_a_user_is_nobody_else(guarded: Guarded) -> None:
    async with guarded.connect("shop_Counter") as counter, guarded.connect("shop_Press") as press:
        with pytest.raises(PermissionDenied):
            await counter.start(Press)
        await counter.start(Counter)
        # It depends on nobody.
        with pytest.raises(PermissionDenied), call_options(wait=60.0):
            await press.client(Counter).order("Emma")


async def test_a_key_is_taken_until_it_is_revoked(guarded: Guarded) -> None:
    registry = guarded.registry
    async with guarded.connect("billing") as before:
        registry.rotate("billing")
        await guarded.reload()
        assert before.is_connected
        async with guarded.connect("billing") as after:
            registry.revoke("billing", previous=True)
            await guarded.reload()
            await eventually(lambda: not before.is_connected, what="its connections are ended")
            assert after.is_connected
