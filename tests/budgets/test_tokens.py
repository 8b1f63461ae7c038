"""The cost of a token from an engine's step to the socket of its client, in calls of functions."""

from __future__ import annotations

import asyncio
import json
import select
import socket

import uvloop
from benchmarks.serving.model import TEMPLATE, VOCABULARY, make_tokenizer
from tests.conditions import eventually
from tests.llm.http.served import FixedCatalog, card

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.engine.interface import Step
from dynbus.llm.engine.worker import EngineWorker
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.mock import MockConfig, MockEngine, Timing
from dynbus.llm.models.card import ModelCard
from dynbus.llm.text.guarded_tokenizer import GuardedTokenizer
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.text_model import TextModel

from .counting import CallCount, counting, hold, is_held

PATH = "a token from an engine's step to the socket"
ROUNDS = 3
"""At most: on a busy machine steps come late and then together, and a few messages carry two."""

STREAMS = 64
TOKENS = 120
STEP_MS = 25.0
"""Long enough for all that follows from a step to be done before the next, counted as it is."""


class MarkingEngine(MockEngine):
    """An engine that marks each step in which all streams have a token."""

    def __init__(self) -> None:
        super().__init__(
            MockConfig(
                vocabulary=VOCABULARY,
                kv_events=False,
                timing=Timing(prefill_ms=(1.0, 0.0, 0.0), decode_ms=(STEP_MS, 0.0, 0.0)),
            )
        )
        self.count: CallCount | None = None

    def step(self) -> Step:
        step = super().step()
        if self.count is not None and len(step.outputs) == STREAMS and not step.prefilled:
            self.count.mark()
        return step


class TokenWorker(EngineWorker, namespace="budget"):
    """Serves such an engine."""

    made: MarkingEngine

    def make_engine(self) -> MarkingEngine:
        self.made = MarkingEngine()
        return self.made


class WordCatalog(FixedCatalog):
    """A catalog of one model, whose tokens are words."""

    def __init__(self) -> None:
        super().__init__({"words": card("words", "budget.TokenWorker.generate")}, TEMPLATE)

    async def text_model(self, card: ModelCard) -> TextModel:
        made = make_tokenizer()
        end = made.token_to_id("<|im_end|>")
        assert end is not None
        tokenizer = GuardedTokenizer(
            made.to_str().encode(), eos_token_ids=[end], special_tokens={"eos_token": "<|im_end|>"}
        )
        return TextModel(
            card.name,
            tokenizer,
            ChatTemplate(TEMPLATE, model=card.name, special_tokens=tokenizer.special_tokens),
        )


def read_streams(port: int) -> int:
    """Ask for all streams at once and read them to their ends, in a thread that is not counted.

    Returns:
        How many tokens came.
    """
    body = json.dumps(
        {
            "model": "words",
            "messages": [{"role": "user", "content": "baba"}],
            "stream": True,
            "max_tokens": TOKENS,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    found: dict[socket.socket, bytearray] = {}
    for _ in range(STREAMS):
        made = socket.create_connection(("127.0.0.1", port), timeout=60)
        made.sendall(head.encode() + body)
        found[made] = bytearray()
    is_open = set(found)
    while is_open:
        ready, _, _ = select.select(is_open, [], [], 60)
        assert ready, "nothing came for a minute"
        for one in ready:
            data = one.recv(65536)
            found[one] += data
            if not data:
                is_open.remove(one)
                one.close()
    return sum(data.count(b'"content":" ') for data in found.values())


def test_a_token_from_an_engine_s_step_to_the_socket(nats_server: RunningServer) -> None:
    async def story() -> tuple[CallCount, int]:
        async with (
            Runtime.connect(nats_server.url) as far,
            Runtime.connect(nats_server.url) as near,
        ):
            worker = (await far.start(TokenWorker)).actor
            assert isinstance(worker, TokenWorker)
            settings = HttpSettings(port=0, grace=1.0)
            async with HttpFrontEnd(near, WordCatalog(), settings) as front_end:
                await eventually(lambda: bool(front_end.shared.models.served))
                port = int(front_end.url.rpartition(":")[2])
                with counting() as count:
                    worker.made.count = count
                    tokens = await asyncio.to_thread(read_streams, port)
            return count, tokens

    calls, count = 0.0, CallCount()
    for _ in range(ROUNDS):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            count, tokens = runner.run(story())
        assert tokens == STREAMS * TOKENS
        calls = count.between_marks() / STREAMS
        if is_held(PATH, calls):
            break
    hold(PATH, calls, count.shown(STREAMS * TOKENS))
