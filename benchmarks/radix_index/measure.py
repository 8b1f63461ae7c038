"""Measures one side in a process of its own and prints its figures as JSON.

`python -m benchmarks.radix_index.measure dynbus|dynamo FOLDER PREFIXES SHARED`
"""

from __future__ import annotations

import gc
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .messages import read_messages
from .workload import EVENT_BLOCKS, make_prefixes


class Side(NamedTuple):
    """What is measured, as functions of plain values."""

    apply: Callable[[int, bytes], object]
    lookup: Callable[[Any], object]
    remove: Callable[[int], object]
    settle: Callable[[], object]


def dynbus_side() -> Side:
    from dynbus.kvrouter import RadixIndex

    index = RadixIndex()
    names = {instance: str(instance) for instance in range(1 << 10)}
    return Side(
        lambda instance, message: index.apply(names[instance], message),
        index.lookup,
        lambda instance: index.remove_instance(names[instance]),
        index.sweep,
    )


def dynamo_side() -> Side:
    llm: Any = importlib.import_module("dynamo.llm")
    tree = llm.RadixTree()
    return Side(tree.apply_event, tree.find_matches, tree.remove_worker, lambda: None)


def resident_bytes() -> int:
    """Memory of this process, in bytes; the peak where /proc does not tell."""
    gc.collect()
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    side: Side, messages: Sequence[tuple[int, bytes]], events: int, prefixes: Sequence[Any]
) -> dict[str, float]:
    """Events and look-ups per second, bytes per block, and what is kept when all have left."""
    before = resident_bytes()
    begun = time.perf_counter()
    for instance, message in messages:
        side.apply(instance, message)
    applied = time.perf_counter() - begun
    held = resident_bytes() - before
    begun = time.perf_counter()
    for prefix in prefixes:
        side.lookup(prefix)
    looked_up = time.perf_counter() - begun
    for instance in sorted({instance for instance, _ in messages}):
        side.remove(instance)
    side.settle()
    return {
        "events_per_s": events / applied,
        "lookups_per_s": len(prefixes) / looked_up,
        "bytes_per_block": held / (events * EVENT_BLOCKS),
        "kept_after_leaving": (resident_bytes() - before) / held,
    }


def main() -> None:
    name, folder, prefixes, shared = sys.argv[1:]
    found: Sequence[Any] = make_prefixes(int(prefixes), shared=shared == "shared")
    if name == "dynamo":
        # It takes lists only.
        found = [prefix.tolist() for prefix in found]
    side = {"dynbus": dynbus_side, "dynamo": dynamo_side}[name]()
    messages = read_messages(Path(folder) / name)
    events = int((Path(folder) / "events").read_text())
    json.dump(measure(side, messages, events, found), sys.stdout)


if __name__ == "__main__":
    main()
