"""Who may get a request at all, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from dynbus.actors.brief_repr import brief_repr
from dynbus.bus.errors import ConfigError, NoInstances

from .cost import Candidate, CostFunction
from .scheduling import SchedulingRequest

MOST_SHOWN: Final = 3
"""Refusals in the text of an error."""


def apply_constraints(request: SchedulingRequest) -> None:
    """Leave out the instances that a request's constraints forbid, and note why.

    Raises:
        NoInstances: they leave none.
    """
    if not request.constraints.narrows:
        return
    refusals = {
        profile.instance: refusal
        for profile in request.profiles
        if (refusal := request.constraints.refusal(profile)) is not None
    }
    request.profiles = [one for one in request.profiles if one.instance not in refusals]
    request.excluded = {**request.excluded, **refusals}
    if not request.profiles:
        first = list(refusals.items())[:MOST_SHOWN]
        shown = "; ".join(f"{instance} {why}" for instance, why in first)
        raise NoInstances(
            f"the request's constraints leave none of {len(refusals)} instances: {shown}",
            request_id=request.request_id,
            started=False,
        )


def scored(
    policy: CostFunction, name: str, request: SchedulingRequest, candidates: Sequence[Candidate]
) -> Sequence[float]:
    """The cost of each candidate: the policy's, times the request's preference.

    Args:
        name: of the policy, for errors.

    Raises:
        ConfigError: the policy does not return one cost for each candidate.
    """
    try:
        costs = policy(request.shape, candidates)
        fit = len(costs) == len(candidates) and not any(map(math.isnan, costs))
    except Exception as error:
        raise ConfigError(
            f"policy {name} raised {type(error).__name__}: {error}",
            request_id=request.request_id,
            started=False,
        ) from error
    if not fit:
        raise ConfigError(
            f"policy {name} returned {brief_repr(costs)} for {len(candidates)} "
            "candidates: return one number for each",
            request_id=request.request_id,
            started=False,
        )
    constraints = request.constraints
    if not constraints:
        return costs
    factors = {one.instance: constraints.multiplier(one) for one in request.profiles}
    return [
        cost * factors[candidate.rank.instance]
        for cost, candidate in zip(costs, candidates, strict=True)
    ]
