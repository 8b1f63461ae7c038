"""The form of what routers tell of their decisions, as far as it is shown.

An instance hears what the routers to its component are asked, and may answer anything.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from dynbus.kvrouter.routing.decision import Explanation

_Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class _Rank(msgspec.Struct):
    instance: str
    dp_rank: _Count


class _Overlap(msgspec.Struct):
    device: _Count
    host: _Count
    disk: _Count
    external: _Count


class _Candidate(_Rank):
    cost: float | None
    overlap: _Overlap
    predicted_blocks: _Count
    active_prefill_tokens: _Count
    active_blocks: float
    added_blocks: _Count
    active_requests: _Count
    peer_blocks: _Count = 0
    hop_ms: float = 0.0


class _Shadow(msgspec.Struct):
    policy: str
    chosen: _Rank | None
    regret: float | None
    error: str


class _Outcome(msgspec.Struct):
    first_item_s: float | None
    reused_tokens: _Count | None
    ended_s: float | None
    error: str


class _Decision(msgspec.Struct):
    ago_s: float
    request_id: str
    attempt: _Count
    prompt_tokens: _Count
    prompt_blocks: _Count
    block_size: _Count
    chosen: _Rank
    reason: str
    policy: str
    temperature: float
    expected_reuse: _Count
    candidates: list[_Candidate]
    excluded: dict[str, str]
    index_sequence: _Count
    awareness: str
    session: str
    waited_s: float
    shadows: list[_Shadow]
    outcome: _Outcome
    peer: _Rank | None = None
    peer_overlap: _Count = 0
    left_out: _Count = 0
    excluded_left_out: _Count = 0


class _Damage(msgspec.Struct):
    at: _Time
    sources: list[str]
    evidence: str
    request_id: str
    blocks: _Count
    first: _Count
    dropped: _Count
    measures: list[str]
    requests: list[str]
    requests_left_out: _Count = 0


_DECISIONS: Final = list[_Decision]
_DAMAGES: Final = list[_Damage]


def check_answer(answer: Explanation) -> None:
    """Refuse an answer that cannot be shown.

    Raises:
        msgspec.ValidationError: it has another form.
    """
    msgspec.convert(answer.decisions, _DECISIONS)
    msgspec.convert(answer.damages or [], _DAMAGES)
