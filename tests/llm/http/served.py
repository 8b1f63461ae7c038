"""A front end on a real socket, before engines that do as their prompts say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import CHATML, tiny_guarded, tiny_tokenizer

from dynbus import Actor, InvalidRequest, Overloaded, context, handler
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.generation import FinishReason, Generated, GenerateRequest, TokenLogprob
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.card import ModelCard, ModelInput
from dynbus.llm.models.catalog import ServedModel
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.text_model import TextModel
from dynbus.testing import TestKit


class ScriptedEngine(Actor, namespace="test"):
    """Answers with what follows `say` in the prompt, a token an item.

    Attributes:
        made: tokens of answers without an end.
    """

    def __init__(self) -> None:
        self.made = 0
        self.requests: list[GenerateRequest] = []
        self.texts: list[EmbedRequest] = []
        self.running = self.most_running = 0
        self.holds = False
        self.left = asyncio.Event()
        self.metadata: list[Mapping[str, str]] = []
        self.ids: list[str] = []

    @handler(concurrency=None)
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generated, None]:
        """Tokens, or a failure."""
        self.requests.append(request)
        self.metadata.append(context().metadata)
        self.ids.append(context().id)
        text = tiny_tokenizer().decode(request.token_ids, special=True)
        # The last word of whoever speaks last.
        command = text.partition("<|im_end|>\n<|im_start|>assistant")[0]
        command = command.rpartition("<|im_start|>user\n")[2]
        self.running += 1
        try:
            async for item in self._answer(command, request):
                yield item
        finally:
            self.running -= 1
            self.left.set()

    async def _answer(
        self, command: str, request: GenerateRequest
    ) -> AsyncGenerator[Generated, None]:
        word, _, rest = command.partition(" ")
        if word == "fail":
            raise ValueError("a secret of the engine")
        if word == "refuse":
            raise InvalidRequest("this prompt is refused")
        if word == "overloaded":
            raise Overloaded("the engine is full", retry_after=2.5)
        if word == "silent":
            await asyncio.sleep(600)
        if word == "late":
            await asyncio.sleep(6)
        most = request.max_tokens or 1000
        ids = tiny_tokenizer().encode(rest) or [5]
        if word in ("endless", "break"):
            count = 0
            while word == "endless" or count < 3:
                yield Generated([ids[0]], cached_tokens=0 if count == 0 else None)
                count += 1
                self.made += 1
                await asyncio.sleep(0.005)
            raise ValueError("a secret of the engine")
        if word == "flood":
            for _ in range(5_000):
                yield Generated(ids * 50)
            yield Generated([], finish_reason="stop")
            return
        for index in range(request.index, request.index + request.n):
            # What was made elsewhere already is not made again.
            made = [*ids, 2][request.generated :]
            for place, token_id in enumerate(made[:most]):
                ended = place + 1 == min(most, len(made))
                reason: FinishReason | None = (
                    ("stop" if token_id == 2 else "length") if ended else None
                )
                wanted = request.sampling.logprobs
                logprob = TokenLogprob(token_id, -0.5, [(token_id, -0.5), (5, -1.5)][: wanted or 0])
                if word == "slowly":
                    await asyncio.sleep(0.02)
                yield Generated(
                    [token_id],
                    index=index,
                    finish_reason=reason,
                    cached_tokens=3 if place == 0 and index == request.index else None,
                    logprobs=[logprob] if wanted is not None else None,
                )

    @handler(concurrency=None)
    async def embed(self, request: EmbedRequest) -> Embedded:
        """Numbers that tell of the text, or a failure."""
        self.texts.append(request)
        self.metadata.append(context().metadata)
        word = tiny_tokenizer().decode(request.token_ids).partition(" ")[0]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if word == "fail":
                raise ValueError("a secret of the engine")
            if word == "overloaded":
                raise Overloaded("the engine is full", retry_after=0.01)
            if word == "silent" or (word == "hold" and self.holds):
                await asyncio.sleep(600)
            if word == "broken":
                return Embedded([float("nan")])
            await asyncio.sleep(0)
            numbers = [float(len(request.token_ids)), float(request.token_ids[0]), 0.1]
            return Embedded(numbers[: request.dimensions], cached_tokens=1)
        finally:
            self.running -= 1
            self.left.set()

    @handler(concurrency=None)
    async def score(self, request: EmbedRequest) -> Embedded:
        """How many tokens a pair has; not one number where it ends with a failure."""
        self.texts.append(request)
        text = tiny_tokenizer().decode(request.token_ids)
        return Embedded([float(len(request.token_ids))] * (2 if text.endswith("fails") else 1))


class PlainEngine(Actor, namespace="test"):
    """A worker by hand: it takes a JSON object and gives others."""

    @handler
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The tokens of `ok`."""
        for token_id in tiny_tokenizer().encode("ok then"):
            yield {"token_ids": [token_id], "extra": 1}
        yield {"token_ids": [2], "finish_reason": "stop"}


