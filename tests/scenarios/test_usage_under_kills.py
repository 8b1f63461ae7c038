"""What tenants use, counted while engines, front ends and the server are killed, against what their
clients are told.

A small story of each kind runs at every push. `USAGE_SCALE=0.1` makes the soak a tenth, requests
and kills alike.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import anyio
import httpx2
import psutil
import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Runtime
from dynbus.bus.clock import monotonic
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.llm.tenants.usage_sums import UsageSum, read_usage, sum_up

from .project import ENGINE, Folder

pytestmark = pytest.mark.anyio

SCALE = float(os.environ.get("USAGE_SCALE", "1"))
KEYS: Final = {"ada": "key-of-ada", "bob": "key-of-bob"}
AT_A_TIME: Final = 12
FOR_NOW: Final = (409, 429, 500, 503)
"""Statuses of answers after which a request is sent again."""


class Size(NamedTuple):
    """How large a story is.

    Attributes:
        engines: the more, the sooner the next may be killed: one that is killed often starts again
            after half a minute.
    """

    requests: int
    kills: int
    engines: int

    def scaled(self) -> Size:
        requests, kills = (max(1, round(of * SCALE)) for of in (self.requests, self.kills))
        return Size(requests, kills, self.engines)


class Used(NamedTuple):
    """The usage that a client is told."""

    requests: int = 0
    prompt: int = 0
    completion: int = 0


class Stage:
    """Engines and two front ends with keys, some of whom are killed.

    Attributes:
        urls: of the front ends that were started last.
    """

    def __init__(
        self, folder: Folder, server: RunningServer, runtime: Runtime, engines: int
    ) -> None:
        self._folder = folder
        self._runtime = runtime
        self._needed = max(3, engines // 3)
        self._answered: list[str] = []
        runtime.discovery.begin()
        (folder.path / "stack.py").write_text(ENGINE)
        lines = [f"{tenant} {key}\n" for tenant, key in KEYS.items()]
        (folder.path / "keys").write_text("".join(lines))
        folder.url = server.url
        fast = ("--Engine.engine=mock", "--Engine.speedup_ratio=4", "--log-level=warning")
        folder.start("stack.py:Engine", *fast, f"--Engine.workers={engines}")
        self.urls = ["", ""]
        self._fronts = [self._front(at) for at in range(2)]

    def _front(self, at: int) -> subprocess.Popen[bytes]:
        port = free_port()
        self.urls[at] = f"http://127.0.0.1:{port}"
        return self._folder.start_front_end(port, "--api-keys", "keys")

    async def kill_an_engine(self) -> None:
        """Kill an engine once others are there: with none left, answers end with an error."""
        await eventually(lambda: len(self._engines()) >= self._needed, what="engines are there")
        engine = random.choice(self._engines())
        engine.kill()
        engine.wait()

    def _engines(self) -> list[psutil.Process]:
        """The processes of instances that are ready; records of those killed stay for a while."""
        there = self._runtime.discovery.view.instances("stack", "Engine", monotonic())
        ready = {int(one.record.address.rpartition(":")[2]) for one in there}
        return [one for one in self._folder.workers() if one.pid in ready]

    async def kill_a_front_end(self) -> None:
        """Kill a front end, and start another one."""
        at = random.randrange(2)
        self._fronts[at].kill()
        self._fronts[at].wait()
        self._fronts[at] = self._front(at)
        await eventually(self.answers, PATIENCE, what=self._who_answers)

    async def answers(self) -> bool:
        """True if both front ends answer for the model."""
        headers = {"Authorization": f"Bearer {KEYS['ada']}"}
        async with httpx2.AsyncClient(timeout=5.0) as client:
            try:
                listed = [
                    await client.get(f"{url}/v1/models", headers=headers) for url in self.urls
                ]
            except httpx2.HTTPError as error:
                self._answered = [repr(error)]
                return False
        self._answered = [f"{one.status_code} {one.text}" for one in listed]
        return all(one.status_code == 200 and "mock" in one.text for one in listed)

    def _who_answers(self) -> str:
        ended = [one.poll() for one in self._fronts]
        return f"both front ends answer: {self.urls}, {ended}, {self._answered}"


class Client:
    """A client that reads one stream, wherever it has to go on with it."""

    def __init__(self, stage: Stage, number: int, client: httpx2.AsyncClient) -> None:
        self._stage = stage
        self._client = client
        self._id = f"request-{number}"
        self._last = ""
        self._may_be_begun = False
        self._body = {
            "model": "mock",
            "messages": [{"role": "user", "content": f"Say {number}. " * (1 + number % 40)}],
            "max_tokens": 20 + number % 60,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.tenant = list(KEYS)[number % len(KEYS)]
        self._headers = {
            "Authorization": f"Bearer {KEYS[self.tenant]}",
            "Dynbus-Resumable": "1",
            "X-Request-Id": self._id,
        }
        self.used: Used | None = None

    async def read(self) -> Used:
        """Read all of it.

        A stream whose first request broke off may have been begun, and is asked for before it is
        begun again.
        """
        watch = Stopwatch()
        for url in itertools.cycle(range(2)):
            watch.check(2 * PATIENCE, f"{self._id} is answered")
            base = self._stage.urls[url]
            with suppress(httpx2.HTTPError):
                if self._may_be_begun:
                    await self._go("GET", f"{base}/v1/streams/{self._id}")
                else:
                    self._may_be_begun = True
                    await self._go("POST", f"{base}/v1/chat/completions", json=self._body)
            if self.used is not None:
                return self.used
            await anyio.sleep(0.1)
        raise AssertionError("unreachable")

    async def _go(self, method: str, url: str, **options: Any) -> None:
        headers = self._headers
        if self._last:
            headers = {**headers, "Last-Event-ID": self._last}
        async with self._client.stream(method, url, headers=headers, **options) as answer:
            status = answer.status_code
            if status == 200:
                assert method == "GET" or answer.headers["dynbus-resumable"] == "1", answer.headers
                async for line in answer.aiter_lines():
                    self._take(line)
            elif method == "POST" and status in FOR_NOW:
                self._may_be_begun = False
            elif method == "GET" and status == 404 and not self._last:
                # Nothing of it has reached the bus.
                self._may_be_begun = False
            elif status not in FOR_NOW:
                await answer.aread()
                raise AssertionError(f"{self._id} ended with {answer.status_code}: {answer.text}")

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self._last = line.removeprefix("id: ")
        assert not line.startswith('data: {"error"'), line
        if '"usage":{' in line:
            usage = json.loads(line.removeprefix("data: "))["usage"]
            self.used = Used(1, usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(150, 8, 3), id="150"),
        pytest.param(Size(5_000, 1000, 12), id="5_000", marks=pytest.mark.soak),
    ],
)
async def test_the_usage_of_each_tenant_is_what_its_clients_are_told(
    folder: Folder, own_server: RunningServer, size: Size
) -> None:
    async with Runtime.connect(own_server.url, wait=30.0) as runtime:
        await compare(folder, own_server, runtime, size.scaled())


async def compare(folder: Folder, own_server: RunningServer, runtime: Runtime, size: Size) -> None:
    stage = Stage(folder, own_server, runtime, size.engines)
    told = {tenant: Used() for tenant in KEYS}
    done = kills = 0
    numbers = iter(range(size.requests))

    async def ask(client: httpx2.AsyncClient) -> None:
        nonlocal done
        for number in numbers:
            asking = Client(stage, number, client)
            used = await asking.read()
            told[asking.tenant] = Used(*map(sum, zip(told[asking.tenant], used, strict=True)))
            done += 1

    await eventually(stage.answers, 120.0, what="both front ends answer")
    async with (
        httpx2.AsyncClient(timeout=PATIENCE) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(AT_A_TIME):
            tasks.start_soon(ask, client)
        for number in range(1, size.kills + 1):
            due = size.requests * number // (size.kills + 2)
            await eventually(is_at_least(lambda: done, due), 600.0, what="requests end")
            kill = stage.kill_a_front_end if random.random() < 0.5 else stage.kill_an_engine
            await kill()
            kills += 1

    hours = await read_usage(runtime.bus.data.jetstream, 0.0, 10.0**11)
    counted = {one.group["tenant"]: used_of(one) for one in sum_up(hours, ("tenant",))}
    print(f"{size}: {kills} kills, {counted}")
    assert counted == told


def is_at_least(count: Callable[[], int], due: int) -> Callable[[], bool]:
    return lambda: count() >= due


def used_of(one: UsageSum) -> Used:
    return Used(one.requests, one.prompt, one.completion)
