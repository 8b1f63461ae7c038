"""The simulation of a whole bus: stories under faults, by a seed, in virtual time.

`plan` is pure; `loop` draws the order of tasks, `randomness` has ids and draws come from the seed,
`processes` are those of a kit, which die and stand still, `nemesis` carries a plan out, `watching`
has what always has to hold, and `simulating` tells stories and shortens the plans of those that
fail.
"""

from . import loop, plan, processes, simulating

__all__ = ["loop", "plan", "processes", "simulating"]
