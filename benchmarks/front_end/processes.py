"""The processes that are measured: an engine, a front end before it, and a reader of the bus alone.

The engine has one token for each of its streams every `--interval` seconds, and hands over a step
in one call, as engines do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator

import anyio
import tokenizers
import uvloop
from tests.conditions import eventually
from tokenizers import decoders, models, pre_tokenizers

from dynbus import Actor, Relay, Reply, Runtime, handler, push_each
from dynbus.actors import Arrival
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.card import ModelCard, ModelInput
from dynbus.llm.models.catalog import ServedModel
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.text_model import TextModel
from dynbus.llm.text.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Stepping(Actor, namespace="bench"):
    """An engine whose steps are a clock's."""

    def __init__(self, interval: float = 0.05) -> None:
        self._interval = interval
        self._open: dict[Reply[Generated], int] = {}

    @handler(concurrency=None, timeout=None)
    async def generate(self, request: GenerateRequest, reply: Reply[Generated]) -> None:
        """A token at once, and then one with each step."""
        reply.push(Generated([65], cached_tokens=0))
        self._open[reply] = request.max_tokens or 1_000_000
        try:
            await reply.ended()
        finally:
            self._open.pop(reply, None)

    async def on_start(self) -> None:
        self.runtime.background.start(self._step, name="steps")

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        item, last = Generated([66]), Generated([66], finish_reason="length")
        while True:
            due += self._interval
            await anyio.sleep(max(0.0, due - loop.time()))
            pairs: list[tuple[Reply[Generated], Generated]] = []
            for reply, left in list(self._open.items()):
                self._open[reply] = left - 1
                pairs.append((reply, last if left <= 2 else item))
            push_each(pairs)
            for reply, one in pairs:
                if one is last:
                    self._open.pop(reply, None)
                    reply.end()


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({one: index for index, one in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw)


class OneModel:
    """A catalog with the engine above."""

    problem = ""

    async def changes(self) -> AsyncGenerator[list[ServedModel], None]:
        """The one model, once."""
        card = ModelCard(
            name="bench",
            endpoint="bench.Stepping.generate",
            input=ModelInput.Tokens,
            types=["chat", "completions"],
        )
        yield [ServedModel(card, 1)]
        await anyio.sleep_forever()

    async def text_model(self, card: ModelCard) -> TextModel:
        """A token for each byte."""
        return TextModel("bench", byte_tokenizer(), ChatTemplate(TEMPLATE, model="bench"))


async def engine(url: str, interval: float) -> None:
    async with Runtime.connect(url, name="engine") as runtime:
        await runtime.start(Stepping, interval=interval)
        print(json.dumps({"ready": True}), flush=True)
        await anyio.sleep_forever()


async def front(url: str, port: int) -> None:
    async with (
        Runtime.connect(url, name="front") as runtime,
        HttpFrontEnd(runtime, OneModel(), HttpSettings(port=port)) as opened,
    ):
        await eventually(lambda: bool(opened.shared.models.names))
        print(json.dumps({"ready": opened.url}), flush=True)
        await anyio.sleep_forever()


async def relay(url: str, streams: int) -> None:
    """Read streams as the front end does, and do nothing with them."""
    count = 0

    def take(arrivals: list[Arrival[int, Generated]]) -> None:
        nonlocal count
        count += sum(len(one.items) for one in arrivals)

    async with Runtime.connect(url, name="relay") as runtime:
        client = runtime.client(Stepping, wait=5.0)
        request = GenerateRequest(token_ids=[1] * 32)
        times: list[float] = []
        for _ in range(50):
            begun = time.perf_counter()
            stream = client.generate(request)
            await anext(stream)
            times.append(time.perf_counter() - begun)
            await stream.aclose()
        with Relay(take) as opened:
            for number in range(streams):
                await opened.open(client.generate(request), number)
            print(json.dumps({"ready": True, "first_ms": sorted(times)[25] * 1000}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps({"count": count, "line": line.strip()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("url")
    parser.add_argument("--interval", type=float, default=0.05)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.role == "engine":
        uvloop.run(engine(options.url, options.interval))
    elif options.role == "front":
        uvloop.run(front(options.url, options.port))
    else:
        uvloop.run(relay(options.url, options.streams))


if __name__ == "__main__":
    main()
