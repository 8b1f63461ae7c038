"""The small engine as an actor: `dynbus run dynbus.llm.small.actor:SmallWorker`."""

from __future__ import annotations

import logging
from typing import cast

from dynbus.bus.errors import ConfigError
from dynbus.llm.engine import Engine, EngineWorker
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.models.register import register_llm
from dynbus.llm.models.source import LocalModel, resolve

from .engine import BackendName, SmallConfig, SmallEngine
from .torch_backend import DType

logger = logging.getLogger(__name__)


class SmallWorker(EngineWorker, namespace="llm"):
    """Serves a real model of the Llama family, and registers it for front ends.

    Args:
        model_path: a folder, a `.gguf` file, `hf://org/name`, `pip://NAME==VERSION`, or `smollm2`.
        model_name: by which requests ask for it; empty for the model's own.
        backend: numpy or torch; auto for PyTorch where it is installed.
        device: of PyTorch, such as cpu or cuda; empty for a GPU where there is one.
        dtype: of PyTorch's numbers: float32 or bfloat16.
        threads: cores that it uses at most; 0 for all.
        deterministic: whether a token's logits have the same bits in any batch; several times
            slower.
        block_size: tokens of a block of the cache.
        blocks: how many the cache has; 0 for what memory_mib holds.
        memory_mib: for the cache; 0 for 2048 tokens for each sequence.
        max_num_seqs: sequences that run at a time; others wait.
        max_num_batched_tokens: tokens that one step computes.
        context_length: the most tokens that a prompt and its output may have; 0 for the model's.
        kv_events: whether blocks are found again by later requests, and routers are told of them.
    """

    def __init__(
        self,
        model_path: str = "smollm2",
        model_name: str = "",
        backend: str = "auto",
        device: str = "",
        dtype: str = "float32",
        threads: int = 0,
        deterministic: bool = False,
        block_size: int = 16,
        blocks: int = 0,
        memory_mib: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        context_length: int = 0,
        kv_events: bool = True,
    ) -> None:
        self._model_path = model_path
        self._model_name = model_name
        self._model: LocalModel | None = None
        try:
            self._options = SmallConfig(
                backend=cast("BackendName", backend),
                device=device,
                dtype=cast("DType", dtype),
                threads=threads,
                deterministic=deterministic,
                block_size=block_size,
                blocks=blocks,
                memory=memory_mib << 20,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                context_length=context_length,
                prefix_caching=kv_events,
            )
        except ValueError as error:
            raise ConfigError(f"SmallWorker: {error}") from None

    def make_engine(self) -> SmallEngine:
        assert self._model is not None, "the model is had before the engine is made"
        try:
            engine = SmallEngine(self._model.path, self._options)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"the model {self._model_path!r} cannot be served: {error}"
            ) from error
        logger.info("%s computes %s", engine.backend, self._model.name)
        return engine

    async def on_start(self) -> None:
        self._model = await resolve(self._model_path)
        await super().on_start()

    async def on_engine(self, engine: Engine) -> None:
        assert self._model is not None, "the model is had before the engine is made"
        await register_llm(
            ModelInput.Tokens,
            ModelType.Backend,
            self.generate,
            self._model.path,
            self._model_name or self._model.name,
            context_length=engine.limits.context_length,
            kv_cache_block_size=engine.limits.block_size,
        )
