"""Token ids of requests to engines of text (servers behind a proxy), of which routers alone have
need.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final, NamedTuple, Protocol

import anyio
import msgspec

from dynbus import DynbusError, EndpointClient
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.text.text_model import TextModel

from .preparing import encoded_prompts

TOKENIZE: Final = "tokenize"
TOKENIZES_KEY: Final = "tokenizes"
"""The metadata key by which an engine of text announces that it tokenizes requests."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_read_tokens: Final = msgspec.json.Decoder(list[_TokenId]).decode

ASK_TIMEOUT: Final = 1.0
"""Seconds that an engine has to tell them; after that the request goes by load alone."""


class RoutedPrompt(NamedTuple):
    """The form in which a router sees a request of text; see `RequestFields`.

    Attributes:
        token_ids: none where nobody could tell them.
    """

    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None


class PromptReader(Protocol):
    """The reader of the tokens of a request."""

    async def token_ids(
        self, request: ChatRequest | CompletionRequest, body: msgspec.Raw
    ) -> Sequence[int]:
        """The tokens of its first prompt.

        Raises:
            DynbusError: they cannot be told.
        """
        ...


class OwnTokenizer:
    """Reads prompts with the tokenizer and the template of the model's card."""

    def __init__(self, text: TextModel) -> None:
        self._text = text

    async def token_ids(
        self, request: ChatRequest | CompletionRequest, body: msgspec.Raw
    ) -> Sequence[int]:
        return (await encoded_prompts(self._text, request))[0]


class EngineTokenizer:
    """Asks an engine of the model for the tokens of prompts.

    Args:
        client: of the endpoint `tokenize`.
    """

    def __init__(self, client: EndpointClient) -> None:
        self._client = client

    async def token_ids(
        self, request: ChatRequest | CompletionRequest, body: msgspec.Raw
    ) -> Sequence[int]:
        if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
            first = request.prompts()[0]
            if not isinstance(first, str):
                return first
        with anyio.move_on_after(ASK_TIMEOUT):
            data: bytes = await self._client.generate(body).raw()
            return _read_tokens(data)
        return ()


async def routed_prompt(
    reader: PromptReader,
    request: ChatRequest | CompletionRequest,
    body: msgspec.Raw,
    *,
    lora_name: str | None,
    cache_salt: str | None,
) -> RoutedPrompt:
    """The prompt that a router is to look at in place of a request.

    What cannot be told of it, an image for example, is left to the engine: it goes by load alone.
    """
    tokens: Sequence[int] = ()
    with suppress(DynbusError, msgspec.MsgspecError):
        tokens = await reader.token_ids(request, body)
    return RoutedPrompt(tokens, lora_name, cache_salt, request.limit)
