"""Engines of this version and of the release before it, and who asks them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.upgrades.releases import RELEASE, install
from tests.vllm.conftest import START_TIMEOUT, Run, running, serving_http
from tests.vllm.process_tree import processes_below
from tests.vllm.test_disaggregation import (
    Calling,
    asked_for,
    nodes_of,
    tokens_of,
    was_handed_over,
)
from tests.vllm.test_vllm_worker import (
    GREEDY,
    TOKENS,
    Answer,
    Engine,
    items_of,
    prompt,
)

from dynbus import Runtime, call_options
from dynbus.bus.extras import own_version
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.page.state import InstanceSurvey
from dynbus.spi import InstanceName

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

DOCUMENTS: Final = tuple(f"document {number} " * 12 for number in range(6))
BLOCK: Final = 32


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which the release before is imported."""
    return install(tmp_path_factory.mktemp("release"))


class Said(NamedTuple):
    """An answer: its text, the tokens of its prompt, and how many of them were there already."""

    text: str
    prompt: int
    cached: int


async def ask(client: AsyncOpenAI) -> list[Said]:
    """Ask about all documents, one after the other."""
    create: Any = client.chat.completions.create
    told: list[Said] = []
    for document in DOCUMENTS:
        answer = await create(
            model="tiny",
            messages=[{"role": "user", "content": document}],
            max_tokens=8,
            temperature=0,
        )
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        told.append(Said(answer.choices[0].message.content, usage.prompt_tokens, cached))
    return told


def is_all_cached(answers: list[Said]) -> bool:
    """Whether each was asked where its prompt was, but for its last blocks: vLLM computes one."""
    return all(one.cached >= one.prompt - 2 * BLOCK > BLOCK for one in answers)


@asynccontextmanager
async def client_of(address: str) -> AsyncGenerator[AsyncOpenAI]:
    """A client of a front end that has found the model."""
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=50) as client:

        async def is_served() -> bool:
            return [model.id async for model in client.models.list()] == ["tiny"]

        await eventually(is_served, START_TIMEOUT, what="the model is listed")
        yield client


async def test_a_front_end_of_the_release_before_routes_to_engines_of_this_version(
    fleet: Run, nats_server: RunningServer, front_end: str, release: Path, tmp_path: Path
) -> None:
    with serving_http(tmp_path, nats_server.url, release) as address:
        async with client_of(address) as old, client_of(front_end) as new:
            before, again = await ask(old), await ask(old)
            elsewhere = await ask(new)

    # Which of the two engines has a prompt it knows from their events alone.
    assert is_all_cached(again)
    assert is_all_cached(elsewhere)
    texts = [one.text for one in before]
    assert [one.text for one in again] == [one.text for one in elsewhere] == texts


async def versions_of(runtime: Runtime, names: list[InstanceName]) -> dict[str, str]:
    """The version of each instance, by its id."""
    rows = await InstanceSurvey(runtime.bus).of(names)
    return {name.instance_id: rows[name].version for name in names}


@pytest.mark.nightly
async def test_engines_of_both_versions_are_one_fleet(
    own_server: RunningServer, tiny_model: Path, release: Path, tmp_path: Path
) -> None:
    """They say the same, front ends of both know what each has, and what the engine of the release
    was at when it is killed goes on at the other."""
    url = own_server.url
    folders = [tmp_path / name for name in ("old", "new", "http-old", "http-new")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        old = stack.enter_context(running(folders[0], url, tiny_model, package=release))
        stack.enter_context(running(folders[1], url, tiny_model))
        addresses = [
            stack.enter_context(serving_http(folders[2], url, release)),
            stack.enter_context(serving_http(folders[3], url)),
        ]
        async with Runtime.connect(url) as runtime:
            engine = runtime.client(Engine)
            await eventually(
                lambda: len(runtime.instance_ids(Engine)) == 2, START_TIMEOUT, what="both are there"
            )
            ids = runtime.instance_ids(Engine)
            names = [InstanceName("vllm", "Engine", one) for one in ids]
            assert set((await versions_of(runtime, names)).values()) == {RELEASE, own_version()}
            request = GenerateRequest(prompt("both", 70), 12, sampling=GREEDY, ignore_eos=True)
            tokens: list[list[int]] = []
            for one in ids:
                with call_options(instance=one):
                    tokens.append(tokens_of(await items_of(engine, request)))
            assert tokens[0] == tokens[1]

            async with client_of(addresses[0]) as first, client_of(addresses[1]) as second:
                before = await ask(first)
                assert is_all_cached(await ask(second))
                assert is_all_cached(await ask(first))
                assert [one.text for one in await ask(second)] == [one.text for one in before]

                answers = [Answer() for _ in range(8)]
                reading = [
                    asyncio.create_task(answer.read(client, f"number {number} " * 5))
                    for number, answer in enumerate(answers)
                    for client in [(first, second)[number % 2]]
                ]
                await eventually(lambda: all(one.text for one in answers), what="texts begin")
                for process in [old.process.pid, *processes_below(old.process.pid, "")]:
                    os.kill(process, signal.SIGKILL)
                await asyncio.gather(*reading)
    assert [one.usage.completion_tokens for one in answers] == [TOKENS] * len(answers)
    assert any("sampler_restarted" in one.usage.model_extra for one in answers)


@pytest.mark.nightly
@pytest.mark.parametrize("old", ["prefill", "decode"])
async def test_a_prompt_goes_over_between_versions(
    own_server: RunningServer, tiny_model: Path, release: Path, tmp_path: Path, old: str
) -> None:
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for node, settings in nodes_of(tiny_model).items():
            folder = tmp_path / node
            folder.mkdir()
            (folder / "node.yaml").write_bytes(msgspec.yaml.encode({node: settings}))
            package = release if node == old else None
            runs[node] = Run(
                folder, own_server.url, ["-f", "node.yaml"], namespace="pair", package=package
            )
            stack.callback(runs[node].stop)
        async with Runtime.connect(own_server.url) as runtime:
            both = Calling(runtime, runs["decode"])
            await eventually(
                lambda: both.instances("prefill") and both.instances("decode"),
                START_TIMEOUT,
                what="the engines are announced",
            )
            names = {
                node: InstanceName("pair", node, both.instances(node)[0])
                for node in ("prefill", "decode")
            }
            versions = await versions_of(runtime, list(names.values()))
            assert versions[names[old].instance_id] == RELEASE
            assert set(versions.values()) == {RELEASE, own_version()}
            # The first contact of two engines takes longer than others.
            await items_of(both.decode, asked_for("contact", 100))
            requests = [asked_for(f"between {number}", 100 + 80 * number) for number in range(6)]
            expected = [await items_of(both.prefill, one) for one in requests]
            assert await both.prefill.reset_prefix_cache()
            made = await asyncio.gather(*(items_of(both.decode, one) for one in requests))
            await eventually(both.is_idle, what="nothing is held")
    assert [tokens_of(items) for items in made] == [tokens_of(items) for items in expected]
    assert all(map(was_handed_over, made))
