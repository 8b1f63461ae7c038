"""The profiles of a component's instances: read once, and checked to fit together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError
from dynbus.bus.records.discovery import Instance

from .profile import InstanceProfile, agreed_block_size, read_profile

logger = logging.getLogger(__name__)

GONE_AFTER: Final = 60.0
"""Seconds without being offered after which an instance is gone for good."""

SWEEP_INTERVAL: Final = 10.0


class Profiles:
    """Reads the profiles of instances as they are offered.

    The first instances must fit together. A later one that does not is left out, and why is
    logged once.

    Args:
        block_size, tokenizer_id, needs_events: see `agreed_block_size`.
    """

    def __init__(self, *, block_size: int | None, tokenizer_id: str, needs_events: bool) -> None:
        self._given_block_size = block_size
        self._agreed: int | None = None
        self._tokenizer_id = tokenizer_id
        self._needs_events = needs_events
        self._read: dict[str, tuple[Mapping[str, str], InstanceProfile | ConfigError]] = {}
        self._offered_at: dict[str, float] = {}
        self._incarnations: dict[str, str] = {}
        self._restarted: set[str] = set()
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"<Profiles [{len(self._read)} instances, blocks of {self._agreed} tokens]>"

    @property
    def block_size(self) -> int:
        """What the instances agree on.

        Raises:
            RuntimeError: there were none yet.
        """
        if self._agreed is None:
            raise RuntimeError("no instances were offered yet")
        return self._agreed

    def of(
        self, instances: Sequence[Instance]
    ) -> tuple[Sequence[InstanceProfile], Mapping[str, str]]:
        """The profiles of instances, and by id why others of them are left out.

        Raises:
            ConfigError: none is left, and why.
        """
        if self._agreed is None:
            self._agree(instances)
        now = monotonic()
        found: list[InstanceProfile] = []
        misfits: dict[str, str] = {}
        for instance in instances:
            instance_id, metadata = instance.id, instance.metadata
            self._offered_at[instance_id] = now
            known = self._read.get(instance_id)
            if known is None or known[0] is not metadata:
                # A new record; as a rule it says again what the one before it said.
                self._look_at_incarnation(instance)
                same = known is not None and known[0] == metadata
                read = known[1] if known is not None and same else self._check(instance)
                known = self._read[instance_id] = (metadata, read)
            if isinstance(known[1], InstanceProfile):
                found.append(known[1])
            else:
                misfits[instance_id] = str(known[1])
        if not found:
            raise ConfigError(next(iter(misfits.values())), started=False)
        return found, misfits

    def restarted(self) -> set[str]:
        """Instances that began anew under their old id since this was asked the last time."""
        restarted, self._restarted = self._restarted, set()
        return restarted

    def gone(self, now: float) -> list[str]:
        """Instances that were not offered for long; they are forgotten by that."""
        if now < self._sweep_at:
            return []
        self._sweep_at = now + SWEEP_INTERVAL
        gone = [name for name, at in self._offered_at.items() if now - at > GONE_AFTER]
        for name in gone:
            del self._offered_at[name]
            self._read.pop(name, None)
            self._incarnations.pop(name, None)
        return gone

    def _look_at_incarnation(self, instance: Instance) -> None:
        incarnation = instance.record.incarnation
        before = self._incarnations.get(instance.id)
        if before is not None and before != incarnation:
            self._restarted.add(instance.id)
        self._incarnations[instance.id] = incarnation

    def _agree(self, instances: Sequence[Instance]) -> None:
        self._agreed = agreed_block_size(
            [read_profile(one.id, one.metadata) for one in instances],
            block_size=self._given_block_size,
            tokenizer_id=self._tokenizer_id,
            needs_events=self._needs_events,
        )

    def _check(self, instance: Instance) -> InstanceProfile | ConfigError:
        try:
            profile = read_profile(instance.id, instance.metadata)
            agreed_block_size(
                [profile],
                block_size=self._agreed,
                tokenizer_id=self._tokenizer_id,
                needs_events=self._needs_events,
            )
        except ConfigError as error:
            logger.error("instance %s gets no calls: %s", instance.id, error)
            return error
        return profile
