"""What is measured, from inside the client process.

A workload warms up, measures for about `duration` seconds and returns its figures under the
keys of `metrics.METRICS`. It bounds no single call: the driver bounds the whole workload.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Any, Final, TypeAlias

from .cpu import cpu_seconds, cpu_used
from .echo import STEP_SECONDS
from .system import BytesCaller, Caller, EngineCaller

WARMUP_SECONDS: Final = 0.3
CALLERS: Final = 64
STEP_STREAMS: Final = 256
FIRST_ITEM_TOKENS: Final = 8

# Longer streams would measure how much the buffers of a system without credit can hold.
LONGEST_STREAM: Final = 100_000


@dataclass(frozen=True)
class Bench:
    """What a workload runs with.

    Attributes:
        duration: seconds to measure.
        server: process ids of the serving side, without the broker.
        broker: process id of the broker, if there is one.
    """

    caller: Caller
    duration: float
    server: Sequence[int]
    broker: int | None


Figures: TypeAlias = dict[str, float]
Workload: TypeAlias = Callable[[Bench], Awaitable[Figures]]


def _microseconds(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return cuts[49] * 1e6, cuts[98] * 1e6


async def _time_calls(call: Callable[[], Awaitable[None]], seconds: float) -> array[float]:
    latencies = array("d")
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        await call()
        latencies.append(time.perf_counter() - begun)
    return latencies


async def unary_latency(bench: Bench) -> Figures:
    """One caller, one call after the other."""
    await _time_calls(bench.caller.unary, WARMUP_SECONDS)

    latencies = await _time_calls(bench.caller.unary, bench.duration)

    p50, p99 = _microseconds(latencies)
    return {"unary_p50_us": p50, "unary_p99_us": p99}


async def unary_rate(bench: Bench) -> Figures:
    """64 callers, each one call after the other."""

    async def call_all(seconds: float) -> float:
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            callers = [
                group.create_task(_time_calls(bench.caller.unary, seconds)) for _ in range(CALLERS)
            ]
        elapsed = time.perf_counter() - begun
        return sum(len(caller.result()) for caller in callers) / elapsed

    await call_all(WARMUP_SECONDS)

    return {"unary_64_rate": await call_all(bench.duration)}


def item_rate(key: str, endpoint: str, streams: int) -> Workload:
    """A workload: `streams` at a time for as long as it takes, in items per second."""

    async def run(bench: Bench) -> Figures:
        length = await _calibrate(bench.caller, endpoint, streams, bench.duration)
        items = 0
        begun = time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < bench.duration * 0.9:
            items += await _read_all(bench.caller, endpoint, streams, length)
        return {key: items / elapsed}

    return run


async def _calibrate(caller: Caller, endpoint: str, streams: int, duration: float) -> int:
    """Warm up; the length of streams that take about `duration`."""
    length = max(1, 256 // streams)
    while True:
        begun = time.perf_counter()
        await _read_all(caller, endpoint, streams, length)
        elapsed = time.perf_counter() - begun
        if elapsed >= WARMUP_SECONDS:
            break
        length *= 4 if elapsed < WARMUP_SECONDS / 4 else 2
    return max(1, min(int(length * duration / elapsed), LONGEST_STREAM))


async def _read_all(caller: Caller, endpoint: str, streams: int, length: int) -> int:
    """Read `streams` streams side by side.

    Raises:
        RuntimeError: items were lost or doubled.
    """
    received = 0

    def count(_: Any) -> None:
        nonlocal received
        received += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(caller.stream(endpoint, length, count))
    if received != streams * length:
        raise RuntimeError(f"{endpoint}: {received} items arrived of {streams * length}")
    return received


async def first_item(bench: Bench) -> Figures:
    """The first item of a stream and a unary call, taken in turn."""

    async def measure(seconds: float) -> tuple[array[float], array[float]]:
        firsts, unary = array("d"), array("d")
        end = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < end:
            await bench.caller.unary()
            unary.append(time.perf_counter() - begun)
            firsts.append(await _time_first_item(bench.caller))
        return firsts, unary

    await measure(WARMUP_SECONDS)

    firsts, unary = await measure(bench.duration)

    p50, p99 = _microseconds(firsts)
    return {
        "first_item_p50_us": p50,
        "first_item_p99_us": p99,
        "first_item_per_unary": p50 / _microseconds(unary)[0],
    }


async def _time_first_item(caller: Caller) -> float:
    arrived = 0.0

    def note(_: Any) -> None:
        nonlocal arrived
        arrived = arrived or time.perf_counter()

    begun = time.perf_counter()
    await caller.stream("stream_yielding", FIRST_ITEM_TOKENS, note)
    return arrived - begun


async def _read_by_tasks(
    caller: Caller, count: int, length: int, receive: Callable[[Any], None]
) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(caller.stream("stream_steps", length, receive))


async def steps(bench: Bench) -> Figures:
    """256 streams, one item each per engine step: CPU per item, lateness of items."""
    return await _measure_steps(bench, "steps", partial(_read_by_tasks, bench.caller))


async def engine_steps(bench: Bench) -> Figures:
    """The same, by the way that a system has for engines and for relays, if it has one."""
    caller = bench.caller
    by_tasks = partial(_read_by_tasks, caller)
    read = caller.engine_streams if isinstance(caller, EngineCaller) else by_tasks
    return await _measure_steps(bench, "engine_steps", read)


async def bytes_steps(bench: Bench) -> Figures:
    """The same, for a client that passes the items on as bytes, as a router does."""
    if not isinstance(bench.caller, BytesCaller):
        raise RuntimeError("this system is not measured with items left as bytes")
    found = await _measure_steps(bench, "bytes_steps", bench.caller.bytes_streams, reads=False)
    return {key: value for key, value in found.items() if "_late_" not in key}


async def _measure_steps(
    bench: Bench,
    name: str,
    read: Callable[[int, int, Callable[[Any], None]], Coroutine[Any, Any, None]],
    *,
    reads: bool = True,
) -> Figures:
    """Measure steps.

    Args:
        reads: whether items are read, so that their lateness is known; it is 0 otherwise.
    """
    settle, margin = 0.5, 1.0
    length = int((settle + bench.duration + margin) / STEP_SECONDS)
    processes = [os.getpid(), *bench.server, *([] if bench.broker is None else [bench.broker])]
    step_of = bench.caller.step_of
    lateness = array("d")
    started = asyncio.Event()
    seen = 0
    measuring = False

    def receive(item: Any) -> None:
        nonlocal seen
        seen += 1
        if measuring:
            lateness.append(time.monotonic() - step_of(item) if reads else 0.0)
        elif seen == STEP_STREAMS:
            started.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(read(STEP_STREAMS, length, receive))
        await started.wait()
        await asyncio.sleep(settle)
        measuring, before = True, cpu_seconds(processes)
        begun = time.perf_counter()
        await asyncio.sleep(bench.duration)
        elapsed = time.perf_counter() - begun
        measuring, after = False, cpu_seconds(processes)

    if seen != STEP_STREAMS * length:
        raise RuntimeError(f"stream_steps: {seen} items arrived of {STEP_STREAMS * length}")
    p50, p99 = _microseconds(lateness)
    used = cpu_used(before, after)
    broker = used.pop(bench.broker, 0.0) if bench.broker is not None else 0.0
    ends = sum(used.values())
    return {
        f"{name}_cpu_us": ends / len(lateness) * 1e6,
        f"{name}_cpu_with_broker_us": (ends + broker) / len(lateness) * 1e6,
        f"{name}_late_p50_ms": p50 / 1e3,
        f"{name}_late_p99_ms": p99 / 1e3,
        f"{name}_rate": len(lateness) / elapsed,
    }


WORKLOADS: Final[dict[str, Workload]] = {
    "unary": unary_latency,
    "unary64": unary_rate,
    "stream": item_rate("stream_rate", "stream", 1),
    "stream-yielding": item_rate("stream_yielding_rate", "stream_yielding", 1),
    "stream64": item_rate("stream_64_rate", "stream", CALLERS),
    "stream64-yielding": item_rate("stream_64_yielding_rate", "stream_yielding", CALLERS),
    "first-item": first_item,
    "steps": steps,
    "engine-steps": engine_steps,
    "bytes-steps": bytes_steps,
}
