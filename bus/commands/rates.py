"""The activity of instances between two looks at them, and the columns of it that fit a terminal.

Pure: `watching.py` looks and draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from dynbus.bus.protocol.names import InstanceName

from .survey import Counts, InstanceReport
from .terminal import terminal

SortKey = Literal["name", "calls", "load", "items"]
UNKNOWN: Final = "-"


class Activity(NamedTuple):
    """An instance and what it does; None for what is not known.

    Attributes:
        calls, errors, items: per second; of an engine, items are its tokens.
        latency: mean seconds of the calls that ended.
        cache: share of the blocks of its KV cache that are in use.
        hit_rate: share of the prompts' tokens that were in its KV cache; of all its prompts where
            none came in between.
    """

    row: InstanceReport
    calls: float | None = None
    errors: float | None = None
    streams: int | None = None
    items: float | None = None
    latency: float | None = None
    cache: float | None = None
    hit_rate: float | None = None

    def to_json(self, now: float) -> dict[str, Any]:
        """For programs; seconds, and rates per second."""
        row = self.row.to_json(now)
        names = ("namespace", "component", "instance_id", "state", "age", "running", "waiting")
        fields = {name: row[name] for name in names}
        values = self._asdict()
        del values["row"]
        for name, value in values.items():
            fields[name] = round(value, 6) if isinstance(value, float) else value
        return fields


def activities(
    before: Mapping[InstanceName, Counts], rows: Iterable[InstanceReport], sort: SortKey = "name"
) -> list[Activity]:
    """The activity of each instance since `before`, in the order that is asked for.

    Args:
        before: by instance, what it had counted then; one that is not in there has no rates yet.
        sort: by the name, or by what is highest.
    """
    listed = [_activity(row, before.get(InstanceName(*row[:3]))) for row in rows]
    if sort == "calls":
        listed.sort(key=lambda each: -(each.calls or 0))
    elif sort == "items":
        listed.sort(key=lambda each: -(each.items or 0))
    elif sort == "load":
        listed.sort(key=lambda each: -(each.row.running + each.row.waiting))
    return listed


def counted(rows: Iterable[InstanceReport]) -> dict[InstanceName, Counts]:
    """The counters of instances, for the next `activities`."""
    return {InstanceName(*row[:3]): row.counts for row in rows if row.counts is not None}


def _activity(row: InstanceReport, before: Counts | None) -> Activity:
    now = row.counts
    if now is None:
        return Activity(row)
    figures = now.figures
    blocks = figures.get("kv_blocks", 0)
    known = Activity(
        row,
        streams=now.streams,
        cache=figures.get("kv_blocks_used", 0) / blocks if blocks else None,
        hit_rate=_share(figures, {}),
    )
    if before is None or now.at <= before.at or now.calls < before.calls:
        return known
    seconds, calls = now.at - before.at, now.calls - before.calls
    is_engine = "output_tokens" in figures
    made = figures["output_tokens"] if is_engine else now.items
    made_before = before.figures.get("output_tokens", 0) if is_engine else before.items
    hit_rate = _share(figures, before.figures)
    return known._replace(
        calls=calls / seconds,
        errors=max(0, now.errors - before.errors) / seconds,
        items=max(0.0, made - made_before) / seconds,
        latency=max(0.0, now.seconds - before.seconds) / calls if calls else None,
        hit_rate=known.hit_rate if hit_rate is None else hit_rate,
    )


def _share(figures: Mapping[str, float], before: Mapping[str, float]) -> float | None:
    """The share of prompt tokens found in a cache, of those that came since `before`."""
    prompts = figures.get("prompt_tokens", 0) - before.get("prompt_tokens", 0)
    cached = figures.get("cached_tokens", 0) - before.get("cached_tokens", 0)
    return min(1.0, max(0.0, cached / prompts)) if prompts > 0 else None


# As a table ----------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table; what is lowest in `keep` goes first where there is no room."""

    title: str
    keep: int
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def columns(shown: Sequence[Activity], now: float) -> list[Column]:
    """All columns that say something of at least one instance."""
    table = [
        Column("COMPONENT", 12, [f"{a.row.namespace}.{a.row.component}" for a in shown]),
        Column("INSTANCE", 6, [a.row.instance_id for a in shown]),
        Column("STATE", 11, [a.row.state for a in shown]),
        Column("SINCE", 5, [_since(a.row, now) for a in shown]),
        Column("CALLS/S", 10, [_rate(a.calls) for a in shown]),
        Column("ERRORS/S", 4, [_rate(a.errors) for a in shown]),
        Column("RUN", 9, [str(a.row.running) if a.row.answers else UNKNOWN for a in shown]),
        Column("QUEUE", 8, [str(a.row.waiting) if a.row.answers else UNKNOWN for a in shown]),
        Column("STREAMS", 3, [UNKNOWN if a.streams is None else str(a.streams) for a in shown]),
        Column("ITEMS/S", 7, [_rate(a.items) for a in shown]),
        Column("LATENCY", 2, [_time(a.latency) for a in shown]),
        Column("KV", 1, [_percent(a.cache) for a in shown]),
        Column("HITS", 1, [_percent(a.hit_rate) for a in shown]),
    ]
    optional = {"KV", "HITS"}
    return [c for c in table if c.title not in optional or set(c.cells) > {UNKNOWN}]


def fitting(table: Sequence[Column], width: int, gap: int = 2) -> list[Column]:
    """The columns that fit into `width` characters; the most important one always stays."""
    kept = list(table)
    while len(kept) > 1 and sum(c.width + gap for c in kept) - gap > width:
        kept.remove(min(kept, key=lambda column: column.keep))
    return kept


def _since(row: InstanceReport, now: float) -> str:
    return terminal.duration(now - row.started) if row.started else UNKNOWN


def _rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"
