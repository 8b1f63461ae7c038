"""The stream of a namespace's KV-cache events: its name, subjects and limits.

Nothing in it is ever purged. What is over a limit goes, oldest first; readers see that by the
numbering of the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token, kv_event_stream, kv_event_subject
from dynbus.bus.transport import REPLICAS, JetStream, StreamConfig, StreamLimits

DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024
DEFAULT_MAX_AGE: Final = 24 * 3600.0
DUPLICATE_WINDOW: Final = 120.0


@dataclass(frozen=True, slots=True)
class EventStream:
    """How the events of a namespace are kept; the same for all who publish or follow there.

    Attributes:
        max_bytes: of all messages.
        max_age: seconds.
        in_memory: whether they are lost with the server, instead of stored in files.
        replicas: how many servers of a cluster keep them at most; a stream that has fewer gets
            more as soon as there are servers for them.

    Raises:
        ConfigError: the namespace is no legal name, or a limit is not a number above 0.
    """

    namespace: str
    max_bytes: int = DEFAULT_MAX_BYTES
    max_age: float = DEFAULT_MAX_AGE
    in_memory: bool = False
    replicas: int = REPLICAS

    def __post_init__(self) -> None:
        check_token("namespace", self.namespace)
        for name, value in (
            ("max_bytes", self.max_bytes),
            ("max_age", self.max_age),
            ("replicas", self.replicas),
        ):
            # Not a number is not above 0 either.
            if not (value > 0 and isfinite(value)):
                raise ConfigError(f"event stream of {self.namespace}: {name} = {value}: give > 0")

    @property
    def name(self) -> str:
        return kv_event_stream(self.namespace)

    @property
    def config(self) -> StreamConfig:
        return StreamConfig(
            name=self.name,
            subjects=(kv_event_subject(self.namespace, "*", "*", "*"),),
            limits=StreamLimits(
                max_bytes=self.max_bytes,
                max_age=self.max_age,
                # The server takes no window that is longer than the maximum age.
                duplicate_window=min(DUPLICATE_WINDOW, self.max_age),
            ),
            in_memory=self.in_memory,
            replicas=self.replicas,
            description="dynbus: KV-cache events",
        )


class _Setting(NamedTuple):
    name: str
    found: object
    wanted: object

    @property
    def is_met(self) -> bool:
        if isinstance(self.found, float) and isinstance(self.wanted, float):
            # The server keeps whole nanoseconds: a third of a second comes back as another float.
            return isclose(self.found, self.wanted, rel_tol=1e-12, abs_tol=2e-9)
        return self.found == self.wanted


async def ensure_stream(jetstream: JetStream, stream: EventStream, *, timeout: float = 5.0) -> None:
    """Make the stream, or check that the one that is there fits.

    Raises:
        ConfigError: a stream of this name has other settings.
        Unavailable: JetStream does not answer.
    """
    wanted = stream.config
    await jetstream.ensure_stream(wanted, timeout=timeout)
    found = await jetstream.stream_config(wanted.name, timeout=timeout)
    differing = [setting for setting in _settings(found, wanted) if not setting.is_met]
    if differing:
        listed = ", ".join(f"{name} = {has}, not {want}" for name, has, want in differing)
        raise ConfigError(
            f"stream {wanted.name} exists with {listed}: give EventStream its settings, "
            f"or change the stream with `nats stream edit {wanted.name}`; storage and retention "
            "can only be changed by deleting it, after which every instance sends its blocks again"
        )


def _settings(found: StreamConfig, wanted: StreamConfig) -> Iterator[_Setting]:
    for name in ("subjects", "in_memory", "work_queue"):
        yield _Setting(name, getattr(found, name), getattr(wanted, name))
    for name in StreamLimits._fields:
        has, want = getattr(found.limits, name), getattr(wanted.limits, name)
        yield _Setting(name, has, want)
