"""`OpenModel`: one model, ready for requests: its text, its router and its client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynbus import Draining, EndpointClient, Relay
from dynbus.kvrouter import KvRouter
from dynbus.llm.answers import AnswerFormat
from dynbus.llm.generation import Announced, Announcement, Session
from dynbus.llm.media.parts import ReadPart
from dynbus.llm.media.reader import MediaReader
from dynbus.llm.models.card import ModelCard, ModelType
from dynbus.llm.openai.api import asking_usage
from dynbus.llm.openai.embeddings import EmbeddingsFormat, EmbeddingsRequest
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.places import Place, at_own_place
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.openai.scores import RerankRequest, ScoreRequest, ScoresFormat
from dynbus.llm.parsing.output_parser import NewId
from dynbus.llm.text.text_model import TextModel
from dynbus.spi import random_id

from .announcing import Announcer
from .embedding import Embeddings, TextEmbeddings, prepare_embeddings
from .preparing import ModelLimits, prepare
from .routed_prompts import PromptReader, routed_prompt
from .scoring import prepare_scores, text_similarity
from .serving import Completion, Part, RequestTiming, Sink, TextCompletion, TokenCompletion


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A request for a completion.

    Attributes:
        request: what it asks for.
        body: all of it, for engines that take text.
        format: how it is answered.
        cache_salt: requests share cached blocks only where it is the same.
        shortens: see `prepare`; engines that take text get the limit as it is.
        new_id: what the ids of tool calls are made of.
        session: the conversation that goes on after it; engines that take text know of none.
        counts_usage: whether what it uses has to be known, also of an engine that takes text.
        places: of its parts, as its client has them; see `places_of`.
    """

    request: ChatRequest | CompletionRequest
    body: msgspec.Raw
    format: AnswerFormat
    cache_salt: str | None = None
    shortens: bool = False
    new_id: NewId = random_id
    counts_usage: bool = False
    session: Session | None = None
    places: Sequence[Place] = ()


