"""Instances fetch the blocks of prefixes from each other over NIXL."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_json
from tests.llm.weights.tiny_models import TINY_MODELS

from dynbus import call_options
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.router import open_router
from dynbus.llm.engine.interface import EngineLoad
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.hand_over.part_reader import Part
from dynbus.llm.hand_over.source import Source
from dynbus.llm.tiers import fetching
from dynbus.llm.tiers.cost import Estimate
from dynbus.llm.tiers.fetching import PrefixFetcher
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit
from dynbus.transfer.layout import KvMemory
from dynbus.transfer.settling import Settled, Settlement, Settling

SIZE = 4
PROMPT = [1 + at % 50 for at in range(12 * SIZE + 1)]


class Slow(Estimate):
    """An estimate that nothing changes."""

    def note(self, value: float) -> None:
        """It stays."""


class Worker(ModelWorker, namespace="llm"):
    def compute_slowly(self) -> None:
        """Have it believe so: a tiny model computes faster than anything is fetched."""
        assert self.tiers.rates is not None
        self.tiers.rates.prefill = Slow(1.0)

    @property
    def fetcher(self) -> PrefixFetcher:
        assert self.tiers.fetcher is not None
        return self.tiers.fetcher

    @property
    def settling(self) -> Settling:
        assert self.tiers.settling is not None
        return self.tiers.settling

    @property
    def source(self) -> Source:
        assert self.tiers.source is not None
        return self.tiers.source

    @property
    def memory(self) -> KvMemory:
        return self._running().memory

    @property
    def engine_load(self) -> EngineLoad:
        return self._running().load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    TINY_MODELS["llama"].write_folder(folder)
    (folder / "tokenizer.json").write_bytes(tiny_json())
    return str(folder)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first fetch from a peer takes longer than half a second."""
    monkeypatch.setattr(fetching, "LEAST_PATIENCE", 20.0)


async def start(
    kit: TestKit,
    model: str,
    name: str,
    *,
    blocks: int = 32,
    host_memory_mib: int = 0,
    **options: Any,
) -> Worker:
    await kit.start(
        Worker,
        instance_id=name,
        model=model,
        backend="numpy",
        deterministic=True,
        block_size=SIZE,
        max_num_seqs=2,
        context_length=64,
        pooling="none",
        fetch_prefixes=True,
        blocks=blocks,
        host_memory_mib=host_memory_mib,
        **options,
    )
    worker = next(one.actor for one in kit.started.values() if one.actor.instance_id == name)
    assert isinstance(worker, Worker)
    worker.compute_slowly()
    return worker


async def generate(
    kit: TestKit, instance: str, prompt: Sequence[int], peer: str = "", blocks: int = 12
) -> list[Generated]:
    metadata = {"kv_peer": peer, "kv_peer_blocks": str(blocks)} if peer else {}
    with call_options(instance=instance, metadata=metadata):
        return [item async for item in kit.client(Worker).generate(greedy(prompt))]


def greedy(prompt: Sequence[int]) -> GenerateRequest:
    return GenerateRequest(list(prompt), 6, sampling=Sampling(temperature=0.0), ignore_eos=True)


def tokens_of(items: Sequence[Generated]) -> list[int]:
    return [token for item in items for token in item.token_ids]


async def at_rest(*workers: Worker) -> None:
    """Wait until nothing is lent, read or held any more."""

    def rests() -> bool:
        return all(
            worker.source.loans == 0
            and worker.fetcher.figures.open == 0
            and worker.engine_load.active_blocks == 0
            for worker in workers
        )

    await eventually(rests, 10.0, what="blocks are still held")


