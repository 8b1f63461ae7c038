"""The prompts of the benchmark, and how much of each every instance holds."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

PROMPTS = 64

Prompt: TypeAlias = NDArray[np.uint32]


class Workload(NamedTuple):
    """What all sides are given.

    Attributes:
        prompts: token ids; the first quarter is the same in all.
        held: blocks of each prompt that each instance holds, from the first on; of shape
            [prompts, instances].
    """

    prompts: list[Prompt]
    held: NDArray[np.int64]


def make_workload(instances: int, tokens: int, block_size: int) -> Workload:
    """The same for the same arguments."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1 << 17, tokens, dtype=np.uint32) for _ in range(PROMPTS)]
    for prompt in prompts[1:]:
        prompt[: tokens // 4] = prompts[0][: tokens // 4]
    return Workload(prompts, random.integers(0, tokens // block_size + 1, (PROMPTS, instances)))
