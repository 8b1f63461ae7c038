"""A profile made of measurements, with where and when it was made."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from dynbus.llm.engine import EngineLimits
from dynbus.llm.mock.profile import EngineProfile, FittedRange
from dynbus.spi import usable_cores

from .batches import longest_request
from .bench import Measured
from .fitting import fit_costs


def make_profile(
    measured: Sequence[Measured],
    limits: EngineLimits,
    *,
    engine: str,
    model: str,
    how: str,
    context: int,
    block_bytes: int = 0,
) -> EngineProfile:
    """The profile of an engine, whose error is not known yet.

    Args:
        limits: of the engine.
        engine, model: their names.
        how: it was measured, as `EngineProfile.measured` has it.
        context: tokens of the longest request that was measured.
        block_bytes: of a block of its cache; 0 where that is not known.

    Raises:
        ValueError: nothing can be fitted.
    """
    costs, latency = fit_costs(measured)
    works = [work for each in measured for work in each.works]
    fitted = FittedRange(
        sequences=max(work.prompts + work.requests for work in works),
        prompt_tokens=max(1, max(work.prompt_tokens for work in works)),
        context_tokens=max(1, max(work.context_tokens for work in works)),
        context=longest_request(limits, context),
    )
    return EngineProfile(
        engine=engine,
        model=model,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        measured=how,
        block_size=limits.block_size,
        blocks=limits.blocks,
        max_num_seqs=min(limits.max_num_seqs, fitted.sequences),
        max_num_batched_tokens=min(limits.max_num_batched_tokens, fitted.prompt_tokens),
        context_length=fitted.context,
        block_bytes=block_bytes,
        latency=latency,
        costs=costs,
        range=fitted,
    )
