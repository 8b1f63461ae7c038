"""The tokens of one sequence, and the hashes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter import block_hashes, sequence_hashes, token_bytes


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
        sequence_hashes, block_hashes: of the blocks that were asked for by `hash_to`.

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
        if as_array is None:
            # It would be found out too late, when they are hashed.
            token_bytes(prompt)
        self._prompt = prompt if as_array is None else as_array
        self.token_ids = list(prompt)
        self.length = len(self.token_ids)
        self.block_hashes: list[int] = []
        self.sequence_hashes: list[int] = []

    def append(self, token_id: int) -> None:
        """Add a token at the end."""
        self.token_ids.append(token_id)
        self.length += 1

    def hash_to(self, blocks: int) -> None:
        """Have the hashes of the first `blocks` blocks, which are complete."""
        known, size = len(self.block_hashes), self._block_size
        if blocks <= known:
            return
        begin, end = known * size, blocks * size
        within = end <= len(self._prompt)
        self._hash(self._prompt[begin:end] if within else self.token_ids[begin:end])

    def _hash(self, tokens: Sequence[int] | NDArray[np.uint32]) -> None:
        """Append the hashes of the complete blocks of these tokens, which follow those hashed."""
        added: list[int] = block_hashes(
            tokens, self._block_size, lora_name=self._lora_name, salt=self._salt
        ).tolist()
        self.block_hashes += added
        self._chain(tokens, added)

    def _chain(self, tokens: Sequence[int] | NDArray[np.uint32], added: list[int]) -> None:
        """Append the sequence hashes of these blocks."""
        hashes = self.sequence_hashes
        hashes += sequence_hashes(added, hashes[-1] if hashes else None).tolist()


class SecretSequence(TokenSequence):
    """A sequence that shares a block with another one only where their tokens are the same.

    An attacker who knows how the hashes for routers are made can make two that collide. So the
    sequence hashes, by which an engine finds its blocks, are made with a key; to others they are
    numbers.

    Args:
        key: of the engine, at most 64 bytes that nobody else knows.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        block_size: int,
        *,
        key: bytes,
        as_array: NDArray[np.uint32] | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
    ) -> None:
        self._keyed = blake2b(digest_size=_HASH, key=key)
        # What is absent is the same as what is empty, as in the hashes of blocks.
        named = [(each or "").encode() for each in (lora_name, salt)]
        self._root = b"".join(len(each).to_bytes(_HASH, "little") + each for each in named)
        super().__init__(prompt, block_size, as_array=as_array, lora_name=lora_name, salt=salt)

    def _chain(self, tokens: Sequence[int] | NDArray[np.uint32], added: list[int]) -> None:
        hashes, keyed = self.sequence_hashes, self._keyed
        data, size = token_bytes(tokens), 4 * self._block_size
        before = hashes[-1].to_bytes(_HASH, "little") if hashes else self._root
        for begin in range(0, len(added) * size, size):
            state = keyed.copy()
            state.update(before + data[begin : begin + size])
            before = state.digest()
            hashes.append(int.from_bytes(before, "little"))


_HASH: Final = 8
"""Bytes of a hash."""
