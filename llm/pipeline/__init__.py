"""From a request for a completion to its answer: tokens, a route, an engine, and text again.

All of it runs in the process of a front end, or in actors of its own: see `Processor`.

`Transcript`, with the parser of the output and the format of the answer, decides what an engine's
tokens come to; `TokenCompletion` carries it out.
"""

from typing import Literal

__all__ = ["RoutingChoice"]

RoutingChoice = Literal[
    "auto", "kv", "round_robin", "random", "least_loaded", "power_of_two", "local_first"
]
"""The way in which requests find an instance; `auto` is `kv` where all instances tell the size of
their blocks, and `least_loaded` elsewhere.
"""
