"""A decision: the candidates for a request, the facts known of each, and the outcome.

Routers tell theirs to clients that ask by core NATS, on the subject `_kv_why` of their component.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.names import WHY
from dynbus.kvrouter.radix.index import Rank
from dynbus.spi import check_token, monotonic, unix_time

from .candidates import Candidate, Candidates

MAX_REQUEST_ID: Final = 128
MAX_LATEST: Final = 100
"""Decisions that a router tells at once without being asked for a request."""

MAX_TOLD: Final = 128
"""Decisions that a router tells at once at all."""
MAX_CANDIDATES: Final = 4096
"""Candidates in these, so that no question holds up the requests of a router for long."""

KEPT_CANDIDATES: Final = 1 << 20
"""Candidates of all decisions that are kept, of 40 to 90 bytes each."""


class Reason(StrEnum):
    """The reason for which a rank was chosen."""

    LOWEST_COST = "lowest_cost"
    SAMPLED = "sampled"
    """Drawn at a temperature above 0."""
    ONLY_CANDIDATE = "only_candidate"
    SESSION = "session"
    """The session was there before."""


@dataclass(slots=True)
class ShadowChoice:
    """The choice that another cost function would have made.

    Attributes:
        chosen: None when it failed, or found no candidate good enough.
        regret: its cost of what was chosen, less its lowest; infinity for one it never chooses.
        error: what it raised; empty for nothing.
    """

    policy: str
    chosen: Rank | None = None
    regret: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Outcome:
    """The events after a decision.

    Attributes:
        first_item_s: seconds from the decision to the first output; None before.
        reused_tokens: prompt tokens that the engine found in its cache; None when not said.
        ended_s: seconds from the decision to the end; None while it runs.
        error: the code of the error that it ended with; empty for none.
    """

    first_item_s: float | None = None
    reused_tokens: int | None = None
    ended_s: float | None = None
    error: str = ""


@dataclass(slots=True, eq=False)
class Decision:
    """One choice of a rank for one attempt at a request.

    Attributes:
        number: counts the decisions of a scheduler; names the decision to it.
        decided_at: seconds of the clock that the scheduler is given; `monotonic` in a router.
        candidates, costs: who could have got it, and at what cost, in one order; the costs of
            shape [candidates]. A cost is that of the policy times the preference for the instance.
        expected_reuse: tokens of the prompt that the chosen rank was taken to hold and not to
            compute again, as engines do with the last one and its block.
        told_reuse: those of them that it had said itself; the others were guessed.
        peer: from whom the chosen rank may fetch blocks that it lacks; None for nobody.
        peer_overlap: blocks of the prompt that the peer holds, from the first one on; 0 without.
        excluded: why other instances could not, by id; also those that the call tried before.
        index_sequence: up to where the router's index had followed the events.
        awareness: how much the index could be trusted.
        predicted: blocks of candidates' overlaps that were guessed, not told, by their position.
        policy: the cost function that decided.
        waited_s: seconds in the queue.
        tenant: whose request it is, as its metadata says.
    """

    number: int
    request_id: str
    attempt: int
    decided_at: float
    prompt_tokens: int
    prompt_blocks: int
    block_size: int
    candidates: Candidates
    costs: NDArray[np.float64]
    chosen: Rank
    reason: Reason
    policy: str
    expected_reuse: int
    told_reuse: int = 0
    peer: Rank | None = None
    peer_overlap: int = 0
    temperature: float = 0.0
    predicted: Mapping[int, int] = field(default_factory=dict[int, int])
    excluded: Mapping[str, str] = field(default_factory=dict[str, str])
    index_sequence: int = 0
    awareness: str = ""
    session: str = ""
    waited_s: float = 0.0
    tenant: str = ""
    shadows: Sequence[ShadowChoice] = ()
    outcome: Outcome = field(default_factory=Outcome)

    def to_json(self) -> bytes:
        """The decision as a JSON object; an infinite cost is null."""
        return msgspec.json.encode(self.as_dict())

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """The decision as plain values, candidates from the lowest cost to the highest.

        `decided_at` is in Unix seconds here: its reader has another monotonic clock.

        Args:
            most: of how many candidates to tell, the chosen one among them, and of how many
                excluded ones; from 1 on. What is missing is counted in `left_out` and
                `excluded_left_out`.
        """
        order: list[int] = np.argsort(self.costs, kind="stable").tolist()
        kept = order[:most]
        chosen = self.candidates.ranks.index(self.chosen)
        if chosen not in kept:
            kept[-1] = chosen
        excluded = dict(islice(self.excluded.items(), most))
        left_out = {
            "left_out": len(order) - len(kept),
            "excluded_left_out": len(self.excluded) - len(excluded),
        }
        return {
            "number": self.number,
            "request_id": self.request_id,
            "attempt": self.attempt,
            "decided_at": round(unix_time() - (monotonic() - self.decided_at), 3),
            "prompt_tokens": self.prompt_tokens,
            "prompt_blocks": self.prompt_blocks,
            "block_size": self.block_size,
            "chosen": self.chosen._asdict(),
            "reason": self.reason.value,
            "policy": self.policy,
            "temperature": self.temperature,
            "expected_reuse": self.expected_reuse,
            "told_reuse": self.told_reuse,
            "peer": None if self.peer is None else self.peer._asdict(),
            "peer_overlap": self.peer_overlap,
            "candidates": [
                _candidate(float(self.costs[at]), self.candidates[at], self.predicted.get(at, 0))
                for at in kept
            ],
            "excluded": excluded,
            **{key: count for key, count in left_out.items() if count},
            "index_sequence": self.index_sequence,
            "awareness": self.awareness,
            "session": self.session,
            "waited_s": self.waited_s,
            "shadows": [_shadow(one) for one in self.shadows],
            "outcome": asdict(self.outcome),
        }


def _candidate(cost: float, candidate: Candidate, predicted: int) -> dict[str, Any]:
    known = candidate._asdict()
    return {
        **known.pop("rank")._asdict(),
        "cost": _finite(cost),
        "overlap": known.pop("overlap")._asdict(),
        "predicted_blocks": predicted,
        **known,
    }


def _shadow(shadow: ShadowChoice) -> dict[str, Any]:
    return {
        "policy": shadow.policy,
        "chosen": None if shadow.chosen is None else shadow.chosen._asdict(),
        "regret": _finite(shadow.regret),
        "error": shadow.error,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class DecisionLog:
    """The latest decisions, by number and by request.

    Args:
        limit: how many are kept; fewer where they have more than `KEPT_CANDIDATES` candidates.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._candidates = 0
        self._decisions: OrderedDict[int, Decision] = OrderedDict()
        self._of_request: dict[str, list[int]] = {}

    def __repr__(self) -> str:
        return f"<DecisionLog [{len(self._decisions)} of {self._limit}]>"

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        """Keep a decision, and forget the oldest for it."""
        self._decisions[decision.number] = decision
        self._of_request.setdefault(decision.request_id, []).append(decision.number)
        self._candidates += len(decision.candidates)
        while len(self._decisions) > self._limit or (
            self._candidates > KEPT_CANDIDATES and len(self._decisions) > 1
        ):
            _, oldest = self._decisions.popitem(last=False)
            self._candidates -= len(oldest.candidates)
            numbers = self._of_request[oldest.request_id]
            numbers.remove(oldest.number)
            if not numbers:
                del self._of_request[oldest.request_id]

    def get(self, number: int) -> Decision | None:
        """A decision by its number; None when it is not kept any longer."""
        return self._decisions.get(number)

    def find(self, request_id: str) -> list[Decision]:
        """The decisions for a request that are still kept: one per attempt, in their order."""
        return [self._decisions[number] for number in self._of_request.get(request_id, ())]

    def tried_before(self, decision: Decision) -> dict[str, str]:
        """The instances that earlier attempts of a decision's call tried and that it left out.

        Calls may share a request's id: the attempts of one begin anew with 1.

        Returns:
            What came of each, by id.
        """
        candidates = {rank.instance for rank in decision.candidates.ranks}
        tried: dict[str, str] = {}
        for number in reversed(self._of_request.get(decision.request_id, ())):
            one = self._decisions[number]
            if one.attempt >= decision.attempt:
                continue
            if one.chosen.instance not in candidates:
                ended = one.outcome.error or "no error"
                why = f"tried before, by attempt {one.attempt}, which ended with {ended}"
                tried.setdefault(one.chosen.instance, why)
            if one.attempt == 1:
                break
        return tried

    def latest(self, count: int) -> list[Decision]:
        """The latest decisions, newest first."""
        newest = reversed(self._decisions.values())
        return [decision for decision, _ in zip(newest, range(count), strict=False)]


