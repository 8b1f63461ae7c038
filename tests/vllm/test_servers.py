"""Two `vllm serve` behind their workers: where requests go, and one that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import msgspec
import pytest
from openai import APIError, AsyncOpenAI
from tests.conditions import PATIENCE, eventually
from tests.vllm.conftest import ENVIRONMENT, START_TIMEOUT, openai_client

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.kvrouter import KvRouter, block_hashes
from dynbus.llm.proxy import OpenAiWorker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

BLOCK: Final = 32
MOST: Final = 1900
"""Tokens of an endless answer: as many as fit."""
OPTIONS: Final = (
    "--served-model-name=tiny",
    "--dtype=float32",
    "--max-model-len=2048",
    "--enforce-eager",
    "--max-num-seqs=16",
    f"--block-size={BLOCK}",
    "--num-gpu-blocks-override=96",
    "--enable-prompt-tokens-details",
)


class Server:
    """A `vllm serve`, which publishes its events."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay"
        self.log = folder / "server.log"
        self._folder = folder
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={self._model}", f"--port={self.port}", "--host=127.0.0.1", *OPTIONS]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, f"--kv-events-config={json.dumps(events)}"],
                cwd=self._folder,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it with all its processes, which say nothing more."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)


@contextmanager
def workers(folder: Path, url: str, servers: list[Server], model: Path) -> Generator[Path]:
    """A `dynbus run` of a worker for each server; where its log is."""
    log = folder / "run.log"
    own = {
        "workers": len(servers),
        "url": ",".join(server.url for server in servers),
        "kv_events": ",".join(server.events for server in servers),
        "kv_replay": ",".join(server.replay for server in servers),
        "model": str(model),
    }
    options = [f"--OpenAiWorker.{name}={value}" for name, value in own.items()]
    command = [sys.executable, "-m", "dynbus", "run", "dynbus.llm:OpenAiWorker"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--nats", url, *options], cwd=folder, stdout=output, stderr=output
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture
def servers(tmp_path: Path, tiny_model: Path) -> Iterator[list[Server]]:
    """Two of them, on the way to be there."""
    with ExitStack() as stack:
        found: list[Server] = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            found.append(Server(tmp_path / name, tiny_model))
            found[-1].start()
            stack.callback(found[-1].kill)
        yield found


@pytest.mark.nightly
async def test_two_servers_are_one_fleet_and_one_of_them_may_die(
    tmp_path: Path, own_server: RunningServer, servers: list[Server], tiny_model: Path
) -> None:
    """Requests go where the router expects their blocks, which are there. Then one server is
    killed in the middle of a stream, is withdrawn, and comes back."""
    with workers(tmp_path, own_server.url, servers, tiny_model) as log:
        async with (
            Runtime.connect(own_server.url) as runtime,
            openai_client(runtime) as (front, client),
        ):
            there = runtime.client(OpenAiWorker)

            def count() -> int:
                return len(runtime.instance_ids(OpenAiWorker))

            def is_routed() -> bool:
                served = front.shared.models.served
                return count() == 2 and bool(served) and served[0].router is not None

            try:
                await eventually(is_routed, START_TIMEOUT)
            except AssertionError:
                raise AssertionError(
                    log.read_text()[-3000:] + servers[0].log.read_text()[-3000:]
                ) from None
            router = front.shared.models.served[0].router
            assert router is not None
            assert not await asked_in_turn(client, router, there, 30)

            before = set(runtime.instance_ids(OpenAiWorker))
            async with anyio.create_task_group() as tasks:
                readings: list[Reading] = []
                while len({one.place for one in readings if one.is_fresh}) < 2:
                    stream = await endless(client, len(readings))
                    reading = Reading(stream, router.latest_decisions(1)[0].chosen.instance)
                    readings.append(reading)
                    tasks.start_soon(reading.run)
                    await eventually(reading.has_begun)
                readings = [one for one in readings if one.is_fresh]
                await asyncio.to_thread(servers[0].kill)
                await eventually(
                    lambda: any(one.error for one in readings),
                    what=f"a stream breaks off, of {readings}",
                )
                lost = {one.place for one in readings if one.error}
                going = [one for one in readings if one.place not in lost]
                assert going
                enough = [one.chunks + 20 for one in going]
                await eventually(
                    lambda: all(
                        one.chunks > count for one, count in zip(going, enough, strict=True)
                    ),
                    what=f"the others go on, of {readings}",
                )
                tasks.cancel_scope.cancel()
            await eventually(lambda: count() == 1, START_TIMEOUT, what="one is withdrawn")
            assert await answer(client, "and now")
            servers[0].start()
            await eventually(lambda: count() == 2, START_TIMEOUT, what="it is back")
            assert len(before & set(runtime.instance_ids(OpenAiWorker))) == 1
            assert not await asked_in_turn(client, router, there, 10)


async def asked_in_turn(
    client: AsyncOpenAI, router: KvRouter, worker: OpenAiWorker, count: int
) -> list[str]:
    """Where the router was wrong of so many chats, each asked once it knows what became of the one
    before."""
    random = Random("documents")
    follower = router.follower
    assert follower is not None
    differing: list[str] = []
    for number in range(count):
        document = f"document {random.randrange(6)} " * random.randrange(20, 60)
        messages: Any = [{"role": "user", "content": f"{document} question {number} {'?' * 40}"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2}
        tokens = await worker.tokenize(msgspec.Raw(msgspec.json.encode(body)))
        create: Any = client.chat.completions.create
        said = await create(**body, extra_headers={"X-Request-Id": f"turn-{number}"})
        decision = router.latest_decisions(1)[0]
        told = said.usage.prompt_tokens_details
        reused = told.cached_tokens if told is not None else 0
        hashes = block_hashes(tokens, BLOCK)
        assert said.usage.prompt_tokens == len(tokens)

        def is_known(chosen: Any = decision.chosen, hashes: Any = hashes) -> bool:
            found = follower.overlaps(hashes).get(chosen)
            return found is not None and found.total == len(hashes)

        await eventually(is_known, what=f"the router knows what request {number} left")
        if reused != decision.expected_reuse:
            differing.append(f"{number}: {reused}, expected {decision.expected_reuse}")
    return differing


async def endless(client: AsyncOpenAI, number: int) -> Any:
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": f"number {number} " * 5}]
    return await create(
        model="tiny",
        messages=messages,
        max_tokens=MOST,
        stream=True,
        extra_body={"ignore_eos": True},
    )


class Reading:
    """Reads a stream.

    Attributes:
        place: the instance that it comes from.
        chunks: how many have come.
        error: how it broke off.
    """

    def __init__(self, stream: Any, place: str) -> None:
        self.place = place
        self.chunks = 0
        self.error: APIError | None = None
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Reading at {self.place} [{self.chunks} chunks | {self.error!r}]>"

    @property
    def is_fresh(self) -> bool:
        """Whether it goes on for some seconds: a server may take as long for its first chunk,
        while the other has the processors."""
        return self.error is None and self.chunks < MOST // 2

    def has_begun(self) -> bool:
        return self.chunks > 0

    async def run(self) -> None:
        """Read to the end."""
        try:
            async for _ in self._stream:
                self.chunks += 1
        except APIError as error:
            self.error = error


async def answer(client: AsyncOpenAI, text: str) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    create: Any = client.chat.completions.create
    return (await create(model="tiny", messages=messages, max_tokens=3)).choices[0]
