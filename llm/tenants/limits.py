"""`Limits`: what a tenant may use, stated as `name=value` wherever it is stated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import ConfigError
from dynbus.spi import suggestion

REQUESTS: Final = "requests_per_minute"
PROMPT: Final = "prompt_tokens_per_minute"
COMPLETION: Final = "completion_tokens_per_minute"
CACHED: Final = "cached_tokens_per_minute"
BUDGET: Final = "tokens_per_month"
RUNNING: Final = "requests_at_a_time"
STREAMS: Final = "open_streams"

PER_MINUTE: Final = (REQUESTS, PROMPT, COMPLETION, CACHED)
PER_MONTH: Final = (BUDGET,)
HELD: Final = (RUNNING, STREAMS)
"""Those whose amounts are given back, in place of being used up."""

COUNTED: Final = (*PER_MINUTE, *PER_MONTH, *HELD)
"""The limits that hold for all front ends of a bus together."""

UNKNOWN_COMPLETION: Final = 1024
"""Tokens that an answer is taken to have where its request says no most."""

MOST: Final = 2**53
"""The largest number that any reader of JSON takes as it is."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a tenant; None for none.

    Attributes:
        requests_per_minute: requests in a minute, also those that fail later.
        prompt_tokens_per_minute: tokens of prompts that no cache has.
        completion_tokens_per_minute: tokens of answers.
        cached_tokens_per_minute: tokens of prompts that a cache has.
        tokens_per_month: tokens of prompts, cached or not, and of answers, in a month by UTC.
        requests_at_a_time: requests that run.
        open_streams: resumable streams that are being made.
        kept_answers: answers to requests with an `Idempotency-Key` that each front end keeps.
        max_prompt_tokens: tokens of one prompt.
        max_priority: the highest priority that a request may ask for.
        models: the models that it may ask, with commas between.
    """

    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None
    completion_tokens_per_minute: int | None = None
    cached_tokens_per_minute: int | None = None
    tokens_per_month: int | None = None
    requests_at_a_time: int | None = None
    open_streams: int | None = None
    kept_answers: int | None = None
    max_prompt_tokens: int | None = None
    max_priority: int | None = None
    models: tuple[str, ...] | None = None

    @property
    def counted(self) -> Mapping[str, int]:
        """Those that hold for all front ends of a bus together, by name."""
        known = ((name, getattr(self, name)) for name in COUNTED)
        return {name: value for name, value in known if value is not None}

    @property
    def of_batches(self) -> Limits:
        """Those that hold for batches too, which fill what interactive requests leave."""
        return Limits(
            tokens_per_month=self.tokens_per_month,
            max_prompt_tokens=self.max_prompt_tokens,
            models=self.models,
        )

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return " ".join(f"{name}={_text(value)}" for name, value in given if value is not None)


NO_LIMITS: Final = Limits()


class Quota(NamedTuple):
    """Limits, and who is held to them: a tenant with all of its keys, or one of these keys alone.

    Attributes:
        name: of its ledger. That of a key has a `/`, which no name of a tenant has.
        whose: as clients are told it.
    """

    name: str
    whose: str
    limits: Limits


def tenant_quota(tenant: str, limits: Limits) -> Quota:
    """That of a tenant."""
    return Quota(tenant, f"the tenant {tenant}", limits)


def key_quota(tenant: str, key: str, limits: Limits) -> Quota:
    """That of a key, by its id."""
    return Quota(f"{tenant}/{key}", "this key", limits)


def quotas_of(
    tenant: str, limits: Limits | None, key: str = "", key_limits: Limits | None = None
) -> tuple[Quota, ...]:
    """The quotas of a request, that of its key first; only those that limit anything.

    Args:
        limits: of the tenant; None for none.
        key: the id of the key.
        key_limits: of that key alone; None for none.
    """
    quotas = (
        key_quota(tenant, key, key_limits or NO_LIMITS),
        tenant_quota(tenant, limits or NO_LIMITS),
    )
    return tuple(one for one in quotas if one.limits != NO_LIMITS)


def models_of(quotas: Iterable[Quota]) -> tuple[str, ...] | None:
    """The models that all of some quotas let ask; None for all."""
    models: tuple[str, ...] | None = None
    for quota in quotas:
        named = quota.limits.models
        if named is not None:
            models = named if models is None else tuple(one for one in models if one in named)
    return models


def _text(value: int | tuple[str, ...]) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def read_limits(words: Iterable[str]) -> Limits:
    """The limits that words state: `name=value` each.

    Raises:
        ConfigError: a name or a value is none.
    """
    given: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        names = Limits.__struct_fields__
        if name in names and not sign:
            example = "ONE,OTHER" if name == "models" else "60"
            raise ConfigError(f"{name} has no value: write {name}={example}")
        if name not in names:
            raise ConfigError(
                f"{word[:80]!r} states no limit{suggestion(name, names)}; the limits are: "
                f"{', '.join(names)}, each as name=value"
            )
        if name in given:
            raise ConfigError(f"the limit {name} is stated twice")
        given[name] = _value(name, value)
    return Limits(**given)


def _value(name: str, value: str) -> int | tuple[str, ...]:
    if name == "models":
        models = tuple(one for one in value.split(",") if one)
        if not models:
            raise ConfigError("models=: name one model at least, with commas between several")
        return models
    least = -MOST if name == "max_priority" else 0
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if not least <= number <= MOST:
        raise ConfigError(f"{name}={value[:40]}: give a whole number from {least} to {MOST}")
    return number