# Questions and answers ----------------------------------------------------------------------


def why_subject(namespace: str, component: str) -> str:
    """The subject at which the routers of a component are asked for their decisions."""
    return f"{check_token('namespace', namespace)}.{check_token('component', component)}.{WHY}"


class Question(msgspec.Struct, frozen=True):
    """The question for the decisions of a request, or for the latest ones.

    Attributes:
        request_id: those for this request; empty for the latest.
        latest: how many of the latest, newest first, without an id.
    """

    request_id: str = ""
    latest: int = 0


class Explanation(msgspec.Struct, frozen=True):
    """The answer of one router to a question about its decisions, as JSON.

    Attributes:
        router: its id.
        process: host name and process id, for people.
        target: `namespace.component` of the instances that it chooses among.
        cache_aware: how far it can rely on what it knows of the caches now.
        kept: decisions that it keeps.
        limit: how many it keeps at most.
        oldest_s: how long ago the oldest of them was made; None without any.
        decisions: as `Decision.as_dict` gives them, one per attempt at the request, or the latest
            ones, newest first; and `ago_s`, how long ago each was made. Of very many candidates
            the costliest are left out, and of very many excluded ones some; `left_out` and
            `excluded_left_out` say how many.
        decisions_left_out: how many older ones are missing because they were too many.
        damages: of an instance's cache, which have touched the request: see `KvDamage`. An
            instance answers with nothing else, and with its own name as the router's id.
    """

    router: str
    process: str
    target: str
    cache_aware: str
    kept: int
    limit: int
    oldest_s: float | None
    decisions: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    decisions_left_out: int = 0
    damages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