class OpenModel:
    """One model, ready for requests.

    Args:
        text: of a model that takes tokens; None for one that takes text.
        prompts: reads the tokens of requests for a router, where that model takes text.
        announcer: tells engines which conversations go on soon; None where no router knows where
            they went.
        media: reads the images and sounds of requests.

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
        prompts: PromptReader | None = None,
        media: MediaReader | None = None,
        announcer: Announcer | None = None,
    ) -> None:
        self.card = card
        self.router = router
        self._text = text
        self._client = client
        self._relay = relay
        self._limits = limits
        self._prompts = prompts
        self._announcer = announcer
        self._media = media or MediaReader()

    def __repr__(self) -> str:
        return f"<OpenModel {self.card.name} at {self.card.endpoint}>"

    @property
    def answers(self) -> ModelType:
        """The uses of the model: chats, completions, embeddings, scores."""
        types = self.card.type & ~(ModelType.Backend | ModelType.Chat)
        if self.card.type & ModelType.Backend:
            types |= ModelType.Completions
        return types | ModelType.Chat if self.takes_chat else types

    @property
    def takes_chat(self) -> bool:
        """True if it can be asked for chats."""
        if self.card.type & ModelType.Backend:
            return self._text is not None and self._text.template is not None
        return bool(self.card.type & ModelType.Chat)

    async def prepare(self, inquiry: Inquiry, sink: Sink, timing: RequestTiming) -> Completion:
        """A request as engines take it, whose answer will go to the sink.

        Raises:
            BadRequest: it does not fit the model.
            DynbusError: its conversation is refused, or the model's template does not work.
        """
        try:
            return await self._prepare(inquiry, sink, timing)
        except BadRequest as error:
            raise at_own_place(error, inquiry.places) from None

    async def _prepare(self, inquiry: Inquiry, sink: Sink, timing: RequestTiming) -> Completion:
        request = inquiry.request
        if self._text is None:
            return await self._prepare_text(inquiry, sink, timing)
        if isinstance(request, ChatRequest):
            await self._media.named(request, self.card.name, ())
        prepared = await prepare(
            self._text,
            self._limits,
            request,
            inquiry.format,
            cache_salt=inquiry.cache_salt,
            shortens=inquiry.shortens,
            new_id=inquiry.new_id,
            session=inquiry.session,
        )
        return TokenCompletion(prepared, sink, timing)

    async def _prepare_text(
        self, inquiry: Inquiry, sink: Sink, timing: RequestTiming
    ) -> TextCompletion:
        """A request for an engine that takes text."""
        request, body = inquiry.request, inquiry.body
        parts: Sequence[ReadPart] = ()
        text_bytes = len(body)
        if isinstance(request, ChatRequest):
            named = await self._media.named(request, self.card.name, self.card.modalities)
            if named:
                request, body, parts, text_bytes = await self._media.read(request, body, named)
        routed_as = None
        if self._prompts is not None:
            routed_as = await routed_prompt(
                self._prompts,
                request,
                body,
                parts,
                lora_name=self._limits.lora_name,
                cache_salt=inquiry.cache_salt,
            )
        asks = inquiry.counts_usage and request.streams
        return TextCompletion(
            asking_usage(bytes(body)) if asks else body,
            sink,
            timing,
            streams=request.streams,
            format=inquiry.format,
            routed_as=routed_as,
            restarts=self.card.idempotent,
            tells_usage=request.include_usage or not asks,
            prompt_bytes=text_bytes,
        )

    async def prepare_embeddings(
        self,
        request: EmbeddingsRequest,
        body: msgspec.Raw,
        format: EmbeddingsFormat,
        cache_salt: str | None,
    ) -> Embeddings[Any] | TextEmbeddings:
        """A request for embeddings as engines take it.

        Args:
            body: all of it, for engines that take text.
            cache_salt: texts share cached blocks only where it is the same.

        Raises:
            BadRequest: it does not fit the model.
            InvalidRequest: a text cannot be encoded.
        """
        if self._text is None:
            return TextEmbeddings(body)
        return await prepare_embeddings(
            self._text, self._limits, request, format, cache_salt=cache_salt
        )

    async def prepare_scores(
        self,
        request: ScoreRequest | RerankRequest,
        body: msgspec.Raw,
        format: ScoresFormat,
        cache_salt: str | None,
    ) -> Embeddings[Any] | TextEmbeddings:
        """A request for scores of texts as engines take it: for scores, or for the embeddings that
        scores are made of.

        Args:
            body: all of it, for engines that take text.
            cache_salt: texts share cached blocks only where it is the same.

        Raises:
            BadRequest: it does not fit the model.
            InvalidRequest: a text cannot be encoded.
        """
        computes = bool(self.card.type & ModelType.Score)
        if self._text is None:
            return (
                TextEmbeddings(body) if computes else text_similarity(request, format, cache_salt)
            )
        return await prepare_scores(
            self._text, self._limits, request, format, computes=computes, cache_salt=cache_salt
        )

    async def embed(self, embeddings: Embeddings[Any] | TextEmbeddings) -> bytes:
        """Have engines make embeddings, or scores; the answer.

        Raises:
            DynbusError: they could not be made.
        """
        try:
            return await embeddings.run(self._client)
        except Draining as error:
            raise self._going_away() from error

    @property
    def text(self) -> TextModel:
        """Its tokenizer and its template.

        Raises:
            BadRequest: it has none here.
        """
        if self._text is None:
            raise BadRequest(
                f"the model {self.card.name} takes text: it has no tokenizer here", param="model"
            )
        return self._text

    async def announce(self, session: str, announcement: Announcement) -> Announced:
        """Have the engine to which a conversation went make its blocks ready; see `Announcer`.

        Raises:
            DynbusError: the engine did not answer, or does not work.
        """
        if self._announcer is None:
            return Announced()
        return await self._announcer.announce(session, announcement)

    async def begin(self, completion: Completion) -> None:
        """Send a request to an engine; its answer goes to the sink from now on.

        Its id, deadline, metadata and trace are those of the context that this is called in.

        Raises:
            DynbusError: it could not be sent.
        """
        try:
            await completion.begin(self._relay, self._client)
        except Draining as error:
            raise self._going_away() from error

    def _going_away(self) -> Draining:
        # Its router was closed with it, or the last of its instances drains.
        return Draining(f"the model {self.card.name} goes away; ask again", started=False)
