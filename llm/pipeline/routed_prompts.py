"""Token ids of requests to engines of text (servers behind a proxy), of which routers alone have
need.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Final, NamedTuple, Protocol

import anyio
import msgspec

from dynbus import DynbusError, EndpointClient
from dynbus.llm.media.parts import ReadPart
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.text.text_model import TextModel

from .preparing import encoded_prompts

TOKENIZE: Final = "tokenize"
TOKENIZES_KEY: Final = "tokenizes"
"""The metadata key by which an engine of text announces that it tokenizes requests."""
STAND_INS_KEY: Final = "media_tokens"
"""The metadata key by which it announces which tokens stand for images and sounds there, with
commas between."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_read_tokens: Final = msgspec.json.Decoder(list[_TokenId]).decode

PlacedPart = tuple[str, int, int]
"""An image or a sound among tokens: its digest, the place of its first token, and how many stand
for it; see `RequestFields.objects`."""

ASK_TIMEOUT: Final = 1.0
"""Seconds that an engine has to tell them; after that the request goes by load alone."""


class RoutedPrompt(NamedTuple):
    """The form in which a router sees a request of text; see `RequestFields`.

    Attributes:
        token_ids: none where nobody could tell them.
        objects: the images and sounds among them.
    """

    token_ids: Sequence[int]
    objects: Sequence[PlacedPart] = ()
    lora_name: str | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None


class ReadPrompt(NamedTuple):
    """The tokens of a prompt, and the images and sounds among them.

    Attributes:
        objects: by their digests, which are part of the identity of the blocks that they are in.
    """

    token_ids: Sequence[int]
    objects: Sequence[PlacedPart] = ()


class PromptReader(Protocol):
    """The reader of the tokens of a request."""

    async def read(
        self,
        request: ChatRequest | CompletionRequest,
        body: msgspec.Raw,
        parts: Sequence[ReadPart],
    ) -> ReadPrompt:
        """The tokens of its first prompt.

        Args:
            request: with a text in place of each image and sound.
            parts: the images and sounds in it.

        Raises:
            DynbusError: they cannot be told.
        """
        ...


class OwnTokenizer:
    """Reads prompts with the tokenizer and the template of the model's card.

    How many tokens an image is there nobody says. In its place is a text with its digest: prompts
    with the same images begin alike, and what stands before them is as engines have it.

    Args:
        for_parts: reads prompts with images and sounds in its place; None where nobody can.
    """

    def __init__(self, text: TextModel, for_parts: PromptReader | None = None) -> None:
        self._text = text
        self._for_parts = for_parts

    async def read(
        self,
        request: ChatRequest | CompletionRequest,
        body: msgspec.Raw,
        parts: Sequence[ReadPart],
    ) -> ReadPrompt:
        if parts and self._for_parts is not None:
            with suppress(DynbusError, msgspec.MsgspecError):
                prompt = await self._for_parts.read(request, body, parts)
                if prompt.token_ids:
                    return prompt
        return ReadPrompt((await encoded_prompts(self._text, request))[0])


class EngineTokenizer:
    """Asks an engine of the model for the tokens of prompts.

    Args:
        client: of the endpoint `tokenize`.
        stand_ins: the tokens that stand for images and sounds, as engines announce them.
    """

    def __init__(self, client: EndpointClient, stand_ins: Collection[int] = ()) -> None:
        self._client = client
        self._stand_ins = stand_ins

    async def read(
        self,
        request: ChatRequest | CompletionRequest,
        body: msgspec.Raw,
        parts: Sequence[ReadPart],
    ) -> ReadPrompt:
        if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
            first = request.prompts()[0]
            if not isinstance(first, str):
                return ReadPrompt(first)
        with anyio.move_on_after(ASK_TIMEOUT):
            data: bytes = await self._client.generate(body).raw()
            token_ids = _read_tokens(data)
            digests = [part.digest for part in parts]
            return ReadPrompt(token_ids, placed(token_ids, digests, self._stand_ins))
        return ReadPrompt(())


def placed(
    token_ids: Sequence[int], digests: Sequence[str], stand_ins: Collection[int]
) -> list[PlacedPart]:
    """The places of images and sounds among the tokens of a prompt.

    Each is a run of tokens that stand for such. Where there are not as many runs as images, as with
    pictures that a model cuts up, all of them count as being in each: no two prompts with other
    images are taken for the same.

    Args:
        digests: of the images and sounds, in their order.
    """
    if not digests:
        return []
    runs: list[tuple[int, int]] = []
    begin = 0
    for stands_in, run in groupby(token_ids, stand_ins.__contains__):
        length = sum(1 for _ in run)
        if stands_in:
            runs.append((begin, length))
        begin += length
    if len(runs) == len(digests):
        return [(digest, *run) for digest, run in zip(digests, runs, strict=True)]
    first = runs[0][0] if runs else 0
    length = len(token_ids) - first
    return [(digest, first, length) for digest in dict.fromkeys(digests) if length]


def announced_stand_ins(metadata: Mapping[str, str]) -> frozenset[int]:
    """The tokens that an instance says stand for images and sounds."""
    words = metadata.get(STAND_INS_KEY, "").split(",")
    return frozenset(int(one) for one in words if one.isascii() and one.isdigit())


async def routed_prompt(
    reader: PromptReader,
    request: ChatRequest | CompletionRequest,
    body: msgspec.Raw,
    parts: Sequence[ReadPart] = (),
    *,
    lora_name: str | None,
    cache_salt: str | None,
) -> RoutedPrompt:
    """The prompt that a router is to look at in place of a request.

    Args:
        parts: the images and sounds in it.

    What cannot be told of it is left to the engine: it goes by load alone.
    """
    read = ReadPrompt(())
    with suppress(DynbusError, msgspec.MsgspecError):
        read = await reader.read(request, body, parts)
    return RoutedPrompt(read.token_ids, read.objects, lora_name, cache_salt, request.limit)
