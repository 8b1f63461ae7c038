"""Requests for the tokens of a text, or the text of tokens, which take no engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import msgspec

from dynbus import DynbusError
from dynbus.llm.messages.errors import message_error
from dynbus.llm.messages.requests import chat_body, read_conversation
from dynbus.llm.openai.errors import BadRequest, ErrorAnswer, answer_of
from dynbus.llm.openai.requests import ChatRequest, chat_of
from dynbus.llm.openai.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    read_detokenize,
    read_tokenize,
)
from dynbus.llm.pipeline.models import SERVED
from dynbus.llm.pipeline.open_model import OpenModel
from dynbus.llm.pipeline.preparing import encoded_prompts
from dynbus.llm.pipeline.tokens import detokenize, tokenize

from .exchange import LONG_BODY, Exchange


class TokensExchange(Exchange):
    """A request that is answered by the tokenizer of a model."""

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return answer_of(error, request_id)

    async def _ask_tokenizer(self, name: str | None) -> OpenModel:
        """The model of a name, or the only one."""
        if name is None:
            known = self._shared.models.names
            tellable = self._shared.models_of(self._caller)
            if tellable is not None:
                known = [one for one in known if one in tellable]
            if len(known) != 1:
                among = ", ".join(known) or "none at present"
                raise BadRequest(f"model: say which; the models are: {among}", param="model")
            name = known[0]
        model, _ = await self._ask_for(name, SERVED)
        return model

    def _end_with(self, answer: msgspec.Struct) -> None:
        assert self._metrics is not None
        prepared = self._timing.prepared = time.perf_counter()
        self._metrics.preparing.observe(prepared - self._timing.began)
        self._writer.write([msgspec.json.encode(answer)])
        self._writer.end(None)


class TokenizeExchange(TokensExchange):
    """A request for the tokens of a text or a conversation."""

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._tokenize, read_tokenize(data))

    async def _tokenize(self, request: TokenizeRequest) -> None:
        model = await self._ask_tokenizer(request.model)
        self._end_with(await tokenize(model.card, model.text, request))


class DetokenizeExchange(TokensExchange):
    """A request for the text of tokens."""

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._detokenize, read_detokenize(data))

    async def _detokenize(self, request: DetokenizeRequest) -> None:
        model = await self._ask_tokenizer(request.model)
        self._end_with(await detokenize(model.text, request))


class TokenCount(msgspec.Struct, frozen=True):
    """The number of tokens of a conversation, as Anthropic tells it."""

    input_tokens: int


class InputTokens(TokenCount, frozen=True):
    """The number of tokens of a conversation, as OpenAI tells it."""

    object: Literal["response.input_tokens"] = "response.input_tokens"


class CountExchange(TokensExchange):
    """A request for how many tokens a conversation has."""

    async def _count(self, request: ChatRequest, answer: Callable[[int], TokenCount]) -> None:
        model = await self._ask_tokenizer(request.model)
        [prompt] = await encoded_prompts(model.text, request)
        self._end_with(answer(len(prompt)))


class MessagesCountExchange(CountExchange):
    """A request of Anthropic's for how many tokens a conversation has."""

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return message_error(error, request_id)

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._count, chat_of(chat_body(read_conversation(data))), TokenCount)


class InputCountExchange(CountExchange):
    """A request of OpenAI's for how many tokens the input of a response has."""

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._look_up, data)

    async def _look_up(self, data: bytes) -> None:
        api = await self._shared.response_api(self._caller.tenant, data, self._take_kept)
        is_long = api.goes_on or len(data) > LONG_BODY
        asked = await self._aside(api.read, data) if is_long else api.read(data)
        request = asked.request
        assert isinstance(request, ChatRequest), "a response is one of a chat"
        await self._count(request, InputTokens)
