"""The place where a prompt is computed: here, beside the tokens that are decoded, or elsewhere.

Pure: it knows the request, the load as it was last seen, and what it found saturated before.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from dynbus.llm.generation import GenerateRequest

from .settings import DisaggregationSettings

BUSY_QUEUE_FACTOR: Final = 2
"""The factor by which a queue may be longer for a decode instance that is busy itself."""

BUSY_MARGIN: Final = 0.1
"""The amount by which the load of a busy decode instance has to fall before it counts as free."""


class PrefillReason(StrEnum):
    """The reason why a prompt is computed where it is."""

    LOCAL_MODE = "local_mode"
    """The settings say so."""
    REMOTE_MODE = "remote_mode"
    """The settings say so."""
    SEVERAL_CONTINUATIONS = "several_continuations"
    """They go on from one prompt, which is handed over once."""
    ADAPTER = "adapter"
    """Its blocks are those of a LoRA adapter, which the prefill instances may not have."""
    STRUCTURED = "structured"
    """Its output has a form, which this engine makes from the beginning only."""
    NO_PREFILL = "no_prefill"
    """No prefill instance is there; with one it might be computed elsewhere."""
    SHORT_PROMPT = "short_prompt"
    """Little of it is not in the own cache."""
    IDLE_DECODE = "idle_decode"
    """Nothing runs here that it would hold up."""
    QUEUE_FULL = "queue_full"
    """Too many prompts wait for prefill instances."""
    TOKENS_FULL = "tokens_full"
    """Too many tokens wait for prefill instances."""
    LONG_PROMPT = "long_prompt"
    """Much of it is to be computed, and prefill instances have room."""
    BUSY_DECODE = "busy_decode"
    """The queue is long, and this instance is busier still."""


class PromptSize(NamedTuple):
    """The size of a prompt and the part of it that is to be computed.

    Attributes:
        prompt_tokens: all of the prompt.
        cached_tokens: of its beginning that the own cache holds.
        stays: why it cannot be computed elsewhere; None where it can.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    stays: PrefillReason | None = None

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)


class PrefillLoad(NamedTuple):
    """The load of both sides, as far as it is known.

    Attributes:
        instances: prefill instances that take prompts.
        queue_length: prompts that wait for any of them.
        queued_tokens: tokens of these prompts; 0 where that is not known.
        decode_running: requests that the decode instance runs.
        decode_load: from 0 to 1, the greater share of its slots or its blocks that is in use.
    """

    instances: int
    queue_length: int = 0
    queued_tokens: int = 0
    decode_running: int = 0
    decode_load: float = 0.0


class Saturation(NamedTuple):
    """The limits that were exceeded at the last decision, and count so until the load is clearly
    less.

    Attributes:
        queue, tokens: at the prefill instances.
        decode: of the decode instance itself.
    """

    queue: bool = False
    tokens: bool = False
    decode: bool = False


class PrefillDecision(NamedTuple):
    """The decision where a prompt is computed.

    Attributes:
        remote: on a prefill instance.
        reason: why.
        prompt, load: what was known.
        saturation: for the next decision.
    """

    remote: bool
    reason: PrefillReason
    prompt: PromptSize
    load: PrefillLoad
    saturation: Saturation

    def describe(self) -> str:
        """The decision with the figures behind it, for people."""
        where = "remote" if self.remote else "local"
        prompt, load = self.prompt, self.load
        return (
            f"{where}: {self.reason.replace('_', ' ')} ({prompt.uncached_tokens} of "
            f"{prompt.prompt_tokens} tokens to compute, {load.queue_length} prompts with "
            f"{load.queued_tokens} tokens wait for {load.instances} prefill instances, decode load "
            f"{load.decode_load:.2f})"
        )


def decide(
    settings: DisaggregationSettings,
    prompt: PromptSize,
    load: PrefillLoad,
    saturation: Saturation = Saturation(),  # noqa: B008 - a frozen named tuple
) -> PrefillDecision:
    """Decide where a prompt is computed.

    Args:
        saturation: of the decision before.
    """
    now = _saturation(settings, load, saturation)
    remote, reason = _choose(settings, prompt, load, now)
    return PrefillDecision(remote, reason, prompt, load, now)


def why_it_stays(request: GenerateRequest, *, forms: bool) -> PrefillReason | None:
    """The reason why the prompt of a request cannot be computed elsewhere; None where it can.

    Args:
        forms: whether the own engine makes an output that has a form behind a prompt of another.
    """
    if request.n != 1:
        return PrefillReason.SEVERAL_CONTINUATIONS
    if request.lora_name:
        return PrefillReason.ADAPTER
    if request.structured is not None and (request.generated or not forms):
        return PrefillReason.STRUCTURED
    return None


def _choose(
    settings: DisaggregationSettings, prompt: PromptSize, load: PrefillLoad, now: Saturation
) -> tuple[bool, PrefillReason]:
    uncached = prompt.uncached_tokens
    if prompt.stays is not None:
        return False, prompt.stays
    if settings.mode == "local":
        return False, PrefillReason.LOCAL_MODE
    if settings.mode == "auto":
        if uncached <= settings.local_prompt_tokens:
            return False, PrefillReason.SHORT_PROMPT
        if load.decode_running <= 0 and uncached <= settings.idle_local_prompt_tokens:
            return False, PrefillReason.IDLE_DECODE
    # What would not go anyway is no reason to have prefill instances.
    if load.instances <= 0:
        return False, PrefillReason.NO_PREFILL
    if settings.mode == "remote":
        return True, PrefillReason.REMOTE_MODE
    if now.queue:
        return False, PrefillReason.QUEUE_FULL
    if now.tokens:
        return False, PrefillReason.TOKENS_FULL
    if load.queue_length >= settings.max_queue_length * load.instances:
        return True, PrefillReason.BUSY_DECODE
    return True, PrefillReason.LONG_PROMPT


def _saturation(
    settings: DisaggregationSettings, load: PrefillLoad, before: Saturation
) -> Saturation:
    busy_from = settings.busy_decode_load - (BUSY_MARGIN if before.decode else 0.0)
    busy = load.decode_running > 0 and load.decode_load >= busy_from
    room = max(load.instances, 1) * (BUSY_QUEUE_FACTOR if busy else 1)

    def too_much(waiting: int, limit: int, was: bool) -> bool:
        return waiting >= limit or (was and waiting > limit * settings.resume_share)

    tokens = settings.max_queued_tokens * room
    return Saturation(
        queue=too_much(load.queue_length, settings.max_queue_length * room, before.queue),
        tokens=tokens > 0 and too_much(load.queued_tokens, tokens, before.tokens),
        decode=busy,
    )
