"""Options that several engines have, each described once."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from dynbus import Option

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
