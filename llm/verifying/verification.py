"""`CacheVerification`: the verifier of a worker's engine, shown to operators and told to others."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from dynbus import DynbusError
from dynbus.kvrouter import touched
from dynbus.llm.engine import EngineWorker, ModelEngine
from dynbus.llm.engine.block_manager import BlockManager
from dynbus.llm.engine.model import ComparableModel
from dynbus.llm.engine.model_engine import witness
from dynbus.llm.instance_watch import InstanceWatch
from dynbus.spi import Metrics, Readings, unix_time

from .findings import Findings, KvDamage, damages_in
from .judging import Suspects
from .ledger import Source
from .options import VerifyOptions
from .verifier import Verifier

logger = logging.getLogger(__name__)

STATUS_KEY: Final = "kv_verification"
SPARE_SHARE: Final = 1 / 8
"""Of the blocks of a cache, that there are beside it to compute prompts again."""


class CacheVerification:
    """The verification of one worker's cache; where it is switched off it costs nothing.

    Attributes:
        verifier: of its engine; None where it is off.
        suspects, findings: so far.
    """

    def __init__(self, options: VerifyOptions) -> None:
        self.verifier: Verifier | None = None
        self.suspects = Suspects(options.verify_own)
        self.findings = Findings()
        self._options = options
        self._name = ""

    def watch(self, engine: ModelEngine, block_size: int) -> Verifier | None:
        """Verify what a new engine answers, before it has a request; None where that is off."""
        if not self._options.verify:
            return None

        def make(model: ComparableModel, manager: BlockManager) -> Verifier:
            self.verifier = Verifier(
                model,
                manager,
                block_size,
                self._options,
                findings=self.findings,
                suspects=self.suspects,
            )
            return self.verifier

        witness(engine, make)
        return self.verifier

    def avoids(self, instance: str) -> bool:
        """True if nothing is taken from an instance, since it has lied."""
        return instance in self.suspects.instances

    def mismatched(self, instance: str) -> None:
        """An instance has sent other blocks than its checksums say: they are not used."""
        if self.verifier is None:
            return
        source = Source("instance", instance)
        measure = self.suspects.blame(source)
        self.findings.add(
            KvDamage(
                self._name,
                round(unix_time(), 3),
                "checksum",
                "",
                [str(source)],
                [measure],
                0,
                0,
                0,
                [],
            )
        )

    @asynccontextmanager
    async def opened(self, worker: EngineWorker) -> AsyncGenerator[None]:
        """Tell operators of it, publish damages and answer for whom they touched, while it is
        entered."""
        verifier = self.verifier
        if verifier is None:
            yield
            return
        self._name = verifier.instance = str(worker.__dynbus_name__)
        bus = worker.runtime.bus
        async with (
            touched.TouchedAnswers(bus, worker.__dynbus_name__, self._damages_of),
            VerificationWatch(worker, verifier),
        ):
            yield

    def _damages_of(self, request_id: str) -> list[dict[str, Any]]:
        return [msgspec.structs.asdict(each) for each in self.findings.of(request_id)]


class VerificationWatch(InstanceWatch):
    """Shows a verifier to operators and publishes what it finds, while in the `async with`; an
    instance that computes damages itself is withdrawn."""

    def __init__(self, worker: EngineWorker, verifier: Verifier) -> None:
        super().__init__(worker.runtime.bus, worker.__dynbus_name__, "verification", _readings)
        self._worker = worker
        self._beside = worker.runtime.background
        self._verifier = verifier
        self._topic = damages_in(worker.__dynbus_name__.namespace)
        self._published = 0

    def look(self) -> None:
        """Show how it is now, and tell of new damages."""
        verifier = self._verifier
        figures, findings = verifier.figures, verifier.findings
        self.show(STATUS_KEY, self._text())
        self.put_by("answers", "dynbus.result", dict(figures.answers))
        self.put("tokens", figures.tokens)
        self.put("seconds", figures.seconds)
        self.put_by("damages", "dynbus.evidence", findings.counts)
        self.put("left", len(verifier.suspects.instances))
        new, self._published = findings.since(self._published), findings.count
        for damage in new:
            self.record(
                "cache.damaged",
                damage.request_id,
                evidence=damage.evidence,
                sources=",".join(damage.sources),
                measures=",".join(damage.measures),
                blocks=damage.blocks,
                dropped=damage.dropped,
                requests=len(damage.requests) + damage.requests_left_out,
            )
            self._beside.start(self._publish, damage, name="an event of a damage")
            if "withdraw" in damage.measures:
                self._worker.report_broken(
                    f"its own KV blocks were damaged {verifier.suspects.own} times"
                )

    async def _publish(self, damage: KvDamage) -> None:
        try:
            await self._topic.publish(damage, runtime=self._worker.runtime)
        except DynbusError as error:
            logger.warning("%r: the event of a damage was not published: %s", self, error)

    def _text(self) -> str:
        verifier = self._verifier
        answers, count = verifier.figures.answers, verifier.findings.count
        text = f"{answers['verified']} answers verified"
        if count:
            text += f", {count} damages"
        if left := verifier.suspects.instances:
            text += f", nothing is taken from {', '.join(sorted(left))}"
        return text


def _readings(metrics: Metrics) -> dict[str, Readings]:
    """The measurements of verification."""
    return {
        "answers": metrics.counter(
            "kv.verification.answers",
            "{answer}",
            "Answers of engines whose cache is verified, by what became of them.",
        ),
        "tokens": metrics.counter(
            "kv.verification.tokens", "{token}", "Tokens that were computed again."
        ),
        "seconds": metrics.counter(
            "kv.verification.time", "s", "Seconds of engines that verification took."
        ),
        "damages": metrics.counter(
            "kv.verification.damages", "{damage}", "Damages of KV blocks, by what differed."
        ),
        "left": metrics.gauge(
            "kv.verification.left", "{instance}", "Instances from which nothing is taken."
        ),
    }
