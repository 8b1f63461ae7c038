"""Engines of several ranks: data-parallel ones, which routers choose, and tensor-parallel ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conditions import eventually
from tests.vllm.conftest import running
from tests.vllm.test_vllm_worker import GREEDY, Engine, calling, items_of, prompt

from dynbus import call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter import open_router
from dynbus.llm.generation import GenerateRequest

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.timeout(600)]


async def test_routers_choose_the_rank_that_holds_a_prompt(
    tmp_path: Path, own_server: RunningServer, tiny_model: Path
) -> None:
    options = ("--Engine.data_parallel_size=2", "--Engine.enable_lora=false")
    with running(tmp_path, own_server.url, tiny_model, *options) as run:
        async with (
            calling(run, own_server.url, 1) as (runtime, _),
            open_router(runtime, Engine) as router,
        ):
            engine = runtime.client(Engine, routing=router)
            ranks: dict[int, set[int]] = {}
            for turn in range(3):
                for number in range(6):
                    name = f"ask-{turn}-{number}"
                    asked = GenerateRequest(prompt(f"rank {number}", 200), 2, sampling=GREEDY)
                    with call_options(request_id=name):
                        items = await items_of(engine, asked)
                    [decision] = router.decisions(name)
                    chosen = decision.chosen
                    ranks.setdefault(number, set()).add(chosen.dp_rank)
                    assert (items[0].cached_tokens or 0) == (192 if turn else 0)

                    async def is_known(name: str = name) -> bool:
                        # The events of a request may come after its end.
                        with call_options(request_id=f"{name}-again"):
                            await items_of(engine, asked)  # noqa: B023
                        [again] = router.decisions(f"{name}-again")
                        return again.expected_reuse == again.outcome.reused_tokens == 192

                    if turn == 0:
                        await eventually(is_known, what="the blocks are known")
    # Each stays where it is, and both get some.
    assert all(len(of_prompt) == 1 for of_prompt in ranks.values())
    assert {rank for of_prompt in ranks.values() for rank in of_prompt} == {0, 1}


async def test_tensor_parallel_ranks_make_the_same_tokens(
    tmp_path: Path, own_server: RunningServer, tiny_model: Path
) -> None:
    asked = GenerateRequest(prompt("tensor", 70), 12, sampling=GREEDY, ignore_eos=True)
    made: list[list[int]] = []
    for number, size in enumerate((1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        option = f"--Engine.tensor_parallel_size={size}"
        with running(folder, own_server.url, tiny_model, option) as run:
            async with calling(run, own_server.url, 1) as (_, engine):
                items = await items_of(engine, asked)
                made.append([token for item in items for token in item.token_ids])
    assert made[0] == made[1]
