"""A model of a few rules, in place of one that is downloaded; it is asked as any other."""

import json
import re
from collections.abc import AsyncGenerator
from typing import Any

from dynbus import Actor, handler
from dynbus.llm import ModelInput, ModelType, register_llm

WORDS = ("order", "refund", "password")


class Rules(Actor, namespace="desk"):
    async def on_start(self) -> None:
        kinds = ModelType.Chat | ModelType.Embedding
        await register_llm(ModelInput.Text, kinds, self.generate, "rules", "rules")

    @handler
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        if "input" in request:
            vectors = [[one.lower().count(word) for word in WORDS] for one in request["input"]]
            data = [{"index": at, "embedding": one} for at, one in enumerate(vectors)]
            yield {"object": "list", "model": "rules", "data": data}
        else:
            choice = {"index": 0, "delta": answer(request), "finish_reason": "stop"}
            yield {"object": "chat.completion.chunk", "model": "rules", "choices": [choice]}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    system, *_, last = request["messages"]
    if "response_format" in request:
        return {"content": json.dumps({"allowed": "idiot" not in last["content"]})}
    number = re.search(r"order (\d+)", last["content"])
    if number and last["role"] == "user" and request.get("tools"):
        call = {"name": "find", "arguments": json.dumps({"number": int(number[1])})}
        return {"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": call}]}
    return {"content": last["content"] if last["role"] == "tool" else system["content"]}
