"""The randomness of a simulation: what is drawn anywhere in the process comes from its seed."""

from __future__ import annotations

import os
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from dynbus.bus.protocol.random_ids import forget_drawn, jitter


@contextmanager
def seeded(seed: str) -> Generator[None]:
    """Draw from a seed in the block: `random`, `secrets`, `uuid`, `os.urandom`, and ids of the bus.

    For the whole process, so that no other thread may need unpredictable bytes meanwhile. The name
    of the process, which instances tell, is the same in every run too.
    """
    source: Any = random
    drawn = random.Random(f"{seed} bytes").randbytes
    states = random.getstate(), jitter.getstate()
    system, of_random, getpid = os.urandom, source._urandom, os.getpid
    random.seed(f"{seed} program")
    jitter.seed(f"{seed} jitter")
    # `secrets` draws by `random.SystemRandom`, which took the function at its import.
    os.urandom = source._urandom = drawn
    os.getpid = _one
    forget_drawn()
    try:
        yield
    finally:
        os.urandom, source._urandom, os.getpid = system, of_random, getpid
        random.setstate(states[0])
        jitter.setstate(states[1])
        forget_drawn()


def _one() -> int:
    return 1
