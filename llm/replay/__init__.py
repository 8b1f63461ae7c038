"""The replay of a trace on a simulated fleet: what a routing policy would have made of it."""

from .fleet import Fleet, Outcome, RequestRecord
from .policies import POLICIES, Policy, make_policy
from .report import Distribution, Objective, Report, summarize
from .simulation import Simulation
from .trace import InvalidTrace, Trace, TraceRequest, read_trace

__all__ = [
    "POLICIES",
    "Distribution",
    "Fleet",
    "InvalidTrace",
    "Objective",
    "Outcome",
    "Policy",
    "Report",
    "RequestRecord",
    "Simulation",
    "Trace",
    "TraceRequest",
    "make_policy",
    "read_trace",
    "summarize",
]
