"""Policies on trial: they score every request, and decide nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from random import Random

from dynbus.bus.errors import ConfigError

from .cost import Candidate, CostFunction, RequestShape, choose
from .decision import ShadowChoice
from .scoring import costs_of

logger = logging.getLogger(__name__)


class Shadows:
    """The policies on trial of one scheduler.

    Attributes:
        agreements: by policy, in how many decisions it would have chosen the same.
    """

    def __init__(self, policies: Mapping[str, CostFunction], random: Random) -> None:
        self._policies = dict(policies)
        self._random = random
        self._failed: set[str] = set()
        self.agreements = dict.fromkeys(self._policies, 0)

    def __repr__(self) -> str:
        return f"<Shadows {self.agreements}>"

    def ask(
        self, request: RequestShape, candidates: Sequence[Candidate], chosen: int
    ) -> list[ShadowChoice]:
        """What each would have chosen.

        Args:
            chosen: the position of the candidate that gets the request.
        """
        if not self._policies:
            return []
        return [self._ask(name, request, candidates, chosen) for name in self._policies]

    def _ask(
        self, name: str, request: RequestShape, candidates: Sequence[Candidate], chosen: int
    ) -> ShadowChoice:
        try:
            costs = costs_of(self._policies[name], name, request, candidates, request_id="")
        except ConfigError as error:
            # A policy on trial must not harm a request; the decision says what is wrong with it.
            if name not in self._failed:
                self._failed.add(name)
                logger.warning("shadow policy %s failed", name, exc_info=True)
            raised = error.__cause__
            return ShadowChoice(
                name, error=f"{type(raised).__name__}: {raised}" if raised else str(error)
            )
        at = choose(costs, 0.0, self._random)
        if at is None:
            return ShadowChoice(name, None, math.inf)
        regret = costs[chosen] - costs[at]
        if regret:
            return ShadowChoice(name, candidates[at].rank, regret)
        # Of equal costs it may have drawn another one: that is no disagreement.
        self.agreements[name] += 1
        return ShadowChoice(name, candidates[chosen].rank)
