"""How a prefix is written on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.hashing import block_hashes


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix as it was asked for: by block hashes, or by token ids where these are None.

    Attributes:
        block_size: None for what the instances say.
    """

    hashes: Sequence[int] | None
    tokens: Sequence[int] | None
    block_size: int | None = None
    lora: str | None = None
    salt: str | None = None

    def block_hashes(self, block_size: int) -> NDArray[np.uint64]:
        """The hashes of its blocks.

        Raises:
            ValueError: a token id does not fit.
        """
        if self.hashes is not None:
            return np.array(self.hashes, dtype=np.uint64)
        return block_hashes(self.tokens or (), block_size, lora_name=self.lora, salt=self.salt)


def parse_prefix(words: Sequence[str]) -> tuple[list[int] | None, list[int] | None]:
    """The block hashes or, if it is a JSON array, the token ids that words say.

    Raises:
        ValueError: they are neither.
    """
    text = " ".join(words).strip()
    if text.startswith("["):
        try:
            tokens = msgspec.json.decode(text.encode(), type=list[int])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ValueError(f"it is no JSON array of token ids: {error}") from None
        if not all(0 <= token < 1 << 32 for token in tokens):
            raise ValueError("token ids are integers from 0 to 2^32 - 1")
        return None, tokens
    hashes = [_hash(word) for word in text.replace(",", " ").split()]
    if not hashes:
        raise ValueError("it is empty: give block hashes, or token ids as a JSON array")
    return hashes, None


def _hash(word: str) -> int:
    try:
        number = int(word, 0)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ValueError(
            f"{word!r} is no block hash: write a number below 2^64, hexadecimal ones with 0x; "
            "token ids are one JSON array"
        )
    return number
