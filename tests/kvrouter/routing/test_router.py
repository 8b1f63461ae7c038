"""`KvRouter` on calls of a client: it finds the cache, charges the load, and lets go of it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from dynbus import (
    ConfigError,
    Draining,
    Instance,
    InvalidRequest,
    NoInstances,
    call_options,
)
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.transport import Connection
from dynbus.kvrouter.events import BlockStored, encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.names import kv_event_subject
from dynbus.kvrouter.routing.cost import DynamoCost
from dynbus.kvrouter.routing.decision import Reason
from dynbus.kvrouter.routing.requests import RequestFields
from dynbus.kvrouter.routing.router import KvRouter, measured_hops, open_router
from dynbus.testing import TestKit, run

from .routing_fixtures import BLOCK, HandIndex, until
from .worker import Worker, prompt, running, start, where


def test_calls_go_where_the_index_says_that_their_prompt_lies() -> None:
    async def story() -> tuple[str, Any]:
        async with TestKit() as kit:
            await start(kit, "a", "b", "c", events="true")
            router = KvRouter(follower=HandIndex(b=4))
            client = kit.client(Worker, routing=router)
            with call_options(request_id="asked"):
                name = await where(client, prompt())
            (decision,) = router.decisions("asked")
            return name, decision

    name, decision = run(story())

    assert name == "b"
    assert decision.reason is Reason.LOWEST_COST
    assert decision.outcome.first_item_s is not None
    assert decision.outcome.ended_s is not None
    assert decision.candidates[0].added_blocks == 4


def test_equal_prompts_go_to_one_instance_and_others_spread_without_events() -> None:
    async def story() -> tuple[set[str], Counter[str]]:
        async with TestKit() as kit:
            await start(kit, "a", "b", "c")
            router = KvRouter()
            client = kit.client(Worker, routing=router)
            equal = {await where(client, prompt()) for _ in range(5)}
            held = [
                asyncio.create_task(where(client, prompt(of=number, hold=True)))
                for number in range(1, 10)
            ]
            await until(lambda: running(router) == 9)
            for instance in kit.started.values():
                assert isinstance(instance.actor, Worker)
                instance.actor.held.set()
            return equal, Counter(await asyncio.gather(*held))

    equal, spread = run(story())

    assert len(equal) == 1
    assert all(count == 3 for count in spread.values())


def in_zone(name: str, zone: str, near: bool = False) -> Instance:
    record = InstanceRecord(
        namespace="llm",
        component="Worker",
        instance_id=name,
        incarnation="1",
        endpoints={},
        started=0.0,
        zone=zone,
    )
    return Instance(record, 0.0, near)


def test_the_way_to_an_instance_that_was_not_measured_is_that_to_the_nearest_of_its_zone() -> None:
    instances = [
        in_zone("near", "east", near=True),
        in_zone("w1", "west"),
        in_zone("w2", "west"),
        in_zone("w3", "west"),
        in_zone("n1", "north"),
        in_zone("nowhere", ""),
    ]
    measured = {"near": 0.5, "w1": 0.25, "w2": 0.125, "nowhere": 0.5}

    hops = measured_hops(instances, measured.get)

    assert hops == {"w1": 250.0, "w2": 125.0, "w3": 125.0}


def test_a_closed_router_takes_no_call_and_cannot_be_opened_again() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await start(kit, "a")
            async with open_router(kit.caller, Worker, exact=False) as used:
                await where(kit.client(Worker, routing=used), prompt())
            async with open_router(kit.caller, Worker, exact=False) as unused:
                pass
            for router in (used, unused):
                with pytest.raises(Draining, match="was closed: call through another router"):
                    await where(kit.client(Worker, routing=router), prompt())
                with pytest.raises(ConfigError, match="make another one"):
                    async with router:
                        raise AssertionError("it was opened")

    run(story())


class LateConnection:
    """A connection whose barriers hold until they are told to end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.asked = asyncio.Event()
        self.may_end = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def barrier(self) -> None:
        self.asked.set()
        await self.may_end.wait()


