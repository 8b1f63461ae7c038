"""`dynbus run` of some nodes, and a runtime that reaches them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from dynbus import Runtime
from dynbus.bus.commands.survey import InstanceReport
from dynbus.bus.nats.server_process import run_server
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import Message

ENGINES: Final = Path(__file__).with_name("engines.py")
START_SECONDS: Final = 120.0

Nodes = Mapping[str, Mapping[str, Any]]
"""Settings of each node, its class among them, and how many `workers` there are."""


@asynccontextmanager
async def deployed(nodes: Nodes) -> AsyncGenerator[Runtime]:
    """Run these nodes of `engines.py` until the block ends; each process computes on one core."""
    with tempfile.TemporaryDirectory(prefix="disaggregated-") as name:
        folder = Path(name)
        # Of a class that no node has, an instance would start. JSON is YAML.
        unused = {"Part", "Whole"} - {settings["class"] for settings in nodes.values()}
        settings = {**nodes, **{kind: {"workers": 0} for kind in unused}}
        (folder / "nodes.yaml").write_text(json.dumps(settings))
        server = await run_server(store_dir=folder / "store")
        with (folder / "run.log").open("wb") as log:
            run = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "dynbus",
                    "run",
                    str(Path(__file__).with_name("engines.py")),
                ),
                *("-f", str(folder / "nodes.yaml"), "--nats", server.url),
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
            )
        ended = asyncio.create_task(run.wait())
        try:
            async with Runtime.connect(server.url) as runtime:
                ready = asyncio.create_task(_until_ready(runtime, nodes))
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ready.cancel()
                    raise RuntimeError((folder / "run.log").read_text(errors="replace")[-3000:])
                await ready
                yield runtime
        finally:
            if run.returncode is None:
                run.terminate()
            await ended
            await server.stop()


async def _until_ready(runtime: Runtime, nodes: Nodes) -> None:
    for node, settings in nodes.items():
        client = await runtime.endpoint(f"bench.{node}.load_metrics").client()
        await client.wait_for_instances(START_SECONDS, count=settings.get("workers", 1))


class Transferred(NamedTuple):
    """What a decode engine has read so far."""

    bytes: float
    seconds: float


async def transferred(runtime: Runtime) -> Transferred:
    """What the only decode engine says of its transfers; it says it anew every half a second."""
    await anyio.sleep(1.0)
    found: list[Mapping[str, float]] = []
    there = asyncio.Event()

    def take(message: Message) -> None:
        row = InstanceReport.read(message.data)
        if row is not None and row.counts is not None:
            found.append(row.counts.figures)
            there.set()

    inbox = f"{runtime.bus.replies.base}.{random_id()}"
    subscription = runtime.bus.data.subscribe(inbox, take)
    try:
        runtime.bus.data.publish("$SRV.STATS.bench_decode", b"", reply=inbox)
        with anyio.fail_after(5.0):
            await there.wait()
    finally:
        subscription.unsubscribe()
    return Transferred(found[0]["transferred_bytes"], found[0]["transfer_seconds"])
