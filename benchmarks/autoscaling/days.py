"""Days that are drawn: arrivals whose rate rises and falls as over a day, with peaks of their own.

A day passes in two hours, so that its slopes are twelve times as steep as those of a real one.
"""

from __future__ import annotations

import math
from random import Random
from typing import Final

import numpy as np

from dynbus.llm.replay import Trace, TraceRequest

DAY: Final = 7200.0
"""Seconds of a drawn day."""
BLOCK: Final = 64


def draw_day(seed: int, *, peak: float, seconds: float = DAY) -> Trace:
    """A day of requests, the same for the same seed.

    Args:
        peak: requests each second at the busiest hour, without its bursts.
    """
    random = Random(seed)
    night = random.uniform(0.02, 0.3)
    noon = random.uniform(0.4, 0.6)
    sharpness = random.uniform(1.0, 3.0)
    # (when, how long, how much more)
    bursts = [
        (random.random(), random.uniform(0.01, 0.05), random.uniform(0.2, 0.6)) for _ in range(3)
    ]
    prompt, output = random.uniform(500, 3000), random.uniform(80, 300)

    def rate(at: float) -> float:
        wave = (1 + math.cos(2 * math.pi * (at - noon))) / 2
        more = sum(much for when, long, much in bursts if when <= at < when + long)
        high: float = peak * (night + (1 - night) * wave**sharpness) * (1 + more)
        return high

    most = peak * 3
    now, requests = 0.0, list[TraceRequest]()
    while True:
        # Thinning (Lewis and Shedler 1979): arrivals of a rate that changes.
        now += random.expovariate(most)
        if now >= seconds:
            break
        if random.random() * most > rate(now / seconds):
            continue
        number = len(requests)
        prompt_tokens = max(1, min(16_000, round(random.lognormvariate(math.log(prompt), 0.6))))
        output_tokens = max(1, min(2_000, round(random.expovariate(1 / output))))
        blocks = prompt_tokens // BLOCK
        hashes = (np.arange(blocks, dtype=np.uint64) + np.uint64(number * 1024 + 1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        requests.append(
            TraceRequest(
                f"r{number}",
                number + 1,
                now,
                prompt_tokens,
                output_tokens,
                np.zeros(0, dtype=np.int64),
                hashes,
            )
        )
    return Trace(requests, BLOCK)
