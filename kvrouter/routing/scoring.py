"""Who may get a request at all, and at what cost."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.errors import ConfigError, NoInstances

from .cost import Candidate, CostFunction, RequestShape
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


def costs_of(
    policy: CostFunction,
    name: str,
    shape: RequestShape,
    candidates: Sequence[Candidate],
    *,
    request_id: str,
) -> list[float]:
    """The cost of each candidate, as a policy says it, whatever kind of numbers it uses.

    Args:
        name: of the policy, for errors.

    Raises:
        ConfigError: it does not return one number for each candidate, or raises.
    """
    try:
        # A tuple: one that sorts them would have its costs told of others.
        costs = policy(shape, tuple(candidates))
    except Exception as error:
        raise ConfigError(
            f"policy {name} raised {type(error).__name__}: {error}{_place(policy, error)}",
            request_id=request_id,
            started=False,
        ) from error
    if inspect.iscoroutine(costs):
        costs.close()
        raise ConfigError(
            f"policy {name} is asynchronous: write `def`, it is asked while the loop waits",
            request_id=request_id,
            started=False,
        )
    numbers = _numbers(costs)
    if numbers is None or len(numbers) != len(candidates):
        raise ConfigError(
            f"policy {name} returned {brief_repr(costs)} for {len(candidates)} candidates: "
            "return a list with one number for each, in their order; infinity is for never, NaN "
            "and -infinity are no costs",
            request_id=request_id,
            started=False,
        )
    return numbers


def _numbers(costs: Any) -> list[float] | None:
    """What a policy returned as a list of floats; None for what is none."""
    # What has no order cannot be matched with candidates, and the rows of a matrix are no numbers.
    if isinstance(costs, (Set, Mapping)) or getattr(costs, "ndim", 1) != 1:
        return None
    try:
        # A number as text passes `float`, not `isnan`.
        if any(map(math.isnan, costs)):
            return None
        numbers = list(map(float, costs))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # A container of the user's own may fail in many ways.
        return None
    return None if -math.inf in numbers else numbers


def _place(policy: CostFunction, error: Exception) -> str:
    """Where a policy raised: its own line, rather than one of a library that it calls."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return ""  # It was not entered: what it takes is wrong.
    code = getattr(policy, "__code__", None) or getattr(type(policy).__call__, "__code__", None)
    own = [one for one in frames if code is not None and one.filename == code.co_filename]
    found = (own or frames)[-1]
    return f" ({found.filename}, line {found.lineno})"


def scored(
    policy: CostFunction, name: str, request: SchedulingRequest, candidates: Sequence[Candidate]
) -> list[float]:
    """The cost of each candidate: the policy's, times the request's preference.

    Args:
        name: of the policy, for errors.

    Raises:
        ConfigError: the policy does not return one cost for each candidate.
    """
    costs = costs_of(policy, name, request.shape, candidates, request_id=request.request_id)
    constraints = request.constraints
    if not constraints:
        return costs
    factors = {one.instance: constraints.multiplier(one) for one in request.profiles}
    return [
        max(cost * factors[candidate.rank.instance], -sys.float_info.max)
        for cost, candidate in zip(costs, candidates, strict=True)
    ]
