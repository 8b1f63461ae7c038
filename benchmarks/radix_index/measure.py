"""Measures one side in a process of its own and prints its figures as JSON.

`python -m benchmarks.radix_index.measure dynbus|dynamo|dynamo-pinned FOLDER PREFIXES SHARED`
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .messages import read_messages
from .workload import EVENT_BLOCKS, make_prefixes

PROMPT_TOKENS = 8192
BLOCK_SIZE = 16
PROMPTS = 200
HOLDERS = 8
"""Instances that hold each prompt, each as far as another eighth of it."""


class Side(NamedTuple):
    """What is measured, as functions of plain values."""

    hash: Callable[[NDArray[np.uint32]], Any]
    apply: Callable[[int, bytes], object]
    store: Callable[[int, Any, int], object]
    """Store blocks of one prefix at an instance, with an event id."""
    lookup: Callable[[Any], object]
    remove: Callable[[int], object]
    settle: Callable[[], object]


def dynbus_side() -> Side:
    from dynbus.kvrouter import BlockStored, RadixIndex, block_hashes
    from dynbus.kvrouter.events import encode_events

    index = RadixIndex()
    names = {instance: str(instance) for instance in range(1 << 10)}

    def store(instance: int, blocks: Any, event_id: int) -> None:
        event = BlockStored(None, blocks, blocks)
        index.apply(names[instance], encode_events([event], event_epoch=1, first_id=event_id))

    return Side(
        lambda tokens: block_hashes(tokens, BLOCK_SIZE),
        lambda instance, message: index.apply(names[instance], message),
        store,
        index.lookup,
        lambda instance: index.remove_instance(names[instance]),
        index.sweep,
    )


def dynamo_side(*, pinned: bool) -> Side:
    """Dynamo's tree, which is a thread of its own; pinned, it shares one core with its caller."""
    if pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    llm: Any = importlib.import_module("dynamo.llm")
    tree = llm.RadixTree()

    def store(instance: int, blocks: Any, event_id: int) -> None:
        pairs = [{"block_hash": block, "tokens_hash": block} for block in blocks]
        data = {"stored": {"parent_hash": None, "blocks": pairs}}
        event = {"event_id": event_id, "data": data, "dp_rank": 0}
        tree.apply_event(instance, json.dumps(event).encode())

    return Side(
        lambda tokens: llm.compute_block_hash_for_seq(tokens.tolist(), BLOCK_SIZE),
        tree.apply_event,
        store,
        tree.find_matches,
        tree.remove_worker,
        lambda: None,
    )


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
        "prompts_per_s": prompts_per_second(side),
    }


def prompts_per_second(side: Side) -> float:
    """Prompts of 8k tokens, in an array, to how much of each every instance holds."""
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 1 << 17, PROMPT_TOKENS, dtype=np.uint32) for _ in range(PROMPTS)]
    for number, prompt in enumerate(prompts):
        blocks = [int(block) for block in side.hash(prompt)]
        for holder in range(HOLDERS):
            kept = (holder + 1) * len(blocks) // HOLDERS
            side.store(1000 + holder, blocks[:kept], number)
    begun = time.perf_counter()
    for prompt in prompts:
        side.lookup(side.hash(prompt))
    return PROMPTS / (time.perf_counter() - begun)


def main() -> None:
    name, folder, prefixes, shared = sys.argv[1:]
    found: Sequence[Any] = make_prefixes(int(prefixes), shared=shared == "shared")
    is_dynamo = name != "dynbus"
    if is_dynamo:
        # It takes lists only.
        found = [prefix.tolist() for prefix in found]
    side = dynamo_side(pinned=name == "dynamo-pinned") if is_dynamo else dynbus_side()
    messages = read_messages(Path(folder) / ("dynamo" if is_dynamo else "dynbus"))
    events = int((Path(folder) / "events").read_text())
    json.dump(measure(side, messages, events, found), sys.stdout)


if __name__ == "__main__":
    main()
