"""A tenant that asks for far more than its part leaves another's first tokens where they were."""

from __future__ import annotations

from random import Random
from typing import Final

import numpy as np

from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.engine import MockConfig, MockEngine

CONFIG: Final = MockConfig(max_num_seqs=128, max_num_batched_tokens=2048, blocks=32768)
SECONDS: Final = 40.0
SHARE: Final = 25.0
"""Requests a second of each of two tenants that load an engine to about nine tenths."""


def arrivals(tenant: str, rate: float, random: Random) -> list[tuple[float, str, GenerateRequest]]:
    now, made = 0.0, list[tuple[float, str, GenerateRequest]]()
    while (now := now + random.expovariate(rate)) < SECONDS:
        prompt = [random.randrange(1 << 16) for _ in range(random.randint(100, 700))]
        asked = GenerateRequest(prompt, random.randint(20, 140), cache_salt=tenant, ignore_eos=True)
        made.append((now, f"{tenant} {len(made)}", asked))
    return made


def first_tokens(rates: dict[str, float]) -> dict[str, list[float]]:
    """Seconds until the first token of each tenant's requests, of those that came to one."""
    engine = MockEngine(CONFIG)
    random = Random(1)
    coming = sorted(one for tenant, rate in rates.items() for one in arrivals(tenant, rate, random))
    coming.reverse()
    arrived: dict[str, float] = {}
    waits: dict[str, list[float]] = {tenant: [] for tenant in rates}
    now = 0.0
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
        for name in (output.request_id for output in step.outputs):
            if name in arrived:
                waits[name.partition(" ")[0]].append(now - arrived.pop(name))
    return waits


def test_fifty_times_its_part_does_not_keep_another_tenant_waiting() -> None:
    quiet = first_tokens({"a": SHARE, "b": SHARE})
    flooded = first_tokens({"a": 10 * SHARE, "b": SHARE})

    p99 = [float(np.percentile(waits["b"], 99)) for waits in (quiet, flooded)]

    print(p99, [float(np.median(w["b"])) for w in (quiet, flooded)], len(flooded["b"]), len(quiet["b"]), len(flooded["a"]), len(quiet["a"]))
    assert len(flooded["b"]) >= 0.98 * len(quiet["b"])
    assert p99[1] <= 1.5 * p99[0]
