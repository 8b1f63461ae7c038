"""Disaggregated serving over NIXL: tokens are those of one engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import eventually
from tests.llm.disaggregated.test_worker import REMOTE, greedy, seeded, tokens_of
from tests.llm.disaggregated.tiny_engine import tiny_engine
from tests.nixl.peers import forwarded, joined_namespaces
from tests.nixl.serving import Engine as Killed
from tests.nixl.serving import (
    figures_of,
    left_in,
    requests_of,
    running,
    serve_while_changing_roles,
    serve_while_killing,
    until_found,
)

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.worker import ModelWorker


class Engine(DisaggregatedWorker, namespace="nixl"):
    """Moves its blocks by NIXL."""


class Whole(ModelWorker, namespace="nixl"):
    """Serves all of a request itself."""


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    return tiny_engine(tmp_path, blocks=256, checksums=True)


def test_two_workers_on_one_server_give_the_tokens_of_one(
    nats_server: RunningServer, model: dict[str, Any]
) -> None:
    requests = [
        *(greedy(length, seed=length) for length in (1, 16, 17, 100, 400)),
        *(seeded(length, seed=length) for length in (33, 250)),
    ]

    async def story() -> None:
        url = nats_server.url
        async with (
            Runtime.connect(url) as one,
            Runtime.connect(url) as two,
            Runtime.connect(url) as three,
            Runtime.connect(url) as caller,
        ):
            prefill = await one.start(Engine, node="prefill", **model)
            decode = await two.start(Engine, node="decode", disaggregation=REMOTE, **model)
            await three.start(Whole, **model, model_name="whole")
            whole = caller.client(Whole, wait=10.0)
            client = caller.client(Engine, node="decode", wait=10.0)
            wanted = [await tokens_of(whole, request) for request in requests]

            found = await asyncio.gather(*(tokens_of(client, request) for request in requests))

            assert found == wanted
            assert isinstance(decode.actor, Engine)
            assert isinstance(prefill.actor, Engine)
            figures = decode.actor.figures
            print(figures.describe(), figures.remote, figures.local)
            assert figures.remote[""] == len(requests)
            assert figures.bytes
            sides = (prefill.actor, decode.actor)

            def is_at_rest() -> bool:
                return not any(
                    side._running().load.active_blocks  # pyright: ignore[reportPrivateUsage]
                    or side.figures.held
                    or side.figures.quarantined
                    for side in sides
                )

            await eventually(is_at_rest, what="nothing is left")

    asyncio.run(story())


async def tokens_of_one(url: str, model: dict[str, Any], count: int) -> list[list[int]]:
    """What one engine that does both gives."""
    async with Runtime.connect(url) as runtime:
        await runtime.start(Whole, **model, model_name="whole")
        client = runtime.client(Whole, wait=10.0)
        return [await tokens_of(client, request) for request in requests_of(count)]


async def instances_of(url: str, workers: int) -> None:
    """Wait until all are there."""
    async with Runtime.connect(url) as runtime:
        runtime.discovery.begin()
        await until_found(runtime, workers)


@pytest.mark.parametrize(
    ("kinds", "requests", "kills", "workers"),
    [
        pytest.param(24, 60, 2, 2, id="60 requests"),
        pytest.param(
            *(200, 10_000, 200, 2),
            id="10_000 requests",
            marks=(pytest.mark.soak, pytest.mark.timeout(7200)),
        ),
    ],
)
def test_tokens_are_those_of_one_engine_while_instances_change_their_roles_and_are_killed(
    nats_server: RunningServer,
    model: dict[str, Any],
    tmp_path: Path,
    kinds: int,
    requests: int,
    kills: int,
    workers: int,
) -> None:
    url = nats_server.url
    wanted = asyncio.run(tokens_of_one(url, model, kinds))

    with running(tmp_path, url, model, workers):
        asyncio.run(instances_of(url, workers))
        # No request fails, and none is sent twice.
        served = asyncio.run(
            serve_while_changing_roles(url, wanted, changes=["prefill", "both", "decode"])
        )
        assert served >= 12
        outcome = asyncio.run(
            serve_while_killing(url, wanted, requests=requests, kills=kills, workers=workers)
        )

    print(outcome)
    assert (outcome.right, outcome.wrong) == (requests, 0)
    assert outcome.kills == kills
    assert outcome.left == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
@pytest.mark.skipif(shutil.which("ip") is None, reason="the program ip is not installed")
def test_a_link_that_is_cut_between_prefill_and_decode_costs_time_and_no_token(
    nats_server: RunningServer,
    model: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two namespaces of one machine would find a way round by its memory.
    monkeypatch.setenv("UCX_TLS", "tcp")
    *cut, late, back = [greedy(300 + at, 6, seed=at) for at in range(5)]

    async def story(set_link: Callable[[str], None]) -> None:
        async with Runtime.connect(nats_server.url) as runtime:
            await runtime.start(Whole, **model, model_name="whole")
            whole = runtime.client(Whole, wait=10.0)
            wanted = [await tokens_of(whole, one) for one in (*cut, late, back)]
            runtime.discovery.begin()
            await until_found(runtime, 1)
            client = runtime.client(Killed, node="decode", wait=10.0)
            others = itertools.count(50)

            async def is_handed_over() -> bool:
                had = (await figures_of(runtime, "decode")).get("prompts_handed_over", 0)
                await tokens_of(client, greedy(40, 2, seed=next(others)))
                return (await figures_of(runtime, "decode")).get("prompts_handed_over", 0) > had

            await eventually(is_handed_over, what="prompts are handed over")

            # With the first token of a prompt on its way its blocks are, too.
            async def tokens_while_cut(request: GenerateRequest) -> list[int]:
                tokens: list[int] = []
                async for item in client.generate(request):
                    set_link("down")
                    tokens += item.token_ids
                return tokens

            tokens = await asyncio.gather(*(tokens_while_cut(one) for one in cut))
            assert tokens == wanted[:-2]
            # All blocks of those may have come before the link was cut; none come now.
            assert await tokens_of(client, late) == wanted[-2]
            assert await left_in(runtime) == 0

            async def is_at_rest() -> bool:
                """One fell back at least, and nothing is left of it."""
                sides = [await figures_of(runtime, node) for node in ("prefill", "decode")]
                return sides[1].get("prompts_fell_back", 0) > 0 and all(
                    side.get("blocks_quarantined") == side.get("prompts_held") == 0
                    for side in sides
                )

            await eventually(is_at_rest, what="nothing is in quarantine")

            set_link("up")
            await eventually(is_handed_over, what="prompts are handed over again")
            assert await tokens_of(client, back) == wanted[-1]

    with ExitStack() as stack:
        ours, theirs, set_link = stack.enter_context(joined_namespaces())
        for role, namespace in (("prefill", theirs), ("decode", ours)):
            url = stack.enter_context(forwarded(namespace, nats_server.port))
            folder = tmp_path / role
            stack.enter_context(running(folder, url, model, 1, [role], namespace))
        asyncio.run(story(set_link))
