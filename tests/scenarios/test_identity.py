"""A graph whose processes have users of their own: each does all that it does, and no more."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio.to_thread
import pytest
from click.testing import CliRunner
from tests.conditions import eventually

from dynbus import PermissionDenied, call_options
from dynbus.actors.commands.auth import (
    client_of_run,
    grants_of_role,
    setup_of_run,
    users_of_run,
)
from dynbus.actors.running.plan import PlanRequest
from dynbus.bus.commands.ps import ps
from dynbus.bus.commands.server import connected
from dynbus.bus.commands.survey import survey
from dynbus.bus.config import BusConfig
from dynbus.bus.identity.users import Users
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import run_server
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.topics import TopicStream
from dynbus.bus.work_queue import DeadLetters
from dynbus.llm.commands.setting_up import needed_in, set_up
from dynbus.llm.commands.setup import setup

from .guarded import KINDS, Guarded, connect_plainly
from .guarded_shop import (
    UNPAID,
    Audit,
    Counter,
    Engine,
    Heard,
    Ledger,
    Press,
    Router,
    Window,
    returned,
)

pytestmark = pytest.mark.anyio

RUN = PlanRequest(targets=[Press.__module__])


@pytest.fixture(params=KINDS)
async def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guarded]:
    """A server with users for the graph, a client of it and an operator, and with its
    streams, which the operator makes as `dynbus auth add` says."""
    registry: Users = KINDS[request.param](tmp_path / "auth")
    registry.put("operator", "operator", "shop", grants_of_role("operator", ["shop"], "operator"))
    for user in [*users_of_run(RUN), client_of_run("billing", RUN)]:
        registry.put(*user)
    registry.save()
    include = f'include "../auth/{registry.server_file.name}"'
    server = await run_server(store_dir=tmp_path / "nats", config=include)
    try:
        operator = await connect_plainly(server, registry, "operator")
        try:
            for command in setup_of_run(RUN):
                given = setup.make_context("setup", shlex.split(command)[2:]).params
                options = ("namespace", "queues", "topics", "durable", "groups")
                needed = needed_in(*(given[name] for name in options))
                await set_up(operator.jetstream, needed)
            yield Guarded(server, registry, operator)
        finally:
            await operator.close()
    finally:
        await server.stop()


async def test_every_component_does_all_that_it_does_with_a_user_of_its_own(
    guarded: Guarded,
) -> None:
    async with AsyncExitStack() as exits:
        for actor in (Press, Counter, Engine, Router, Window, Ledger, Audit):
            runtime = await exits.enter_async_context(guarded.connect(f"shop_{actor.__name__}"))
            await runtime.start(actor)
        billing = await exits.enter_async_context(guarded.connect("billing"))
        counter, press = billing.client(Counter), billing.client(Press)
        router = billing.client(Router)
        with call_options(wait=60.0):
            answered = await counter.order("Emma")
            items = [
                item async for item in router.generate({"token_ids": [1, 2, 3], "max_tokens": 4})
            ]
            job = await press.book.submit("Persuasion")
            cancelled = await job.cancel()
            state = await job.state()

            async def has_fired() -> bool:
                return await press.fired() > 0

            await eventually(has_fired, 30.0)

            def has_heard(hearer: type[Heard], *titles: str) -> Callable[[], Awaitable[bool]]:
                async def ask() -> bool:
                    return sorted(await billing.client(hearer).heard()) == sorted(titles)

                return ask

            await eventually(has_heard(Window, "Emma?", "Emma", UNPAID), 30.0)
            await eventually(has_heard(Ledger, "Emma"), 30.0)
            await eventually(has_heard(Audit, "Emma", UNPAID), 30.0)
        letters = DeadLetters(guarded.operator.jetstream, "shop")

        async def is_buried() -> bool:
            return [letter.data for letter in await letters.find("Ledger")] == [b'"unpaid"']

        await eventually(is_buried, 30.0)

    assert answered == "Emma bound, approved by Ada"
    assert items[-1]["finish_reason"] == "length"
    assert cancelled
    assert state.status == "cancelled"
    assert guarded.refusals == []


async def test_events_that_a_member_has_delivered_as_those_of_another_topic_are_none(
    guarded: Guarded,
) -> None:
    """No permission bounds where the server answers who asks the consumer of a group."""
    stream, jetstream = "DYNBUS_TOPIC_shop+book+ordered", guarded.operator.jetstream
    await jetstream.publish("shop._topic.book.ordered._event.k", b'"forged"')
    forged, true = (f"shop._topic.book.returned._event.{key}" for key in ("forged", "true"))
    heard: list[bytes] = []
    topic = TopicStream(guarded.operator, returned.config(), returned.misfit)
    listening = await topic.listen(lambda event: heard.append(event.data))
    async with guarded.connect("shop_Ledger") as ledger:
        ledger.bus.data.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.ledger", b"1", reply=forged)

        async def is_stored() -> bool:
            return (await jetstream.stream_info(topic.config.stream)).messages == 1

        await eventually(is_stored, what="the server has delivered the event there")
    await jetstream.publish(true, b'"true"')
    await eventually(lambda: heard)
    await listening.stop()

    assert heard == [b'"true"']


async def test_a_user_is_nobody_else(guarded: Guarded) -> None:
    async with guarded.connect("shop_Counter") as counter, guarded.connect("shop_Press") as press:
        with pytest.raises(PermissionDenied):
            await counter.start(Press)
        await counter.start(Counter)
        # It is known of no instance but its own whether it is there.
        there = press.bus.questions.is_there
        assert await there(InstanceName("shop", "Counter", "c")) is None
        assert await there(InstanceName("shop", "Press", "p")) is False
        # It depends on nobody.
        with pytest.raises(PermissionDenied), call_options(wait=60.0):
            await press.client(Counter).order("Emma")


async def test_a_handler_is_for_the_users_that_it_allows(guarded: Guarded) -> None:
    guarded.registry.put(*client_of_run("clerk", RUN))
    await guarded.reload()
    async with (
        guarded.connect("shop_Counter") as server,
        guarded.connect("billing") as billing,
        guarded.connect("clerk") as clerk,
    ):
        await server.start(Counter)
        with call_options(wait=60.0):
            principal = await billing.client(Counter).refund()
            with pytest.raises(PermissionDenied):
                await clerk.client(Counter).refund()

    assert principal == "billing"


async def test_a_process_goes_on_with_the_next_key_where_the_one_before_is_revoked(
    guarded: Guarded,
) -> None:
    registry = guarded.registry
    async with guarded.connect("billing") as before:
        connection = before.bus.data
        assert isinstance(connection, NatsConnection)

        def client() -> int:
            return int(connection.server_info["client_id"])

        first = client()
        registry.rotate("billing")
        await guarded.reload()
        assert before.is_connected
        assert client() == first
        async with guarded.connect("billing") as after:
            registry.revoke("billing", previous=True)
            await guarded.reload()
            await eventually(
                lambda: before.is_connected and client() != first, what="it has read the next key"
            )
            assert after.is_connected
            registry.revoke("billing")
            await guarded.reload()
            await eventually(
                lambda: not before.is_connected and not after.is_connected, what="both are shut out"
            )


async def test_those_who_may_not_ask_instances_call_none_of_them_silent(guarded: Guarded) -> None:
    states: dict[str, str] = {}
    printed: dict[str, str] = {}
    async with guarded.connect("shop_Counter") as runtime:
        await runtime.start(Counter)
        await eventually(lambda: bool(runtime.instance_ids(Counter)), what="it is there")
        for user in ("billing", "operator"):
            key = str(guarded.registry.credential_file(user))
            config = BusConfig(servers=(guarded.server.url,), credentials=key)
            async with connected(config, "ps") as server:
                (row,) = (await survey(server)).rows
                states[user] = row.state
            command = partial(
                CliRunner().invoke,
                ps,
                ["--nats", guarded.server.url],
                env={"DYNBUS_CREDENTIALS": key},
            )
            printed[user] = (await anyio.to_thread.run_sync(command)).output

    assert all(state in printed[user] for user, state in states.items()), printed
    assert states == {"billing": "unknown", "operator": "serving"}
