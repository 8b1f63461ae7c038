"""Requests to engines that make embeddings, and their results.

A worker that is written by hand takes the same: a JSON object with `token_ids`, answered by one
with `embedding`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Pooling = Literal["mean", "last"]
"""The way in which the states of a text's tokens become one: their mean, or that of the last
token.
"""


class EmbedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text to embed, or a pair of texts whose score is to be computed.

    Attributes:
        token_ids: the text, one token at least, each from 0 to 2^32 - 1.
        dimensions: numbers of the embedding; None for all that the model has. Fewer are its first
            ones, brought to length 1 again.
        lora_name: the adapter to use.
        cache_salt: requests share cached blocks only where it is the same.
        priority: a higher one is computed before a lower one.
        second_from: of a pair, the place of the first token that the tokenizer counts to the second
            text; None for one text, or where it tells them not apart.
    """

    token_ids: list[int]
    dimensions: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    second_from: int | None = None


class Embedded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The embedding of a text; of a pair whose score was asked for, a single number: that score.

    Attributes:
        embedding: numbers, or their bytes as float32 in little endian, which JSON has as base64:
            a quarter of the size.
        cached_tokens: of the text, found in the cache.
    """

    embedding: bytes | list[float]
    cached_tokens: int = 0

    def vector(self) -> NDArray[np.float32]:
        """The embedding as an array, of shape [dimensions].

        Raises:
            ValueError: it is empty, the bytes are no float32 numbers, or one is not finite.
        """
        given = self.embedding
        if isinstance(given, bytes):
            array = np.frombuffer(given, "<f4")
        else:
            with np.errstate(over="ignore"):
                array = np.array(given, "<f4")
        if not array.size or not np.isfinite(array).all():
            raise ValueError("an embedding has numbers, all of them finite")
        return array
