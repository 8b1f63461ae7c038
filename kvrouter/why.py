"""`_kv_why`: a router tells what it decided for a request, to whoever asks by core NATS."""

from __future__ import annotations

import os
import socket
from typing import Any, Final, Protocol

import msgspec

from dynbus.bus.names import check_token

from .decision import Decision

MAX_REQUEST_ID: Final = 128


def why_subject(namespace: str, component: str) -> str:
    """Where the routers of a component are asked for their decisions."""
    return f"{check_token('namespace', namespace)}.{check_token('component', component)}._kv_why"


class Question(msgspec.Struct, frozen=True):
    """Which request is meant."""

    request_id: str


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
        decisions: as `Decision.as_dict` gives them, one per attempt, and `ago_s`, how long ago
            each was made. Of very many candidates the costliest are left out; `left_out` says how
            many.
    """

    router: str
    process: str
    target: str
    cache_aware: str
    kept: int
    limit: int
    oldest_s: float | None
    decisions: list[dict[str, Any]]


class DecisionSource(Protocol):
    """What a router keeps."""

    def decisions(self, request_id: str) -> list[Decision]: ...
    def latest_decisions(self, count: int = 20) -> list[Decision]: ...


_question = msgspec.json.Decoder(Question)


def read_question(data: bytes) -> str | None:
    """The id of the request that is asked for; None for bytes that ask for none."""
    try:
        request_id = _question.decode(data).request_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return request_id if 0 < len(request_id) <= MAX_REQUEST_ID else None


def process_name() -> str:
    """This process, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def encode_answer(answer: Answer, limit: int) -> bytes:
    """An answer as JSON of at most `limit` bytes, which costs the costliest candidates.

    Raises:
        ValueError: it does not fit even with one candidate for each decision.
    """
    most = max((len(one["candidates"]) for one in answer.decisions), default=0)
    while True:
        text = msgspec.json.encode(answer)
        if len(text) <= limit:
            return text
        if most <= 1:
            raise ValueError(f"an answer of {len(text)} bytes does not fit into {limit}")
        most //= 2
        answer = msgspec.structs.replace(
            answer, decisions=[_shortened(one, most) for one in answer.decisions]
        )


def _shortened(decision: dict[str, Any], most: int) -> dict[str, Any]:
    """A decision with its cheapest candidates, and with the chosen one."""
    candidates: list[dict[str, Any]] = decision["candidates"]
    kept = candidates[:most]
    chosen = decision["chosen"]
    if not any(_is(one, chosen) for one in kept):
        kept[-1:] = [one for one in candidates if _is(one, chosen)]
    left_out = decision.get("left_out", 0) + len(candidates) - len(kept)
    return {**decision, "candidates": kept, "left_out": left_out}


def _is(candidate: dict[str, Any], chosen: dict[str, Any]) -> bool:
    return all(candidate[key] == value for key, value in chosen.items())