def test_a_router_that_closes_while_its_first_call_begins_leaves_nothing_open() -> None:
    async def story() -> tuple[BaseException | str, list[str]]:
        async with TestKit() as kit:
            await start(kit, "a")
            late = LateConnection(kit.caller.bus.data)
            router = KvRouter(connection=cast(Any, late))
            async with AsyncExitStack() as exits:
                await exits.enter_async_context(router)
                first = asyncio.create_task(where(kit.client(Worker, routing=router), prompt()))
                await late.asked.wait()
                closing = asyncio.create_task(exits.aclose())
                late.may_end.set()
                await closing
            (ended,) = await asyncio.gather(first, return_exceptions=True)
            tasks = [task.get_name() for task in asyncio.all_tasks()]
            return ended, [name for name in tasks if name.startswith("load of")]

    ended, left = run(story())

    assert isinstance(ended, Draining)
    assert left == []


def test_an_instance_that_began_anew_under_its_id_is_taken_to_hold_nothing() -> None:
    async def story() -> tuple[int, int]:
        async with TestKit() as kit:
            await start(kit, "a")
            router = KvRouter()
            client = kit.client(Worker, routing=router)
            for request_id in ("first", "again"):
                with call_options(request_id=request_id):
                    await where(client, prompt())
            await kit.started["a"].stop()
            await start(kit, "a")
            with call_options(request_id="anew"):
                await where(client, prompt())
            (again,), (anew,) = router.decisions("again"), router.decisions("anew")
            return again.expected_reuse, anew.expected_reuse

    # The last token is always computed, and with it its block.
    assert run(story()) == (3 * BLOCK, 0)


def test_a_session_and_tags_are_read_from_the_metadata_of_the_call() -> None:
    async def story() -> tuple[set[str], str]:
        async with TestKit() as kit:
            await start(kit, "a", "b", tags="eu")
            await start(kit, "c", tags="us")
            client = kit.client(Worker, routing=KvRouter())
            with call_options(metadata={"session": "s"}):
                session = {await where(client, prompt(of=number)) for number in range(6)}
            with call_options(metadata={"kv_required_tags": "us"}):
                tagged = await where(client, prompt(of=9))
            with (
                call_options(metadata={"kv_required_tags": "moon"}),
                pytest.raises(NoInstances, match="moon"),
            ):
                await where(client, prompt())
            return session, tagged

    session, tagged = run(story())

    assert len(session) == 1
    assert tagged == "c"


def test_a_request_without_token_ids_is_refused_with_what_to_do() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            await start(kit, "a")
            router = KvRouter(fields=RequestFields(token_ids="prompt.ids"))
            with pytest.raises(InvalidRequest, match=r"'prompt\.ids'") as refused:
                await where(kit.client(Worker, routing=router), prompt())
            return str(refused.value)

    assert "RequestFields(token_ids=...)" in run(story())


def test_instances_that_do_not_fit_together_are_refused_at_the_start() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await start(kit, "a")
            await start(kit, "b", block_size="32")
            client = kit.client(Worker, routing=KvRouter())
            with pytest.raises(ConfigError, match="block sizes differ"):
                await where(client, prompt())
            exact = kit.client(Worker, routing=KvRouter(follower=HandIndex(), block_size=BLOCK))
            with pytest.raises(ConfigError, match="block sizes differ|publishes no KV events"):
                await where(exact, prompt())

    run(story())


def test_an_instance_that_comes_later_and_does_not_fit_gets_no_calls() -> None:
    async def story() -> tuple[set[str], Mapping[str, str]]:
        async with TestKit() as kit:
            await start(kit, "a")
            router = KvRouter()
            client = kit.client(Worker, routing=router)
            await where(client, prompt())
            await start(kit, "misfit", block_size="32")
            names = {await where(client, prompt(of=number)) for number in range(6)}
            return names, router.latest_decisions(1)[0].excluded

    names, excluded = run(story())

    assert names == {"a"}
    assert "block sizes differ" in excluded["misfit"]


