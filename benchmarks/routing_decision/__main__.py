"""`python -m benchmarks.routing_decision`: p50 and p99 of a decision, in microseconds.

Wall time, and the time that its thread had a core: they differ by what else the machine does.
"""

from __future__ import annotations

import gc
import json
import subprocess
from time import perf_counter, thread_time

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dynbus.kvrouter.events import BlockStored, encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.profiles import InstanceProfile, read_profile
from dynbus.kvrouter.routing.queue import SchedulingRequest
from dynbus.kvrouter.routing.router import AttemptObserver
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.follower import Position

from .workload import Prompt, make_workload

RUNNING = 8
"""Requests that run on each instance meanwhile."""
ITEM = b'{"token_ids":[17042],"text":" word","index":0,"finish_reason":null}'
"""An engine's, of one token."""


class FilledIndex:
    """An index in which every instance holds some part of every prompt."""

    position = Position(1)

    def __init__(self) -> None:
        self.index = RadixIndex()
        self.overlaps = self.index.overlaps

    def awareness(self) -> CacheAwareness:
        return CacheAwareness(AwarenessLevel.EXACT)

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """What engines reuse is not said here."""

    def store(self, instance: str, first_id: int, blocks: list[int]) -> int:
        event = BlockStored(None, blocks, np.array(blocks, dtype=np.uint64))
        self.index.apply(instance, encode_events([event], event_epoch=1, first_id=first_id))
        return first_id + 1


@click.command()
@click.option("--instances", type=click.IntRange(1), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(16), default=8192, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--decisions", type=click.IntRange(100), default=3000, show_default=True)
@click.option("--python-dynamo", help="The Python with ai-dynamo-runtime, to compare with it.")
def main(
    instances: int, tokens: int, block_size: int, decisions: int, python_dynamo: str | None
) -> None:
    """Measure decisions on prompts that share a prefix with what all instances hold."""
    workload = make_workload(instances, tokens, block_size)
    follower = FilledIndex()
    profiles = [_profile(f"instance-{number}", block_size) for number in range(instances)]
    ids = dict.fromkeys((profile.instance for profile in profiles), 0)
    for prompt, counts in zip(workload.prompts, workload.held.tolist(), strict=True):
        blocks = block_hashes(prompt, block_size).tolist()
        for profile, held in zip(profiles, counts, strict=True):
            if held:
                ids[profile.instance] = follower.store(
                    profile.instance, ids[profile.instance], blocks[:held]
                )
    scheduler = KvScheduler(follower=follower)
    spent = _measure(scheduler, workload.prompts, block_size, profiles, decisions)
    title = f"us, {tokens} tokens over {instances} instances"
    table = Table("", "p50", "p99", "p50 on a core", "p99 on a core", title=title)
    for name, values in spent.items():
        p50, p99 = np.percentile(np.array(values) * 1e6, [50, 99], axis=0)
        table.add_row(name, *(f"{value:,.0f}" for value in (p50[0], p99[0], p50[1], p99[1])))
    console = Console()
    if python_dynamo is None:
        console.print(table)
        return
    peer = _dynamo(python_dynamo, instances, tokens, block_size, decisions)
    theirs = np.percentile(np.array(peer) * 1e6, [50, 99])
    table.add_row("Dynamo's hash and find", *(f"{value:,.0f}" for value in theirs), "", "")
    console.print(table)
    whole = np.percentile(np.array([wall for wall, _ in spent["whole"]]) * 1e6, [50, 99])
    console.print(
        f"whole: p50 {whole[0] / theirs[0]:.1f} times Dynamo's hash and find, "
        f"p99 {whole[1] / whole[0]:.1f} times p50"
    )


def _dynamo(python: str, *arguments: int) -> list[float]:
    """Seconds that Dynamo's hashes and look-up take; it does nothing else of a decision here."""
    command = [python, "-m", "benchmarks.routing_decision.dynamo_peer", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: list[float] = json.loads(done.stdout)
    return found


def _profile(instance: str, block_size: int) -> InstanceProfile:
    metadata = {"kv_block_size": str(block_size), "kv_events": "true", "kv_total_blocks": "100000"}
    return read_profile(instance, metadata)


def _measure(
    scheduler: KvScheduler,
    prompts: list[Prompt],
    block_size: int,
    profiles: list[InstanceProfile],
    decisions: int,
) -> dict[str, list[tuple[float, float]]]:
    spent: dict[str, list[tuple[float, float]]] = {
        "hash": [],
        "decide": [],
        "whole": [],
        "an item, counted": [],
        "first item, end": [],
    }
    running: list[int] = []
    gc.collect()
    gc.freeze()
    for number in range(decisions):
        begun = _now()
        shape = RequestShape.of(prompts[number % len(prompts)], block_size)
        hashed = _now()
        request = SchedulingRequest(str(number), shape, profiles, begun[0])
        decision = scheduler.submit(request, begun[0])
        decided = _now()
        spent["hash"].append(_between(begun, hashed))
        spent["decide"].append(_between(hashed, decided))
        spent["whole"].append(_between(begun, decided))
        assert isinstance(decision, Decision)
        observer = AttemptObserver(scheduler, _nothing, decision.number, "", block_size)
        begun = _now()
        observer.arrived((ITEM,))
        spent["an item, counted"].append(_between(begun, _now()))
        running.append(decision.number)
        if len(running) > RUNNING * len(profiles):
            oldest = running.pop(0)
            begun = _now()
            scheduler.first_item(oldest, begun[0])
            scheduler.ended(oldest, begun[0])
            spent["first item, end"].append(_between(begun, _now()))
    return spent


def _nothing() -> None:
    """Nobody waits for room here."""


def _now() -> tuple[float, float]:
    return perf_counter(), thread_time()


def _between(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


if __name__ == "__main__":
    main()
