"""`_kv_why`: a router tells what it decided for a request, to whoever asks by core NATS."""

from __future__ import annotations

import heapq
import os
import socket
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from dynbus.bus.protocol.names import check_token

from .decision import Decision

MAX_REQUEST_ID: Final = 128
MAX_LATEST: Final = 100
"""Decisions that a router tells at once without being asked for a request."""

MAX_TOLD: Final = 128
"""Decisions that a router tells at once at all."""
MAX_CANDIDATES: Final = 4096
"""Candidates in these, so that no question holds up the requests of a router for long."""


def why_subject(namespace: str, component: str) -> str:
    """Where the routers of a component are asked for their decisions."""
    return f"{check_token('namespace', namespace)}.{check_token('component', component)}._kv_why"


class Question(msgspec.Struct, frozen=True):
    """Which decisions are meant.

    Attributes:
        request_id: those for this request; empty for the latest.
        latest: how many of the latest, newest first, without an id.
    """

    request_id: str = ""
    latest: int = 0


class Answer(msgspec.Struct, frozen=True):
    """What one router knows of a request, as JSON.

    Attributes:
        router: its id.
        process: host name and process id, for people.
        target: `namespace.component` of the instances that it chooses among.
        cache_aware: how far it can rely on what it knows of the caches now.
        kept: decisions that it keeps.
        limit: how many it keeps at most.
        oldest_s: how long ago the oldest of them was made; None without any.
        decisions: as `Decision.as_dict` gives them, one per attempt at the request, or the latest
            ones, newest first; and `ago_s`, how long ago
            each was made. Of very many candidates the costliest are left out, and of very many
            excluded ones some; `left_out` and `excluded_left_out` say how many.
        decisions_left_out: how many older ones are missing because they were too many.
    """

    router: str
    process: str
    target: str
    cache_aware: str
    kept: int
    limit: int
    oldest_s: float | None
    decisions: list[dict[str, Any]]
    decisions_left_out: int = 0


_question = msgspec.json.Decoder(Question)


def read_question(data: bytes) -> Question | None:
    """What is asked for; None for bytes that ask for nothing."""
    try:
        question = _question.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if question.request_id:
        return question if len(question.request_id) <= MAX_REQUEST_ID else None
    return question if 0 < question.latest <= MAX_LATEST else None


def process_name() -> str:
    """This process, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def tell(decisions: Sequence[Decision], now: float) -> list[dict[str, Any]]:
    """Decisions as an answer has them, in their order: the newest of too many.

    Args:
        now: on the clock by which they were made.
    """
    newest = {one.number for one in heapq.nlargest(MAX_TOLD, decisions, key=_number)}
    told = [one for one in decisions if one.number in newest]
    most = MAX_CANDIDATES // max(1, len(told))
    return [{**one.as_dict(most), "ago_s": round(now - one.decided_at, 3)} for one in told]


def _number(decision: Decision) -> int:
    return decision.number


def encode_answer(answer: Answer, limit: int) -> bytes:
    """An answer as JSON of at most `limit` bytes.

    That costs the costliest candidates, then the oldest decisions.

    Raises:
        ValueError: it does not fit even with one candidate of one decision.
    """
    most = max(
        (max(len(one["candidates"]), len(one["excluded"])) for one in answer.decisions), default=0
    )
    while True:
        text = msgspec.json.encode(answer)
        if len(text) <= limit:
            return text
        if most > 1:
            most //= 2
            shorter = [_shortened(one, most) for one in answer.decisions]
        elif len(answer.decisions) > 1:
            newest = sorted(one["number"] for one in answer.decisions)
            first = newest[(len(newest) + 1) // 2]
            shorter = [one for one in answer.decisions if one["number"] >= first]
        else:
            raise ValueError(f"an answer of {len(text)} bytes does not fit into {limit}")
        left_out = answer.decisions_left_out + len(answer.decisions) - len(shorter)
        answer = msgspec.structs.replace(answer, decisions=shorter, decisions_left_out=left_out)


def _shortened(decision: dict[str, Any], most: int) -> dict[str, Any]:
    """A decision with its cheapest candidates, with the chosen one, and some of the excluded."""
    candidates: list[dict[str, Any]] = decision["candidates"]
    kept = candidates[:most]
    chosen = decision["chosen"]
    if not any(_is(one, chosen) for one in kept):
        kept[-1:] = [one for one in candidates if _is(one, chosen)]
    excluded = dict(islice(decision["excluded"].items(), most))
    missing = len(decision["excluded"]) - len(excluded)
    return {
        **decision,
        "candidates": kept,
        "left_out": decision.get("left_out", 0) + len(candidates) - len(kept),
        "excluded": excluded,
        "excluded_left_out": decision.get("excluded_left_out", 0) + missing,
    }


def _is(candidate: dict[str, Any], chosen: dict[str, Any]) -> bool:
    return all(candidate[key] == value for key, value in chosen.items())
