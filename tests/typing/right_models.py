"""Models as dependencies: everything here must pass mypy --strict and pyright strict."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import assert_type

from pydantic import BaseModel

from dynbus import Actor, Runtime, depends, handler
from dynbus.llm import FakeModel, Model, ModelClient, ModelStream, tool_call
from dynbus.testing import TestKit


class Verdict(BaseModel):
    fine: bool


class Judge(Actor, namespace="demo"):
    model = depends(Model("qwen", wait=10.0, priority=2))

    @handler
    async def judge(self, text: str) -> Verdict:
        assert_type(self.model, ModelClient)
        answer = await self.model.chat(text, response_format=Verdict, temperature=0.0)
        assert_type(answer.text, str)
        return assert_type(answer.parse(Verdict), Verdict)

    @handler
    async def words(self, text: str) -> AsyncGenerator[str, None]:
        stream = self.model.stream([{"role": "user", "content": text}], tools=[Judge.judge])
        assert_type(stream, ModelStream)
        async for chunk in stream:
            yield chunk.text


async def program(runtime: Runtime, kit: TestKit) -> None:
    model = assert_type(Model("qwen").client(runtime), ModelClient)
    assert_type((await model.embed(["a"])).vectors, list[list[float]])
    assert_type((await model.complete("a", max_tokens=3)).text, str)
    assert_type(await FakeModel.start(kit, "qwen", ["a", tool_call("b", c=1)]), FakeModel)
