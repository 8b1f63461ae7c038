"""The engines that are served: mock engines whose steps take what the settings say, or small ones.

`python -m benchmarks.serving.engines NATS_URL SETTINGS` serves some of them until its standard
input ends.
"""

from __future__ import annotations

import sys

import msgspec
import uvloop

from dynbus import Runtime
from dynbus.llm import ModelInput, ModelType, register_llm
from dynbus.llm.engine.interface import Engine, EngineLimits
from dynbus.llm.engine.worker import EngineWorker
from dynbus.llm.mock import MockConfig, MockEngine, Timing

from .model import NAME, VOCABULARY
from .processes import answer, until_closed

NAMESPACE = "bench"


class EngineSettings(msgspec.Struct, frozen=True):
    """What engines a measurement wants.

    Attributes:
        folder: with the model's files.
        computes: whether they are small engines, each on one core, and not mock ones.
        instances: how many in one process.
        processes: of these.
        prefill_ms, decode_ms: polynomials as in `Timing`; None for those of the mock engine.
        context_length: in tokens.
    """

    folder: str
    computes: bool = False
    instances: int = 1
    processes: int = 1
    block_size: int = 16
    blocks: int = 65_536
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    context_length: int = 131_072
    prefill_ms: tuple[float, float, float] | None = None
    decode_ms: tuple[float, float, float] | None = None

    def engine(self) -> Engine:
        """An engine of this kind."""
        return self._small() if self.computes else self.mock()

    def _small(self) -> Engine:
        from dynbus.llm.small import SmallConfig, SmallEngine

        return SmallEngine(
            self.folder,
            SmallConfig(
                backend="numpy",
                threads=1,
                block_size=self.block_size,
                blocks=self.blocks,
                max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
                max_num_batched_tokens=self.max_num_batched_tokens,
                context_length=self.context_length,
            ),
        )

    def mock(self) -> MockEngine:
        """A mock engine with these limits and times."""
        usual = Timing()
        timing = Timing(
            prefill_ms=self.prefill_ms or usual.prefill_ms,
            decode_ms=self.decode_ms or usual.decode_ms,
        )
        return MockEngine(
            MockConfig(
                block_size=self.block_size,
                blocks=self.blocks,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                context_length=self.context_length,
                vocabulary=VOCABULARY,
                timing=timing,
            )
        )


class BenchWorker(EngineWorker, namespace=NAMESPACE):
    """Serves such an engine, and registers its model."""

    def __init__(self, settings: str) -> None:
        self._settings = msgspec.json.decode(settings, type=EngineSettings)

    def make_engine(self) -> Engine:
        return self._settings.engine()

    async def on_engine(self, limits: EngineLimits) -> None:
        await register_llm(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self.generate,
            self._settings.folder,
            NAME,
            context_length=self._settings.context_length,
            kv_cache_block_size=self._settings.block_size,
        )


async def _serve(url: str, given: str) -> None:
    settings = msgspec.json.decode(given, type=EngineSettings)
    async with Runtime.connect(url, name="engines") as runtime:
        for _ in range(settings.instances):
            await runtime.start(BenchWorker, settings=given)
        answer({"ready": settings.instances})
        await until_closed()


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:3]))
