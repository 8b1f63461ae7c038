"""The mover of the guide hands prompts over: what comes out is what one engine gives."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conditions import eventually
from tests.llm.disaggregated.test_worker import REMOTE, expected, greedy, seeded, tokens_of
from tests.llm.disaggregated.tiny_engine import tiny_engine
from tests.test_docs import blocks

from dynbus.testing import TestKit, run


def program(mark: str) -> str:
    """The program of the guide with a mark."""
    texts: list[str] = [
        block.text
        for [block] in (one.values for one in blocks("python", mark))
        if block.document == "docs/guides/parts-of-your-own.md"
    ]
    [text] = texts
    return text


def mover_of_the_guide(folder: Path) -> Any:
    """The mover's module, whose files are in a folder; the test at its end is not run."""
    module: Any = ModuleType("file_mover")
    exec(compile(program("").rpartition("\nasyncio.run")[0], "guide", "exec"), module.__dict__)
    module.FOLDER = folder / "blocks"
    return module


def test_the_test_of_the_guide_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "file_mover", mover_of_the_guide(tmp_path))

    exec(compile(program("tests the mover"), "guide", "exec"), {"__name__": "guide"})


@pytest.mark.parametrize("through", ["call", "queue"])
def test_prompts_come_through_files_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    guide = mover_of_the_guide(tmp_path)
    engine = guide.Engine
    model = tiny_engine(tmp_path)
    settings = {**REMOTE, "through": through} if through == "queue" else REMOTE
    requests = [greedy(100), seeded(200, seed=3), greedy(33)]

    async def story() -> None:
        async with TestKit() as kit:
            prefill = await kit.start(engine, node="prefill", **model, disaggregation=settings)
            decode = await kit.start(engine, node="decode", **model, disaggregation=settings)
            for instance in (prefill, decode):
                await kit.caller.discovery.wait_for_instance(instance.name)
            wanted = await expected(kit, model, *requests)
            client = kit.client(engine, node="decode")

            assert [await tokens_of(client, request) for request in requests] == wanted

            actor: Any = decode.actor
            assert actor.figures.remote == {"": len(requests)}

            async def holds_nothing() -> bool:
                loads = [
                    await kit.client(engine, node=node).load_metrics()
                    for node in ("prefill", "decode")
                ]
                return not any(load.kv_active_blocks for load in loads)

            await eventually(holds_nothing, what="no block is held")
            assert list(guide.FOLDER.iterdir()) == []

    run(story())
