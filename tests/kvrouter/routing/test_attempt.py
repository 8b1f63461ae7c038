"""What a router learns of an attempt from the items that pass, and what it tells the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import count
from typing import Any, cast

import msgspec
import pytest
from pydantic import BaseModel

from dynbus import Actor, InvalidRequest, call_options, context, handler
from dynbus.kvrouter.events import BlockStored
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.router import AttemptObserver, KvRouter, open_router
from dynbus.kvrouter.stream.awareness import AwarenessLevel
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.testing import TestKit, run

from .routing_fixtures import HandIndex, by_name, until

BLOCK = 16


class Prompt(BaseModel):
    token_ids: list[int]
    items: int = 3
    cached: int = 0


class Engine(Actor, namespace="llm"):
    """Says which metadata reached it, then items, and in the last one its usage."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def instance_metadata(self) -> Mapping[str, str]:
        return {
            "kv_block_size": str(BLOCK),
            "kv_events": "true",
            "kv_dp_size": str(self.ranks),
            "kv_fetches": "true",
        }

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
        yield {"metadata": dict(context().metadata)}
        for number in range(prompt.items):
            yield {"token": number}
        yield {"usage": {"prompt_tokens_details": {"cached_tokens": prompt.cached}}}

    @handler
    async def embed(self, prompt: Prompt) -> dict[str, int]:
        return {"cached_tokens": prompt.cached}


PROMPT = Prompt(token_ids=list(range(4 * BLOCK + 1)))
OPENAI = "usage.prompt_tokens_details.cached_tokens"


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def grown(self, number: int, output_tokens: int) -> None:
        self.told.append(("grown", output_tokens))

    def note_reused(self, number: int, tokens: int, now: float) -> None:
        self.told.append(("reused", tokens))


def observer(told: Told, reused_field: str, block_size: int = 0) -> AttemptObserver:
    return AttemptObserver(cast(Any, told), lambda: None, 7, reused_field, block_size)


def test_the_rank_and_the_predicted_overlap_reach_the_engine() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a", ranks=2)
            index = HandIndex()
            index.held = {Rank("a", 1): HandIndex(a=3).held[Rank("a", 0)]}
            engine = kit.client(Engine, routing=KvRouter(follower=index))
            with call_options(metadata={"tenant": "t"}):
                return [item async for item in engine.generate(PROMPT)][0]

    assert run(story())["metadata"] == {
        "tenant": "t",
        "kv_dp_rank": "1",
        "kv_overlap_blocks": "3",
    }


def test_the_peer_that_holds_more_of_the_prompt_reaches_the_engine() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a")
            await kit.start(Engine, instance_id="b")
            router = KvRouter(policy=by_name, follower=HandIndex(b=3))
            engine = kit.client(Engine, routing=router)
            return [item async for item in engine.generate(PROMPT)][0]

    metadata = run(story())["metadata"]
    assert (metadata["kv_peer"], metadata["kv_peer_blocks"]) == ("b", "3")


def test_a_peer_of_a_call_that_was_routed_before_is_not_passed_on() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a")
            engine = kit.client(Engine, routing=KvRouter(follower=HandIndex()))
            with call_options(metadata={"kv_peer": "z", "kv_peer_blocks": "9"}):
                return [item async for item in engine.generate(PROMPT)][0]

    metadata = run(story())["metadata"]
    assert (metadata["kv_peer"], metadata["kv_peer_blocks"]) == ("", "0")


@pytest.mark.parametrize("path", ["cached_tokens", OPENAI])
def test_what_was_reused_is_read_from_the_result_or_from_any_item(path: str) -> None:
    async def story() -> int | None:
        async with TestKit() as kit:
            await kit.start(Engine)
            router = KvRouter(follower=HandIndex(), reused_field=path)
            engine = kit.client(Engine, routing=router)
            prompt = Prompt(token_ids=PROMPT.token_ids, items=700, cached=48)
            with call_options(request_id="asked"):
                if path == OPENAI:
                    assert len([item async for item in engine.generate(prompt)]) == 702
                else:
                    await engine.embed(prompt)
            return router.decisions("asked")[0].outcome.reused_tokens

    assert run(story()) == 48


