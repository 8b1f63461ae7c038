"""The holdings of one cache in one run: a prefix without a gap, pieces behind a hole, copies.

The invariant: `ends[holder] = e` in a run says that the holder has the blocks [start, e) of
it and all blocks before the run. Blocks that it has behind a hole are kept as `detached`
intervals; when the hole is filled they count again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import intervals
from .intervals import Intervals
from .runs import Holder, Run


def reach(run: Run, number: int, depth: int) -> int | None:
    """The end of what a holder has of a run from block `depth` on; None if it lacks that one."""
    end = run.ends.get(number, run.start)
    if depth < end:
        return end
    if run.detached is None:
        return None
    return intervals.end_at(run.detached.get(number, ()), depth)


def next_start(run: Run, number: int, depth: int) -> int:
    """The next position behind `depth` from which a holder has something of a run again; the run's
    end for none."""
    spans = run.detached.get(number, ()) if run.detached is not None else ()
    return next((start for start, _ in spans if start > depth), run.end)


def count_tiers(holders: Sequence[int], path: Iterable[Run], end: int) -> list[int]:
    """The number of the blocks [0, end) of a path that one rank has in each tier.

    A block counts for the nearest tier that has it. The count ends with the first block that
    the rank has nowhere.

    Args:
        holders: the number of the rank's holder in each tier, nearest first; 0 for none.
    """
    counts = [0] * len(holders)
    at = 0
    for run in path:
        while at < min(run.end, end):
            stop = min(run.end, end)
            nearest = None
            for tier, holder in enumerate(holders):
                if not holder:
                    continue
                reached = reach(run, holder, at)
                if reached is not None:
                    nearest = tier
                    stop = min(reached, stop)
                    break
                # A farther tier counts only up to where this one has something again.
                stop = min(stop, next_start(run, holder, at))
            if nearest is None:
                return counts
            counts[nearest] += stop - at
            at = stop
    return counts


def split_detached(run: Run, lower: Run, at: int) -> None:
    above: dict[int, Intervals] = {}
    below: dict[int, Intervals] = {}
    for number, spans in (run.detached or {}).items():
        below[number], above[number] = intervals.split(spans, at)
    run.detached = {number: spans for number, spans in below.items() if spans} or None
    lower.detached = {number: spans for number, spans in above.items() if spans} or None


def mark(holder: Holder, run: Run, start: int, end: int, connected: bool) -> None:
    """Note that a holder has the blocks [start, end) of a run."""
    number = holder.number
    reached = run.ends.get(number, run.start)
    detached = run.detached.get(number) if run.detached is not None else None
    if start < reached or detached is not None:
        _count_copies(run, number, start, end)
    if not connected:
        _detach(holder, run, start, end)
        return
    before, reached = run.ends.get(number), max(reached, end)
    while detached is not None and detached and detached[0][0] <= reached:
        first, last = detached.pop(0)
        holder.detached -= last - first
        reached = max(reached, last)
    if detached is not None and not detached:
        _forget_detached(run, number)
    run.ends[number] = reached
    run.stamp += 1
    if holder.detached and reached == run.end and reached != before:
        _attach_below(holder, run)


def _count_copies(run: Run, number: int, start: int, end: int) -> None:
    for depth in range(start, end):
        if reach(run, number, depth) is not None:
            copies = run.copies = run.copies or {}
            copies[number, depth] = copies.get((number, depth), 0) + 1


def _detach(holder: Holder, run: Run, start: int, end: int) -> None:
    """Note blocks that a holder has behind a hole."""
    everybodys = run.detached = run.detached or {}
    spans = everybodys.setdefault(holder.number, [])
    holder.detached += end - start - intervals.add(spans, start, end)


def _forget_detached(run: Run, number: int) -> None:
    assert run.detached is not None
    del run.detached[number]
    if not run.detached:
        run.detached = None


def _attach_below(holder: Holder, run: Run) -> None:
    """Count again the blocks that the holder has right below a run that it now holds whole."""
    number = holder.number
    whole = [run]
    while whole:
        for child in (whole.pop().children or {}).values():
            holder.looked_at += 1
            spans = child.detached.get(number) if child.detached is not None else None
            if not spans or spans[0][0] != child.start:
                continue
            first, reached = spans.pop(0)
            child.ends[number] = reached
            child.stamp += 1
            holder.detached -= reached - first
            if not spans:
                _forget_detached(child, number)
            if reached == child.end:
                whole.append(child)


def remove_copy(run: Run, number: int, depth: int) -> bool:
    """Take one of several engine hashes from a block; False if there is one only."""
    assert run.copies is not None
    key = number, depth
    copies = run.copies.get(key)
    if copies is None:
        return False
    if copies > 1:
        run.copies[key] = copies - 1
    else:
        del run.copies[key]
        run.copies = run.copies or None
    return True


def cut(holder: Holder, run: Run, depth: int) -> None:
    """Remove a block that others of the holder may follow: those are detached."""
    number = holder.number
    reached = run.ends.get(number, run.start)
    if depth >= reached:
        assert run.detached is not None
        spans = run.detached[number]
        intervals.discard(spans, depth)
        holder.detached -= 1
        if not spans:
            _forget_detached(run, number)
        return
    if depth > run.start:
        run.ends[number] = depth
    else:
        del run.ends[number]
    run.stamp += 1
    if reached > depth + 1:
        _detach(holder, run, depth + 1, reached)
    whole = [run] if reached == run.end else []
    while whole:
        for child in (whole.pop().children or {}).values():
            holder.looked_at += 1
            end = child.ends.pop(number, None)
            if end is not None:
                child.stamp += 1
                _detach(holder, child, child.start, end)
                if end == child.end:
                    whole.append(child)


def forget(run: Run, number: int) -> bool:
    known = run.ends.pop(number, None) is not None
    run.stamp += 1
    if run.detached is not None and run.detached.pop(number, None) is not None:
        known = True
        if not run.detached:
            run.detached = None
    if run.copies is not None:
        run.copies = {key: n for key, n in run.copies.items() if key[0] != number} or None
    return known
