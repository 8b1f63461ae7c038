"""Policies on trial: they score every request, and decide nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from random import Random

from .cost import Candidate, CostFunction, RequestShape, choose
from .decision import ShadowChoice

logger = logging.getLogger(__name__)


class Shadows:
    """The policies on trial of one scheduler.

    Attributes:
        agreements: by policy, in how many decisions it would have chosen the same.
    """

    def __init__(self, policies: Mapping[str, CostFunction], random: Random) -> None:
        self._policies = dict(policies)
        self._random = random
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
            costs = self._policies[name](request, candidates)
            at = choose(costs, 0.0, self._random)
            if at is None:
                return ShadowChoice(name, None, math.inf)
            regret = costs[chosen] - costs[at]
        except Exception as error:
            # A policy on trial must not harm a request; the decision says what it raised.
            logger.warning("shadow policy %s raised", name, exc_info=True)
            return ShadowChoice(name, error=f"{type(error).__name__}: {error}")
        if regret:
            return ShadowChoice(name, candidates[at].rank, regret)
        # Of equal costs it may have drawn another one: that is no disagreement.
        self.agreements[name] += 1
        return ShadowChoice(name, candidates[chosen].rank)
