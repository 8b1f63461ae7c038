"""A tenant that asks for far more than its part leaves another's first tokens where they were."""

from __future__ import annotations

from random import Random
from typing import Final

import numpy as np

from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.engine import MockConfig, MockEngine

CONFIG: Final = MockConfig(max_num_seqs=128, max_num_batched_tokens=1024, blocks=32768)
SECONDS: Final = 12.0
SHARE: Final = 8.0
"""Requests a second of each of two tenants: a third of what an engine has for each."""


def arrivals(tenant: str, rate: float, random: Random) -> list[tuple[float, str, GenerateRequest]]:
    now, made = 0.0, list[tuple[float, str, GenerateRequest]]()
    while (now := now + random.expovariate(rate)) < SECONDS:
        prompt = [random.randrange(1 << 16) for _ in range(random.randint(100, 700))]
        asked = GenerateRequest(prompt, random.randint(20, 140), cache_salt=tenant, ignore_eos=True)
        made.append((now, f"{tenant} {len(made)}", asked))
    return made


def first_tokens(rates: dict[str, float]) -> tuple[dict[str, list[float]], float]:
    """Seconds until the first token of each tenant's requests, of those that came to one, and of
    the longest step."""
    engine = MockEngine(CONFIG)
    coming = sorted(
        one for tenant, rate in rates.items() for one in arrivals(tenant, rate, Random(tenant))
    )
    coming.reverse()
    arrived: dict[str, float] = {}
    waits: dict[str, list[float]] = {tenant: [] for tenant in rates}
    now = longest = 0.0
    while now < SECONDS:
        while coming and coming[-1][0] <= now:
            at, name, asked = coming.pop()
            arrived[name] = at
            engine.add(name, asked)
        if not engine.has_work:
            now = coming[-1][0] if coming else SECONDS
            continue
        step = engine.advance()
        now += step.duration
        longest = max(longest, step.duration)
        for name in (output.request_id for output in step.outputs):
            if name in arrived:
                waits[name.partition(" ")[0]].append(now - arrived.pop(name))
    return waits, longest


def test_far_more_than_its_part_does_not_keep_another_tenant_waiting() -> None:
    quiet, _ = first_tokens({"a": SHARE, "b": SHARE})
    flooded, longest = first_tokens({"a": 50 * SHARE, "b": SHARE})

    # One step runs as it comes, one finds that there is no room, and two compute prompts where
    # several come at once.
    assert np.percentile(flooded["b"], 99) <= 4 * longest
    assert np.median(flooded["b"]) <= 2 * np.median(quiet["b"])
    assert len(flooded["b"]) >= 0.98 * len(quiet["b"])
    # It has what the other does not use.
    assert len(flooded["a"]) > 3 * len(flooded["b"])
