"""What is asked of an engine that makes embeddings, and what it gives.

Whoever writes a worker by hand takes the same: a JSON object with `token_ids`, answered by one with
`embedding`.
"""

from __future__ import annotations

import sys
from array import array
from typing import Literal

import msgspec

Pooling = Literal["mean", "last"]
"""How the states of a text's tokens become one: their mean, or that of the last token."""


class EmbedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text to embed.

    Attributes:
        token_ids: the text, one token at least, each from 0 to 2^32 - 1.
        dimensions: numbers of the embedding; None for all that the model has. Fewer are its first
            ones, brought to length 1 again.
        lora_name: the adapter to use.
        cache_salt: requests share cached blocks only where it is the same.
        priority: a higher one is computed before a lower one.
    """

    token_ids: list[int]
    dimensions: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class Embedded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The embedding of a text.

    Attributes:
        embedding: numbers, or their bytes as float32 in little endian, which JSON has as base64:
            a quarter of the size.
        cached_tokens: of the text, found in the cache.
    """

    embedding: bytes | list[float]
    cached_tokens: int = 0

    @property
    def numbers(self) -> list[float]:
        """The embedding as numbers.

        Raises:
            ValueError: the bytes are no float32 numbers.
        """
        if isinstance(self.embedding, list):
            return self.embedding
        return _in_little_endian(array("f", self.embedding)).tolist()

    @property
    def data(self) -> bytes:
        """The embedding as float32 in little endian.

        Raises:
            ValueError, OverflowError: the bytes are no float32 numbers, or a number is too large.
        """
        if isinstance(self.embedding, list):
            return _in_little_endian(array("f", self.embedding)).tobytes()
        if len(self.embedding) % 4:
            raise ValueError(f"{len(self.embedding)} bytes are no float32 numbers")
        return self.embedding


def _in_little_endian(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
