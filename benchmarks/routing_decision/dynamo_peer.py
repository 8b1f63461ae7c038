"""`python -m benchmarks.routing_decision.dynamo_peer INSTANCES TOKENS BLOCK_SIZE TIMES`.

In Dynamo's environment: the token ids of a prompt in an array, to the blocks of it that each
instance holds. Prints the seconds of each time as JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from time import perf_counter
from typing import Any

from .workload import make_workload


def main() -> None:
    """Fill Dynamo's tree, and measure its hashes and its look-up."""
    instances, tokens, block_size, times = map(int, sys.argv[1:])
    # It is not installed where the types are checked.
    llm: Any = importlib.import_module("dynamo.llm")
    tree = llm.RadixTree()
    workload = make_workload(instances, tokens, block_size)
    event_id = 0
    for prompt, held in zip(workload.prompts, workload.held.tolist(), strict=True):
        blocks = llm.compute_block_hash_for_seq(prompt.tolist(), block_size)
        for instance, count in enumerate(held):
            pairs = [{"block_hash": block, "tokens_hash": block} for block in blocks[:count]]
            data = {"stored": {"parent_hash": None, "blocks": pairs}}
            event = {"event_id": event_id, "data": data, "dp_rank": 0}
            event_id += 1
            tree.apply_event(instance, json.dumps(event).encode())
    gc.collect()
    spent: list[float] = []
    for number in range(times):
        prompt = workload.prompts[number % len(workload.prompts)]
        begun = perf_counter()
        tree.find_matches(llm.compute_block_hash_for_seq(prompt.tolist(), block_size))
        spent.append(perf_counter() - begun)
    json.dump(spent, sys.stdout)


if __name__ == "__main__":
    main()
