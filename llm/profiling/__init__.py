"""Profiles of engines: steps measured, costs fitted, and the error on traffic that was held out."""

from .batches import longest_request
from .bench import Effort, EngineBench, Measured, measure
from .checking import HeldOut, check_profile, misses
from .making import make_profile
from .measured_engine import MeasuredEngine, measured_fleet, with_vocabulary
from .served import ServedBench, open_served_bench
from .steps import SteppedBench
from .traffic import TrafficShape, draw_traffic

__all__ = [
    "Effort",
    "EngineBench",
    "HeldOut",
    "Measured",
    "MeasuredEngine",
    "ServedBench",
    "SteppedBench",
    "TrafficShape",
    "check_profile",
    "draw_traffic",
    "longest_request",
    "make_profile",
    "measure",
    "measured_fleet",
    "misses",
    "open_served_bench",
    "with_vocabulary",
]
