"""The tokens of one sequence, and the hashes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter.hashing import SEED, block_hashes, sequence_hashes


class TokenSequence:
    """Token ids of a prompt and what follows it.

    Args:
        prompt: ids from 0 to 2^32 - 1, one at least.
        as_array: the same, where it is known: hashing it takes much less time.
        block_size: tokens of a block.
        lora_name, salt: blocks are the same only where these are.

    Attributes:
        token_ids: all so far.
        length: how many.
        sequence_hashes, block_hashes: of the complete blocks of the prompt, and of those that were
            asked for by `hash_to`.

    Raises:
        ValueError: the prompt is empty, or a token does not fit.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        block_size: int,
        *,
        as_array: NDArray[np.uint32] | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
    ) -> None:
        if not len(prompt):
            raise ValueError("the prompt is empty: an engine needs one token at least")
        self._block_size = block_size
        self._lora_name, self._salt = lora_name, salt
        tokens = prompt if as_array is None else as_array
        hashes = block_hashes(tokens, block_size, lora_name=lora_name, salt=salt)
        self.token_ids = list(prompt)
        self.length = len(self.token_ids)
        self.block_hashes: list[int] = hashes.tolist()
        self.sequence_hashes: list[int] = sequence_hashes(hashes).tolist()

    def append(self, token_id: int) -> None:
        """Add a token at the end."""
        self.token_ids.append(token_id)
        self.length += 1

    def hash_to(self, blocks: int) -> None:
        """Have the hashes of the first `blocks` blocks, which are complete."""
        known, size = len(self.block_hashes), self._block_size
        if blocks <= known:
            return
        tokens = self.token_ids[known * size : blocks * size]
        added: list[int] = block_hashes(
            tokens, size, lora_name=self._lora_name, salt=self._salt
        ).tolist()
        self.block_hashes += added
        _chain(self.sequence_hashes, added)


_PAIR: Final = 8
"""Bytes of each of the two hashes that make the next one."""


def _chain(hashes: list[int], blocks: list[int]) -> None:
    """Append the sequence hashes of blocks to those of what is before them."""
    for block in blocks:
        if hashes:
            pair = hashes[-1].to_bytes(_PAIR, "little") + block.to_bytes(_PAIR, "little")
            block = xxh3_64_intdigest(pair, SEED)
        hashes.append(block)
