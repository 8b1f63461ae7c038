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

from dynbus.llm.engine.scheduler import HashedSequence
from dynbus.llm.engine.tokens import TokenSequence

VOCABULARY: Final = 32_000
BASE: Final = 0x9E3779B97F4A7C15
GAMMA: Final = 0xD1342543DE82EF95
_MASK: Final = (1 << 64) - 1


class GrowingSequence(HashedSequence, Protocol):
    """The interface that the mock engine needs of a request's tokens."""

    def extend(self, count: int) -> list[int]:
        """Generate tokens; returns them, or nothing where only their number matters."""
        ...


def mix(value: int) -> int:
    """The finaliser of SplitMix64: a 64-bit number that looks random."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class MockSequence(TokenSequence):
    """Tokens that follow a prompt as they would in every other engine with this seed.

    Args:
        prompt, block_size, as_array, lora_name, salt: see `TokenSequence`.
        vocabulary: tokens are below it.

    Raises:
        ValueError: the prompt is empty, or a token does not fit.
    """

    def __init__(
        self,
        prompt: list[int],
        block_size: int,
        *,
        seed: int = 0,
        vocabulary: int = VOCABULARY,
        as_array: NDArray[np.uint32] | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
    ) -> None:
        tokens = np.array(prompt, dtype=np.uint32) if as_array is None else as_array
        super().__init__(prompt, block_size, as_array=tokens, lora_name=lora_name, salt=salt)
        self._state = rolling_state(tokens)
        self._salted = seed * GAMMA
        self._vocabulary = vocabulary

    def extend(self, count: int) -> list[int]:
        """Generate tokens; returns them."""
        state, salted, vocabulary = self._state, self._salted, self._vocabulary
        tokens: list[int] = []
        for _ in range(count):
            token = mix(state + salted) % vocabulary
            state = (state * BASE + token + 1) & _MASK
            tokens.append(token)
        self._state = state
        self.token_ids += tokens
        self.length += count
        return tokens


def rolling_state(tokens: NDArray[np.integer]) -> int:
    """The state of the token generator behind these tokens."""
    values = tokens.astype(np.uint64) + np.uint64(1)
    return int(np.sum(values[::-1] * _powers(len(values)), dtype=np.uint64))


def _powers(count: int) -> NDArray[np.uint64]:
    """The first powers of `BASE`, from 1 on; they are kept."""
    global _known_powers
    if len(_known_powers) < count:
        powers = np.full(max(count, 2 * len(_known_powers)), BASE, dtype=np.uint64)
        powers[0] = 1
        _known_powers = np.multiply.accumulate(powers)
    return _known_powers[:count]


_known_powers: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
