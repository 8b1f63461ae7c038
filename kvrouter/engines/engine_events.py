"""The events of an actor's engine: read over ZeroMQ, and published for the actor's instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Literal, Self

from dynbus.actors import Actor
from dynbus.bus.cleanup import end_tasks, finish
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.kvrouter.stream.publisher import KvEventPublisher

from .bridge import EngineBridge
from .status import BridgeStatus
from .zmq_subscriber import ZmqSource, check_source, follow_engine

logger = logging.getLogger(__name__)


class EngineEvents:
    """Has routers know what the engine of an actor holds. Enter it in `on_start`, before the
    engine is there or after it, and close it in `on_stop`; or use it with `async with`.

    Args:
        publisher: not entered yet; it is entered and closed here.
        block_size: tokens of a block, as routers hash them.
        lora_names: names of the adapters that the engine gives by number only.

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
    ) -> None:
        check_source(source)
        self.publisher = publisher
        self.bridge = EngineBridge(publisher, block_size=block_size, lora_names=lora_names)
        self._source = source
        self._exits = AsyncExitStack()

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
        return cls(publisher, source, block_size=block_size, lora_names=lora_names)

    async def __aenter__(self) -> Self:
        """Begin to publish, and to read the engine, which may come later.

        Raises:
            ConfigError: the stream of events is there with other settings.
            Unavailable: JetStream does not answer.
        """
        for rank in (None,) if self._source.ranks is None else self._source.ranks:
            # Said before anything is published: nobody takes the rank for an empty cache.
            self.bridge.stream(rank)
        async with AsyncExitStack() as exits:
            await exits.enter_async_context(self.publisher)
            task = asyncio.get_running_loop().create_task(
                self._follow(), name=f"engine-events-{self._source.endpoint}"
            )
            exits.push_async_callback(end_tasks, task)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await finish(self.close())

    async def close(self) -> None:
        """Read and publish no more."""
        await self._exits.aclose()

    def report_mode(self) -> Literal["incremental", "full"]:
        """What to give vLLM with the request that is made now; see `EngineBridge.report_mode`."""
        return self.bridge.report_mode()

    def cleared(self) -> None:
        """The engine's prefix cache was reset; see `EngineBridge.cleared`."""
        self.bridge.cleared()

    def status(self) -> BridgeStatus:
        """How far the events can be relied on, and what was read."""
        return self.bridge.status()

    async def _follow(self) -> None:
        try:
            await follow_engine(self._source, self.bridge)
        except Exception:
            # The bridge has said that nobody reads any longer.
            logger.exception("%r: the engine's events are no longer read", self)
