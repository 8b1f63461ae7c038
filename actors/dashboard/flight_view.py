"""`FlightView`: the picture of a flight, folded record by record, of bounded size.

It has no I/O and no clock: what shows it says what time it is.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dynbus.bus.flight import MOST_ONE_IN, SAMPLED, SampledTimes

from .happenings import MISSING, FlightReader, Happening
from .lives import ENDED, Lives
from .timeline import Bucket, Span, Timeline

if TYPE_CHECKING:
    from dynbus.bus.flight import Entry

MOST_MARKS: Final = 2_000
"""The latest faults, scalings and the like that are kept one by one."""
MOST_INSTANCES: Final = 512
SAME_LOSS: Final = 10.0
"""Seconds within which several callers notice one loss, or several requests meet one fault."""
AHEAD: Final = 60.0
"""Seconds by which a clock may be wrong; what is from further outside the time that is looked at
was written by nobody who records."""

Kind: TypeAlias = Literal["fault", "scaling", "instance", "gap"]

KINDS: Final[Mapping[str, Kind]] = {
    "instance.ready": "instance",
    "instance.draining": "instance",
    "instance.stopped": "instance",
    "instance.lost": "fault",
    "instance.broken": "fault",
    "instance.taken_over": "fault",
    "process.ended": "fault",
    "hand_over.failed": "fault",
    "hand_over.given_up": "fault",
    "hand_over.unread": "fault",
    "cache.damaged": "fault",
    "tier.damaged": "fault",
    "node.scaled": "scaling",
    "node.restarted": "scaling",
    "pool.decided": "scaling",
    "pool.not_scaled": "fault",
    MISSING: "gap",
    SAMPLED: "gap",
}
"""The events that are shown one by one; further ones of instances and nodes are of these kinds,
too."""

MANY: Final = frozenset((MISSING, "instance.lost", "hand_over.failed", "hand_over.given_up"))
"""The events of which several shortly after each other are one mark."""

STATES: Final = {
    "ready": "ready",
    "draining": "draining",
    "stopped": "stopped",
    "lost": "lost",
    "broken": "broken",
    "taken_over": "taken over",
}
"""The state of an instance after an event."""


GONE: Final = "gone"
"""The state of an instance that has left without a word: a router has seen its record expire."""


@dataclass(slots=True)
class Mark:
    """One event on the time line.

    Attributes:
        count: how often it was told: by each caller of an instance that was lost.
    """

    happened: Happening
    kind: Kind
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        time, what, who, _, details = self.happened
        return {
            "time": time,
            "kind": self.kind,
            "what": what,
            "who": who,
            "count": self.count,
            "details": dict(details),
        }


@dataclass(slots=True)
class Instance:
    """An instance as the flight has it.

    Attributes:
        address: `namespace.Component@id`; of one that only a router has named, too.
        state: empty where nothing was said of it.
        since: Unix seconds of what was said last.
        running: requests that routers have sent there, and that are not over.
    """

    address: str
    state: str = ""
    since: float = 0.0
    running: int = 0
    sent: int = 0
    errors: int = 0

    @property
    def is_gone(self) -> bool:
        """True if it serves nobody any more."""
        return self.state in ("stopped", "lost", "broken", "taken over", GONE)


class FlightView:
    """A time line, lives of requests, instances and events of a flight.

    Where one of several requests is on record, it counts as all of them.

    Args:
        since, until: Unix seconds between which it is looked at; `until` may be infinite for one
            that goes on.
        keep: seconds of one that goes on which are looked at.
        reader: of the records.

    Attributes:
        sampled: the times of that.
        outside: happenings that were not between the two.
        records: happenings that were taken.
    """

    def __init__(
        self,
        since: float = 0.0,
        until: float = math.inf,
        *,
        keep: float = math.inf,
        reader: FlightReader | None = None,
    ) -> None:
        self.lives = Lives()
        self.sampled = SampledTimes()
        self.outside = 0
        self.records = 0
        self._since, self._until = since - AHEAD, until + AHEAD
        self._reader = reader or FlightReader()
        self._timeline = Timeline(keep)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self._instances: dict[str, Instance] = {}
        # Of recorders that keep a part of the requests: of how many one.
        self._shares: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<FlightView [{self.records} records, {self._timeline!r}, {self.lives!r}]>"

    @property
    def range(self) -> tuple[float, float] | None:
        """Unix seconds between which anything happened; None where nothing did."""
        return self._timeline.range

    @property
    def instances(self) -> list[Instance]:
        """All that are kept: those that serve first, by their names."""
        return sorted(self._instances.values(), key=lambda each: (each.is_gone, each.address))

    def marks(self, since: float, until: float) -> list[Mark]:
        """The events between two times, in the order of time."""
        some = [one for one in self._marks if since <= one.happened.time < until]
        return sorted(some, key=lambda each: each.happened.time)

    def span(self, since: float, until: float, most: int) -> Span:
        """The buckets between two times, at most so many; see `lanes`."""
        return self._timeline.span(since, until, most)

    def lanes(self, span: Span) -> dict[str, list[float | None]]:
        """The measures of the time line for each bucket: rates per second, `hits` from 0 to 1,
        times in seconds, and None where nothing is known."""
        started = self._better("router.begun", "front.begun")
        over = self._ends
        output = self._better("router.output", "front.output")
        first = f"{over}.first"
        width = span.width
        lanes: dict[str, list[float | None]] = {
            name: []
            for name in ("begun", "ended", "failed", "refused", "hits", "ttft_p50", "ttft_p99")
        }
        for name in ("output", "retried", "moved", "missing"):
            lanes[name] = []
        for bucket in span.buckets:
            counts = bucket.counts
            rates = {
                "begun": counts.get(started, 0.0),
                "ended": counts.get(f"{over}.ended", 0.0),
                "failed": counts.get(f"{over}.failed", 0.0),
                "refused": counts.get(f"{over}.refused", 0.0),
                "output": counts.get(output, 0.0),
                "retried": counts.get("retried", 0.0),
                "moved": counts.get("moved", 0.0),
                "missing": counts.get("missing", 0.0),
            }
            for name, amount in rates.items():
                lanes[name].append(amount / width)
            lanes["hits"].append(hit_rate(bucket))
            times = bucket.times.get(first)
            lanes["ttft_p50"].append(None if times is None else times.quantile(0.5))
            lanes["ttft_p99"].append(None if times is None else times.quantile(0.99))
        return lanes

    def totals(self, span: Span) -> dict[str, float | None]:
        """The same of all buckets together: counts in place of rates."""
        whole = Bucket()
        for bucket in span.buckets:
            whole.merge(bucket)
        [values] = zip(*self.lanes(Span(span.since, 1.0, [whole])).values(), strict=True)
        return dict(zip(self.lanes(Span(span.since, 1.0, [])), values, strict=True))

    # Taking records -----------------------------------------------------------------------

    def take(self, entry: Entry) -> None:
        """Take the next record, each recorder's in their order."""
        self.sampled.take(entry)
        for happened in self._reader.take(entry):
            self.happened(happened)

    def happened(self, happened: Happening) -> None:
        """Take something that happened."""
        if not self._since <= happened.time <= self._until:
            self.outside += 1
            return
        self.records += 1
        word, _, rest = happened.what.partition(".")
        if word == "route":
            self._routed(rest, happened)
        elif word == "call":
            if rest in ("retried", "moved"):
                self._timeline.add(happened.time, rest)
            elif rest == "refused":
                self._timeline.add(happened.time, "router.refused", _weight(happened))
        elif happened.what == ENDED:
            self._answered(happened)
        else:
            self._note(word, rest, happened)
        if happened.request:
            self.lives.take(happened)

    def move_on(self, now: float) -> None:
        """It is so late: what is from further ahead was written by nobody who records."""
        self._until = now + AHEAD

    def _routed(self, word: str, happened: Happening) -> None:
        time, line, weight = happened.time, self._timeline, _weight(happened)
        if word == "asked":
            if (happened.number("attempt") or 1) <= 1:
                line.add(time, "router.begun", weight)
        elif word == "sent":
            place = happened.text("instance").partition("/")[0]
            instance = self._instance(f"{happened.who}@{place}")
            instance.running += weight
            instance.sent += weight
            line.place(time, instance.address, weight)
        elif word == "first":
            seconds = happened.number("seconds")
            if seconds is not None and (happened.number("attempt") or 1) <= 1:
                line.observe(time, "router.first", seconds, weight)
        elif word == "reused":
            tokens = happened.number("tokens") or 0.0
            prompt = happened.number("prompt_tokens") or 0.0
            line.add(time, "prompt", prompt * weight)
            line.add(time, "cached", min(tokens, prompt) * weight)
        elif word == "grown":
            line.add(time, "router.output", max(0.0, happened.number("more") or 0.0) * weight)
        elif word == "ended":
            place = happened.text("instance").partition("/")[0]
            instance = self._instance(f"{happened.who}@{place}")
            instance.running = max(0, instance.running - weight)
            error = happened.text("error")
            instance.errors += weight * bool(error)
            line.add(time, "router.ended", weight)
            if error:
                line.add(time, "router.failed", weight)
        elif word == "gone":
            instance = self._instance(happened.who)
            if not instance.is_gone and time >= instance.since:
                instance.state, instance.since, instance.running = GONE, time, 0
        elif word == "refused":
            line.add(time, "router.ended", weight)
            line.add(time, "router.refused", weight)

    def _answered(self, happened: Happening) -> None:
        """A front end has told the end of a request."""
        end, line, weight = happened.time, self._timeline, _weight(happened)
        status = happened.number("status") or 0
        line.add(end, "front.ended", weight)
        if 400 <= status < 500 or happened.text("why"):
            line.add(end, "front.refused", weight)
        elif happened.text("error") or status >= 500:
            line.add(end, "front.failed", weight)
        took = max(0.0, happened.number("end_ms") or 0.0) / 1000
        began = max(end - took, self._since)
        line.add(began, "front.begun", weight)
        first = happened.number("first_token_ms")
        start = began
        if first is not None:
            start = min(end, began + max(0.0, first) / 1000)
            line.observe(start, "front.first", max(0.0, first) / 1000, weight)
        output = happened.number("completion_tokens")
        if output is not None and output > 0:
            line.spread(start, end, "front.output", output * weight)

    def _note(self, word: str, rest: str, happened: Happening) -> None:
        kind = KINDS.get(happened.what)
        if kind is None:
            if word not in ("instance", "node", "process"):
                # A later version tells further things.
                return
            kind = "scaling" if word == "node" else "instance"
        if happened.what == MISSING:
            self._timeline.add(happened.time, "missing", happened.number("count") or 0.0)
        if word == "instance" and rest in STATES:
            self._instance_is(rest, happened)
        if happened.what == "process.ended" and happened.number("code") == 0:
            kind = "instance"
        if happened.what == SAMPLED and not self._is_new_share(happened):
            return
        # So that the time line reaches to it, where nothing was asked by then.
        self._timeline.add(happened.time, "marks")
        before = next(
            (
                one
                for one in reversed(self._marks)
                if one.happened[1:3] == happened[1:3]
                and abs(one.happened.time - happened.time) < SAME_LOSS
            ),
            None,
        )
        if before is not None and happened.what in MANY:
            before.count += 1
        else:
            self._marks.append(Mark(happened, kind))

    def _is_new_share(self, happened: Happening) -> bool:
        """True if a recorder keeps another share than it has told before."""
        one_in = happened.number("one_in") or 1.0
        before = self._shares.pop(happened.who, 1.0)
        if one_in > 1 and len(self._shares) < MOST_INSTANCES:
            self._shares[happened.who] = one_in
        return one_in != before

    def _instance_is(self, word: str, happened: Happening) -> None:
        instance = self._instance(happened.who)
        # Others notice it when it may be back, and records come late.
        if happened.time >= instance.since and not (word == "lost" and instance.is_gone):
            instance.state, instance.since = STATES[word], happened.time
            if instance.is_gone:
                instance.running = 0

    def _instance(self, address: str) -> Instance:
        known = self._instances.get(address)
        if known is None:
            if len(self._instances) >= MOST_INSTANCES:
                gone = next((at for at, one in self._instances.items() if one.is_gone), None)
                del self._instances[gone or next(iter(self._instances))]
            known = self._instances[address] = Instance(address)
        return known

    @property
    def _ends(self) -> str:
        """The part that says how requests ended: front ends know it of a request as a whole, and
        routers of each attempt, unless most requests come from programs with routers of their
        own."""
        totals = self._timeline.totals
        front = totals.get("front.ended", 0.0)
        is_front = front > 0 and front >= totals.get("router.begun", 0.0) / 2
        return "front" if is_front else "router"

    def _better(self, one: str, other: str) -> str:
        """Of two that count the same, the one that has seen more of it: a namespace may have front
        ends, or programs with routers, or both, and not all of them record."""
        totals = self._timeline.totals
        return one if totals.get(one, 0.0) >= totals.get(other, 0.0) else other