def test_an_instance_that_reuses_less_than_it_says_is_asked_for_a_resync_alone() -> None:
    async def story() -> tuple[HandIndex, list[str]]:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="honest")
            await kit.start(Engine, instance_id="liar")
            index = HandIndex(liar=4, honest=4)
            router = KvRouter(follower=index, reused_field=OPENAI)
            engine = kit.client(Engine, routing=router)
            levels = [router.awareness().level.value]
            for _ in range(40):
                with call_options(request_id="asked"):
                    stream = engine.generate(PROMPT)
                    await anext(stream)
                    await stream.aclose()
                chosen = router.decisions("asked")[-1].chosen.instance
                router.report_reused("asked", 0 if chosen == "liar" else 64)
            levels.append(router.awareness().level.value)
            assert router.latest_decisions(1)[0].expected_reuse == 64
            assert "liar/0: it reuses" in router.awareness().reason
            return index, levels

    index, levels = run(story())

    assert [rank.instance for rank, _ in index.resyncs] == ["liar"]
    assert "64 tokens fewer" in index.resyncs[0][1]
    assert levels == ["exact", "degraded"]


@pytest.mark.parametrize(
    ("item", "path", "tokens"),
    [
        (b'{"cached_tokens": 5}', "cached_tokens", 5),
        (b'{"a":{"b":{"cached_tokens":7}}}', "a.b.cached_tokens", 7),
        (b'{"cached_tokens":true}', "cached_tokens", None),
        (b'{"cached_tokens":-1}', "cached_tokens", None),
        (b'{"cached_tokens":"5"}', "cached_tokens", None),
        (b'{"text":"say \\"cached_tokens\\""}', "cached_tokens", None),
        (b'"cached_tokens"', "cached_tokens", None),
        (b'{"cached_tokens":', "cached_tokens", None),
        (b'{"cached_tokens":1.5}', "cached_tokens", None),
    ],
)
def test_only_a_number_of_tokens_is_taken_for_one(
    item: bytes, path: str, tokens: int | None
) -> None:
    told = Told()

    observer(told, path).arrived([item])

    assert told.told == ([] if tokens is None else [("reused", tokens)])


def test_an_observer_looks_at_no_more_items_once_it_knows_what_was_reused() -> None:
    looks = observer(told := Told(), "cached_tokens")

    assert looks.arrived([b'{"token":1}']) is True
    assert looks.arrived([b"1", b'{"cached_tokens":32}', b'{"cached_tokens":9}']) is False
    assert told.told == [("reused", 32)]


def test_an_observer_with_nothing_to_find_looks_at_no_item() -> None:
    assert observer(Told(), "").arrived([b'{"cached_tokens":1}']) is False


def test_output_is_told_whenever_it_fills_another_block() -> None:
    looks = observer(told := Told(), "", 4)

    for items in ([b"1"] * 3, [b"1"], [b"1"] * 9, [b"1"] * 2):
        assert looks.arrived(items)

    assert told.told == [("grown", 4), ("grown", 13)]


def test_an_item_of_many_tokens_counts_as_so_many() -> None:
    looks = observer(told := Told(), "", 4)
    joined = msgspec.json.encode({"token_ids": list(range(100)), "index": 1})

    looks.arrived([joined, b'{"token_ids":[7]}', b'{"text":"' + b"," * 200 + b'"}'])

    assert told.told == [("grown", 102)]


@pytest.mark.parametrize(
    ("item", "tokens"),
    [
        (b'{"token_ids":[1,2]}', 2),
        (b'{"text":"a, b","logprobs":[[1,-0.5],[2,-0.5]],"token_ids":[1,2,3],"index":0}', 3),
        (b'{"token_ids" : [ 1 , 2 ]}', 2),
        (b'{"token_ids":[],"finish_reason":"stop"}', 0),
        (b'{"token_ids":null}', 1),
        (b'{"token_ids":"1,2,3"}', 1),
        (b'{"text":"[1,2,3]"}', 1),
        (b"[1,2,3]", 1),
        (b'{"token_ids":[1,', 1),
        (b'{"text":"\xff"}', 1),
        (b'{"text":' + b"[" * 5000 + b"]" * 5000 + b"}", 1),
    ],
)
def test_an_item_has_the_tokens_that_it_lists_wherever_commas_stand(
    item: bytes, tokens: int
) -> None:
    looks = observer(told := Told(), "", 1)

    looks.arrived([b"1", item])

    assert told.told == [("grown", 1 + tokens)]