def test_two_open_routers_know_each_others_load() -> None:
    async def story() -> Counter[str]:
        async with TestKit() as kit:
            workers = await start(kit, "a", "b", "c", "d")
            other = await kit.runtime()
            async with (
                open_router(kit.caller, Worker, exact=False) as one,
                open_router(other, "llm.Worker", exact=False) as two,
            ):
                clients = (kit.client(Worker, routing=one), other.client(Worker, routing=two))
                with call_options(wait=5.0):
                    for number, client in enumerate(clients):
                        await where(client, prompt(of=100 + number))
                held: list[asyncio.Task[str]] = []
                for number in range(8):
                    client = clients[number % 2]
                    held.append(asyncio.create_task(where(client, prompt(of=number, hold=True))))
                    await asyncio.sleep(0.02)
                for worker in workers.values():
                    worker.held.set()
                return Counter(await asyncio.gather(*held))

    assert set(run(story()).values()) == {2}


def test_an_equal_prompt_goes_where_another_router_has_sent_it() -> None:
    async def story() -> set[str]:
        async with TestKit() as kit:
            await start(kit, "a", "b", "c", "d")
            names: set[str] = set()
            async with AsyncExitStack() as exits:
                clients: list[Worker] = []
                for number in range(4):
                    runtime = await kit.runtime()
                    opened = open_router(runtime, Worker, exact=False)
                    router = await exits.enter_async_context(opened)
                    clients.append(runtime.client(Worker, routing=router))
                    with call_options(wait=5.0):
                        await where(clients[-1], prompt(of=number))
                for client in clients:
                    names.add(await where(client, prompt(of=50)))
                    await asyncio.sleep(0.02)
            return names

    assert len(run(story())) == 1


def test_an_exact_router_follows_what_engines_publish() -> None:
    async def story() -> tuple[str, int, str]:
        async with TestKit() as kit:
            await start(kit, "a", "b", "c", events="true")
            wanted = prompt()
            async with open_router(kit.caller, Worker) as router:
                blocks = block_hashes(wanted.token_ids, BLOCK)
                message = encode_events(
                    [BlockStored(None, blocks, blocks)], event_epoch=1, first_id=0
                )
                subject = kv_event_subject("llm", "Worker", "b", 0)
                await kit.caller.bus.data.jetstream.publish(subject, message)
                client = kit.client(Worker, routing=router)
                for other in range(1, 50):
                    await where(client, prompt(of=other))
                    if router.latest_decisions(1)[0].index_sequence:
                        break
                name = await where(client, wanted)
                (decision,) = router.latest_decisions(1)
                return name, decision.expected_reuse, decision.awareness

    name, expected_reuse, awareness = run(story())

    assert (name, expected_reuse) == ("b", 3 * BLOCK)
    assert awareness != "approximate"


def test_a_policy_is_changed_while_calls_run_by_the_name_of_a_users_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own_policy.py"
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]

    def write(instance: str) -> None:
        module.write_text(
            "def cost(request, candidates):\n"
            f"    return [float(one.rank.instance != {instance!r}) for one in candidates]\n"
        )

    async def story() -> list[str]:
        async with TestKit() as kit:
            await start(kit, "a", "b")
            write("a")
            router = KvRouter(policy="own_policy:cost")
            client = kit.client(Worker, routing=router)
            names = [await where(client, prompt())]
            write("b")
            router.use_policy("own_policy:cost")
            names.append(await where(client, prompt()))
            with pytest.raises(ConfigError, match="no_such_module"):
                router.use_policy("no_such_module:cost")
            names.append(await where(client, prompt()))
            return names

    try:
        assert run(story()) == ["a", "b", "b"]
    finally:
        sys.modules.pop("own_policy", None)


