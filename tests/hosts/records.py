"""The calls and effects that these stories wrote down, and the promises that they keep or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

Kind = Literal["resumed", "replayed", "plain", "repeatable", "once"]
RESUMED: Sequence[Kind] = ("resumed", "replayed")
STREAMS: Sequence[Kind] = (*RESUMED, "plain")
NOT_REPEATED: Sequence[Kind] = ("plain", "once")

STALL = 5.0
"""Seconds for which a stream that resumes may stand still."""
LATE = 2.0
"""Seconds after its deadline within which a call ends in its error."""


class Gap(msgspec.Struct, frozen=True):
    """A time in which a caller had nothing of a call, by the monotonic clock.

    Attributes:
        busy: seconds of it in which somebody waited for a processor or a disk.
    """

    begin: float
    end: float
    busy: float


class Record(msgspec.Struct, frozen=True):
    """One call as its caller saw it.

    Attributes:
        begun, ended: by the monotonic clock, which all hosts of a lab share.
        items: how many came, all of them right.
        wrong: the first item that was not, or what came after the end.
        error: what it ended with; empty when it ended well.
        is_typed: whether that is a `DynbusError`.
        gaps: those of a second and more.
        replay: seconds that its handler takes to make its items again, if that is how it goes on.
    """

    kind: Kind
    tag: str
    begun: float
    ended: float
    wanted: int
    items: int
    timeout: float
    wrong: str = ""
    error: str = ""
    is_typed: bool = True
    gaps: Sequence[Gap] = ()
    replay: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.tag}, {self.items} of {self.wanted} in "
            f"{self.ended - self.begun:.2f} s: {self.wrong or self.error or 'well'}"
        )


class Outage(NamedTuple):
    """A time in which a host could do nothing for its own callers, by the monotonic clock."""

    begin: float
    end: float


def read_records(journals: Iterable[Path]) -> list[Record]:
    """All calls that ended; a last line that was not written to its end is none."""
    written = [path.read_bytes() for path in journals if path.exists()]
    lines = (line for data in written for line in data.splitlines(keepends=True))
    return [msgspec.json.decode(line, type=Record) for line in lines if line.endswith(b"\n")]


def repeated(effects: Iterable[Path]) -> list[str]:
    """The tags of what was carried out more than once, on whichever hosts."""
    tags = Counter(
        line.split()[0]
        for path in effects
        if path.exists()
        for line in path.read_text().splitlines()
    )
    return [f"{tag} was carried out {times} times" for tag, times in tags.items() if times > 1]


def broken_promises(
    records: Iterable[Record], outages: Sequence[Outage] = (), *, patient: bool = True
) -> list[str]:
    """What was promised and not kept, a line each.

    Args:
        outages: of the callers' hosts, which count as nobody's stall.
        patient: whether time in which the machine was busy is left out.
    """
    return [
        f"{record}: {broken}" for record in records for broken in _broken(record, outages, patient)
    ]


def _broken(record: Record, outages: Sequence[Outage], patient: bool) -> Iterator[str]:
    if record.wrong:
        yield "an item is not the next one"
    if record.error and not record.is_typed:
        yield "the error has no type"
    if not record.error and record.items != record.wanted:
        yield "it ended before its last item"
    if record.kind in RESUMED and record.error:
        yield "it was to go on elsewhere"
    if record.kind in RESUMED:
        for gap in record.gaps:
            if (stall := stalled(gap, outages, patient) - record.replay) > STALL:
                yield f"it stood still for {stall:.2f} s from {gap.begin:.2f}"
    if record.timeout:
        took = stalled(Gap(record.begun, record.ended, _busy(record)), outages, patient)
        if took > record.timeout + LATE:
            yield f"it ended {took - record.timeout:.2f} s after its deadline"


def _busy(record: Record) -> float:
    return sum(gap.busy for gap in record.gaps)


def stalled(gap: Gap, outages: Sequence[Outage], patient: bool) -> float:
    """Seconds of a gap for which the bus has to answer."""
    seconds = gap.end - gap.begin - (gap.busy if patient else 0.0)
    for outage in outages:
        seconds -= max(0.0, min(gap.end, outage.end) - max(gap.begin, outage.begin))
    return seconds
