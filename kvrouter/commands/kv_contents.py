"""Contents of an index, as rows for people and programs. Hashes are hexadecimal text: JSON's
numbers lose digits in many programs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

from dynbus.kvrouter.events import Tier
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.radix.runs import Run


def rank_rows(index: RadixIndex) -> list[dict[str, Any]]:
    """For each rank its blocks, in all and by tier; the largest first."""
    rows: list[dict[str, Any]] = [
        {
            "instance": rank.instance,
            "dp_rank": rank.dp_rank,
            "event_epoch": state.event_epoch,
            "partial": state.partial,
            "awareness": state.stated or "exact",
            "blocks": state.blocks,
            **{
                tier.name.lower(): holder.blocks if (holder := state.holders.get(tier)) else 0
                for tier in Tier
            },
        }
        for rank, state in index.ranks.items()
    ]
    return sorted(rows, key=lambda row: (-row["blocks"], row["instance"], row["dp_rank"]))


def hottest_prefixes(index: RadixIndex, limit: int) -> list[dict[str, Any]]:
    """The prefixes that most instances hold whole, in any tier; of those that equally many
    hold the longest, and none that is a part of another with the same holders."""
    owners = {number: rank.instance for number, (rank, _) in _owners(index).items()}
    candidates: list[tuple[int, int, Run]] = []
    for run in index.tree.by_level():
        held = _by_instance(run, owners)
        if run.parent is None or not held:
            continue
        common = min(held.values())
        goes_on = common == run.end and any(
            len(_by_instance(child, owners)) == len(held) for child in (run.children or {}).values()
        )
        if not goes_on:
            candidates.append((len(held), common, run))
    return [
        {
            "block_hashes": _path_hashes(run, common),
            "instances": sorted(_by_instance(run, owners)),
        }
        for _, common, run in heapq.nlargest(limit, candidates, key=lambda one: one[:2])
    ]


def dump_lines(index: RadixIndex) -> Iterator[dict[str, Any]]:
    """Everything: a line for each rank, then one for each run of blocks, parents first.

    A run holds the blocks from `start` on of every prefix through it. Of each holder `end` is
    where what it holds without a gap ends; `detached` are blocks behind a gap.
    """
    for row in rank_rows(index):
        yield {"kind": "rank"} | row
    owners = _owners(index)
    for run in index.tree.by_level():
        if run.parent is None:
            continue
        yield {
            "kind": "run",
            "id": run.id,
            "parent": run.parent.id or None,
            "start": run.start,
            "end": run.end,
            "block_hashes": _hex(bytes(run.blocks)),
            "holders": [
                _holder(owners[number]) | {"end": end}
                for number, end in run.ends.items()
                if number in owners
            ],
            "detached": [
                _holder(owners[number]) | {"start": start, "end": end}
                for number, spans in (run.detached or {}).items()
                if number in owners
                for start, end in spans
            ],
        }


def _owners(index: RadixIndex) -> dict[int, tuple[Rank, int]]:
    """By the number of a cache in the tree, whose it is and in which tier."""
    return {
        holder.number: (rank, tier)
        for rank, state in index.ranks.items()
        for tier, holder in state.holders.items()
    }


def _holder(owner: tuple[Rank, int]) -> dict[str, Any]:
    rank, tier = owner
    return rank._asdict() | {"tier": Tier(tier).name.lower()}


def _by_instance(run: Run, owners: dict[int, str]) -> dict[str, int]:
    """The number of blocks of a run that each instance holds without a gap."""
    reach: dict[str, int] = {}
    for number, end in run.ends.items():
        instance = owners.get(number)
        if instance is not None:
            reach[instance] = max(end, reach.get(instance, 0))
    return reach


def _path_hashes(run: Run, end: int) -> list[str]:
    """The block hashes from the root to block `end` of a run."""
    pieces: list[bytes] = []
    at: Run | None = run
    while at is not None:
        pieces.append(bytes(at.blocks))
        at = at.parent
    return _hex(b"".join(reversed(pieces))[: 8 * end])


def _hex(blocks: bytes) -> list[str]:
    return [f"{number:#018x}" for number in np.frombuffer(blocks, dtype="<u8").tolist()]