def test_a_prefix_that_a_peer_holds_is_read_from_it_and_gives_the_same_tokens(model: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            one, other = await start(kit, model, "one"), await start(kit, model, "other")
            computed = await generate(kit, "one", PROMPT)

            fetched = await generate(kit, "other", PROMPT, peer="one")
            again = await generate(kit, "other", PROMPT, peer="one")

            assert tokens_of(fetched) == tokens_of(again) == tokens_of(computed)
            # What was fetched was not found in the cache, as its router expects.
            assert [items[0].cached_tokens for items in (fetched, again)] == [0, 12 * SIZE]
            assert other.fetcher.statistics.blocks == one.source.lent_blocks == 12
            await at_rest(one, other)

    asyncio.run(story())


@pytest.mark.parametrize("damages", [False, True])
def test_blocks_with_other_checksums_than_the_peer_has_are_computed(
    model: str, damages: bool
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            one = await start(kit, model, "one")
            other = await start(kit, model, "other", checksums=True)
            computed = await generate(kit, "one", PROMPT)
            reader, memory = other.fetcher.reader, other.memory

            class Damaging:
                """Flips a bit of what was read, before the peer is asked for checksums."""

                start = staticmethod(reader.start)

                async def settled(self, part: Part) -> bool:
                    if damages:
                        for region in memory.regions:
                            for at in range(0, region.size, memory.layout.token_bytes):
                                ctypes.c_uint8.from_address(region.address + at).value ^= 1
                    return await reader.settled(part)

            other.fetcher.reader = Damaging()

            fetched = await generate(kit, "other", PROMPT, peer="one")

            assert tokens_of(fetched) == tokens_of(computed)
            ended = "ChecksumMismatch" if damages else "fetched"
            assert other.fetcher.statistics.results == {ended: 1}
            assert other.fetcher.statistics.blocks == (0 if damages else 12)
            await at_rest(one, other)

    asyncio.run(story())


def test_a_router_names_the_peer_that_has_evicted_the_prefix_to_its_host(model: str) -> None:
    def to_other(request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        return [float(each.rank.instance != "other") for each in candidates]

    async def story() -> None:
        async with TestKit() as kit:
            one = await start(kit, model, "one", blocks=16, host_memory_mib=1, lend_share=1.0)
            other = await start(kit, model, "other")
            computed = await generate(kit, "one", PROMPT)
            await generate(kit, "one", [token + 5 for token in PROMPT])
            async with open_router(kit.caller, Worker, policy=to_other) as router:
                overlaps = router.follower.overlaps if router.follower else None
                assert overlaps is not None
                hashes = block_hashes(PROMPT, SIZE)
                await eventually(lambda: sum(overlaps(hashes).get(Rank("one", 0), ())) == 12)
                on_host = overlaps(hashes)[Rank("one", 0)].host
                engine = kit.client(Worker, routing=router)
                with call_options(request_id="mine"):
                    fetched = [item async for item in engine.generate(greedy(PROMPT))]
                [decision] = router.decisions("mine")

            assert on_host > 4
            assert (decision.chosen, decision.peer) == (Rank("other", 0), Rank("one", 0))
            assert decision.peer_overlap == 12
            assert tokens_of(fetched) == tokens_of(computed)
            assert other.fetcher.statistics.blocks == 12
            await at_rest(one, other)

    asyncio.run(story())


def test_a_prefix_is_computed_where_its_peer_is_gone_or_does_not_vouch_for_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            one, other = await start(kit, model, "one"), await start(kit, model, "other")
            computed = await generate(kit, "one", PROMPT)

            async def denies(_: Settlement) -> Settled:
                return Settled(held=False)

            monkeypatch.setattr(one.settling, "settle", denies)

            unproven = await generate(kit, "other", PROMPT, peer="one")
            later = await generate(kit, "other", PROMPT[1:], peer="nobody")

            assert tokens_of(unproven) == tokens_of(computed)
            assert later[-1].finish_reason == "length"
            assert other.fetcher.statistics.results == {"LeaseLost": 1, "Unavailable": 1}
            assert other.fetcher.statistics.blocks == 0
            await at_rest(one, other)

    asyncio.run(story())


def test_a_caller_that_leaves_in_the_middle_of_a_fetch_has_all_freed(model: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            one, other = await start(kit, model, "one"), await start(kit, model, "other")
            await generate(kit, "one", PROMPT)
            settling = asyncio.Event()

            class Silent:
                start = staticmethod(other.fetcher.reader.start)

                async def settled(self, part: Part) -> bool:
                    settling.set()
                    await asyncio.Event().wait()
                    return True

            other.fetcher.reader = Silent()
            call = asyncio.create_task(generate(kit, "other", PROMPT, peer="one"))
            await settling.wait()
            call.cancel()
            await at_rest(one, other)

    asyncio.run(story())
