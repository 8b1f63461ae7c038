"""`OpenModel`: one model, ready for requests: its text, its router and its client."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from dynbus.actors.calling.clients import EndpointClient
from dynbus.actors.calling.relay import Relay
from dynbus.bus.context import current_context
from dynbus.bus.errors import Draining
from dynbus.bus.protocol.tokens import random_id
from dynbus.kvrouter import KvRouter
from dynbus.llm.models.card import ModelCard, ModelType
from dynbus.llm.openai.answers import AnswerHead
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.text.text_model import TextModel

from .preparing import ModelLimits, Prepared, prepare
from .serving import Completion, Part, RequestTiming, Sink, TextCompletion, TokenCompletion


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A request for a completion.

    Attributes:
        request: what it asks for.
        body: all of it, for engines that take text.
        around: what stands around each chunk of a stream.
        cache_salt: requests share cached blocks only where it is the same.
    """

    request: ChatRequest | CompletionRequest
    body: msgspec.Raw
    around: tuple[bytes, bytes]
    cache_salt: str | None = None


class OpenModel:
    """One model, ready for requests.

    Attributes:
        card: what it says of itself.
        router: None where requests do not go by what is cached.
    """

    def __init__(
        self,
        card: ModelCard,
        text: TextModel | None,
        limits: ModelLimits,
        client: EndpointClient,
        router: KvRouter | None,
        relay: Relay[Part, bytes],
    ) -> None:
        self.card = card
        self.router = router
        self._text = text
        self._client = client
        self._relay = relay
        self._limits = limits

    def __repr__(self) -> str:
        return f"<OpenModel {self.card.name} at {self.card.endpoint}>"

    @property
    def takes_chat(self) -> bool:
        """Whether it can be asked for chats."""
        if self.card.type & ModelType.Backend:
            return self._text is not None and self._text.template is not None
        return bool(self.card.type & ModelType.Chat)

    async def prepare(self, inquiry: Inquiry, sink: Sink, timing: RequestTiming) -> Completion:
        """A request as engines take it, whose answer will go to the sink.

        Raises:
            BadRequest: it does not fit the model.
            DynbusError: its conversation is refused, or the model's template does not work.
        """
        request = inquiry.request
        if self._text is None:
            return TextCompletion(
                inquiry.body, sink, timing, streams=request.streams, around=inquiry.around
            )
        return TokenCompletion(await self._prepare(self._text, inquiry), sink, timing)

    async def begin(self, completion: Completion) -> None:
        """Send a request to an engine; its answer goes to the sink from now on.

        Its id, deadline, metadata and trace are those of the context that this is called in.

        Raises:
            DynbusError: it could not be sent.
        """
        try:
            await completion.begin(self._relay, self._client)
        except Draining as error:
            # Its router was closed with it, or the last of its instances drains.
            raise Draining(
                f"the model {self.card.name} goes away; ask again", started=False
            ) from error

    async def _prepare(self, text: TextModel, inquiry: Inquiry) -> Prepared:
        request = inquiry.request
        context = current_context()
        answer_id = context.id if context is not None else random_id()
        is_chat = isinstance(request, ChatRequest)
        head = AnswerHead(
            f"{'chatcmpl' if is_chat else 'cmpl'}-{answer_id}",
            int(time.time()),
            request.model,
            is_chat,
            request.include_usage,
            request.continuous_usage,
        )
        return await prepare(
            text,
            self._limits,
            request,
            head,
            around=inquiry.around if request.streams else None,
            cache_salt=inquiry.cache_salt,
        )