def test_a_router_with_a_connection_that_was_not_entered_says_what_to_write() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await start(kit, "a")
            router = KvRouter(connection=kit.caller.bus.data)
            with pytest.raises(ConfigError, match="async with KvRouter"):
                await where(kit.client(Worker, routing=router), prompt())

    run(story())


def test_a_router_serves_one_component() -> None:
    class Other(Worker, namespace="llm", component="Other"):
        pass

    async def story() -> None:
        async with TestKit() as kit:
            await start(kit, "a")
            await kit.start(Other, name="o", metadata={})
            router = KvRouter()
            await where(kit.client(Worker, routing=router), prompt())
            with pytest.raises(ConfigError, match="make one for each component"):
                await where(kit.client(Other, routing=router), prompt())

    run(story())


@pytest.mark.parametrize("target", ["Worker", "llm.", ".Worker", "llm.Worker.generate", None, 3])
def test_what_is_no_target_is_refused_with_what_to_write(target: Any) -> None:
    async def story() -> None:
        async with TestKit() as kit, open_router(kit.caller, target):
            raise AssertionError("it was opened")

    with pytest.raises(ConfigError, match=r"'namespace\.component'|is not a valid name"):
        run(story())


def test_a_client_is_no_target_but_its_class_is() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            with pytest.raises(ConfigError, match="give the class of the engine's actor") as caught:
                async with open_router(kit.caller, kit.client(Worker)):  # type: ignore[arg-type]
                    raise AssertionError("it was opened")
            return str(caught.value)

    assert "Worker" in run(story())


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"lora": "requier"}, r"lora='requier' \(did you mean require\?\): give one of prefer"),
        ({"block_size": 0}, "block_size=0: give a whole number of tokens, at least 1, or None"),
        ({"block_size": "16"}, "block_size='16': give"),
        ({"tokenizer_id": None}, "tokenizer_id=None: give"),
        ({"reused_field": "a..b"}, "reused_field='a..b': give"),
        ({"shadows": "kv"}, "shadows='kv': give policies by name, or a list of names"),
        ({"config": {"temperature": 1}}, "config={'temperature': 1}: give a RouterConfig"),
        ({"fields": "ids"}, "fields='ids': give a RequestFields"),
        ({"policy": DynamoCost}, r"policy DynamoCost is a class: give an object, DynamoCost\(\)"),
        ({"policy": 3}, "policy 3 is not a cost function"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        KvRouter(**setting)


@pytest.mark.parametrize("tokens", [-5, "3", 1.5, None, True])
def test_what_is_no_number_of_tokens_cannot_have_been_reused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="give a whole number of at least 0"):
        KvRouter().report_reused("mine", tokens)


@pytest.mark.parametrize("exact", [True, False])
def test_a_router_without_instances_is_off_and_says_whose(
    exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> tuple[str, str, str]:
        async with TestKit() as kit:
            async with open_router(kit.caller, "llm.Workr", exact=exact) as router:
                await until(lambda: "cache_aware is off" in caplog.text)
                typo = str(router.awareness())
            async with open_router(kit.caller, Worker, exact=exact) as router:
                await start(kit, "a", events="true")
                await until(lambda: "no instances" not in str(router.awareness()))
                there = str(router.awareness())
                await kit.started["a"].stop()
                await until(lambda: "no instances" in str(router.awareness()))
                return typo, there, str(router.awareness())

    typo, there, gone = run(story())

    assert typo == "off (no instances of llm.Workr)"
    assert "a: open a KvEventPublisher" in there if exact else "own decisions" in there
    assert gone == "off (no instances of llm.Worker)"
    assert any(
        record.levelname == "WARNING"
        and record.message.startswith("llm.Workr: cache_aware is off (no instances of llm.Workr)")
        for record in caplog.records
    )
