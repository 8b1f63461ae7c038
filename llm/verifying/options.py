"""The options of an engine whose cache is verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dynbus import Option, Options


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    """The part of what an engine answers from kept and moved blocks that is computed again."""

    verify: Annotated[
        float,
        Option(
            "of the requests of `small` whose prompt was not all computed for them, that are "
            "computed again in idle time and compared; 0 for none",
            least=0,
            most=1,
            guide="verifying-caches.md",
        ),
    ] = 0.05
    verify_budget: Annotated[
        float,
        Option(
            "of the engine's time, that this takes at most",
            above=0,
            most=1,
            guide="verifying-caches.md",
        ),
    ] = 0.01
    verify_factor: Annotated[
        float,
        Option(
            "a difference is one that is so many times the largest that the engine makes between "
            "two ways of computing the same",
            least=1,
            guide="verifying-caches.md",
        ),
    ] = 8.0
    verify_own: Annotated[
        int,
        Option(
            "with more damages than these of blocks that it computed itself an instance is "
            "withdrawn",
            least=0,
            guide="verifying-caches.md",
        ),
    ] = 3
