"""Options that several engines have, each described once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from dynbus import ConfigError, Option, Options

from .step_watch import HangLimits

BlockSize: TypeAlias = Annotated[
    int, Option("tokens of a block of the cache", least=1, unit="tokens")
]
Blocks: TypeAlias = Annotated[int, Option("how many blocks the cache has", least=1)]
MaxNumSeqs: TypeAlias = Annotated[int, Option("requests that run at a time; others wait", least=1)]
MaxNumBatchedTokens: TypeAlias = Annotated[
    int,
    Option(
        "tokens that one step computes, `max_num_seqs` at least: what a prompt delays the outputs "
        "beside it by",
        least=1,
        unit="tokens",
    ),
]
ContextLength: TypeAlias = Annotated[
    int,
    Option(
        "the most tokens that a prompt and its output may have; 0 for the model's, as far as the "
        "cache holds it",
        least=0,
        unit="tokens",
    ),
]
KvEvents: TypeAlias = Annotated[bool, Option("whether routers are told what the cache holds")]
SpeedupRatio: TypeAlias = Annotated[
    float, Option("how many times faster a mock is than the engine that it plays", above=0)
]


@dataclass(frozen=True, kw_only=True)
class HangOptions(Options):
    """The longest step that an engine may take before it counts as hung."""

    hang_limit: Annotated[
        float,
        Option(
            "the longest that a step may take, also before anything is learned of its steps; then "
            "the engine hangs, and its instance is withdrawn. 0 for never",
            least=0,
            unit="seconds",
            guide="hangs.md",
        ),
    ] = HangLimits().longest
    hang_least: Annotated[
        float,
        Option(
            "a step may take so long at least, however short those before were",
            above=0,
            unit="seconds",
            guide="hangs.md",
        ),
    ] = HangLimits().least
    hang_factor: Annotated[
        float,
        Option(
            "in between it may take so many times the longest that was seen of its size",
            least=1,
            guide="hangs.md",
        ),
    ] = HangLimits().factor

    def check(self) -> None:
        super().check()
        if 0 < self.hang_limit < self.hang_least:
            raise ConfigError(
                f"hang_limit={self.hang_limit:g} is less than hang_least={self.hang_least:g}: give "
                "a larger hang_limit, or a smaller hang_least"
            )
