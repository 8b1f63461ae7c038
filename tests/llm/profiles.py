"""A profile of an engine that nobody measured, for tests."""

from __future__ import annotations

from dynbus.llm.mock.profile import EngineProfile, FittedRange, HeldOutError, StepCosts


def made_profile(*, held_out: float | None = None) -> EngineProfile:
    """An engine of 4 requests at a time: 1 ms for each in a step, 0.1 ms for each prompt token, and
    1 us for each token of context.

    Args:
        held_out: all errors of a run that was held out; None for no such run.
    """
    errors: list[HeldOutError] = []
    if held_out is not None:
        errors.append(HeldOutError(100, 0.5, held_out, held_out, held_out, held_out))
    return EngineProfile(
        engine="e",
        model="m",
        measured_at="2026-11-29T00:00:00+00:00",
        machine="nowhere",
        measured="steps",
        block_size=16,
        blocks=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        context_length=1024,
        block_bytes=4096,
        costs=StepCosts(
            sequences=[(1, 0.001), (4, 0.004)],
            prompt_tokens=[(256, 0.0256)],
            attention=1e-8,
            context_tokens=1e-6,
        ),
        range=FittedRange(sequences=4, prompt_tokens=256, context_tokens=4096, context=1024),
        held_out=errors,
    )
