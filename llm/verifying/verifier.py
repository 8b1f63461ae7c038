"""`Verifier`: answers from kept and moved blocks are computed again while an engine is idle."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine.block_manager import BlockManager
from dynbus.llm.engine.interface import CachedBlock, Came, KvWitness, forgets
from dynbus.llm.engine.model import ComparableModel
from dynbus.spi import monotonic, unix_time

from .budget import TimeBudget
from .findings import MAX_TOUCHED, Findings, KvDamage, request_of
from .judging import Compared, Evidence, Judgement, Measure, Suspects, judge
from .ledger import BlockLedger, Source
from .noise import MEASURES, Difference, Floats, Noise, logits_difference
from .options import VerifyOptions
from .recomputing import Shape, compare, pieces, recompute, spare

logger = logging.getLogger(__name__)

QUIET: Final = 0.2
"""Seconds for which nothing has come before a check begins or goes on."""
MAX_SAMPLES: Final = 8
"""Answers that wait to be computed again; the oldest goes for a new one."""
EVEN: Final = Shape(64)
ODD: Final = Shape(37, single=3)
"""Two ways of computing a prompt. A step is short, as new work waits for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An answer that is to be computed again.

    Attributes:
        name: of its request in the engine.
        token_ids: before the logits.
        logits: from which its first token here was drawn.
        hashes: of its complete blocks, and those behind.
        sources: of its first blocks; None for those that it computed itself.
    """

    name: str
    token_ids: Sequence[int]
    logits: Floats
    hashes: Sequence[int]
    sources: Sequence[Source | None]


@dataclass(slots=True)
class Figures:
    """Figures of a verifier.

    Attributes:
        answers: by what became of them: `computed` had all of its prompt computed for it,
            `passed_by` was not sampled, `lost` made room for a newer one, `verified`, `damaged`,
            `touched` by the damage of another one before it was looked at, `unconfirmed`: it
            differed from what was computed once, and not from a second time, or `unmeasured`: the
            noise was to be measured by its prompt, which gave what is not finite.
        tokens: that were computed again.
        seconds: that this took.
    """

    answers: Counter[str]
    tokens: int = 0
    seconds: float = 0.0


class Verifier(KvWitness):
    """Computes a part of the answers that were not all computed for their requests once more.

    Args:
        model: of the engine; it has two spare blocks at least.
        manager: of the engine's blocks.
        block_size: tokens of a block.
        findings, suspects: of its instance; it adds to them.

    Attributes:
        findings, figures, noise, suspects: so far.
        instance: the name of its instance for events; empty until that has one.
    """

    def __init__(
        self,
        model: ComparableModel,
        manager: BlockManager,
        block_size: int,
        options: VerifyOptions,
        *,
        findings: Findings,
        suspects: Suspects,
        random: Random | None = None,
    ) -> None:
        assert len(model.spare_blocks) > 1, "two spare blocks are needed"
        self.findings = findings
        self.suspects = suspects
        self.figures = Figures(Counter())
        self.noise = Noise(model.epsilon, options.verify_factor)
        self.instance = ""
        self._model = model
        self._manager = manager
        self._block_size = block_size
        self._share = options.verify
        self._random = random or Random()
        self._ledger = BlockLedger(manager.blocks)
        self._budget = TimeBudget(options.verify_budget, monotonic())
        self._samples: deque[Sample] = deque()
        self._check: Generator[None, None, None] | None = None
        self._quiet_from = 0.0

    def __repr__(self) -> str:
        verified = self.figures.answers["verified"]
        return f"<Verifier [{verified} verified, {self.findings.count} damaged]>"

    # What the engine tells ------------------------------------------------------------------

    def came(
        self,
        name: str,
        sequence_hashes: list[int],
        first: int,
        last: int,
        how: Came,
        source: str,
        stored: Sequence[CachedBlock],
    ) -> None:
        if how == "moved":
            self.noise.admit_others()
        hashes = [each.sequence_hash for each in stored]
        self._ledger.came(name, sequence_hashes, first, last, how, source, hashes)

    def drawn(self, name: str, token_ids: Sequence[int], logits: NDArray[np.float32]) -> None:
        self._quiet_from = monotonic() + QUIET
        hashes, sources = self._ledger.begun(name)
        answers = self.figures.answers
        if all(source is None for source in sources):
            answers["computed"] += 1
            return
        if self._random.random() >= self._share:
            answers["passed_by"] += 1
            return
        if len(self._samples) == MAX_SAMPLES:
            self._samples.popleft()
            answers["lost"] += 1
        sample = Sample(name, list(token_ids), np.array(logits, np.float32), hashes, sources)
        self._samples.append(sample)

    # Checks ---------------------------------------------------------------------------------

    def idle_for(self) -> float | None:
        if self._check is None and not self._samples:
            return None
        now = monotonic()
        return max(0.0, self._quiet_from - now, self._budget.wait(now))

    def check(self) -> None:
        began = perf_counter()
        if self._check is None:
            if not self._samples:
                return
            self._check = self._verify(self._samples.popleft())
        if next(self._check, self) is self:
            self._check = None
        seconds = perf_counter() - began
        self.figures.seconds += seconds
        self._budget.spend(seconds, monotonic())

    def _verify(self, sample: Sample) -> Generator[None, None, None]:
        size, room = self._block_size, len(self._model.spare_blocks)
        if not self.noise.is_known:
            is_measured = yield from self._measure(sample.token_ids[: room // 2 * size])
            if not is_measured:
                self._take_no_measure()
                return
        tokens = sample.token_ids[: room * size]
        judgement: Judgement | None = None
        for shape in (EVEN, ODD):
            compared, now = yield from self._compare(sample, tokens, shape)
            judged = judge(compared, self.noise.bounds, sample.sources, now)
            if judged is None:
                # A fault of this computation, if the one before differed.
                answer = "verified" if judgement is None else "unconfirmed"
                self.figures.answers[answer] += 1
                return
            judgement = judged
        assert judgement is not None, "it was judged"
        self.figures.answers["damaged"] += 1
        self._take_damage(sample, judgement)

    def _compare(
        self, sample: Sample, tokens: Sequence[int], shape: Shape
    ) -> Generator[None, None, tuple[Compared, Sequence[Source]]]:
        """Compute a sample again, and compare what is there of it."""
        spare_blocks = self._model.spare_blocks
        count = -(-len(tokens) // self._block_size)
        table = spare(spare_blocks, 0, count)
        logits = yield from recompute(self._model, tokens, table, shape)
        self.figures.tokens += len(tokens)
        whole = min(len(tokens) // self._block_size, len(sample.hashes))
        blocks: list[Difference | None] = [None] * whole
        sources: list[Source] = [Source("own")] * whole
        for piece in pieces(whole):
            cached = {at: self._manager.block_of(sample.hashes[at]) for at in piece}
            kept = {at: block for at, block in cached.items() if block is not None}
            computed = [table[at] for at in kept]
            exactly = self.noise.is_exact
            apart = compare(self._model, list(kept.values()), computed, exactly=exactly)
            for at, difference in zip(kept, apart, strict=True):
                blocks[at] = difference
                sources[at] = self._ledger.source(sample.hashes[at])
            yield
        apart_logits = 0.0
        if len(tokens) == len(sample.token_ids):
            exactly = self.noise.is_exact
            apart_logits = logits_difference(sample.logits, logits, exactly=exactly)
        return Compared(blocks, apart_logits), sources

    def _measure(self, tokens: Sequence[int]) -> Generator[None, None, bool]:
        """Measure how far two ways of computing the same are apart; False where they gave what is
        not finite."""
        model, size = self._model, self._block_size
        count = -(-len(tokens) // size)
        tables = [spare(model.spare_blocks, first, count) for first in (0, count)]
        even = yield from recompute(model, tokens, tables[0], EVEN)
        odd = yield from recompute(model, tokens, tables[1], ODD)
        self.figures.tokens += 2 * len(tokens)
        whole = len(tokens) // size
        apart = compare(model, tables[0][:whole], tables[1][:whole])
        is_measured = self.noise.note(apart, logits_difference(even, odd, exactly=False))
        yield
        return is_measured

    def _take_no_measure(self) -> None:
        answers = self.figures.answers
        answers["unmeasured"] += 1
        if answers["unmeasured"] == MEASURES:
            logger.warning(
                "%s: what the engine computes of prompts is not finite (inf or NaN), %d times so "
                "far: its noise is not known, and no answer is verified before it is; look at "
                "the model and the type of its numbers",
                self.instance or "an engine",
                MEASURES,
            )

    # A damage -------------------------------------------------------------------------------

    def _take_damage(self, sample: Sample, judgement: Judgement) -> None:
        damaged = {sample.hashes[at] for at in judgement.damaged}
        first = judgement.damaged[0] if judgement.damaged else 0
        touched = self._ledger.touched(damaged)
        # Of those that wait it is known already.
        sound = [one for one in self._samples if damaged.isdisjoint(one.hashes[: len(one.sources)])]
        self.figures.answers["touched"] += len(self._samples) - len(sound)
        self._samples = deque(sound)
        self._settle(judgement.evidence, sample.name, judgement.blamed, damaged, touched, first)

    def damaged_on_host(self, sequence_hashes: Sequence[int]) -> None:
        """The host has not what was kept under some of these hashes, and has forgotten them."""
        self._settle("checksum", "", (Source("host"),), set(sequence_hashes), (), 0)

    def _settle(
        self,
        evidence: Evidence,
        name: str,
        blamed: Sequence[Source],
        damaged: Collection[int],
        touched: Sequence[str],
        first: int,
    ) -> None:
        """Drop what is damaged, leave its sources, and tell of it."""
        measures: list[Measure] = [self.suspects.blame(source) for source in blamed]
        tier = self._manager.tier
        gone: set[int] = set(damaged)
        if forgets(tier):
            gone |= set(tier.forget(damaged))
            if "close_host" in measures:
                tier.close()
        dropped = self._drop(evidence, gone)
        requests = list(dict.fromkeys(map(request_of, touched)))
        damage = KvDamage(
            self.instance,
            round(unix_time(), 3),
            evidence,
            request_of(name) if name else "",
            [str(source) for source in blamed],
            measures,
            first,
            len(damaged),
            dropped,
            requests[-MAX_TOUCHED:],
            max(0, len(requests) - MAX_TOUCHED),
        )
        self.findings.add(damage)
        logger.error(
            "%s: KV blocks are damaged, by their %s: %d from block %d on, of %s; %d blocks are "
            "dropped (%s), %d requests have used them%s",
            self.instance or "an engine",
            evidence,
            len(damaged),
            first,
            " and ".join(damage.sources),
            dropped,
            ", ".join(measures),
            len(requests),
            f", among them {requests[-1]}: dynbus why {requests[-1]}" if requests else "",
        )

    def _drop(self, evidence: Evidence, gone: Collection[int]) -> int:
        """Forget blocks of the cache and what follows them; what the host lost is there whole."""
        if evidence == "checksum":
            return len(gone)
        tier = self._manager.tier
        return len(self._manager.drop(gone, tier if forgets(tier) else ()))
