"""A small engine whose cache is made to lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.llm.weights.tiny_models import TINY_MODELS, VOCABULARY

from dynbus.kvrouter.events import KvEvent
from dynbus.llm.engine.block_manager import BlockManager
from dynbus.llm.engine.model import ComparableModel
from dynbus.llm.engine.model_engine import witness
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.small import SmallConfig, SmallEngine
from dynbus.llm.tiers.cost import Rates
from dynbus.llm.tiers.host_store import HostStore
from dynbus.llm.verifying.findings import Findings
from dynbus.llm.verifying.judging import Suspects
from dynbus.llm.verifying.options import VerifyOptions
from dynbus.llm.verifying.verifier import Verifier

SIZE = 8
BLOCKS = 64
SMALL = SmallConfig(
    backend="numpy",
    block_size=SIZE,
    blocks=BLOCKS,
    max_num_batched_tokens=64,
    pooling=None,
    spare_share=0.5,
)


class Lying:
    """An engine, its verifier, and what injects damages into its cache.

    Args:
        exact: whether the engine is deterministic.
        host: places of a host store; 0 for none.

    Attributes:
        events: of its steps and checks.
    """

    def __init__(
        self,
        path: Path,
        *,
        exact: bool = True,
        host: int = 0,
        host_checksums: bool = False,
        most_own: int = 1 << 60,
        options: SmallConfig = SMALL,
        verify: VerifyOptions | None = None,
        seed: int = 1,
        name: str = "llama",
    ) -> None:
        folder = path / name
        if not folder.exists():
            folder.mkdir()
            TINY_MODELS[name].write_folder(folder)
        self.engine = SmallEngine(folder, replace(options, deterministic=exact))
        self.suspects, self.findings = Suspects(most_own), Findings()
        self.events: list[KvEvent] = []
        self.store: HostStore | None = None
        if host:
            memory = self.engine.memory
            rates = Rates(options.block_size, memory.layout.block_bytes)
            rates.note_prefill(100, 1000.0)
            size = host * memory.layout.block_bytes
            self.store = HostStore(memory, size, rates, checksums=host_checksums)
            self.engine.keep_evicted(self.store)
        witness(
            self.engine,
            lambda model, manager: self._make(
                model, manager, verify or VerifyOptions(verify=1.0), seed
            ),
        )
        if self.store is not None:
            self.store.damaged = self.verifier.damaged_on_host
        self.random = Random(seed)
        self.requests = 0

    def _make(
        self, model: ComparableModel, manager: BlockManager, options: VerifyOptions, seed: int
    ) -> Verifier:
        self.model, self.manager = model, manager
        self.verifier = Verifier(
            model,
            manager,
            self.engine.limits.block_size,
            options,
            findings=self.findings,
            suspects=self.suspects,
            random=Random(seed),
        )
        return self.verifier

    @property
    def caches(self) -> Sequence[NDArray[np.float32]]:
        """The keys and values of each layer: [blocks, block_size, 2, heads, head_dim]."""
        model: Any = self.model
        caches: Sequence[NDArray[np.float32]] = model._caches
        return caches

    def ask(self, prompt: Sequence[int], tokens: int = 1, name: str = "") -> tuple[list[int], int]:
        """The tokens behind a prompt, and how many of it were cached."""
        self.requests += 1
        name = name or f"r{self.requests}.0"
        sampling = Sampling(temperature=0.0)
        request = GenerateRequest(list(prompt), tokens, sampling=sampling, ignore_eos=True)
        self.engine.add(name, request)
        return self.run(name)

    def run(self, name: str) -> tuple[list[int], int]:
        """The tokens of a request, and how many of its prompt were cached."""
        made: list[int] = []
        cached = 0
        while self.engine.has_work:
            step = self.engine.step()
            self.events += step.events
            for request_id, item in step.outputs:
                if request_id == name:
                    made += item.token_ids
                    cached += item.cached_tokens or 0
        return made, cached

    def idle(self) -> None:
        """Have it do all checks that it wants to."""
        while self.engine.idle_for() is not None:
            self.events += self.engine.check().events

    def blocks_of(self, prompt: Sequence[int]) -> list[int]:
        """The blocks that are cached of a prompt, by their ids."""
        engine: Any = self.engine
        request = GenerateRequest(list(prompt))
        sequence = engine._tokens(request, np.array(prompt, np.uint32))
        sequence.hash_to(len(prompt) // self.engine.limits.block_size)
        found = [self.manager.block_of(each) for each in sequence.sequence_hashes]
        return [each for each in found if each is not None]

    def store_bytes(self) -> NDArray[np.uint8]:
        """The blocks of the host store."""
        assert self.store is not None
        [region] = self.store.memory.regions
        data = (ctypes.c_uint8 * region.size).from_address(region.address)
        return np.ctypeslib.as_array(data)

    def answers(self) -> dict[str, int]:
        """What became of the answers so far."""
        return dict(self.verifier.figures.answers)


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of random tokens."""
    draw = Random(seed)
    return [draw.randrange(4, VOCABULARY) for _ in range(tokens)]
