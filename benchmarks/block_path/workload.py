"""The messages of an engine: prompts that are stored, outputs that grow, and all of it evicted."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE: Final = 16
PROMPT_BLOCKS: Final = 64
OUTPUT_BLOCKS: Final = 8
"""Of each prompt, which come one at a time."""
PROMPTS_PER_STEP: Final = 8
"""Of 1,024 tokens each, so that a step computes 8,192."""
SEQUENCES_PER_STEP: Final = 64
"""Of which one step stores or evicts a block."""
_HASHES: Final = 1 << 63
_TOKENS: Final = 128_000


class Workload(NamedTuple):
    """What the engine says, message by message.

    Attributes:
        prompts: blocks of prompts, 64 in an event.
        outputs: blocks of outputs, one in an event.
        evictions: of all of these, one in an event, from the end of each sequence on.
        tokens: of each prompt; of shape [prompts, tokens].
    """

    prompts: list[bytes]
    outputs: list[bytes]
    evictions: list[bytes]
    tokens: NDArray[np.uint32]


def make_workload(prompts: int) -> Workload:
    """The same for the same number of prompts, as vLLM 0.32 says it."""
    random = np.random.default_rng(1)
    blocks = PROMPT_BLOCKS + OUTPUT_BLOCKS
    shape = (prompts, blocks * BLOCK_SIZE)
    tokens = random.integers(0, _TOKENS, shape, dtype=np.uint32)
    hashes: list[list[int]] = random.integers(1, _HASHES, (prompts, blocks)).tolist()

    def stored(prompt: int, first: int, end: int) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": hashes[prompt][first:end],
            "parent_block_hash": hashes[prompt][first - 1] if first else None,
            "token_ids": tokens[prompt, first * BLOCK_SIZE : end * BLOCK_SIZE].tolist(),
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * (end - first),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def removed(prompt: int, at: int) -> dict[str, Any]:
        names = {"type": "BlockRemoved", "block_hashes": [hashes[prompt][at]]}
        return {**names, "medium": "GPU", "group_idx": 0}

    whole = [stored(prompt, 0, PROMPT_BLOCKS) for prompt in range(prompts)]
    grown: list[Any] = []
    gone: list[Any] = []
    for first in range(0, prompts, SEQUENCES_PER_STEP):
        sequences = range(first, min(first + SEQUENCES_PER_STEP, prompts))
        for at in range(PROMPT_BLOCKS, blocks):
            grown += [stored(prompt, at, at + 1) for prompt in sequences]
        for at in reversed(range(blocks)):
            gone += [removed(prompt, at) for prompt in sequences]
    return Workload(
        _messages(whole, PROMPTS_PER_STEP),
        _messages(grown, SEQUENCES_PER_STEP),
        _messages(gone, SEQUENCES_PER_STEP),
        tokens[:, : PROMPT_BLOCKS * BLOCK_SIZE],
    )


def _messages(events: list[Any], each: int) -> list[bytes]:
    return [
        msgspec.msgpack.encode([1.5, events[at : at + each], 0])
        for at in range(0, len(events), each)
    ]
