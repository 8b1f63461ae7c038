"""What a decode instance knows when it decides where a prompt is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from dynbus.kvrouter import KvRouter, RequestFields
from dynbus.kvrouter.radix import Rank
from dynbus.kvrouter.routing import OVERLAP_KEY, requests
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import GenerateRequest

from .decision import PrefillDecision, PrefillLoad, PromptSize, Saturation, decide
from .settings import LiveSettings

logger = logging.getLogger(__name__)

FIELDS: Final = RequestFields(
    token_ids="request.token_ids",
    lora_name="request.lora_name",
    salt="request.cache_salt",
    # Only a token of it is computed there.
    expected_output_tokens="request.-",
)
"""Where the router of prefill instances finds the prompt in a call of theirs."""


class PrefillChoice:
    """Decides for the requests of one decode instance.

    Args:
        router: of the prefill instances.
        instances: their ids at this moment.
        runner: of the own engine.
    """

    def __init__(
        self,
        router: KvRouter,
        instances: Callable[[], Collection[str]],
        runner: EngineRunner,
        live: LiveSettings,
    ) -> None:
        self._router = router
        self._instances = instances
        self._runner = runner
        self._live = live
        self._saturation = Saturation()
        self._is_alone = False

    def __repr__(self) -> str:
        return f"<PrefillChoice {self._live.current.mode}>"

    def cached_tokens(self, metadata: Mapping[str, str]) -> int:
        """Tokens of a prompt that are in the own cache, as the router of its call has said."""
        return requests.routed_blocks(metadata, OVERLAP_KEY) * self._runner.limits.block_size

    def decide(self, request: GenerateRequest, cached: int, *, jobs: int = 0) -> PrefillDecision:
        """Where the prompt of a request is computed.

        Args:
            cached: tokens of it that are in the own cache.
            jobs: prompts that wait in a queue, beside those that were sent to an instance.
        """
        instances = self._instances()
        loads = [self._router.load(Rank(one, 0)) for one in instances]
        load, limits = self._runner.load, self._runner.limits
        decision = decide(
            self._live.current,
            PromptSize(len(request.token_ids), cached),
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