def _weight(happened: Happening) -> int:
    """The number of requests for which one is on record."""
    one_in = happened.number("one_in") or 1.0
    return max(1, round(min(one_in, MOST_ONE_IN)))


def hit_rate(bucket: Bucket) -> float | None:
    """The part of the prompts' tokens that engines had in their caches; None where none told."""
    prompt = bucket.counts.get("prompt", 0.0)
    return bucket.counts.get("cached", 0.0) / prompt if prompt > 0 else None


def view_json(
    view: FlightView, since: float, until: float, now: float, most: int
) -> dict[str, Any]:
    """A part of a flight for a page or a program: the time line in at most so many buckets, what
    happened in it, and the instances."""
    span = view.span(since, until, most)
    places: Counter[str] = Counter()
    for bucket in span.buckets:
        places.update(bucket.places)
    return {
        "since": span.since,
        "until": span.until,
        "width": span.width,
        "lanes": view.lanes(span),
        "totals": view.totals(span),
        "marks": [mark.to_json() for mark in view.marks(span.since, span.until)],
        "instances": [
            {
                "address": each.address,
                "state": each.state,
                "since": each.since,
                "running": each.running,
                "sent": each.sent,
                "errors": each.errors,
                "sent_here": places.get(each.address, 0),
            }
            for each in view.instances
        ],
        "places": {
            address: [bucket.places.get(address, 0) / span.width for bucket in span.buckets]
            for address, _ in places.most_common(12)
        },
        "open": len(view.lives.listed("open", now, 100_000)),
        "requests": len(view.lives),
        "forgotten": view.lives.forgotten,
        "records": view.records,
        "outside": view.outside,
        "sampled": [one._asdict() for one in view.sampled.times],
    }
