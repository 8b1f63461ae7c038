"""Blocks per second and staleness: python -m benchmarks.kv_events"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dynbus.bus.nats.server_process import run_server

SETTLE_TIMEOUT = 90.0


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kv_events.processes", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"a process of the benchmark ended: {process.wait(5.0)}")
    return line


def measure(url: str, rate: float, seconds: float, blocks_per_event: int) -> dict[str, Any]:
    """One run with processes of its own."""
    follower = start("follow", url)
    line_of(follower)
    publisher = start("publish", url, str(rate), str(seconds), str(blocks_per_event))
    try:
        published = json.loads(line_of(publisher))
        followed = json.loads(follower.communicate("\n", timeout=SETTLE_TIMEOUT)[0])
        publisher.communicate("\n", timeout=SETTLE_TIMEOUT)
    finally:
        for process in (follower, publisher):
            if process.poll() is None:
                process.kill()
                process.wait(5.0)
    return {"publisher": published, "follower": followed}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="20000,200000", help="blocks per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--blocks-per-event", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for rate in map(float, options.rates.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            server = await run_server(store_dir=Path(folder))
            try:
                run = await asyncio.to_thread(
                    measure, server.url, rate, options.seconds, options.blocks_per_event
                )
            finally:
                await server.stop()
        found[f"{rate:.0f}"] = run
        one, other = run["publisher"], run["follower"]
        print(
            f"{rate:9,.0f} blocks/s asked: {one['blocks'] / one['seconds']:9,.0f} stored, "
            f"staleness p50 {other['p50_ms']:.2f} ms, p99 {other['p99_ms']:.2f}, "
            f"worst {other['worst_ms']:.2f}; CPU {one['cpu'] / one['seconds']:.0%} publisher and "
            f"engine, {other['cpu'] / one['seconds']:.0%} follower; {one['batches']} messages, "
            f"{one['epochs']} epochs, publish {one['publish_us_per_event']:.2f} us per event; "
            f"held {one['held']} and {other['held']}, {other['awareness']}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
