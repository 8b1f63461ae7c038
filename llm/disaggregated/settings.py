"""What may be tuned in disaggregated serving while it runs: one record of the bus, which workers
watch."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, Self

import msgspec

from dynbus.bus.bus import Bus
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ComponentName

MAX_TOKENS: Final = 1 << 40


class DisaggregationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When prompts are computed elsewhere.

    Attributes:
        mode: `auto` decides for each request; `local` and `remote` always say the same, as far as
            there is a prefill instance.
        through: how a prompt gets to a prefill instance: `direct` is a call of the one that the
            router chooses, `queue` a job that the first one with room takes.
        local_prompt_tokens: prompts of so many tokens at most, less those in the own cache, are
            computed locally.
        idle_local_prompt_tokens: the same while the decode instance runs nothing that a long
            prompt would hold up; at least `local_prompt_tokens` counts.
        max_queue_length: prompts that may wait for each prefill instance; with as many or more,
            further ones are computed locally.
        max_queued_tokens: tokens that may wait for each prefill instance, likewise; 0 for no limit.
        busy_decode_load: from 0 to 1; a decode instance that is as busy as that waits for queues
            of twice the length.
        resume_share: from 0 to 1; a queue that was too long is so until it is down to this share
            of its limit, lest single requests tip the decision.
    """

    mode: Literal["auto", "local", "remote"] = "auto"
    through: Literal["direct", "queue"] = "direct"
    local_prompt_tokens: int = 512
    idle_local_prompt_tokens: int = 0
    max_queue_length: int = 4
    max_queued_tokens: int = 32_768
    busy_decode_load: float = 0.9
    resume_share: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "local_prompt_tokens",
            "idle_local_prompt_tokens",
            "max_queue_length",
            "max_queued_tokens",
        ):
            value = getattr(self, name)
            if not 0 <= value <= MAX_TOKENS:
                raise ConfigError(f"{name} = {value} is not usable: give 0 or more")
        if self.max_queue_length == 0:
            raise ConfigError(
                "max_queue_length = 0 is not usable: give 1 or more, or mode = local to compute "
                "all prompts locally"
            )
        for name in ("busy_decode_load", "resume_share"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ConfigError(f"{name} = {value} is not usable: give a number from 0 to 1")

    def changed(self, changes: dict[str, Any]) -> Self:
        """These settings with some of another value.

        Raises:
            ConfigError: there is no such setting, or it cannot have that value.
        """
        known = self.__struct_fields__
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"{name!r} is not a setting of disaggregated serving: there are "
                    f"{', '.join(known)}"
                )
        try:
            return msgspec.convert({**msgspec.to_builtins(self), **changes}, type(self))
        except msgspec.ValidationError as error:
            cause = error.__cause__
            if isinstance(cause, ConfigError):
                raise cause from None
            raise ConfigError(f"settings of disaggregated serving: {error}") from None


class LiveSettings:
    """The settings that hold for a component at this moment.

    Attributes:
        current: those that the record changes, and the worker's own for the rest.
        revision: of the record; 0 where there is none.
    """

    def __init__(self, own: DisaggregationSettings) -> None:
        self.current = own
        self.revision = 0


@asynccontextmanager
async def follow_settings(
    bus: Bus,
    component: ComponentName,
    own: DisaggregationSettings = DisaggregationSettings(),  # noqa: B008 - frozen
) -> AsyncGenerator[LiveSettings]:
    """Follow the settings of a component: `current` is what they are, within a second.

    Without JetStream, and where the record cannot be read, those before hold.

    Args:
        own: what holds where the record says nothing.
    """
    yield LiveSettings(own)