_question = msgspec.json.Decoder(Question)


def read_question(data: bytes) -> Question | None:
    """The question in bytes; None for bytes that ask for nothing."""
    try:
        question = _question.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if question.request_id:
        return question if len(question.request_id) <= MAX_REQUEST_ID else None
    return question if 0 < question.latest <= MAX_LATEST else None


def tell(
    decisions: Sequence[Decision], now: float, most: int = MAX_CANDIDATES
) -> list[dict[str, Any]]:
    """Decisions as an `Explanation` has them, in their order.

    Args:
        now: on the clock by which they were made.
        most: of how many candidates of each to tell.
    """
    return [{**one.as_dict(most), "ago_s": round(now - one.decided_at, 3)} for one in decisions]


def newest(decisions: Sequence[Decision], count: int = MAX_TOLD) -> list[Decision]:
    """The latest of decisions, in the order in which they are given."""
    numbers = {one.number for one in heapq.nlargest(count, decisions, key=lambda one: one.number)}
    return [one for one in decisions if one.number in numbers]


def encode_explanation(
    explanation: Explanation, decisions: Sequence[Decision], now: float, limit: int
) -> bytes:
    """An explanation with these decisions, as JSON of at most `limit` bytes.

    That costs the costliest candidates, then the oldest decisions.

    Raises:
        ValueError: it does not fit even with one candidate of one decision.
    """
    kept = newest(decisions)
    longest = max((max(len(one.candidates), len(one.excluded)) for one in kept), default=1)
    most = min(longest, MAX_CANDIDATES // max(1, len(kept)))
    while True:
        text = msgspec.json.encode(
            msgspec.structs.replace(
                explanation,
                decisions=tell(kept, now, most),
                decisions_left_out=len(decisions) - len(kept),
            )
        )
        if len(text) <= limit:
            return text
        if most > 1:
            most //= 2
        elif len(kept) > 1:
            kept = newest(kept, len(kept) // 2)
        else:
            raise ValueError(f"an answer of {len(text)} bytes does not fit into {limit}")
