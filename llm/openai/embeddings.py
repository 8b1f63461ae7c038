"""OpenAI's `/v1/embeddings`: requests are read and checked, and answers told."""

from __future__ import annotations

import time
from base64 import b64encode
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.llm.answers import Usage

from .requests import Count, Priority, read_body, texts_of

MAX_INPUTS: Final = 2048


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `/v1/embeddings`. Fields that nobody here knows are passed over.

    Attributes:
        add_special_tokens: whether texts get what the tokenizer puts around them.
    """

    model: str
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    # What engines know beyond OpenAI's fields, by the names that others use too.
    add_special_tokens: bool | None = None
    priority: Priority | None = None

    def texts(self) -> list[str | list[int]]:
        """The inputs to embed, each as text or as token ids.

        Raises:
            BadRequest: there is nothing, or something else, or too much.
        """
        return texts_of(self.input, "input", MAX_INPUTS)


_decoder: Final = msgspec.json.Decoder(EmbeddingsRequest)


def read_embeddings(data: bytes) -> EmbeddingsRequest:
    """The request for embeddings that a body holds.

    Raises:
        BadRequest: it is none.
    """
    request = read_body(_decoder, data)
    request.texts()
    return request


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    """The tokens of a request's texts."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> Self:
        """The tokens that were used, as they are told."""
        return cls(usage.prompt, usage.prompt + usage.completion)


class OneEmbedding(msgspec.Struct, frozen=True):
    """The embedding of one text: numbers, or float32 in little endian as base64."""

    embedding: list[float] | str
    index: int
    object: Literal["embedding"] = "embedding"


class EmbeddingsAnswer(msgspec.Struct, frozen=True):
    """An answer of `/v1/embeddings`.

    Attributes:
        data: `OneEmbedding` for each text, as JSON.
    """

    id: str
    created: int
    model: str
    data: list[msgspec.Raw]
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class EmbeddingsFormat:
    """The format of the answer to one request for embeddings.

    Args:
        request_id: of the request.
    """

    def __init__(self, request: EmbeddingsRequest, request_id: str) -> None:
        self._model = request.model
        self._in_base64 = request.encoding_format == "base64"
        self.id = f"embd-{request_id}"

    def embedding(self, index: int, vector: NDArray[np.float32]) -> msgspec.Raw:
        """One embedding of the answer; they may be many, and are told one by one."""
        encoded: list[float] | str = (
            b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
            if self._in_base64
            else vector.tolist()
        )
        return msgspec.Raw(msgspec.json.encode(OneEmbedding(encoded, index)))

    def whole(self, embeddings: list[msgspec.Raw], usage: Usage) -> bytes:
        """The answer, of the embeddings in their order."""
        used, now = EmbeddingsUsage.of(usage), int(time.time())
        return msgspec.json.encode(EmbeddingsAnswer(self.id, now, self._model, embeddings, used))
