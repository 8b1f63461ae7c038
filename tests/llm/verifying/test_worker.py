"""A worker whose cache is damaged: who is told of it, and what it takes from nobody any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conditions import eventually
from tests.flights import events_on
from tests.llm.text.tiny_tokenizer import tiny_json
from tests.llm.weights.tiny_models import TINY_MODELS

from dynbus import Actor, Topic, call_options, subscribe
from dynbus.bus.flight import digest_of_request
from dynbus.bus.flight.records import Event
from dynbus.bus.transport import Message
from dynbus.kvrouter.routing.decision import Explanation, Question, why_subject
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.tiers.cost import Rates
from dynbus.llm.tiers.fetching import PrefixFetcher
from dynbus.llm.verifying.findings import KvDamage, kv_damage
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit

from .lying import prompt

SIZE = 8
PREFIX = prompt(1, 4 * SIZE)
heard: list[KvDamage] = []


class Worker(ModelWorker, namespace="llm"):
    pass


class Operator(Actor, namespace="llm"):
    @subscribe(kv_damage)
    async def hear(self, event: KvDamage) -> None:
        heard.append(event)


@pytest.fixture
def model(tmp_path: Path) -> str:
    TINY_MODELS["llama"].write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tiny_json())
    return str(tmp_path)


async def start(kit: TestKit, model: str, **options: Any) -> Worker:
    chosen: dict[str, Any] = {"verify": 1.0, "verify_budget": 1.0, **options}
    await kit.start(
        Worker,
        model=model,
        backend="numpy",
        deterministic=True,
        block_size=SIZE,
        blocks=64,
        pooling="none",
        **chosen,
    )
    [instance] = kit.started.values()
    worker = instance.actor
    assert isinstance(worker, Worker)
    return worker


async def ask(kit: TestKit, tokens: Sequence[int], request_id: str = "") -> list[int]:
    request = GenerateRequest(list(tokens), 2, sampling=Sampling(temperature=0.0), ignore_eos=True)
    items: list[Generated] = []
    with call_options(request_id=request_id) if request_id else call_options():
        items += [item async for item in kit.client(Worker).generate(request)]
    return [token for item in items for token in item.token_ids]


def damage_block(worker: Worker, at: int) -> None:
    """Change a bit of a block of the prefix."""
    verifier: Any = worker.verification.verifier
    for sequence_hash in list(verifier._ledger._uses.values())[-1].hashes[at : at + 1]:
        block = verifier._manager.block_of(sequence_hash)
        verifier._model._caches[0][block, 0, 0, 0, :1].view("u4")[:] ^= 1


async def why(kit: TestKit, request_id: str) -> list[Explanation]:
    """What is answered to `dynbus why`."""
    answers: list[Explanation] = []
    bus = kit.caller.bus
    inbox = f"{bus.replies.base}.test"

    def take(message: Message) -> None:
        if message.data:
            answers.append(msgspec.json.decode(message.data, type=Explanation))

    subscription = bus.data.subscribe(inbox, take)
    await bus.data.barrier()
    question = msgspec.json.encode(Question(request_id))
    bus.data.publish(why_subject("llm", "Worker"), question, reply=inbox)
    # Whether anybody answers at all is what is asked.
    await asyncio.sleep(0.5)
    subscription.unsubscribe()
    return answers


def test_a_damage_is_told_to_the_log_as_an_event_and_to_who_asks_of_its_requests(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard.clear()

    async def story() -> tuple[list[Explanation], list[Explanation]]:
        async with TestKit(flight=True) as kit:
            worker = await start(kit, model)
            await kit.start(Operator)
            verifier = worker.verification.verifier
            assert verifier is not None
            await ask(kit, [*PREFIX, 5], "first")
            await ask(kit, [*PREFIX, 6], "second")
            await eventually(lambda: verifier.figures.answers["verified"] == 1)
            damage_block(worker, 2)
            await ask(kit, [*PREFIX, 7], "third")
            await eventually(lambda: heard)
            assert worker.verification.findings.counts == {"blocks": 1, "logits": 0, "checksum": 0}
            await ask(kit, [*PREFIX, 8], "fourth")
            await eventually(lambda: verifier.figures.answers["verified"] == 2)

            async def is_recorded() -> bool:
                events = await events_on(kit.bus, "llm")
                recorded[:] = [one for one in events if one.what == "cache.damaged"]
                return bool(recorded)

            await eventually(is_recorded, what="it is on record")
            return await why(kit, "second"), await why(kit, "fourth")

    recorded: list[Event] = []
    with caplog.at_level(logging.ERROR):
        told, untold = asyncio.run(story())

    [damage] = heard
    assert (damage.evidence, damage.first, damage.request_id) == ("blocks", 2, "third")
    assert damage.requests == ["first", "second", "third"]
    assert damage.measures == ["none"]
    assert "dynbus why third" in caplog.text
    assert [one.damages[0]["requests"] for one in told if one.damages] == [damage.requests]
    assert untold == []
    [event] = recorded
    assert event.request == digest_of_request("third")
    assert event.who.startswith("llm.Worker@")
    known = {name: event.details[name] for name in ("evidence", "measures", "requests", "blocks")}
    assert known == {"evidence": "blocks", "measures": "none", "requests": 3, "blocks": 1}


def test_an_instance_whose_own_blocks_are_damaged_too_often_is_withdrawn(model: str) -> None:
    async def story() -> str:
        async with TestKit() as kit:
            worker = await start(kit, model, verify_own=0)
            [instance] = kit.started.values()
            await ask(kit, [*PREFIX, 5])
            damage_block(worker, 0)
            await ask(kit, [*PREFIX, 6])
            await eventually(lambda: instance.broken)
            return instance.broken

    assert asyncio.run(story()) == "its own KV blocks were damaged 1 times"


def test_verification_that_is_off_takes_no_blocks_and_no_time(model: str) -> None:
    async def story() -> tuple[object, int]:
        async with TestKit() as kit:
            worker: Any = await start(kit, model, verify=0.0)
            engine = worker._running()._engine
            await ask(kit, [*PREFIX, 5])
            await ask(kit, [*PREFIX, 5])
            return worker.verification.verifier, len(engine._model.spare_blocks)

    assert asyncio.run(story()) == (None, 0)


def test_nothing_is_fetched_from_a_peer_that_has_lied() -> None:
    class Nobody:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    rates = Rates(4, 1024)
    rates.note_prefill(1000, 1000.0)
    nobody: Any = Nobody()
    avoided = {"liar"}
    fetcher = PrefixFetcher(
        nobody, rates, peer=nobody, mover_of=nobody, avoids=avoided.__contains__
    )
    request = GenerateRequest(list(range(64)))

    chosen = [
        fetcher.choose(request, {"kv_peer": name, "kv_peer_blocks": "10"}, None)
        for name in ("liar", "other")
    ]

    assert chosen[0] is None
    assert chosen[1] is not None


def test_other_checksums_of_a_peer_are_a_damage_of_it(model: str) -> None:
    async def story() -> tuple[bool, bool, KvDamage]:
        async with TestKit() as kit:
            worker = await start(kit, model)
            worker.verification.mismatched("peer")
            [damage] = worker.verification.findings.latest
            return worker.verification.avoids("peer"), worker.verification.avoids("x"), damage

    avoided, other, damage = asyncio.run(story())

    assert (avoided, other) == (True, False)
    assert (damage.evidence, damage.sources) == ("checksum", ["instance peer"])
    assert damage.instance.startswith("llm.Worker@")


def test_a_topic_of_damages_retains_nothing() -> None:
    assert isinstance(kv_damage, Topic)
    assert kv_damage.retain is None
