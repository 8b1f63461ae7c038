"""`ModelWorker`: a model behind its name, computed by the small engine or played by a mock."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

import msgspec

from dynbus.bus.errors import ConfigError

from .embedding import Pooling
from .engine.interface import Engine
from .generation import GenerateRequest
from .mock.engine import MockConfig, MockEngine
from .mock.text_model import CONTEXT_LENGTH, END_ID, MOCK_TOKENS, write_mock_model
from .mock.timing import Timing
from .models.source import LocalModel
from .small.engine import BackendName, SmallConfig, SmallEngine
from .small.torch_backend import DType
from .tiers.lending import MAX_SHARE
from .tiers.worker import TieredWorker

logger = logging.getLogger(__name__)

BLOCKS: Final = 1024
"""Of the cache, unless they or its memory are given."""

MOCK_NAME: Final = "mock"
"""What a mock is called unless its user says otherwise."""


class ModelWorker(TieredWorker, abstract=True):
    """Serves a model under its name by tokens: completions, and chats where it has a template.

    A subclass gives it a namespace: `class Engine(ModelWorker, namespace="llm")`.

    Args:
        engine: `small` computes a model of the Llama family, or Qwen; `mock` draws words at random,
            in the time and with the cache of a real engine, and needs no model.
        model: where it is: a folder, a `.gguf` file, `smollm2`, or what else `register_llm` takes.
        model_name: by which requests ask for it; unless given, what its files are called.
        backend: what `small` computes with; `auto` is PyTorch where it is installed.
        device: of PyTorch, such as `cpu` or `cuda:1`; empty for a GPU where there is one.
        dtype: of PyTorch's numbers.
        threads: cores that it uses at most; 0 for all.
        deterministic: has every row the same bits whatever is computed beside it; slower.
        block_size: tokens of a block of the cache.
        blocks: how many the cache has; 0 for what `memory_mib` holds, or 1024.
        memory_mib: of the cache of `small`; give this or `blocks`.
        max_num_seqs: requests that run at a time; others wait.
        max_num_batched_tokens: tokens that one step computes.
        context_length: the most tokens that a prompt and its output may have; 0 for the model's, as
            far as the cache holds it.
        default_sampling: for what requests do not say: see `register_llm`; `model` takes what the
            model's files recommend.
        kv_events: whether blocks are found again by later requests, and routers are told of them.
        host_memory_mib: memory of the host for blocks that the cache of `small` has no room for: a
            prefix that is asked for again is copied back from there. 0 for none.
        fetch_prefixes: whether `small` reads the blocks of a prefix that another instance holds,
            where that is faster than computing them, and has others read its own.
        lend_share: of its cache, from 0 to 1, that others may keep in place at a time while they
            read it.
        checksums: whether blocks that were read from another instance are used only if their
            checksums are those of what that one has. That costs 0.2 to 0.3 s of a core for each
            GB, on each side.
        pooling: how `small` makes the embedding of a text: of the `mean` of its tokens' states, or
            of the `last`; `none` for no embeddings.
        speedup_ratio: how many times faster than the modelled engine a mock is.
        tool_call_parser, reasoning_parser: how its outputs have tool calls and reasoning, such as
            `hermes` and `qwen3`; `auto` goes by the chat template: see `register_llm`.

    Raises:
        ConfigError: a value is not usable.
    """

    def __init__(
        self,
        engine: Literal["small", "mock"] = "small",
        model: str = "smollm2",
        model_name: str = "",
        backend: BackendName = "auto",
        device: str = "",
        dtype: DType = "float32",
        threads: int = 0,
        deterministic: bool = False,
        block_size: int = 16,
        blocks: int = 0,
        memory_mib: int = 0,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        context_length: int = 0,
        default_sampling: dict[str, float] | Literal["model", "openai"] = "model",
        kv_events: bool = True,
        speedup_ratio: float = 1.0,
        pooling: Literal["mean", "last", "none"] = "mean",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        host_memory_mib: int = 0,
        fetch_prefixes: bool = False,
        lend_share: float = MAX_SHARE,
        checksums: bool = False,
    ) -> None:
        super().__init__(model, model_name, default_sampling, tool_call_parser, reasoning_parser)
        self.engine = engine
        if host_memory_mib < 0:
            raise ConfigError(f"host_memory_mib = {host_memory_mib}: set 0 for none, or more")
        if engine == "mock" and (host_memory_mib or fetch_prefixes):
            raise ConfigError(
                "host_memory_mib and fetch_prefixes are for engine=small: a mock has no blocks to "
                "keep or to read"
            )
        if not kv_events and (host_memory_mib or fetch_prefixes):
            raise ConfigError(
                "host_memory_mib and fetch_prefixes need kv_events: without them no block is found "
                "again"
            )
        if not 0 < lend_share <= 1:
            raise ConfigError(f"lend_share = {lend_share:g}: set more than 0, and at most 1")
        self.host_memory = host_memory_mib << 20
        self.fetches_prefixes = fetch_prefixes
        self.lends_share = lend_share
        self.checksums = checksums
        of_mock = blocks or BLOCKS
        try:
            self._small = SmallConfig(
                backend=backend,
                device=device,
                dtype=dtype,
                threads=threads,
                deterministic=deterministic,
                block_size=block_size,
                blocks=blocks if memory_mib else of_mock,
                memory=memory_mib << 20,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                context_length=context_length,
                prefix_caching=kv_events,
                pooling=None if pooling == "none" else pooling,
            )
            # A mock may have to take the place of a model.
            self._mock = MockConfig(
                block_size=block_size,
                blocks=of_mock,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefix_caching=kv_events,
                vocabulary=MOCK_TOKENS,
                context_length=min(context_length or CONTEXT_LENGTH, block_size * of_mock),
                timing=Timing(speedup_ratio=speedup_ratio),
            )
        except ValueError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None
        self._exits = ExitStack()

    @property
    def pooling(self) -> Pooling | None:
        return self._small.pooling if self.engine == "small" else None

    async def find_model(self) -> LocalModel | None:
        """The files of the model; None for a mock, which needs none.

        Raises:
            ConfigError, ModelUnavailable: it cannot be had.
        """
        return None if self.engine == "mock" else await super().find_model()

    async def stand_in(self) -> LocalModel:
        self.engine = "mock"
        self.host_memory, self.fetches_prefixes = 0, False
        folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="dynbus-mock-")))
        await asyncio.to_thread(write_mock_model, folder)
        return LocalModel(folder, "folder", MOCK_NAME, MOCK_NAME)

    def loading(self, done: int, total: int) -> None:
        """So many of the model's layers are loaded; called from any thread, for subclasses."""

    async def on_start(self) -> None:
        # Once the model is registered, what is read of it is in JetStream.
        with self._exits:
            await super().on_start()

    def make_engine(self) -> Engine:
        if self.engine == "mock":
            return _TalkingMock(self._mock)
        path = self.found.path
        try:
            engine = SmallEngine(path, self._small, progress=self.loading)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(f"the model {self.model!r} cannot be served: {error}") from error
        self.keep_evicted(engine)
        logger.info("%s computes %s", engine.backend, path.name)
        return engine


class _TalkingMock(MockEngine):
    """A mock whose texts end, as a model's do, with a token of their own."""

    def add(self, request_id: str, request: GenerateRequest) -> None:
        if not request.ignore_eos:
            stops = [*request.stop_token_ids, END_ID]
            request = msgspec.structs.replace(request, stop_token_ids=stops)
        super().add(request_id, request)
