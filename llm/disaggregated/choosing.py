"""The choice of a decode instance, with all that it knows when it decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

from dynbus import Instance
from dynbus.kvrouter import KvRouter, Rank, RequestFields, profiles, requests
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.weights.fingerprint import are_same

from .decision import PrefillDecision, PrefillLoad, PromptSize, Saturation, decide, why_it_stays
from .settings import LiveSettings

logger = logging.getLogger(__name__)

FIELDS: Final = RequestFields(
    token_ids="request.token_ids",
    lora_name="request.lora_name",
    salt="request.cache_salt",
    # Only a token of it is computed there.
    expected_output_tokens="request.-",
)
"""The fields in which the router of prefill instances finds the prompt of their calls."""


class PrefillChoice:
    """Decides for the requests of one decode instance.

    Args:
        router: of the prefill instances.
        instances: those that may be chosen at this moment.
        runner: of the own engine.
        own: ids of instances that are this one, which moves no blocks to itself.
        model: the fingerprint of the own model; the blocks of another one mean something else.
            Empty to believe all.
        forms: see `why_it_stays`.
    """

    def __init__(
        self,
        router: KvRouter,
        instances: Callable[[], Sequence[Instance]],
        runner: EngineRunner,
        live: LiveSettings,
        *,
        own: Container[str] = frozenset(),
        model: str = "",
        forms: bool = False,
    ) -> None:
        self._router = router
        self._instances = instances
        self._runner = runner
        self._live = live
        self._own = own
        self._model = model
        self._forms = forms
        self._told_of: set[str] = set()
        self._saturation = Saturation()
        self._is_alone = False

    def __repr__(self) -> str:
        return f"<PrefillChoice {self._live.current.mode}>"

    @property
    def goes_by_queue(self) -> bool:
        """True if prompts that are computed elsewhere are put into the work queue."""
        return self._live.current.through == "queue"

    def cached_tokens(self, metadata: Mapping[str, str]) -> int:
        """Tokens of a prompt that are in the own cache, as the router of its call has said."""
        return (
            requests.routed_blocks(metadata, requests.OVERLAP_KEY) * self._runner.limits.block_size
        )

    def usable(self, instances: Sequence[Instance]) -> list[Instance]:
        """Those that can compute prompts for this one. Of who computes another model it is said
        once."""
        others = [one for one in instances if one.id not in self._own]
        strange = {
            one.id: theirs
            for one in others
            if not are_same(self._model, theirs := one.metadata.get(profiles.MODEL_KEY, ""))
        }
        for one, theirs in strange.items():
            if one not in self._told_of:
                logger.warning(
                    "prefill instance %s computes a model of fingerprint %s, and this one of %s: "
                    "it is left out; give both the same files",
                    *(one, theirs[:8], self._model[:8]),
                )
        self._told_of = (self._told_of & {one.id for one in others}) | strange.keys()
        return [one for one in others if one.id not in strange]

    def decide(self, request: GenerateRequest, cached: int, *, jobs: int = 0) -> PrefillDecision:
        """Decide where the prompt of a request is computed.

        Args:
            cached: tokens of it that are in the own cache.
            jobs: prompts that wait in a queue, beside those that were sent to an instance.
        """
        instances = self.usable(self._instances())
        loads = [self._router.load(Rank(one.id, 0)) for one in instances]
        load, limits = self._runner.load, self._runner.limits
        decision = decide(
            self._live.current,
            PromptSize(len(request.token_ids), cached, why_it_stays(request, forms=self._forms)),
            PrefillLoad(
                len(instances),
                # Of those that were sent, each instance computes one.
                max(0, sum(one.requests for one in loads) - len(instances)) + jobs,
                sum(one.prefill_tokens for one in loads),
                load.running,
                max(load.running / limits.max_num_seqs, load.active_blocks / limits.blocks),
            ),
            self._saturation,
        )
        self._saturation = decision.saturation
        if self._live.current.mode != "local":
            self._say_whether_alone(not instances)
        return decision

    def _say_whether_alone(self, is_alone: bool) -> None:
        """Log when there is no prefill instance, and when there is one again; each once."""
        if is_alone is self._is_alone:
            return
        self._is_alone = is_alone
        if is_alone:
            logger.warning(
                "no prefill instance is there: prompts are computed where they are decoded until "
                "one is (%r)",
                self._router,
            )
        else:
            logger.info("a prefill instance is there (%r)", self._router)
