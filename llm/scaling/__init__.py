"""The autoscaler: how many instances the pools of a model are to have, decided by their load and
carried out by others.
"""

from .autoscaler import Autoscaler, AutoscalerOptions
from .capacity import EngineSpeed, Line
from .observation import Observation, PoolKind, PoolLoad, PoolState, PoolTarget
from .observing import PoolCounts
from .policy import PoolConfig, ScalingConfig, ScalingPolicy

__all__ = [
    "Autoscaler",
    "AutoscalerOptions",
    "EngineSpeed",
    "Line",
    "Observation",
    "PoolConfig",
    "PoolCounts",
    "PoolKind",
    "PoolLoad",
    "PoolState",
    "PoolTarget",
    "ScalingConfig",
    "ScalingPolicy",
]
