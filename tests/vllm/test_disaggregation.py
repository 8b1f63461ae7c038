"""Prompts that one vLLM computes and another goes on from: the same tokens, whatever fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests.conditions import eventually
from tests.vllm.conftest import ENGINE, START_TIMEOUT, Run
from tests.vllm.process_tree import processes_below
from tests.vllm.test_vllm_worker import GREEDY, Engine, items_of, prompt

from dynbus import Runtime
from dynbus.bus.errors import InvalidRequest
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter import block_hashes, open_router
from dynbus.kvrouter.radix.index import Rank
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.hand_over.messages import PrefillRequest
from dynbus.llm.vllm.handing_over import HandOver

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

LEASE = 6


def nodes_of(model: Path) -> dict[str, dict[str, Any]]:
    """A prefill engine and a decode engine, by the names of their nodes."""
    engine = {**ENGINE, "class": "Engine", "model": str(model), "model_name": "pair"}
    # On CPUs vLLM fails with seeded requests whose prompts are computed in several steps.
    engine |= {"enable_lora": False, "max_num_batched_tokens": 8192}
    return {
        "prefill": {**engine, "kv_lease": LEASE},
        "decode": {
            **engine,
            "disaggregation": {"local_prompt_tokens": 64, "max_queue_length": 16},
        },
    }


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, nats_server: RunningServer, tiny_model: Path
) -> Iterator[Run]:
    """A run of both."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "pair.yaml").write_bytes(msgspec.yaml.encode(nodes_of(tiny_model)))
    run = Run(folder, nats_server.url, ["-f", "pair.yaml"], namespace="pair")
    try:
        yield run
    finally:
        run.stop()


class Calling:
    """Clients of both engines."""

    def __init__(self, runtime: Runtime, run: Run) -> None:
        self.runtime = runtime
        self.run = run
        self.prefill = runtime.client(Engine, node="prefill", namespace="pair")
        self.decode = runtime.client(Engine, node="decode", namespace="pair")

    def instances(self, node: str) -> list[str]:
        assert self.run.process.poll() is None, self.run.output[-3000:]
        return self.runtime.instance_ids("pair", node)

    async def is_idle(self) -> bool:
        """Whether neither engine holds anything; prefill says so of its last step."""
        loads = [await one.load_metrics() for one in (self.prefill, self.decode)]
        return not any(load.request_active_slots or load.kv_active_blocks for load in loads)


@asynccontextmanager
async def calling(run: Run, url: str) -> AsyncGenerator[Calling]:
    async with Runtime.connect(url) as runtime:
        both = Calling(runtime, run)
        await eventually(
            lambda: both.instances("prefill") and both.instances("decode"),
            START_TIMEOUT,
            what="the engines are announced",
        )
        yield both


def tokens_of(items: list[Generated]) -> list[int]:
    return [token for item in items for token in item.token_ids]


def was_handed_over(items: list[Generated]) -> bool:
    """An engine that computes a prompt says with the first token what was in its cache."""
    return items[0].cached_tokens is None and len(items[0].token_ids) == 1


def asked_for(name: str, length: int, sampling: Sampling = GREEDY) -> GenerateRequest:
    return GenerateRequest(prompt(name, length), 24, sampling=sampling, ignore_eos=True)


async def test_tokens_are_those_of_one_engine(pair: Run, nats_server: RunningServer) -> None:
    """Greedy and seeded, alone and beside others, and with what both engines have of a prompt."""
    async with calling(pair, nats_server.url) as both:
        # The first contact of two engines takes longer than others.
        await items_of(both.decode, asked_for("contact", 100))
        requests = [
            asked_for(f"equal {n}", 100 + 80 * n, Sampling(seed=n, logprobs=1) if n % 2 else GREEDY)
            for n in range(8)
        ]
        expected = [await items_of(both.prefill, one) for one in requests]
        assert await both.prefill.reset_prefix_cache()
        made = await asyncio.gather(*(items_of(both.decode, one) for one in requests))
        again = [await items_of(both.decode, one) for one in requests[:3]]
        random = await items_of(both.decode, asked_for("random", 90, Sampling()))
        short = await items_of(both.decode, asked_for("short", 40))
        one = GenerateRequest(prompt("one", 80), 1, sampling=GREEDY)
        ended = await items_of(both.decode, one)
        several = GenerateRequest(prompt("two", 80), 4, n=2, sampling=GREEDY, ignore_eos=True)
        others = await items_of(both.decode, several)
        await eventually(both.is_idle, what="nothing is held")
        last = asked_for("indexed", 200)
        await items_of(both.decode, last)
        for node in ("prefill", "decode"):
            await eventually(partial(knows, both, node, last), what=f"the blocks of {node}")

    assert [tokens_of(items) for items in made] == [tokens_of(items) for items in expected]
    assert [tokens_of(items) for items in again] == [tokens_of(items) for items in expected[:3]]
    assert all(map(was_handed_over, [*made, *again, random, ended]))
    assert [len(tokens_of(items)) for items in (random, short, ended, others)] == [24, 24, 1, 8]
    assert not was_handed_over(short)
    assert not was_handed_over(others)
    assert (ended[-1].finish_reason, made[0][-1].finish_reason) == ("length", "length")
    told = [one for item in made[1] for one in item.logprobs or ()]
    assert [one.token_id for one in told] == tokens_of(made[1])


