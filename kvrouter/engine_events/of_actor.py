"""The events of an actor's engine: read over ZeroMQ, and published for the actor's instance."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Literal, Self

import anyio

from dynbus import Actor
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.spi import Background, Openable

from .bridge import EngineBridge
from .status import BridgeStatus
from .zmq_subscriber import ZmqSource, check_source, follow_engine

logger = logging.getLogger(__name__)


class EngineEvents(Openable):
    """Has routers know what the engine of an actor holds. Enter it in `on_start`, before the
    engine is there or after it, and close it in `on_stop`; or use it with `async with`.

    Entering it begins to publish, and to read the engine, which may come later. It raises
    `ConfigError` when the stream of events is there with other settings, and `Unavailable` when
    JetStream does not answer.

    Args:
        publisher: not entered yet; it is entered and closed here.
        block_size: tokens of a block, as routers hash them.
        lora_names: names of the adapters that the engine gives by number only.
        background: see `Openable`.

    Raises:
        ValueError: an endpoint of the source cannot be connected to.

    Attributes:
        publisher, bridge: what the events go through, for their counters.
    """

    def __init__(
        self,
        publisher: KvEventPublisher,
        source: ZmqSource,
        *,
        block_size: int,
        lora_names: Mapping[int, str] | None = None,
        background: Background | None = None,
    ) -> None:
        super().__init__(background)
        check_source(source)
        self.publisher = publisher
        sink = publisher.loop_sink()
        self.bridge = EngineBridge(
            sink, block_size=block_size, lora_names=lora_names, cache=sink.cache
        )
        self._source = source

    def __repr__(self) -> str:
        return f"<EngineEvents of {self._source.endpoint} for {self.publisher!r}>"

    @classmethod
    def of(
        cls,
        actor: Actor,
        source: ZmqSource,
        *,
        block_size: int,
        lora_names: Mapping[int, str] | None = None,
        stream: EventStream | None = None,
    ) -> Self:
        """The events of an actor's engine, to be entered in its `on_start`.

        Raises:
            ValueError: an endpoint of the source cannot be connected to.
        """
        ranks = (0,) if source.ranks is None else source.ranks
        publisher = KvEventPublisher.of(actor, ranks=ranks, stream=stream)
        return cls(
            publisher,
            source,
            block_size=block_size,
            lora_names=lora_names,
            background=actor.runtime.bus.background,
        )

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        for rank in (None,) if self._source.ranks is None else self._source.ranks:
            # Said before anything is published: nobody takes the rank for an empty cache.
            self.bridge.stream(rank)
        async with self.publisher, anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow)
            yield
            tasks.cancel_scope.cancel()

    def report_mode(self) -> Literal["incremental", "full"]:
        """The mode to give vLLM with the request that is made now; see
        `EngineBridge.report_mode`."""
        return self.bridge.report_mode()

    def cleared(self) -> None:
        """The engine's prefix cache was reset; see `EngineBridge.cleared`."""
        self.bridge.cleared()

    def status(self) -> BridgeStatus:
        """The degree to which the events can be relied on, and what was read."""
        return self.bridge.status()

    async def _follow(self) -> None:
        try:
            await follow_engine(self._source, self.bridge)
        except Exception:
            # The bridge has said that nobody reads any longer.
            logger.exception("%r: the engine's events are no longer read", self)
