"""Choosing an instance by the prefixes that it holds and the load that it has.

A `KvRouter` routes the calls of a program, a `RouterActor` those of others. Both carry out what a
`KvScheduler` decides, which needs neither the bus nor a clock: a simulation drives it as well.

`KvScheduler` decides where a request goes; `KvRouter` carries it out, and the replay of traces
drives the same object.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import fairness, profiles, requests, token_rule, touched
    from .active_load import ActiveLoad, RankLoad
    from .caches import Follower
    from .candidates import Candidate
    from .config import RouterActorOptions, RouterConfig, RouterSettings
    from .cost import CostFunction, DynamoCost, KvCost, PrefixCounts, RequestShape
    from .decision import Decision, Outcome, Reason, ShadowChoice
    from .policies import COST_FUNCTIONS, Policy
    from .profiles import InstanceProfile
    from .queue import SchedulingRequest, Ticket
    from .requests import DP_RANK_KEY, OVERLAP_KEY, REQUIRED_KEY, Constraints, RequestFields
    from .router import KvRouter, open_router
    from .router_actor import (
        DecisionQuery,
        PolicyChoice,
        PolicyReport,
        RouterActor,
    )
    from .scheduler import KvScheduler

__all__ = [
    "COST_FUNCTIONS",
    "DP_RANK_KEY",
    "OVERLAP_KEY",
    "REQUIRED_KEY",
    "ActiveLoad",
    "Candidate",
    "Constraints",
    "CostFunction",
    "Decision",
    "DecisionQuery",
    "DynamoCost",
    "Follower",
    "InstanceProfile",
    "KvCost",
    "KvRouter",
    "KvScheduler",
    "Outcome",
    "Policy",
    "PolicyChoice",
    "PolicyReport",
    "PrefixCounts",
    "RankLoad",
    "Reason",
    "RequestFields",
    "RequestShape",
    "RouterActor",
    "RouterActorOptions",
    "RouterConfig",
    "RouterSettings",
    "SchedulingRequest",
    "ShadowChoice",
    "Ticket",
    "fairness",
    "open_router",
    "profiles",
    "requests",
    "token_rule",
    "touched",
]

if not TYPE_CHECKING:
    # Policies, replays and what reads decisions need no router.
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        "fairness",
        "profiles",
        "active_load",
        "candidates",
        "cost",
        "config",
        "decision",
        "policies",
        "queue",
        "requests",
        "token_rule",
        "touched",
        "caches",
        "scheduler",
        "router",
        "router_actor",
    )
