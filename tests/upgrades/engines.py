"""A model's engine, and who asks it, run by either of two versions."""

from __future__ import annotations

import asyncio
import signal as signals
import sys

import msgspec

from dynbus import Runtime
from dynbus.kvrouter import open_router
from dynbus.llm import Model, ModelWorker

NAMESPACE = "upgrade"
WORDS = 200
SLOW = 0.1


class Engine(ModelWorker, namespace=NAMESPACE):
    """A mock with the text of a model, and a cache whose events routers follow."""


async def serve(runtime: Runtime, instance_id: str) -> None:
    await runtime.start(Engine, instance_id=instance_id, engine="mock")
    print("serves", flush=True)


async def serve_slowly(runtime: Runtime, name: str) -> None:
    """Serve a model of a component of its own, whose streams take seconds."""
    await runtime.start(Engine, node=name, engine="mock", model_name=name, speedup_ratio=SLOW)
    print("serves", flush=True)


async def ask(runtime: Runtime, *documents: str) -> None:
    """Ask about each document; prints the tokens of each prompt, and how many of them were there
    already."""
    model = Model("mock", wait=30.0).client(runtime)
    asked: list[list[int]] = []
    for document in documents:
        answer = await model.chat(f"{document} " * WORDS, max_tokens=4)
        assert answer.usage is not None
        cached = (answer.usage.prompt_tokens_details or {})["cached_tokens"]
        asked.append([answer.usage.prompt_tokens, cached])
    print(f"asked {msgspec.json.encode(asked).decode()}", flush=True)


SERVING = {one.__name__: one for one in (serve, serve_slowly)}


async def main(role: str, url: str, *arguments: str) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signals.SIGTERM, ended.set)
    async with Runtime.connect(url, name=role) as runtime:
        if role in SERVING:
            await SERVING[role](runtime, *arguments)
            await ended.wait()
            return
        # It stays, and takes the snapshots of the index.
        async with open_router(runtime, Engine):
            await ask(runtime, *arguments)
            await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
