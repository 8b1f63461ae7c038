"""The number of engines that a traffic takes, by simulation with profiles of engines."""

from .configuration import Configuration
from .search import Plan, fewest, make_plan
from .targets import Target, attained

__all__ = [
    "Configuration",
    "Plan",
    "Target",
    "attained",
    "fewest",
    "make_plan",
]
