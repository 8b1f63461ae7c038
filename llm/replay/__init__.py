"""The replay of a trace on a simulated fleet: what a routing policy would have made of it."""

from .apart import DECODE, PREFILL, ApartSimulation
from .fleet import Fleet, ReplayedRequest, ReplayResult
from .policies import POLICY_NAMES, with_policy
from .report import Distribution, Objective, Report, summarize
from .simulation import POOL, Simulation
from .trace import InvalidTrace, Trace, TraceRequest, read_trace

__all__ = [
    "DECODE",
    "POLICY_NAMES",
    "POOL",
    "PREFILL",
    "ApartSimulation",
    "Distribution",
    "Fleet",
    "InvalidTrace",
    "Objective",
    "Report",
    "ReplayResult",
    "ReplayedRequest",
    "Simulation",
    "Trace",
    "TraceRequest",
    "read_trace",
    "summarize",
    "with_policy",
]
