"""`dynbus why` finds the routers by itself and shows the whole decision."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from pydantic import BaseModel
from tests.kvrouter.routing.routing_fixtures import HandIndex, by_name, decide, request

from dynbus import Actor, Runtime, call_options, handler
from dynbus.bus.config import load_config
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter.commands.why import why
from dynbus.kvrouter.commands.why_report import (
    ask_routers,
    dump_decisions,
    print_answer,
    print_latest,
)
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.decision import Explanation, Question, tell
from dynbus.kvrouter.routing.observing import TARGET_KEY
from dynbus.kvrouter.routing.profiles import read_profile
from dynbus.kvrouter.routing.router import open_router
from dynbus.kvrouter.routing.router_actor import RouterActor
from dynbus.kvrouter.routing.scheduler import KvScheduler

NAMESPACE = f"why{secrets.token_hex(4)}"


class Prompt(BaseModel):
    token_ids: list[int]


class Engine(Actor, namespace=NAMESPACE):
    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16", "kv_tags": self.instance_id}

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, int], None]:
        yield {"cached_tokens": 16}


class Front(RouterActor, namespace=NAMESPACE):
    pass


PROMPT = {"token_ids": list(range(64))}


async def command(url: str, *arguments: str) -> Result:
    """`dynbus why` in a thread, while the routers go on."""
    return await asyncio.to_thread(CliRunner().invoke, why, [*arguments, "--nats", url])


async def ask_both(url: str, *arguments: str) -> tuple[Result, str]:
    """What the command says of a request that a client-side router and an actor decided."""
    request_id = secrets.token_hex(8)
    async with Runtime.connect(url) as runtime:
        await runtime.start(Engine, instance_id="one")
        await runtime.start(Engine, instance_id="other")
        front = await runtime.start(Front, target=f"{NAMESPACE}.Engine.generate", exact=False)
        async with open_router(runtime, Engine, exact=False, shadows={"trial": "kv"}) as router:
            with call_options(request_id=request_id, wait=10.0):
                engine = runtime.client(Engine, routing=router)
                with call_options(metadata={"kv_required_tags": "other"}):
                    assert [item async for item in engine.generate(Prompt(**PROMPT))]
                assert [item async for item in runtime.client(Front).generate(PROMPT)]
            result = await command(url, request_id, *arguments)
        await front.stop()
    return result, request_id


def test_the_decisions_of_all_routers_are_shown_with_candidates_and_outcome(
    nats_server: RunningServer,
) -> None:
    result, request_id = asyncio.run(ask_both(nats_server.url))

    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.count(f"{request_id}, attempt 1: ") == 2
    assert "only_candidate by policy kv" in text
    assert "lowest_cost by policy kv" in text
    assert "64 tokens, 4 blocks of 16" in text
    assert "not     one: " in text
    assert "trial would have chosen the same" in text
    assert "16 tokens reused, 16 more than expected" in text
    assert "ended after " in text
    assert "> other/0" in text
    assert "PEER" in text


def test_json_has_every_field_of_every_decision(nats_server: RunningServer) -> None:
    result, request_id = asyncio.run(ask_both(nats_server.url, "--json"))

    answers: list[dict[str, Any]] = json.loads(result.stdout)
    decisions = [decision for answer in answers for decision in answer["decisions"]]
    assert [answer["target"] for answer in answers] == [f"{NAMESPACE}.Engine"] * 2
    assert {decision["request_id"] for decision in decisions} == {request_id}
    assert sorted(len(decision["candidates"]) for decision in decisions) == [1, 2]
    assert all("overlap" in one for decision in decisions for one in decision["candidates"])
    assert all("peer_blocks" in one for decision in decisions for one in decision["candidates"])
    assert [decision["peer"] for decision in decisions] == [None, None]


def raising(*_: object) -> list[float]:
    raise ZeroDivisionError("said by code of a user")


def test_a_dump_of_the_fleet_has_decisions_without_sessions_or_what_policies_raise(
    nats_server: RunningServer,
) -> None:
    async def story() -> list[dict[str, Any]]:
        config = load_config({"servers": nats_server.url})
        async with Runtime.connect(nats_server.url) as runtime:
            await runtime.start(Engine)
            async with open_router(
                runtime, Engine, exact=False, shadows={"trial": raising}
            ) as router:
                engine = runtime.client(Engine, routing=router)
                session = {"session": "of-a-user"}
                with call_options(request_id="dumped", wait=10.0, metadata=session):
                    assert [item async for item in engine.generate(Prompt(**PROMPT))]
                return await dump_decisions(config)

    # As the archive has them, with the fields that a router has nothing to say of.
    answers = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(asyncio.run(story()))))

    (decision,) = [
        one for each in answers for one in each["decisions"] if one["request_id"] == "dumped"
    ]
    assert decision["session"] is True
    assert [shadow["error"] for shadow in decision["shadows"]] == ["ZeroDivisionError"]


def test_a_router_whose_engines_are_all_gone_is_found_by_its_own_word(
    nats_server: RunningServer,
) -> None:
    async def story() -> Result:
        async with Runtime.connect(nats_server.url) as runtime:
            await runtime.start(Front, target=f"{NAMESPACE}.Engine.generate", exact=False)
            return await command(nats_server.url, "unknown")

    result = asyncio.run(story())

    assert result.exit_code == 1
    assert "1 router answered, none knows unknown" in result.stderr
    assert f"{NAMESPACE}.Engine in " in result.stderr
    assert "keeps its latest 512 decisions: 0, none yet" in result.stderr


def test_where_no_router_answers_the_command_says_so_within_bounds(
    nats_server: RunningServer,
) -> None:
    async def story() -> Result:
        async with asyncio.timeout(60):
            return await command(nats_server.url, "unknown", "--component", "nobody.Here")

    result = asyncio.run(story())

    assert result.exit_code == 1
    assert "no router answered for unknown" in result.stderr


@pytest.mark.parametrize(
    ("request_id", "component", "wrong"),
    [
        ("", "Engine", "1 to 128"),
        ("x" * 129, "Engine", "1 to 128"),
        ("x", "En gine", "component"),
        ("x", "", "component"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_before_it_is_asked(
    request_id: str, component: str, wrong: str
) -> None:
    config = load_config({"servers": "nats://127.0.0.1:1"})

    with pytest.raises(ConfigError, match=wrong):
        asyncio.run(ask_routers(config, Question(request_id), "llm", component))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--component", "Engine"], "give --component as namespace.component, or --namespace"),
        (["--component", "a.Engine", "--namespace", "b"], "--namespace is b, and --component"),
        (["x", "--last"], "give a request id, or --last"),
    ],
)
def test_words_that_do_not_fit_together_are_refused(words: list[str], wrong: str) -> None:
    result = CliRunner().invoke(why, words)

    assert result.exit_code == 2
    assert wrong in result.stderr


def test_without_an_id_the_latest_decisions_of_all_routers_are_listed_newest_first(
    nats_server: RunningServer,
) -> None:
    async def story() -> tuple[Result, Result, Result]:
        async with Runtime.connect(nats_server.url) as runtime:
            await runtime.start(Engine, instance_id="one")
            async with open_router(runtime, Engine, exact=False) as router:
                engine = runtime.client(Engine, routing=router)
                for name in ("first", "second", "third"):
                    with call_options(request_id=name, wait=10.0):
                        assert [item async for item in engine.generate(Prompt(**PROMPT))]
                place = ("--namespace", NAMESPACE, "--component", "Engine")
                return (
                    await command(nats_server.url, "--limit", "2", *place),
                    await command(nats_server.url, "--last"),
                    await command(nats_server.url, "--json", *place),
                )

    listed, last, as_json = asyncio.run(story())

    rows = listed.stdout.splitlines()
    assert [row.split()[1] for row in rows] == ["REQUEST", "third", "second"]
    assert rows[1].split()[2:5] == ["one/0", "48", "64"]
    assert last.stdout.startswith("third, attempt 1: one/0")
    assert last.stdout.count("attempt") == 1
    (answer,) = json.loads(as_json.stdout)
    assert [one["request_id"] for one in answer["decisions"]] == ["third", "second", "first"]
    assert all(abs(one["decided_at"] - time.time()) < 60 for one in answer["decisions"])


def test_where_nothing_was_decided_the_list_says_so(nats_server: RunningServer) -> None:
    async def story() -> Result:
        async with (
            Runtime.connect(nats_server.url) as runtime,
            open_router(runtime, Engine, exact=False),
        ):
            return await command(nats_server.url, "--component", f"{NAMESPACE}.Engine")

    result = asyncio.run(story())

    assert result.exit_code == 1
    assert "1 router answered, no router has decided anything yet" in result.stderr


def test_a_peer_that_may_send_blocks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    profiles = [
        read_profile(name, {"kv_block_size": "16", "kv_fetches": "true"}) for name in ("a", "b")
    ]
    scheduler = KvScheduler(RouterConfig(policy=by_name), follower=HandIndex(b=3))
    decide(scheduler, request("mine", profiles))
    told = tell(scheduler.decisions.find("mine"), 0.0)

    print_answer(Explanation("router", "host:1", "llm.Engine", "exact", 1, 512, 0.0, told))

    text = capsys.readouterr().out
    assert "  peer    b/0 holds 3 blocks of it, which may be fetched from there" in text


def test_a_damage_that_has_touched_a_request_says_whose_it_is_and_what_was_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage = {
        "at": 0.0,
        "evidence": "blocks",
        "request_id": "sampled",
        "sources": ["instance 77"],
        "measures": ["leave_instance"],
        "first": 3,
        "blocks": 2,
        "dropped": 5,
        "requests": ["mine", "sampled"],
        "requests_left_out": 1,
    }
    told = Explanation("llm.Engine@a", "host:1", "llm.Engine", "", 0, 0, None, damages=[damage])

    print_answer(told)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "touched by a damage of the KV cache of llm.Engine@a, in host:1"
    assert lines[2:] == [
        "  of      instance 77, seen by blocks of sampled",
        "  blocks  2, the first is number 3 of its prompt; 5 were dropped",
        "  done    leave_instance",
        "  others  2 requests have used them as well",
    ]


TOLD: dict[str, Any] = {
    "ago_s": 1.0,
    "request_id": "r",
    "attempt": 1,
    "prompt_tokens": 1,
    "prompt_blocks": 1,
    "block_size": 1,
    "chosen": {"instance": "i", "dp_rank": 0},
    "reason": "\x1b]0;title\x07[red]",
    "policy": "p",
    "temperature": 0.0,
    "expected_reuse": 0,
    "candidates": [],
    "excluded": {},
    "index_sequence": 0,
    "awareness": "exact",
    "session": "",
    "waited_s": 0.0,
    "shadows": [],
    "outcome": {"first_item_s": None, "reused_tokens": None, "ended_s": None, "error": ""},
}
"""A decision in a form that can be shown."""


def explanation(**fields: Any) -> bytes:
    known = {"router": "r", "process": "p", "target": "demo.Odd", "cache_aware": "", "kept": 1}
    return json.dumps({**known, "limit": 1, "oldest_s": 1.0, **fields}).encode()


async def answered(url: str, data: bytes) -> list[Explanation]:
    """The answers that are taken where an instance answers in the place of a router."""
    connection = await connect([url])
    name = f"Odd{secrets.token_hex(6)}"
    connection.subscribe(
        f"demo.{name}._kv_why", lambda message: connection.publish(message.reply, data)
    )
    await connection.barrier()
    try:
        question = Question(latest=1)
        return await ask_routers(load_config({"servers": url}), question, "demo", name)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    "data",
    [
        explanation(decisions=[{"ago_s": 1.0}]),
        explanation(decisions=[{**TOLD, "ago_s": None}]),
        explanation(decisions=[{**TOLD, "prompt_tokens": 10**400}]),
        explanation(decisions=[{**TOLD, "outcome": []}]),
        explanation(damages=[{"at": 1e300}]),
        b'{"router":"r","x":' + b"[" * 100_000,
    ],
)
def test_what_no_router_would_answer_is_passed_over(
    nats_server: RunningServer, data: bytes
) -> None:
    assert asyncio.run(answered(nats_server.url, data)) == []


def test_nothing_of_an_answer_steers_the_terminal(
    nats_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = asyncio.run(answered(nats_server.url, explanation(decisions=[TOLD])))

    print_latest(answers, 1)
    for answer in answers:
        print_answer(answer)
    shown = capsys.readouterr().out

    assert "\\x1b]0;title" in shown
    assert "[red]" in shown
    assert "\x1b" not in shown


def test_instances_that_say_that_they_route_to_no_component_keep_nobody_from_asking(
    nats_server: RunningServer,
) -> None:
    async def story() -> list[Explanation]:
        connection = await connect([nats_server.url])
        endpoint = {"name": "odd", "data": {"status": {TARGET_KEY: "no name.Odd"}}}
        stats = {
            "name": "demo_Odd",
            "id": "odd",
            "started": "2026-01-01T00:00:00Z",
            "metadata": {"dynbus.namespace": "demo"},
            "endpoints": [endpoint],
        }
        answer = json.dumps(stats).encode()
        connection.subscribe(
            "$SRV.STATS", lambda message: connection.publish(message.reply, answer)
        )
        await connection.barrier()
        try:
            config = load_config({"servers": nats_server.url})
            return await ask_routers(config, Question(latest=1), None, None)
        finally:
            await connection.close()

    assert asyncio.run(story()) == []
