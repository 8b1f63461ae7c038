"""Damages that are injected into blocks, and what has to come of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from tests.llm.weights.tiny_models import VOCABULARY

from dynbus.llm.engine.interface import Held
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.small import SmallEngine
from dynbus.llm.verifying.recomputing import compare

from .lying import SIZE, SMALL, Lying

Kind = Literal["none", "bit", "stale", "layers", "adapter", "tokenizer"]
Way = Literal["own", "host", "moved"]

KINDS: Final[Sequence[Kind]] = ("none", "bit", "stale", "layers", "adapter", "tokenizer")
GREEDY: Final = Sampling(temperature=0.0)
Block = NDArray[np.float32]
"""The keys and values of a block: [layers, block_size, 2, heads, head_dim]."""


@dataclass
class Report:
    """What came of injections.

    Attributes:
        injected, caught: damages, by kind.
        within_noise: bits whose change is less than the engine's own noise, which are no damage.
        used_again: damaged blocks that an answer had after the damage was found.
        false_alarms: damages that were found where none was.
        wrong: damages of which the wrong block or source was named.
    """

    injected: Counter[str] = field(default_factory=Counter[str])
    caught: Counter[str] = field(default_factory=Counter[str])
    within_noise: int = 0
    used_again: int = 0
    false_alarms: int = 0
    wrong: int = 0


class Injector:
    """Injects damages into the blocks of a small engine by a seed.

    Args:
        way: by which the blocks come to the requests that are answered from them.
    """

    def __init__(self, path: Path, way: Way, seed: int, *, exact: bool = True) -> None:
        options = replace(SMALL, blocks=32 if way == "host" else 256, spare_share=0.5)
        host = 256 if way == "host" else 0
        self.way: Way = way
        self.random = Random(seed)
        self.lying = Lying(path, exact=exact, host=host, options=options, seed=seed)
        self.report = Report()
        folder = path / "llama"
        plain = replace(SMALL, deterministic=exact, prefix_caching=False)
        self._truth = SmallEngine(folder, plain)
        self._adapted = SmallEngine(folder, plain)
        _adapt(self._adapted, seed)
        self._tokenizer = list(range(4, VOCABULARY))
        self.random.shuffle(self._tokenizer)

    def run(self, count: int) -> Report:
        """Inject so many damages, one after the other."""
        for at in range(count):
            self._inject(KINDS[at % len(KINDS)])
        return self.report

    def _inject(self, kind: Kind) -> None:
        draw, lying, report = self.random, self.lying, self.report
        if lying.store is not None and lying.store.statistics.is_closed:
            _reopen(lying)
        blocks = draw.randrange(2, 6)
        prefix = [draw.randrange(4, VOCABULARY) for _ in range(blocks * SIZE)]
        suffix = [draw.randrange(4, VOCABULARY) for _ in range(draw.randrange(1, 2 * SIZE))]
        at = draw.randrange(blocks)
        right = self._computed(self._truth, prefix)
        wrong = right.copy()
        wrong[at] = self._damaged(kind, prefix, at, right)
        before = lying.findings.count
        table = self._bring(prefix, right if kind == "none" else wrong, suffix)
        seen = kind != "none" and self._is_seen(table, at, right[at])
        lying.idle()
        found = lying.findings.count - before
        if kind != "none" and not seen:
            report.within_noise += 1
        elif kind == "none":
            report.false_alarms += found
        else:
            report.injected[kind] += 1
            report.caught[kind] += found == 1
            if found:
                damage = lying.findings.latest[-1]
                named = {"own": "this instance", "host": "the memory", "moved": "instance peer"}
                is_right = damage.sources[0].startswith(named[self.way])
                report.wrong += damage.first != at or not is_right
        # What is there now is right, and so is the answer.
        kept = lying.findings.count
        again, cached = lying.ask([*prefix, *suffix], 2)
        lying.idle()
        report.false_alarms += lying.findings.count - kept
        if seen:
            is_clean = cached <= at * SIZE and again == self._answer(prefix, suffix)
            table = lying.blocks_of(prefix)
            is_clean &= not any(self._is_seen(table, one, right[one]) for one in range(len(table)))
            report.used_again += not is_clean

    def _damaged(self, kind: Kind, prefix: Sequence[int], at: int, right: Block) -> Block:
        draw = self.random
        wrong: Block = right[at].copy()
        match kind:
            case "bit":
                words = wrong.reshape(-1).view(np.uint32)
                words[draw.randrange(words.size)] ^= np.uint32(1 << draw.randrange(32))
            case "stale":
                other = [draw.randrange(4, VOCABULARY) for _ in prefix]
                wrong = self._computed(self._truth, other)[at]
            case "layers":
                wrong = wrong[::-1].copy()
            case "adapter":
                wrong = self._computed(self._adapted, prefix)[at]
            case "tokenizer":
                other = [self._tokenizer[token - 4] for token in prefix]
                wrong = self._computed(self._truth, other)[at]
            case "none":
                pass
        return wrong

    def _computed(self, engine: SmallEngine, tokens: Sequence[int]) -> Block:
        """The blocks of tokens as an engine computes them."""
        model: Any = engine
        request = GenerateRequest(list(tokens), 1, sampling=GREEDY, ignore_eos=True)
        engine.add("c", request)
        [scheduled] = model._pool._requests["c"]
        engine.step()
        # The blocks are free again, and have what they had.
        del scheduled
        count = len(tokens) // SIZE
        table = self._table(engine, tokens)
        layers = [model._model.layer_of(table[:count], layer) for layer in range(2)]
        return np.stack(layers, 1)

    def _table(self, engine: SmallEngine, tokens: Sequence[int]) -> list[int]:
        """The blocks that a request of an engine without caching has just had."""
        manager: Any = engine
        unused: list[int] = manager._pool.manager._unused
        count = -(-len(tokens) // SIZE)
        return unused[: -count - 1 : -1]

    def _answer(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        engine = self._truth
        request = GenerateRequest([*prefix, *suffix], 2, sampling=GREEDY, ignore_eos=True)
        engine.add("a", request)
        tokens: list[int] = []
        while engine.has_work:
            tokens += [each for _, item in engine.step().outputs for each in item.token_ids]
        return tokens

    # The ways ---------------------------------------------------------------------------------

    def _bring(self, prefix: Sequence[int], content: Block, suffix: Sequence[int]) -> list[int]:
        """Have an answer from these contents; the blocks that have them."""
        lying = self.lying
        if self.way == "own":
            lying.ask(prefix)
            table = lying.blocks_of(prefix)
            self._write(table, content)
            lying.ask([*prefix, *suffix], 2)
            return table
        if self.way == "host":
            lying.ask(prefix)
            self._write(lying.blocks_of(prefix), content)
            # They go to the host with what they have.
            for _ in range(2):
                lying.ask([self.random.randrange(4, VOCABULARY) for _ in range(20 * SIZE)])
            verifier: Any = lying.verifier
            verifier._samples.clear()
            assert not lying.blocks_of(prefix)
            lying.ask([*prefix, *suffix], 2)
            return lying.blocks_of(prefix)
        name = f"m{lying.requests}.0"
        lying.requests += 1
        engine, tokens = lying.engine, [*prefix, *suffix]
        engine.reserve(name, GenerateRequest(tokens, 2, sampling=GREEDY, ignore_eos=True))
        held: list[Held] = []
        while not held:
            held += engine.step().held
        self._write(held[0].blocks, content)
        engine.note_source(name, f"peer{lying.requests}")
        engine.deliver(name, len(prefix), None)
        engine.release(name)
        lying.run(name)
        return lying.blocks_of(prefix)

    def _write(self, table: Sequence[int], content: Block) -> None:
        for layer, cache in enumerate(self.lying.caches):
            cache[list(table[: len(content)])] = content[:, layer]

    def _is_seen(self, table: Sequence[int], at: int, right: Block) -> bool:
        """True if a block is other than it should be, by more than noise."""
        lying = self.lying
        noise = lying.verifier.noise
        spare = lying.model.spare_blocks[0]
        for layer, cache in enumerate(lying.caches):
            cache[spare] = right[layer]
        [difference] = compare(lying.model, [table[at]], [spare], exactly=noise.is_exact)
        return not noise.is_known or not noise.bounds.allow(difference)


def _adapt(engine: SmallEngine, seed: int) -> None:
    """Give the last layer's keys and values an adapter of rank 1, that changes them by a hundredth
    or so, and the first one's likewise."""
    model: Any = engine
    numbers = np.random.default_rng(seed)
    for layer in model._model._layers:
        left = numbers.standard_normal((layer.qkv.shape[0], 1))
        right = numbers.standard_normal((1, layer.qkv.shape[1]))
        size = float(np.abs(layer.qkv).mean())
        layer.qkv[:] += (0.01 * size * left @ right).astype(np.float32)


def _reopen(lying: Lying) -> None:
    """Let the host keep blocks again, which an instance never does."""
    store: Any = lying.store
    store._is_closed = False
