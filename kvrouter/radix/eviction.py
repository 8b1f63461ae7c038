"""Eviction of runs of a `PrefixTree` at its limit: their choice, the share that each holder
forgets, and its removal.

A run can be given up by those that hold nothing below it. A holder knows its blocks by name, and
a run does not know the names: forgetting a run costs a look at all names of the holder. So many
runs are chosen at once, and one holder after the other forgets as many of them as it has to.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from .holdings import forget
from .prefix_tree import PrefixTree, forget_name, run_at
from .runs import Holder, Run


class Victim(NamedTuple):
    """A run to give up, unless it was found or has grown since it was chosen.

    Attributes:
        touched, end: of the run, when it was chosen.
    """

    run: Run
    touched: int
    end: int


def choose_victims(tree: PrefixTree, holders: Collection[int], count: int) -> list[Victim]:
    """The runs that were found the longest ago, of which `count` blocks or more can be given up.

    Args:
        holders: the numbers of those whose blocks count. A run of which none of them can give
            up anything stays.
    """
    victims: list[Victim] = []
    runs = [run for run in tree.runs.values() if run.parent]
    for run in sorted(runs, key=lambda run: run.touched):
        if count <= 0:
            break
        below = _holders_below(run)
        ends = [one for one in _holders(run) if one in holders and one not in below]
        if held := sum(_held(run, number) for number in ends):
            victims.append(Victim(run, run.touched, run.end))
            count -= held
    return victims


def evict(tree: PrefixTree, holder: Holder, victims: Sequence[Victim], most: int) -> int:
    """Forget what a holder has of these runs, in their order, until that is `most` blocks or
    more; returns how many."""
    number = holder.number
    own: dict[int, Run] = {}
    for run, touched, end in victims:
        if most <= 0:
            break
        if (
            tree.runs.get(run.id) is run
            and run.touched == touched
            and run.end <= end
            and number in _holders(run)
            and number not in _holders_below(run)
        ):
            own[run.id] = run
            most -= _held(run, number)
    if not own:
        return 0
    forgotten = _forget_names(holder, own, _leading_to(own.values()))
    for run in own.values():
        holder.detached -= _detached(run, number)
        forget(run, number)
        tree.trim(run)
    return forgotten


def fair_share(held: Collection[int], room: int) -> int:
    """The most that each of some may keep so that together they keep no more than `room`.

    Those that hold less keep all of it, and leave the rest of their share to the others.
    """
    left, most = room, 0
    for number, blocks in enumerate(sorted(held)):
        share = max(0, left) // (len(held) - number)
        if blocks > share:
            return share
        left -= blocks
        most = blocks
    return most


def _holders(run: Run) -> Collection[int]:
    return run.ends if run.detached is None else run.ends.keys() | run.detached.keys()


def _holders_below(run: Run) -> Collection[int]:
    """The holders of a block right below a run."""
    if run.children is None:
        return ()
    return {number for child in run.children.values() for number in _holders(child)}


def _held(run: Run, number: int) -> int:
    """The number of blocks of a run that a holder has."""
    return run.ends.get(number, run.start) - run.start + _detached(run, number)


def _detached(run: Run, number: int) -> int:
    spans = run.detached.get(number, ()) if run.detached is not None else ()
    return sum(end - start for start, end in spans)


def _forget_names(holder: Holder, victims: Mapping[int, Run], leading: Container[int]) -> int:
    """Take the blocks of some runs from a holder's names; returns how many.

    Args:
        leading: the runs from which one of them may be reached by tails.
    """
    held = holder.held
    before = len(held)
    for named in dict.fromkeys(held.values()):
        if named.run.id in leading:
            gone = [
                name
                for depth, name in enumerate(named.list_names(), named.start)
                if run_at(named.run, depth).id in victims
            ]
            # From the end on: nothing is below those.
            for name in reversed(gone):
                forget_name(held, (one := held.pop(name)), one.depth_of(name))
    return before - len(held)


def _leading_to(runs: Iterable[Run]) -> set[int]:
    """The numbers of runs from which one of `runs` may be reached by tails, its own among them."""
    leading: set[int] = set()
    for run in runs:
        above = run
        while above.id not in leading:
            leading.add(above.id)
            if above.parent is None or above.parent.tail is not above:
                break
            above = above.parent
    return leading
