"""The tokens of one request, as the engine sees them: how many, and the hashes of their blocks.

The next token is a function of the seed and of all tokens before it, through a hash that rolls
over them:

    state(tokens) = (... ((t0 + 1) * B + (t1 + 1)) * B + ...) mod 2^64
    next token    = mix(state + seed * G) mod vocabulary

with the finaliser of SplitMix64 as `mix`. So a request that is continued, with the prompt and
the tokens accepted so far as its prompt, has the same rest.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter.hashing import SEED, block_hashes, sequence_hashes

VOCABULARY: Final = 32_000
BASE: Final = 0x9E3779B97F4A7C15
GAMMA: Final = 0xD1342543DE82EF95
_MASK: Final = (1 << 64) - 1


class Sequence(Protocol):
    """What the scheduler needs of a request's tokens.

    Attributes:
        length: the tokens so far.
        sequence_hashes, block_hashes: of the complete blocks that were asked for by `hash_to`;
            those of the prompt from the beginning.
    """

    length: int
    sequence_hashes: list[int]
    block_hashes: list[int]

    def extend(self, count: int) -> list[int]:
        """Generate tokens; returns them, or nothing where only their number matters."""
        ...

    def hash_to(self, blocks: int) -> None:
        """Have the hashes of the first `blocks` blocks, which are complete."""
        ...


def mix(value: int) -> int:
    """The finaliser of SplitMix64: a 64-bit number that looks random."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class TokenSequence:
    """A sequence of token ids.

    Args:
        tokens: the prompt; of shape [length], below 2^32.

    Raises:
        ValueError: the prompt is empty, or a token does not fit.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        block_size: int,
        *,
        seed: int = 0,
        vocabulary: int = VOCABULARY,
    ) -> None:
        if not len(tokens):
            raise ValueError("the prompt is empty: an engine needs one token at least")
        hashes = block_hashes(tokens, block_size)
        self.length = len(tokens)
        self.block_hashes: list[int] = hashes.tolist()
        self.sequence_hashes: list[int] = sequence_hashes(hashes).tolist()
        self._block_size = block_size
        # The tokens behind the last block that is hashed.
        self._tail: list[int] = tokens[len(hashes) * block_size :].tolist()
        self._state = rolling_state(tokens)
        self._salt = seed * GAMMA
        self._vocabulary = vocabulary

    def extend(self, count: int) -> list[int]:
        state, salt, vocabulary = self._state, self._salt, self._vocabulary
        tokens: list[int] = []
        for _ in range(count):
            token = mix(state + salt) % vocabulary
            state = (state * BASE + token + 1) & _MASK
            tokens.append(token)
        self._state = state
        self._tail += tokens
        self.length += count
        return tokens

    def hash_to(self, blocks: int) -> None:
        missing = blocks - len(self.block_hashes)
        if missing <= 0:
            return
        taken = missing * self._block_size
        added: list[int] = block_hashes(self._tail[:taken], self._block_size).tolist()
        del self._tail[:taken]
        self.block_hashes += added
        chain(self.sequence_hashes, added)


def chain(hashes: list[int], blocks: list[int]) -> None:
    """Append the sequence hashes of blocks to those of what is before them."""
    for block in blocks:
        if hashes:
            pair = hashes[-1].to_bytes(8, "little") + block.to_bytes(8, "little")
            block = xxh3_64_intdigest(pair, SEED)
        hashes.append(block)


def rolling_state(tokens: NDArray[np.integer]) -> int:
    """The state of the token generator behind these tokens."""
    values = tokens.astype(np.uint64) + np.uint64(1)
    powers = np.full(len(values), BASE, dtype=np.uint64)
    powers[-1] = 1
    powers = np.multiply.accumulate(powers[::-1])[::-1]
    return int(np.sum(values * powers, dtype=np.uint64))
