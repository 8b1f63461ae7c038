"""The mock engine as an actor: `dynbus run dynbus.llm.mock.actor:MockWorker`."""

from __future__ import annotations

from dynbus.bus.errors import ConfigError
from dynbus.llm.engine.worker import EngineWorker

from .engine import MockConfig, MockEngine
from .sequence import VOCABULARY
from .timing import Timing


class MockWorker(EngineWorker, namespace="llm"):
    """Serves tokens that no model made, in the time and with the cache of a real engine.

    Args:
        block_size: tokens of a block.
        blocks: how many the cache has.
        max_num_seqs: requests that run at a time; others wait.
        max_num_batched_tokens: tokens that one step computes.
        speedup_ratio: how many times faster than the modelled engine it is.
        kv_events: whether it publishes what its cache holds.
        vocabulary: its tokens are below it; that of a tokenizer makes them text.
        context_length: the most tokens that a prompt and its output may have; 0 for what the cache
            holds.
    """

    def __init__(
        self,
        block_size: int = 64,
        blocks: int = 16_384,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        speedup_ratio: float = 1.0,
        kv_events: bool = True,
        vocabulary: int = VOCABULARY,
        context_length: int = 0,
    ) -> None:
        try:
            self._config = MockConfig(
                block_size=block_size,
                blocks=blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                vocabulary=vocabulary,
                context_length=context_length or None,
                kv_events=kv_events,
                timing=Timing(speedup_ratio=speedup_ratio),
            )
        except ValueError as error:
            raise ConfigError(f"MockWorker: {error}") from None

    def make_engine(self) -> MockEngine:
        return MockEngine(self._config)