@pytest.mark.parametrize("asks", ["config", "call", "nobody"])
def test_output_counts_as_load_while_it_grows_when_somebody_asks_for_it(asks: str) -> None:
    async def story() -> tuple[float, float]:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a")
            config = RouterConfig(track_output=asks == "config")
            router = KvRouter(follower=HandIndex(), config=config, reused_field="")
            engine = kit.client(Engine, routing=router)
            metadata = {"kv_track_output": "true"} if asks == "call" else {}
            prompt = Prompt(token_ids=PROMPT.token_ids, items=10 * BLOCK)
            with call_options(metadata=metadata):
                long = engine.generate(prompt)
            for _ in range(6 * BLOCK):
                await anext(long)
            with call_options(request_id="beside"):
                assert [item async for item in engine.generate(PROMPT)]
            blocks = router.decisions("beside")[0].candidates[0].active_blocks
            await long.aclose()
            with call_options(request_id="after"):
                assert [item async for item in engine.generate(PROMPT)]
            return blocks, router.decisions("after")[0].candidates[0].active_blocks

    beside, after = run(story())

    assert after == 0
    assert (beside >= 4 + 6) == (asks != "nobody")
    assert asks != "nobody" or beside == 4


def test_a_wish_to_track_output_that_is_none_is_refused() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Engine)
            engine = kit.client(Engine, routing=KvRouter(follower=HandIndex()))
            with (
                call_options(metadata={"kv_track_output": "yes"}),
                pytest.raises(InvalidRequest, match="kv_track_output = 'yes'"),
            ):
                await anext(engine.generate(PROMPT))

    run(story())


class Publishing(Actor, namespace="llm", component="Publishing"):
    """Says that it holds the prompt; what it reuses is another thing."""

    def __init__(self, reuses: int) -> None:
        self.reuses = reuses

    async def on_start(self) -> None:
        self.events = KvEventPublisher.of(self)
        await self.events.__aenter__()
        blocks = block_hashes(PROMPT.token_ids, BLOCK)
        self.events.publish([BlockStored(None, blocks, blocks)])

    async def on_stop(self) -> None:
        await self.events.close()

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": str(BLOCK), "kv_events": "true"}

    @handler
    async def embed(self, prompt: Prompt) -> dict[str, int]:
        return {"cached_tokens": self.reuses}

    @property
    def resyncs(self) -> int:
        return sum(rank.statistics.resyncs for rank in self.events.status().ranks)


def test_a_lying_instance_gets_the_request_for_a_resync_and_an_honest_one_none() -> None:
    async def story() -> tuple[int, int, str]:
        async with TestKit() as kit:
            actors: list[Publishing] = []
            for reuses in (0, 4 * BLOCK):
                actor = (await kit.start(Publishing, reuses=reuses)).actor
                assert isinstance(actor, Publishing)
                actors.append(actor)
            lying, honest = actors
            turns = count()

            def in_turn(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
                turn = next(turns) % 2
                return [float(number != turn) for number in range(len(candidates))]

            async with open_router(kit.caller, Publishing, policy=in_turn) as router:
                await until(lambda: router.awareness().level is AwarenessLevel.EXACT)
                client = kit.client(Publishing, routing=router)
                for _ in range(60):
                    await client.embed(PROMPT)
                await until(lambda: lying.resyncs > 0)
                await until(lambda: "being resent" not in router.awareness().reason)
                return lying.resyncs, honest.resyncs, router.awareness().reason

    lying, honest, reason = run(story())

    assert (lying, honest) == (1, 0)
    assert "it reuses 64 tokens fewer than it says that it holds" in reason
