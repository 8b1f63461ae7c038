"""CPU per token of the mock engine, bare and through the bus: python -m benchmarks.engine"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from dynbus import Arrival, Relay, Runtime
from dynbus.bus.lane import new_event_loop
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.mock.engine import MockConfig, MockEngine
from dynbus.llm.mock.timing import Timing
from dynbus.llm.mock.worker import MockWorker

PROMPT_TOKENS = 64
SPEEDUP = 0.3
"""Steps of 20 ms."""
LIMIT = 300.0
"""Seconds for one run."""


def requests(streams: int, tokens: int, way: str = "") -> list[GenerateRequest]:
    return [
        GenerateRequest(
            list(range(each * PROMPT_TOKENS, (each + 1) * PROMPT_TOKENS)),
            tokens,
            stream=way != "whole",
        )
        for each in range(streams)
    ]


def bare(streams: int, tokens: int) -> float:
    """Microseconds of CPU for each token, without the bus."""
    engine = MockEngine(MockConfig(timing=Timing(speedup_ratio=SPEEDUP)))
    for number, request in enumerate(requests(streams, tokens)):
        engine.add(str(number), request)
    began, made = time.process_time(), 0
    while engine.has_work:
        made += len(engine.step().outputs)
    return (time.process_time() - began) / made * 1e6


async def serve(url: str, kv_events: bool) -> None:
    """The process of the engine: tells that it is ready, and at each line how much CPU it used."""
    async with Runtime.connect(url) as runtime:
        await runtime.start(MockWorker, speedup_ratio=SPEEDUP, kv_events=kv_events)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(time.process_time(), flush=True)


async def read(url: str, streams: int, tokens: int, way: str) -> dict[str, float]:
    """The process of the reader: reads all streams, and returns the CPU that this took."""
    async with Runtime.connect(url) as runtime:
        client = runtime.client(MockWorker)
        await (await runtime.endpoint("llm.MockWorker.generate").client()).wait_for_instances()
        wanted = requests(streams, tokens, way)
        began, clock, made = time.process_time(), time.perf_counter(), 0
        if way == "tasks":

            async def one(request: GenerateRequest) -> int:
                count = 0
                async with aclosing(client.generate(request)) as stream:
                    async for item in stream:
                        count += len(item.token_ids)
                return count

            made = sum(await asyncio.gather(*map(one, wanted)))
        else:
            left = streams
            done = asyncio.Event()

            def deliver(arrivals: Sequence[Arrival[int, Generated]]) -> None:
                nonlocal made, left
                for arrival in arrivals:
                    if arrival.error is not None:
                        raise arrival.error
                    for item in arrival.items:
                        made += len(item.token_ids)
                    left -= arrival.ended
                if not left:
                    done.set()

            with Relay(deliver) as relay:
                for number, request in enumerate(wanted):
                    await relay.open(client.generate(request), number)
                await done.wait()
        assert made == streams * tokens
        return {
            "cpu": time.process_time() - began,
            "seconds": time.perf_counter() - clock,
            "tokens": made,
        }


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"a process of the benchmark ended: {process.wait(5.0)}")
    return line


async def through_the_bus(options: argparse.Namespace, way: str) -> dict[str, float]:
    """Microseconds of CPU for each token, of the engine's process, the reader's and the server."""
    with TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder))
        try:
            return await asyncio.to_thread(between_processes, server, options, way)
        finally:
            await server.stop()


def between_processes(
    server: RunningServer, options: argparse.Namespace, way: str
) -> dict[str, float]:
    """The same, with a server that runs."""
    command = [sys.executable, "-m", "benchmarks.engine"]
    events = ["--kv-events"] if options.kv_events else []
    worker = subprocess.Popen(
        [*command, "--serve", server.url, *events],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line_of(worker)

        def used() -> float:
            assert worker.stdin is not None
            print(file=worker.stdin, flush=True)
            return float(line_of(worker))

        nats = psutil.Process(server.pid)
        before, nats_before = used(), sum(nats.cpu_times()[:2])
        reading = [*command, "--read", server.url, way]
        sizes = ["--streams", str(options.streams), "--tokens", str(options.tokens)]
        text = subprocess.run(
            reading + sizes, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True
        ).stdout
        found = json.loads(text)
        engine, nats_cpu = used() - before, sum(nats.cpu_times()[:2]) - nats_before
    finally:
        worker.kill()
        worker.wait(5.0)
    each = 1e6 / found["tokens"]
    return {
        "engine": engine * each,
        "reader": found["cpu"] * each,
        "nats-server": nats_cpu * each,
        "tokens/s": found["tokens"] / found["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=250, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-events", action="store_true", help="publish KV events too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=2, metavar=("URL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if options.serve:
            runner.run(serve(options.serve, options.kv_events))
            return
        if options.read:
            url, way = options.read
            print(json.dumps(runner.run(read(url, options.streams, options.tokens, way))))
            return
        runs: dict[str, list[dict[str, float]]] = {
            "bare": [],
            "relay": [],
            "tasks": [],
            "whole": [],
        }
        for _ in range(options.rounds):
            runs["bare"].append({"engine": bare(options.streams, options.tokens)})
            for way in ("relay", "tasks", "whole"):
                runs[way].append(runner.run(through_the_bus(options, way)))
    found: dict[str, Any] = {
        way: {key: statistics.median(run[key] for run in each) for key in each[0]}
        for way, each in runs.items()
    }
    for way, values in found.items():
        print(f"{way:>6}: " + ", ".join(f"{key} {value:,.1f}" for key, value in values.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"medians": found, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
