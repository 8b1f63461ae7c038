"""The mock engine as an actor: `dynbus run dynbus.llm.mock.actor:MockWorker`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from itertools import count

import anyio
import msgspec
import numpy as np

from dynbus.actors import Actor
from dynbus.actors.declaring.handlers import handler
from dynbus.bus.context import context
from dynbus.bus.errors import ConfigError, InvalidRequest, Unavailable
from dynbus.kvrouter.routing import profiles
from dynbus.kvrouter.stream import KvEventPublisher

from .engine import EngineConfig, EngineRequest
from .runner import EngineRunner, EventSink
from .timing import Timing


class GenerateRequest(msgspec.Struct, frozen=True):
    """A prompt to continue.

    A request that was broken off is continued by another one whose prompt is the prompt and the
    tokens that came, with `max_tokens` less these: it gives the rest.

    Attributes:
        token_ids: from 0 to 2^32 - 1; one at least.
        max_tokens: how many tokens it shall get.
        seed: output differs with it.
    """

    token_ids: list[int]
    max_tokens: int
    seed: int = 0


class GeneratedToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token of the output.

    Attributes:
        cached_tokens: of the prompt, found in the cache. The first token has it; None for others.
    """

    token_id: int
    cached_tokens: int | None = None


class MockWorker(Actor, namespace="llm"):
    """Serves tokens that no model made, in the time and with the cache of a real engine.

    Args:
        block_size: tokens of a block.
        blocks: how many the cache has.
        max_num_seqs: requests that run at a time; others wait.
        max_num_batched_tokens: tokens that one step computes.
        speedup_ratio: how many times faster than the modelled engine it is.
        kv_events: whether it publishes what its cache holds.
    """

    def __init__(
        self,
        block_size: int = 64,
        blocks: int = 16_384,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        speedup_ratio: float = 1.0,
        kv_events: bool = True,
    ) -> None:
        self._kv_events = kv_events
        try:
            self._config = EngineConfig(
                block_size=block_size,
                blocks=blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                timing=Timing(speedup_ratio=speedup_ratio),
            )
        except ValueError as error:
            raise ConfigError(f"MockWorker: {error}") from None
        self._runner: EngineRunner | None = None
        self._exits = AsyncExitStack()
        self._numbers = count()

    def event_sink(self) -> AbstractAsyncContextManager[EventSink]:
        """Where its KV events go; for subclasses that send them elsewhere."""
        return KvEventPublisher.of(self)

    async def on_start(self) -> None:
        async with AsyncExitStack() as exits:
            sink: EventSink | None = None
            if self._kv_events:
                sink = await exits.enter_async_context(self.event_sink())
            self._runner = await exits.enter_async_context(EngineRunner(self._config, sink))
            self._exits = exits.pop_all()

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()

    def instance_metadata(self) -> Mapping[str, str]:
        return {
            profiles.BLOCK_SIZE_KEY: str(self._config.block_size),
            profiles.TOTAL_BLOCKS_KEY: str(self._config.blocks),
            profiles.MAX_BATCHED_TOKENS_KEY: str(self._config.max_num_batched_tokens),
            profiles.EVENTS_KEY: "true" if self._kv_events else "false",
        }

    @handler(concurrency=None)
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GeneratedToken, None]:
        """The tokens that continue a prompt, one by one."""
        runner = self._runner
        if runner is None:
            raise Unavailable("the engine is not started")
        running = context()
        name = f"{running.id}.{next(self._numbers)}"
        unlink = running.link(lambda _: runner.cancel(name))
        try:
            if running.is_stopped():
                return
            outputs = runner.generate(_engine_request(name, request))
            async with aclosing(outputs):
                async for output in outputs:
                    cached = output.cached_tokens if output.is_first else None
                    for token in output.tokens:
                        yield GeneratedToken(token, cached)
                        cached = None
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        finally:
            unlink()


def _engine_request(name: str, request: GenerateRequest) -> EngineRequest:
    try:
        tokens = np.array(request.token_ids, dtype=np.uint32)
    except (OverflowError, ValueError):
        raise InvalidRequest(
            "token_ids has a number that is not from 0 to 2^32 - 1: send token ids"
        ) from None
    return EngineRequest(name, tokens, request.max_tokens, request.seed)
