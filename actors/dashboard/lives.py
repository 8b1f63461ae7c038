"""Lives of requests: all that a flight has of each, and its picture.

A request has an id, which clients may give, and a life is what happened under it. A front end says
once, at its end, when a request was prepared, sent, had its first token and ended; routers say at
once what they decide, and calls that they are tried again or move.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from .happenings import Happening

MOST_LIVES: Final = 10_000
"""The latest requests that are kept."""
MOST_KEPT: Final = 2_000
"""Earlier ones that failed, were tried again or moved."""
MOST_SLOW: Final = 500
"""Earlier ones that took longest."""
MOST_STEPS: Final = 64
"""Happenings of a request that are kept: the first one and the latest."""
SILENCE: Final = 900.0
"""Seconds without a word after which a request no longer counts as one that runs."""

ENDED: Final = "request.ended"
"""The event in which a front end tells of a request that is over."""

State: TypeAlias = Literal["open", "well", "refused", "failed", "unknown"]
Order: TypeAlias = Literal["latest", "slowest", "failed", "open"]


@dataclass(slots=True, eq=False)
class Life:
    """A request's life as far as it is known.

    Attributes:
        request: digest of its id.
        began, latest: Unix seconds of the first and the last that is known.
        ended: Unix seconds of its end; None while it is not known.
        is_answered: whether a front end has told its end.
        status: of the front end's answer; 0 without one.
        error: the code of the last error; empty once a later attempt went well.
        is_refused: whether it ended so since it was not admitted.
        first: seconds to the first token.
        attempts: that were sent.
        moves: of its stream to another instance.
        retries: attempts that were tried again.
    """

    request: str
    began: float
    latest: float
    ended: float | None = None
    is_answered: bool = False
    status: int = 0
    error: str = ""
    is_refused: bool = False
    model: str = ""
    first: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    attempts: int = 0
    moves: int = 0
    retries: int = 0
    instances: list[str] = field(default_factory=list[str])
    steps: list[Happening] = field(default_factory=list[Happening])

    def state(self, now: float) -> State:
        """Its state; `unknown` where its end is on no record."""
        if self.ended is None:
            return "open" if now - self.latest < SILENCE else "unknown"
        if self.is_refused:
            return "refused"
        return "failed" if self.error or self.status >= 500 else "well"

    def seconds(self, now: float) -> float:
        """The time that it took, or takes so far."""
        return max(0.0, (now if self.ended is None else self.ended) - self.began)

    @property
    def is_worth_keeping(self) -> bool:
        """True if something went wrong in it."""
        # What clients asked wrongly is theirs, and may be much.
        is_theirs = 400 <= self.status < 500
        return bool(self.retries or self.moves or (self.error and not is_theirs))

    def take(self, happened: Happening) -> None:
        """Have something that happened to it."""
        self.steps.append(happened)
        if len(self.steps) > MOST_STEPS:
            del self.steps[1]
        began = happened.time
        what = happened.what
        if what == ENDED:
            began -= (happened.number("end_ms") or 0.0) / 1000
            self._end_at_front(happened)
        elif what == "route.asked":
            tokens = happened.number("prompt_tokens")
            if tokens is not None and self.prompt_tokens is None:
                self.prompt_tokens = round(tokens)
        elif what == "route.sent":
            self.attempts += 1
            self._at(happened.text("instance").partition("/")[0])
        elif what == "route.first":
            if self.first is None:
                self.first = happened.time - self.began
        elif what == "route.reused":
            self.cached_tokens = round(happened.number("tokens") or 0.0)
        elif what == "route.grown":
            self.output_tokens = max(
                self.output_tokens or 0, round(happened.number("tokens") or 0.0)
            )
        elif what in ("route.ended", "route.refused", "route.left", "call.refused"):
            if not self.is_answered:
                self.ended = happened.time
                self.error = happened.text("error")
                self.is_refused = what.endswith(".refused") or (
                    self.is_refused and bool(self.error)
                )
        elif what == "call.retried":
            self.retries += 1
            self._at(happened.text("instance"))
        elif what == "call.moved":
            self.moves += 1
            self._at(happened.text("instance"))
        if (
            what in ("route.asked", "route.sent", "call.retried", "call.moved")
            and not self.is_answered
        ):
            # It goes on in another attempt.
            self.ended, self.error, self.is_refused = None, "", False
        self.began = min(self.began, began)
        self.latest = max(self.latest, happened.time)

    def _end_at_front(self, happened: Happening) -> None:
        """A front end knows best how a request ended."""
        self.is_answered = True
        self.ended = happened.time
        self.status = round(happened.number("status") or 0)
        self.error = happened.text("error")
        self.is_refused = 400 <= self.status < 500 or bool(happened.text("why"))
        self.model = happened.text("model")
        first = happened.number("first_token_ms")
        if first is not None:
            self.first = first / 1000
        if (tokens := happened.number("prompt_tokens")) is not None:
            self.prompt_tokens = round(tokens)
        if (tokens := happened.number("completion_tokens")) is not None:
            self.output_tokens = round(tokens)
        for instance in happened.text("instances").split(","):
            self._at(instance)

    def _at(self, instance: str) -> None:
        if instance and instance not in self.instances and len(self.instances) < MOST_STEPS:
            self.instances.append(instance)

    def to_json(self, now: float) -> dict[str, Any]:
        """A line of a list, as plain values; times in Unix seconds, durations in seconds."""
        return {
            "request": self.request,
            "began": self.began,
            "seconds": self.seconds(now),
            "state": self.state(now),
            "status": self.status,
            "error": self.error,
            "model": self.model,
            "first": self.first,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "attempts": self.attempts,
            "retries": self.retries,
            "moves": self.moves,
            "instances": self.instances,
        }


class Lives:
    """The lives of the latest requests, and of earlier ones that failed or took long.

    Args:
        most, most_kept, most_slow: how many of each.

    Attributes:
        forgotten: earlier ones.
    """

    def __init__(
        self, most: int = MOST_LIVES, most_kept: int = MOST_KEPT, most_slow: int = MOST_SLOW
    ) -> None:
        self.forgotten = 0
        self._most, self._most_kept, self._most_slow = most, most_kept, most_slow
        self._latest: OrderedDict[str, Life] = OrderedDict()
        self._kept: OrderedDict[str, Life] = OrderedDict()
        self._slow: dict[str, Life] = {}
        # By how long they took; the quickest goes first.
        self._by_seconds: list[tuple[float, str]] = []

    def __repr__(self) -> str:
        return f"<Lives [{len(self)} requests, {self.forgotten} forgotten]>"

    def __len__(self) -> int:
        return len(self._latest) + len(self._kept) + len(self._slow)

    def __iter__(self) -> Iterator[Life]:
        yield from self._latest.values()
        yield from self._kept.values()
        yield from self._slow.values()

    def take(self, happened: Happening) -> Life:
        """Have something that happened to a request; its life with that."""
        request = happened.request
        life = self.get(request)
        if life is None:
            life = self._latest[request] = Life(request, happened.time, happened.time)
            if len(self._latest) > self._most:
                self._retire(*self._latest.popitem(last=False))
        life.take(happened)
        return life

    def get(self, request: str) -> Life | None:
        """The life of the request with this digest; None where none is kept."""
        return self._latest.get(request) or self._kept.get(request) or self._slow.get(request)

    def listed(self, order: Order, now: float, most: int) -> list[Life]:
        """At most so many of them: the latest, or those that took longest, failed last, or run
        longest."""
        if order == "slowest":
            over = (one for one in self if one.ended is not None)
            return heapq.nlargest(most, over, key=lambda one: one.seconds(now))
        if order == "open":
            running = (one for one in self if one.state(now) == "open")
            return heapq.nsmallest(most, running, key=lambda one: one.began)
        some = (one for one in self if order == "latest" or one.is_worth_keeping)
        return heapq.nlargest(most, some, key=lambda one: one.latest)

    def _retire(self, request: str, life: Life) -> None:
        """Find a place for one that is no longer among the latest."""
        if life.is_worth_keeping:
            self._kept[request] = life
            if len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)
                self.forgotten += 1
            return
        self._slow[request] = life
        heapq.heappush(self._by_seconds, (life.seconds(life.latest), request))
        if len(self._slow) > self._most_slow:
            _, quickest = heapq.heappop(self._by_seconds)
            del self._slow[quickest]
            self.forgotten += 1


# The picture of one ------------------------------------------------------------------------


def picture(life: Life, now: float) -> dict[str, Any]:
    """A request's life as rows of bars on one axis of time, for people to look at.

    Returns:
        `rows`, each with a `label`, a `note` and `bars` (`kind`, `from`, `to` in seconds since its
        beginning, `text`), and `marks` (`at`, `text`, `kind`) of what happened at a moment.
    """
    steps = sorted(life.steps, key=lambda each: each.time)
    rows: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    by_attempt: dict[tuple[str, str, float], dict[str, Any]] = {}
    end = life.seconds(now)
    for each in steps:
        at = max(0.0, each.time - life.began)
        if each.what == ENDED:
            rows.insert(0, _front_row(each, life.began))
        elif each.what in _HAND_OVERS:
            rows.append(_hand_over_row(each, at))
        elif each.what.startswith("route."):
            key = (each.who, each.text("router"), each.number("attempt") or 1)
            row = by_attempt.get(key)
            if row is None or (each.what == "route.asked" and "end" in row):
                row = by_attempt[key] = {"who": each.who, "attempt": key[2]}
                rows.append(row)
            _take_route(row, each, at)
        else:
            marks.append({"at": at, "kind": each.what, "text": _mark(each)})
    done = [_route_row(row, end) if "who" in row else row for row in rows]
    return {
        **life.to_json(now),
        "length": max(end, *(bar["to"] for row in done for bar in row["bars"]), 1e-3)
        if any(row["bars"] for row in done)
        else max(end, 1e-3),
        "rows": done,
        "marks": marks,
        "steps": [
            {"time": each.time, "what": each.what, "who": each.who, "details": dict(each.details)}
            for each in steps
        ],
    }


def _front_row(ended: Happening, began: float) -> dict[str, Any]:
    """The row of a front end, which says what it did in milliseconds since its own beginning."""
    end = (ended.number("end_ms") or 0.0) / 1000
    # Another one may have had a request of this id before.
    start = max(0.0, ended.time - end - began)
    at = {
        name: value / 1000
        for name in ("prepared", "sent", "first_token")
        if (value := ended.number(f"{name}_ms")) is not None
    }
    bars: list[dict[str, Any]] = []
    before = 0.0
    held = (ended.number("held_ms") or 0.0) / 1000
    for kind, until in (
        # What comes before the wait for its model is short.
        ("queue", held or None),
        ("prepare", at.get("prepared")),
        ("queue", at.get("sent")),
        ("prefill", at.get("first_token")),
        ("output" if "first_token" in at else "end", end),
    ):
        if until is not None:
            until = max(before, min(until, end))
            bars.append(_bar(kind, start + before, start + until))
            before = until
    status = round(ended.number("status") or 0)
    error = ended.text("error")
    return {
        "label": f"front end {ended.who}",
        "note": " ".join(filter(None, (str(status or ""), ended.text("why")))),
        "error": error,
        "bars": bars,
    }


def _take_route(row: dict[str, Any], each: Happening, at: float) -> None:
    word = each.what.partition(".")[2]
    if word == "asked":
        row["asked"] = at
    elif word == "sent":
        row["sent"] = at
        row["instance"] = each.text("instance")
        row["why"] = each.text("reason")
        row["expected"] = each.number("tokens")
    elif word == "first":
        row["first"] = at
    elif word == "reused":
        row["reused"] = each.number("tokens")
    elif word in ("ended", "refused", "left"):
        row["end"] = at
        row["error"] = each.text("error") or ("left" if word == "left" else "")


def _route_row(row: dict[str, Any], end: float) -> dict[str, Any]:
    """The row of one attempt: what its router, and then its instance, did with it."""
    over = row.get("end", end)
    asked = row.get("asked", row.get("sent", over))
    bars: list[dict[str, Any]] = []
    sent, first = row.get("sent"), row.get("first")
    bars.append(_bar("queue", asked, over if sent is None else sent))
    if sent is not None:
        bars.append(_bar("prefill", sent, over if first is None else first))
        if first is not None:
            bars.append(_bar("output", first, over))
    facts: list[str] = []
    if row.get("why"):
        facts.append(row["why"].replace("_", " "))
    if row.get("reused") is not None:
        facts.append(f"{row['reused']:.0f} tokens in its cache")
    elif row.get("expected"):
        facts.append(f"{row['expected']:.0f} tokens expected in its cache")
    place = row.get("instance") or "no instance"
    return {
        "label": f"attempt {row['attempt']:.0f} at {row['who']} {place.removesuffix('/0')}",
        "note": ", ".join(facts),
        "error": row.get("error", ""),
        "bars": bars,
    }


def _hand_over_row(ended: Happening, end: float) -> dict[str, Any]:
    """The row of a hand-over, which the instance tells at its end, in seconds before that."""
    began = max(0.0, end - max(0.0, ended.number("seconds") or 0.0))
    answered, read = ended.number("answered"), ended.number("read")
    since = end if answered is None else min(end, began + max(0.0, answered))
    until = end if read is None else min(end, began + max(0.0, read))
    facts = [{"prefill": "its prompt", "cache": "from its cache"}.get(ended.text("kind"), "")]
    if blocks := ended.number("blocks"):
        facts.append(f"{blocks:.0f} blocks")
    if tokens := ended.number("computed_here"):
        facts.append(f"{tokens:.0f} tokens computed here")
    source = ended.text("source") or "no instance"
    return {
        "label": f"hand-over from {source} to {ended.who.rpartition('@')[2]}",
        "note": ", ".join(filter(None, facts)),
        "error": ", ".join(filter(None, (ended.text("why"), ended.text("error")))),
        "bars": [_bar("queue", began, since), _bar("transfer", since, until)],
    }


def _bar(kind: str, since: float, until: float) -> dict[str, Any]:
    return {"kind": kind, "from": since, "to": max(since, until)}


_HAND_OVERS: Final = ("hand_over.done", "hand_over.failed")
_WORDS: Final = {
    "cache.damaged": "its blocks were damaged",
    "call.moved": "moved",
    "call.refused": "refused",
    "call.retried": "tried again",
    "call.waited": "taken in",
    "hand_over.given_up": "a transfer was given up",
    "hand_over.unread": "nobody has read its prompt",
    "request.held": "held, its model has no engine",
    "request.let_go": "held no longer",
}
_AT_INSTANCES: Final = (
    "cache.damaged",
    "call.refused",
    "call.waited",
    "hand_over.given_up",
    "hand_over.unread",
)
"""Events of instances themselves."""


def _mark(each: Happening) -> str:
    word = _WORDS.get(each.what, each.what)
    attempt, waited = each.number("attempt"), each.number("waited")
    after = f" after attempt {attempt:.0f}" if attempt is not None else ""
    if waited is not None:
        after += f" after {waited:.3g} s"
    place = each.text("instance")
    if each.what in _AT_INSTANCES:
        place = each.who.rpartition("@")[2]
    at = f" at {place}" if place else ""
    why = ", ".join(filter(None, (each.text("error"), each.text("why"))))
    return f"{word}{after}{at}{f': {why}' if why else ''}"
