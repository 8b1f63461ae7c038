"""The agent example: a model that calls a handler, is told of a mistake, and answers."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from dynbus.llm import FakeModel, tool_call
from dynbus.testing import TestKit, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent" / "actors.py"


def test_the_agent_looks_an_order_up_before_it_answers() -> None:
    actors = runpy.run_path(str(EXAMPLE))
    orders, agent = actors["Orders"], actors["Agent"]
    answers = [tool_call("find", number=9), tool_call("find", number=7), "It was sent on Monday."]

    async def story() -> tuple[str, list[dict[str, Any]]]:
        async with TestKit() as kit:
            fake = await FakeModel.start(kit, "qwen", answers)
            await kit.start(orders)
            await kit.start(agent)
            return await kit.client(agent).ask("Where is order 7?"), fake.requests

    answer, requests = run(story())

    assert answer == "It was sent on Monday."
    told = [one["content"] for one in requests[-1]["messages"] if one["role"] == "tool"]
    assert told == ["error: there is no order 9", "sent on Monday"]
    assert len(EXAMPLE.read_text().splitlines()) <= 40
