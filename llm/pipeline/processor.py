"""`Processor`: an actor of the user's between a front end and the engines of a model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final

import anyio
import msgspec

from dynbus import Actor, ConfigError, Context, Unavailable, handler
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.models.register import register_llm
from dynbus.llm.openai.answers import BARE
from dynbus.llm.openai.api import format_of
from dynbus.llm.openai.requests import chat_of, completion_of
from dynbus.llm.text.text_model import TextModel
from dynbus.spi import ComponentName, Grant, random_id

from . import RoutingChoice
from .models import Models
from .open_model import Inquiry
from .serving import RequestTiming
from .waiting import WaitingChunks

MODEL_TIMEOUT: Final = 10.0
"""Seconds that a model behind has to be there."""


class Processor(Actor, abstract=True):
    """Serves a model of its own, by asking the model behind it.

    A subclass gives it a namespace and overrides `process`:

        class Polite(Processor, namespace="llm"):
            async def process(self, request):
                if "messages" in request:
                    request["messages"].insert(0, {"role": "system", "content": "Be polite."})
                async for chunk in self.ask(request):
                    yield chunk

    Args:
        model: the name of the model behind it.
        serve_as: the name by which front ends offer what it makes of it.
        routing: how its requests find an engine, see `Models`.

    Raises:
        ConfigError: both names are the same.
    """

    __dynbus_calls_all__ = True

    def __init__(self, model: str, serve_as: str, routing: RoutingChoice = "auto") -> None:
        if model == serve_as:
            raise ConfigError(
                f"serve_as={serve_as!r} is the model that is asked, and a processor cannot ask "
                "itself: give it a name of its own"
            )
        self._model = model
        self._serve_as = serve_as
        self._routing: RoutingChoice = routing
        self._catalog: Catalog | None = None
        self._models: Models | None = None
        self._exits = AsyncExitStack()

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.permissions import asking_models, registering_models

        return [
            *super().__dynbus_grants__(address, namespaces),
            *asking_models(namespaces),
            *registering_models(address),
        ]

    async def on_start(self) -> None:
        async with AsyncExitStack() as exits:
            self._catalog = await exits.enter_async_context(Catalog(self.runtime))
            self._models = await exits.enter_async_context(
                Models(self.runtime, self._catalog, routing=self._routing, only=self._model)
            )
            self._exits = exits.pop_all()
        await register_llm(
            ModelInput.Text,
            ModelType.Chat | ModelType.Completions,
            self.generate,
            self._serve_as,
            self._serve_as,
            # What the model behind takes is known when it is asked.
            modalities=None,
        )

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()

    # How long a chunk may take is the engine's to say, whose limits hold.
    @handler(concurrency=None, idle_timeout=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """OpenAI's requests in, its chunks out; one whole answer where no stream is asked for."""
        async with aclosing(self.process(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def process(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The answer to a request; for subclasses, which call `ask` for that of the model."""
        return self.ask(request)

    async def text_model(self) -> TextModel:
        """The tokenizer and the chat template of the model behind, such as to count tokens by.

        Raises:
            NoInstances: there is no model of that name within 10 seconds.
            ValueError: that model takes text, and its tokenizer is not known here.
            Unavailable: the processor is not started, or the tokenizer cannot be read now.
        """
        if self._catalog is None:
            raise Unavailable("the processor is not started")
        kind = ModelType.Chat | ModelType.Completions
        card = await self._catalog.wait_for(self._model, kind, timeout=MODEL_TIMEOUT)
        return await self._catalog.text_model(card)

    async def ask(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks with which the model behind answers, or its whole answer.

        They name the model that the request names.

        Args:
            request: for a chat where it has `messages`, for a completion elsewhere.

        Raises:
            BadRequest: the request is not usable.
            DynbusError: how its answer failed.
        """
        if self._models is None:
            raise Unavailable("the processor is not started")
        is_chat = "messages" in request
        read = (chat_of if is_chat else completion_of)(request)
        kind = ModelType.Chat if is_chat else ModelType.Completions
        opened = await self._models.get(self._model, kind | ModelType.Backend)
        salt = request.get("cache_salt")
        context = Context.current()
        request_id = context.id if context is not None else random_id()
        inquiry = Inquiry(
            read,
            msgspec.Raw(msgspec.json.encode({**request, "model": self._model})),
            format_of(read, request_id, frame=BARE),
            salt if isinstance(salt, str) else None,
        )
        waiting = WaitingChunks()
        completion = await opened.prepare(inquiry, waiting, RequestTiming(time.perf_counter()))
        try:
            await opened.begin(completion)
            while (chunk := await waiting.take(completion)) is not None:
                yield msgspec.json.decode(chunk)
        finally:
            completion.cancel()