class TextEngine(Actor, namespace="test"):
    """An engine that takes OpenAI's requests and gives its chunks.

    Attributes:
        deltas: what its answer says.
        finish_reason: of its answer.
        usage: as it tells it in a last chunk, also unasked.
        vectors: how many embeddings it makes; None for one for each text.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.usage: dict[str, Any] | None = None
        self.deltas: list[dict[str, Any]] = [{"content": "two"}, {"content": " words"}]
        self.finish_reason = "stop"
        self.vectors: int | None = None

    @handler
    async def chat(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Two words, unless told otherwise."""
        asked: Any = request
        self.requests.append(asked)
        head = {
            "id": "chatcmpl-text",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": asked["model"],
        }
        for place, delta in enumerate(self.deltas, start=1):
            is_last = place == len(self.deltas)
            yield {
                **head,
                "choices": [
                    {
                        "index": 0,
                        "delta": delta,
                        "finish_reason": self.finish_reason if is_last else None,
                    }
                ],
            }
        usage = self.usage
        options: Any = request.get("stream_options")
        if usage is None and options and options.get("include_usage"):
            usage = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
        if usage is not None:
            yield {**head, "choices": [], "usage": usage}

    @handler
    async def embed(self, request: dict[str, Any]) -> dict[str, Any]:
        """What it was asked for."""
        self.requests.append(request)
        given: Any = request["input"]
        count = 1 if isinstance(given, str) else len(given)
        told = [
            {"object": "embedding", "index": index, "embedding": [0.5]}
            for index in range(self.vectors or count)
        ]
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        return {"object": "list", "data": told, "model": request["model"], "usage": usage}

    @handler
    async def score(self, request: dict[str, Any]) -> dict[str, Any]:
        """No results."""
        self.requests.append(request)
        return {"results": [], "usage": {"prompt_tokens": 3}}


def card(name: str, endpoint: str, **fields: Any) -> ModelCard:
    """A card; of a model that takes tokens unless it says otherwise."""
    known: dict[str, Any] = {
        "input": ModelInput.Tokens,
        "types": ["chat", "completions"],
        "context_length": 2000,
        "eos_token_ids": [2],
    }
    return ModelCard(name=name, endpoint=endpoint, **{**known, **fields})


CARDS = {
    one.name: one
    for one in (
        card("tiny", "test.ScriptedEngine.generate"),
        card("plain", "test.PlainEngine.generate"),
        card("bare", "test.ScriptedEngine.generate", types=["completions"]),
        card("text", "test.TextEngine.chat", input=ModelInput.Text, types=["chat"]),
    )
}


class FixedCatalog:
    """A catalog that a test fills."""

    problem = ""

    def __init__(self, cards: Mapping[str, ModelCard] = CARDS, template: str = CHATML) -> None:
        self.cards = dict(cards)
        self.registered: dict[str, tuple[ComponentName, ...]] = {}
        self.template = template
        self._news = asyncio.Event()

    async def changes(self) -> AsyncGenerator[list[ServedModel], None]:
        """The cards, and again after each `change`."""
        while True:
            yield [ServedModel(card, 1) for card in self.cards.values()]
            await self._news.wait()
            self._news.clear()

    def change(self, cards: Mapping[str, ModelCard]) -> None:
        """Have other cards from now on."""
        self.cards = dict(cards)
        self._news.set()

    async def text_model(self, card: ModelCard) -> TextModel:
        """The tiny tokenizer with ChatML."""
        tokenizer = tiny_guarded()
        template = ChatTemplate(
            self.template, model=card.name, special_tokens=tokenizer.special_tokens
        )
        return TextModel(card.name, tokenizer, template)


class Served:
    """A front end, and what stands behind it.

    Attributes:
        engine: the scripted one.
    """

    def __init__(self, kit: TestKit, front_end: HttpFrontEnd, catalog: FixedCatalog) -> None:
        self.kit = kit
        self.front_end = front_end
        self.catalog = catalog
        self.url = front_end.url
        self.port = int(front_end.url.rpartition(":")[2])
        self.engine = self._actor(ScriptedEngine)
        self.text = self._actor(TextEngine)

    def _actor(self, kind: type[Any]) -> Any:
        return next(one.actor for one in self.kit.started.values() if type(one.actor) is kind)


@asynccontextmanager
async def served(
    cards: Mapping[str, ModelCard] = CARDS,
    *,
    template: str = CHATML,
    telemetry: Telemetry | None = None,
    flight: bool = False,
    **settings: Any,
) -> AsyncGenerator[Served]:
    """A front end at a free port, and its engines, on a bus in memory."""
    async with TestKit(telemetry=telemetry, flight=flight) as kit:
        for engine in (ScriptedEngine, PlainEngine, TextEngine):
            await kit.start(engine)
        catalog = FixedCatalog(cards, template)
        chosen: dict[str, Any] = {"port": 0, "grace": 1.0, **settings}
        config = HttpSettings(**chosen)
        async with HttpFrontEnd(kit.caller, catalog, config) as front_end:
            await eventually(lambda: len(front_end.shared.models.served) == len(cards))
            yield Served(kit, front_end, catalog)
