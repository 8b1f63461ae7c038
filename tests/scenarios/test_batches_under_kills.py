"""Batches while engines, front ends, workers and the server are killed; and `dynbus batch run`.

A small story runs at every push. `BATCH_SCALE=0.1` makes the soak a tenth, lines and kills alike.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import psutil
import pytest
from tests.conditions import eventually

from dynbus import Runtime, Unavailable
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.llm import Catalog
from dynbus.llm.batches.records import Batch, BatchRequest
from dynbus.llm.batches.service import Batches

from .project import Folder

pytestmark = pytest.mark.anyio

SCALE = float(os.environ.get("BATCH_SCALE", "1"))
CHAT: Final = "/v1/chat/completions"
ENGINE: Final = """
from dynbus.llm.batches import BatchWorker
from dynbus.llm.worker import ModelWorker

class Engine(ModelWorker, namespace="stack"):
    pass
"""


class Size(NamedTuple):
    """How large a story is: its lines, and the kills of processes and of the server."""

    lines: int
    kills: int
    server_kills: int

    def scaled(self) -> Size:
        return Size(*(max(1, round(of * SCALE)) for of in self))


def line(number: int, **body: Any) -> bytes:
    asked = {"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 8, **body}
    fields = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": asked}
    return json.dumps(fields).encode() + b"\n"


async def pieces(lines: int) -> AsyncGenerator[bytes]:
    for number in range(lines):
        yield line(number, model="mock")


class Stage:
    """Engines, front ends that do batches, and workers of batches, some of whom are killed."""

    def __init__(self, folder: Folder, server: RunningServer) -> None:
        self._folder = folder
        self._server = server
        (folder.path / "stack.py").write_text(ENGINE)
        folder.url = server.url
        fast = ("--Engine.engine=mock", "--Engine.speedup_ratio=20", "--log-level=warning")
        folder.start("stack.py:Engine", *fast, "--Engine.workers=2")
        folder.start("stack.py:BatchWorker", "--BatchWorker.workers=2", "--log-level=warning")
        self._fronts = [self._front() for _ in range(2)]

    def _front(self) -> subprocess.Popen[bytes]:
        return self._folder.start_front_end(free_port(), "--batches")

    def workers(self) -> list[psutil.Process]:
        """The processes of engines and of workers of batches, which are started again."""
        return self._folder.workers()

    def kill_a_worker(self) -> None:
        """Kill an engine, or a worker of batches."""
        workers = self.workers()
        if workers:
            random.choice(workers).kill()

    def kill_a_front_end(self) -> None:
        """Kill a front end, and start another one."""
        at = random.randrange(len(self._fronts))
        self._fronts[at].kill()
        self._fronts[at].wait()
        self._fronts[at] = self._front()

    async def kill_the_server(self) -> None:
        """Kill the server, and start it again with its store."""
        self._server.kill()
        await self._server.start()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(160, 3, 1), id="160"),
        pytest.param(Size(20_000, 100, 100), id="20_000", marks=pytest.mark.soak),
    ],
)
async def test_each_line_is_in_the_output_once_whoever_is_killed(
    folder: Folder, own_server: RunningServer, size: Size
) -> None:
    size = size.scaled()
    stage = Stage(folder, own_server)
    async with Runtime.connect(own_server.url, wait=30.0) as runtime:
        batches = Batches(runtime)
        await eventually(lambda: len(stage.workers()) == 4, what="processes are there")
        await eventually(partial(has_model, runtime), 60.0, what="the model is served")
        began = time.monotonic()
        file = await batches.upload("", "in.jsonl", pieces(size.lines), limit=10**9)
        batch = await batches.create("", BatchRequest(file.id, CHAT, "24h"))

        async def state() -> Batch:
            while True:
                try:
                    return await batches.batch("", batch.id)
                except Unavailable:
                    await anyio.sleep(0.2)

        async def has(lines: int) -> bool:
            nonlocal batch
            batch = await state()
            return batch.has_ended or batch.counts.completed + batch.counts.failed >= lines

        kills = ["process"] * size.kills + ["server"] * size.server_kills
        random.shuffle(kills)
        for number, kill in enumerate(kills, 1):
            due = size.lines * number // (len(kills) + 2)
            await eventually(partial(has, due), 600.0, what="lines end")
            if kill == "server":
                await stage.kill_the_server()
            elif random.random() < 0.7:
                stage.kill_a_worker()
            else:
                stage.kill_a_front_end()
        await eventually(partial(has, size.lines + 1), 600.0, what="the batch ends")
        print(f"{size}: {time.monotonic() - began:.0f} s")

        assert batch.output_file_id is not None
        written = await batches.file("", batch.output_file_id)
        data = b"".join([piece async for piece in batches.store.content(written)])
    answered = [json.loads(one) for one in data.splitlines()]
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.counts.completed == size.lines
    ids = [one["custom_id"] for one in answered]
    assert ids == [f"line-{number}" for number in range(size.lines)]
    assert set(Counter(one["id"] for one in answered).values()) == {1}
    assert {one["response"]["status_code"] for one in answered} == {200}


async def has_model(runtime: Runtime) -> bool:
    async with Catalog(runtime) as catalog:
        return bool(catalog.models)


# The command -------------------------------------------------------------------------------------


def written(path: Path) -> list[Any]:
    return [json.loads(one) for one in path.read_bytes().splitlines()]


async def test_a_file_is_run_and_one_that_was_interrupted_goes_on(
    folder: Folder, own_server: RunningServer
) -> None:
    (folder.path / "stack.py").write_text(ENGINE)
    folder.url = own_server.url
    lines = [line(number) for number in range(60)]
    (folder.path / "in.jsonl").write_bytes(b"".join(lines))
    asking = ("batch", "run", "in.jsonl", "--out", "out.jsonl", "--model", "mock")
    # So slow that it is not over before it is interrupted.
    folder.start(
        "stack.py:Engine",
        "--Engine.engine=mock",
        "--Engine.speedup_ratio=0.5",
        "--log-level=warning",
    )

    first = folder.begin(*asking, "--concurrency", "4", "--wait", "60")
    assert first.stderr is not None
    said = ""
    while " ended, " not in said:
        said += await anyio.to_thread.run_sync(first.stderr.readline)
        assert first.poll() is None, said
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = await anyio.to_thread.run_sync(folder.dynbus_in_a_process, *asking)
    out = written(folder.path / "out.jsonl")
    third = await anyio.to_thread.run_sync(
        folder.dynbus_in_a_process, "batch", "run", "bad.jsonl", "--out", "bad.out"
    )
    (folder.path / "bad.jsonl").write_bytes(line(1, model="mock") + b"nonsense\n")
    fourth = await anyio.to_thread.run_sync(
        folder.dynbus_in_a_process, "batch", "run", "bad.jsonl", "--out", "bad.out"
    )
    async with Runtime.connect(own_server.url) as runtime:
        store = Batches(runtime).store
        left = [*await store.files(""), *await store.batches("")]

    assert ": begun" in said
    assert ": resumed" in second.stderr
    assert second.returncode == 0, second.stderr
    assert [one["custom_id"] for one in out] == [f"line-{number}" for number in range(60)]
    assert {one["response"]["body"]["model"] for one in out} == {"mock"}
    assert not (folder.path / "out.jsonl.errors").exists()
    assert (third.returncode, "bad.jsonl cannot be read" in third.stderr) == (3, True)
    assert (fourth.returncode, "bad.jsonl, line 2: " in fourth.stderr) == (1, True)
    assert left == []