async def knows(both: Calling, node: str, asked: GenerateRequest) -> bool:
    """Whether routers know that an engine has a prompt."""
    hashes = block_hashes(asked.token_ids, ENGINE["block_size"])
    async with open_router(both.runtime, f"pair.{node}") as router:
        assert router.follower is not None
        found = router.follower.overlaps(hashes).get(Rank(both.instances(node)[0], 0))
        return found is not None and found.total == len(hashes)


async def test_a_request_that_is_left_leaves_nothing_on_either_side(
    pair: Run, nats_server: RunningServer
) -> None:
    """Whatever it was at: routed, computed, handed over, read, decoded."""
    random = Random(1)
    async with calling(pair, nats_server.url) as both:
        await items_of(both.decode, asked_for("contact", 100))
        before = pair.output.count("Releasing expired")
        for number in range(40):
            asked = asked_for(f"left {number}", random.randrange(80, 900))
            leaving = asyncio.ensure_future(items_of(both.decode, asked))
            # Not to let something settle: each is left at another moment.
            await asyncio.sleep(random.random() * 0.08)
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
        await eventually(both.is_idle, what="nothing is held")
        # Nor was it held until its lease was over.
        assert pair.output.count("Releasing expired") == before
        whole = await items_of(both.decode, asked_for("unharmed", 200))
    assert was_handed_over(whole)
    assert len(tokens_of(whole)) == 24


async def test_a_prompt_is_handed_over_once_and_only_to_who_asked(
    pair: Run, nats_server: RunningServer
) -> None:
    async with calling(pair, nats_server.url) as both:
        [instance] = both.instances("prefill")
        identities = [await one.kv_identity() for one in (both.prefill, both.decode)]
        wanted = PrefillRequest("mine", asked_for("protocol", 80))
        async with aclosing(both.prefill.prefill(wanted)) as stream:
            computed = await anext(stream)
            with pytest.raises(InvalidRequest, match="'mine' is going on already"):
                await anext(both.prefill.prefill(wanted))
            given = await both.prefill.hand_over(HandOver("mine"))
            for name in ("mine", "other"):
                with pytest.raises(InvalidRequest, match=f"nothing is held .* '{name}'"):
                    await both.prefill.hand_over(HandOver(name))
        await both.prefill.give_back(HandOver("mine"))
        await both.prefill.give_back(HandOver("mine"))
        # One that nobody takes is freed when its reader leaves.
        async with aclosing(both.prefill.prefill(wanted)) as stream:
            await anext(stream)
        await eventually(both.is_idle, what="nothing is held")
        with pytest.raises(InvalidRequest, match="role=decode"):
            await anext(both.decode.prefill(wanted))
    assert computed.instance == instance
    assert identities[0] == identities[1]
    assert 0 < given.seconds <= LEASE


async def test_blocks_that_are_read_after_their_lease_are_not_used(
    pair: Run, nats_server: RunningServer
) -> None:
    """The decode engine is frozen while the prefill engine frees the blocks and gives them to
    others: it computes the prompt itself, since what it reads then is theirs."""
    async with calling(pair, nats_server.url) as both:
        asked = asked_for("late", 640)
        expected = tokens_of(await items_of(both.prefill, asked))
        await both.prefill.reset_prefix_cache()
        await items_of(both.decode, asked_for("contact", 100))
        with frozen(engine_worker(pair, "decode")):
            late = asyncio.ensure_future(items_of(both.decode, asked))
            await eventually(
                lambda: "it did not come in time" in pair.output,
                what="the decode engine waits no longer",
            )
            await eventually(
                lambda: pair.output.count("Releasing expired"), what="the lease is over"
            )
            for number in range(6):
                await items_of(both.prefill, asked_for(f"others {number}", 900))
        assert tokens_of(await late) == expected
        await eventually(both.is_idle, what="nothing is held")


@pytest.mark.nightly
async def test_prefill_may_be_killed_and_comes_back(pair: Run, nats_server: RunningServer) -> None:
    async with calling(pair, nats_server.url) as both:
        requests = [asked_for(f"killed {n}", 300 + 60 * n) for n in range(8)]
        expected = [tokens_of(await items_of(both.prefill, one)) for one in requests]
        [first] = both.instances("prefill")
        asking = [asyncio.ensure_future(items_of(both.decode, one)) for one in requests]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        [worker] = processes_below(pair.process.pid, "pair.prefill")
        os.kill(worker, signal.SIGKILL)
        made = [tokens_of(items) for items in await asyncio.gather(*asking)]
        alone = await items_of(both.decode, requests[0])
        assert made == expected
        assert tokens_of(alone) == expected[0]
        assert not was_handed_over(alone)

        await eventually(
            lambda: [one for one in both.instances("prefill") if one != first],
            START_TIMEOUT,
            what="another prefill engine is there",
        )

        async def is_handed_over() -> bool:
            items = await items_of(both.decode, requests[0])
            assert tokens_of(items) == expected[0]
            return was_handed_over(items)

        await eventually(is_handed_over, what="the other one is used")
        await eventually(both.is_idle, what="nothing is held")


def engine_worker(run: Run, node: str) -> int:
    """The process of an engine that computes, and reads blocks."""
    [actor] = processes_below(run.process.pid, f"pair.{node}")
    return processes_below(actor, "VLLM::EngineCore")[0]


@contextmanager
def frozen(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
