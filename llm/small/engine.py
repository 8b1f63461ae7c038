"""The small engine: a real model on numpy or PyTorch, ready from its files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from dynbus import ConfigError, Option, Options
from dynbus.llm.embedding import EmbedRequest, Pooling
from dynbus.llm.engine import EngineLimits, ModelEngine
from dynbus.llm.engine.options import BlockSize, ContextLength, MaxNumBatchedTokens, MaxNumSeqs
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.weights.config import ModelConfig
from dynbus.llm.weights.gguf import GgufFile
from dynbus.llm.weights.model import open_weights

from .backend import Backend
from .decoder import Decoder
from .numpy_backend import NumpyBackend
from .torch_backend import DType, TorchBackend

BackendName = Literal["auto", "numpy", "torch"]

BLOCKS: Final = 1024
"""Of the cache, unless they or its memory are given."""


@dataclass(frozen=True, kw_only=True)
class SmallSize(Options):
    """The size and the data types of a small engine's computation."""

    backend: Annotated[
        BackendName, Option("what it computes with; `auto` is PyTorch where it is installed")
    ] = "auto"
    device: Annotated[
        str,
        Option("of PyTorch, such as `cpu` or `cuda:1`; empty for a GPU where there is one"),
    ] = ""
    dtype: Annotated[DType, Option("of PyTorch's weights and cache; numpy computes in float32")] = (
        "float32"
    )
    threads: Annotated[int, Option("cores that a step uses at most; 0 for all", least=0)] = 0
    deterministic: Annotated[
        bool,
        Option(
            "whether a token's logits have the same bits whatever is computed beside it; several "
            "times slower"
        ),
    ] = False
    block_size: BlockSize = 16
    blocks: Annotated[
        int,
        Option(f"how many blocks the cache has; 0 for what its memory holds, or {BLOCKS}", least=0),
    ] = 0
    max_num_seqs: MaxNumSeqs = 16
    max_num_batched_tokens: MaxNumBatchedTokens = 512
    context_length: ContextLength = 0

    def check(self) -> None:
        super().check()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running request needs a token of a step"
            )
        if self.backend == "numpy" and (self.dtype != "float32" or self.device):
            raise ConfigError(
                "numpy computes in float32 on the CPU: dtype and device are PyTorch's"
            )


@dataclass(frozen=True, kw_only=True)
class SmallConfig(SmallSize):
    """The configuration of a small engine and of its cache.

    Raises:
        ConfigError: a value is not usable.
    """

    memory: Annotated[
        int, Option("of the cache, in place of `blocks`; 0 for these", least=0, unit="bytes")
    ] = 0
    prefix_caching: Annotated[bool, Option("whether blocks are found again by later requests")] = (
        True
    )
    spare_share: Annotated[
        float,
        Option(
            "blocks beside the cache, as a part of it, in which prompts can be computed again to "
            "verify it; 0 for none",
            least=0,
            most=1,
            guide="verifying-caches.md",
        ),
    ] = 0.0
    pooling: Annotated[
        Pooling | None,
        Option("how the states of a text become its embedding; none to make no embeddings"),
    ] = "mean"

    def check(self) -> None:
        super().check()
        if self.blocks and self.memory:
            raise ConfigError("give blocks or memory, not both")

    def limits_for(self, model: ModelConfig) -> EngineLimits:
        """The limits of an engine for this model.

        Raises:
            ValueError: the cache is too small for one block, or the context too long.
        """
        numbers = 2 * model.layers * model.kv_heads * model.head_dim * self.block_size
        block = numbers * (2 if self.dtype == "bfloat16" else 4)
        blocks = self.blocks or BLOCKS
        if self.memory:
            blocks = self.memory // block
            if not blocks:
                raise ValueError(f"memory {self.memory} is not usable: a block takes {block} bytes")
        if self.context_length > model.context_length:
            raise ValueError(
                f"context_length {self.context_length} is not usable: the model was made for "
                f"{model.context_length} tokens"
            )
        context = self.context_length or model.context_length
        return EngineLimits(
            block_size=self.block_size,
            blocks=blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            context_length=min(context, blocks * self.block_size),
            has_events=self.prefix_caching,
            vocabulary=model.vocabulary,
        )

    def spare_blocks(self, limits: EngineLimits) -> int:
        """The number of blocks beside the cache of an engine with these limits."""
        if not self.spare_share:
            return 0
        most = -(-limits.context_length // limits.block_size)
        # The noise is measured by two computations side by side.
        return max(2, min(most, math.ceil(self.spare_share * limits.blocks)))

    def make_backend(self) -> Backend[Any]:
        """Make the backend that computes.

        Raises:
            ImportError: PyTorch was asked for and is not installed.
            ValueError: the device is not there.
        """
        name = self.backend
        if name == "auto":
            asks_for_torch = self.device or self.dtype != "float32"
            name = "torch" if asks_for_torch or find_spec("torch") is not None else "numpy"
        if name == "numpy":
            return NumpyBackend(threads=self.threads, deterministic=self.deterministic)
        return TorchBackend(
            device=self.device or None,
            dtype=self.dtype,
            threads=self.threads,
            deterministic=self.deterministic,
        )


class SmallEngine(ModelEngine):
    """An engine for a model of the Llama family: Llama (such as SmolLM2), Qwen2 or Qwen3.

    Making one reads all weights, which takes seconds.

    Args:
        path: a GGUF file, or a folder with `config.json` and safetensors files.
        progress: is told, from the thread that makes it, how many layers of how many are loaded.

    Attributes:
        config: the model's sizes and options.
        backend: the name of what computes.

    Raises:
        OSError: a file cannot be read.
        BrokenModel: the model's files are cut or contradict each other.
        UnsupportedModel: it is of another kind, or its quantisation is not read.
        ImportError: PyTorch was asked for and is not installed.
        ValueError: the options do not fit the model, or the device is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: SmallConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        options = options or SmallConfig()
        with open_weights(path) as weights:
            self.config = weights.config
            limits = options.limits_for(weights.config)
            backend = options.make_backend()
            decoder = Decoder(
                weights,
                backend,
                blocks=limits.blocks,
                block_size=limits.block_size,
                spare=options.spare_blocks(limits),
                progress=progress,
            )
        self.backend = backend.name
        super().__init__(
            decoder,
            limits,
            eos_token_ids=self.config.eos_token_ids,
            prefix_caching=options.prefix_caching,
            pooling=options.pooling,
            tokenizer=partial(_tokenizer_json, Path(path)),
        )

    def check_request(self, request: GenerateRequest | EmbedRequest) -> None:
        if request.lora_name:
            raise ValueError(
                f"lora_name = {request.lora_name!r}: the small engine has no adapters: leave it out"
            )


def _tokenizer_json(path: Path) -> bytes:
    """The tokenizer in a model's files, as a `tokenizer.json`.

    Raises:
        ImportError, BrokenModel, UnsupportedModel: it cannot be read.
    """
    from dynbus.llm.text.tokenizer import Tokenizer

    if path.is_dir():
        return Tokenizer.from_folder(path).to_json()
    with GgufFile.open(path) as file:
        return Tokenizer.from_gguf(file.metadata, origin=str(path)).to_json()
