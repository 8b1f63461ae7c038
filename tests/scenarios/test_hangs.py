"""An engine hangs while its process is alive and its loop answers: it is noticed, withdrawn, its
streams go on elsewhere token for token, and another process is started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final
from urllib.request import urlopen

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Runtime, call_options
from dynbus.bus.nats.server_process import free_port
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.mock.engine import MockConfig, MockEngine

from . import hanging_engine
from .hanging_engine import Engine
from .project import Folder
from .test_run import health

pytestmark = pytest.mark.anyio

LEAST: Final = 2.0
"""Seconds of the longest legal step: steps of a hundredth of a second are seen no shorter than a
quarter, of which four times are less."""
LIMIT: Final = 6.0
"""Seconds of a step of a size that was not seen yet."""
STREAMS: Final = 12
TOKENS: Final = 300

ACTORS: Final = Path(hanging_engine.__file__).read_text()


def request_of(number: int, prompt: int = 40, tokens: int = TOKENS) -> GenerateRequest:
    """A request for an output that is always the same."""
    asked = [number + position % 97 for position in range(prompt)]
    return GenerateRequest(asked, tokens, sampling=Sampling(seed=number))


def expected(request: GenerateRequest) -> list[int]:
    engine = MockEngine(MockConfig(blocks=4096, block_size=16, max_num_batched_tokens=512))
    engine.add("it", request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for _, item in engine.step().outputs for token in item.token_ids]
    return tokens


class Stream:
    """A stream that is read from its beginning to its end.

    Attributes:
        token_ids: that have come.
    """

    def __init__(self, client: Engine, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.reading = asyncio.create_task(self._read(client))

    async def _read(self, client: Engine) -> None:
        async for item in client.generate(self.request):
            self.token_ids += item.token_ids

    async def check(self) -> None:
        """Wait for its end: nothing was lost, and nothing came twice."""
        await self.reading
        assert self.token_ids == expected(self.request)


@asynccontextmanager
async def engines(folder: Folder, count: int, *more: str) -> AsyncGenerator[Runtime]:
    """A run with so many engines, and a caller that knows them."""
    (folder.path / "engines.py").write_text(ACTORS)
    await asyncio.to_thread(
        folder.start_ready,
        *("engines.py:Engine", f"--Engine.workers={count}"),
        *(f"--Engine.hang_least={LEAST}", f"--Engine.hang_limit={LIMIT}"),
        *more,
        instances=count,
    )
    async with Runtime.connect(folder.url) as runtime:
        await runtime.discovery.wait_synchronized(PATIENCE)
        await eventually(lambda: len(runtime.instance_ids(Engine)) == count)
        yield runtime


def pids_of(folder: Folder) -> dict[str, int]:
    """The processes of the instances, by their ids."""
    rows = json.loads(folder.dynbus("ps", "--json").stdout)
    return {row["instance_id"]: int(row["address"].rpartition(":")[2]) for row in rows}


def metrics_page(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


async def hang(folder: Folder, runtime: Runtime, way: str, victim: str) -> float:
    """Have an instance hang; seconds until nobody finds it any longer."""
    (folder.path / f"hang-{victim}").write_text(way)
    watch = Stopwatch()
    await eventually(lambda: victim not in runtime.instance_ids(Engine))
    return watch.seconds()


IN_EACH_WAY: Final = pytest.mark.nightly(
    "tests/llm/engine/test_hangs.py::test_an_engine_that_hangs_is_withdrawn_and_its_streams_go_on_elsewhere"
)


@pytest.mark.parametrize(
    "way",
    [
        "lock",
        pytest.param("c", marks=IN_EACH_WAY),
        pytest.param("loop", marks=IN_EACH_WAY),
        pytest.param("scheduler", marks=IN_EACH_WAY),
    ],
)
async def test_an_engine_that_hangs_is_withdrawn_its_streams_go_on_and_it_starts_again(
    way: str, folder: Folder
) -> None:
    port = free_port()
    async with engines(folder, 2, f"--health=127.0.0.1:{port}") as runtime:
        client = runtime.client(Engine)
        streams = [Stream(client, request_of(number)) for number in range(STREAMS)]
        await eventually(lambda: all(len(stream.token_ids) > 20 for stream in streams))
        pids = await asyncio.to_thread(pids_of, folder)
        victim = runtime.instance_ids(Engine)[0]

        noticed = await hang(folder, runtime, way, victim)
        for stream in streams:
            await stream.check()
        # The one that took its place.
        await eventually(lambda: len(runtime.instance_ids(Engine)) == 2)
        await eventually(lambda: not os.path.exists(f"/proc/{pids[victim]}"))
        await Stream(client, request_of(99)).check()
        page = await asyncio.to_thread(metrics_page, port)

    hangs = [line for line in page.splitlines() if line.startswith("dynbus_hangs_total{")]
    assert sorted(line.rpartition(" ")[2] for line in hangs) == ["0.0", "1.0"], hangs
    assert 'dynbus_component="Engine"' in hangs[0]
    assert page.count("dynbus_engine_step_limit_seconds{") == 2
    # A scheduler may have had one step more.
    assert noticed < LIMIT * (2 if way == "scheduler" else 1) + 3.0
    assert "its engine hangs: it has work and" in folder.output()
    assert "Thread engine:" in folder.output()
    assert "it hangs, and is ended" in folder.output()
    assert "restarting in" in folder.output()


@pytest.mark.parametrize("way", ["interpreter", "loop on the loop"])
async def test_a_process_that_a_step_keeps_to_itself_is_ended_and_its_streams_go_on(
    way: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing of the process can say what it does: `dynbus run` asks it in vain. Where it holds the
    # loop alone, the control lane ends it.
    monkeypatch.setenv("DYNBUS_MUTE_LIMIT", "3")
    if way != "interpreter":
        (folder.path / "on-the-loop").touch()
    async with engines(folder, 2) as runtime:
        client = runtime.client(Engine)
        streams = [Stream(client, request_of(number)) for number in range(STREAMS)]
        await eventually(lambda: all(len(stream.token_ids) > 20 for stream in streams))
        victim = runtime.instance_ids(Engine)[0]
        pid = (await asyncio.to_thread(pids_of, folder))[victim]

        (folder.path / f"hang-{victim}").write_text(way.partition(" ")[0])
        watch = Stopwatch()
        await eventually(lambda: not os.path.exists(f"/proc/{pid}"))
        ended = watch.seconds()
        for stream in streams:
            await stream.check()
        await eventually(lambda: len(set(runtime.instance_ids(Engine)) - {victim}) == 2)

    # A question each second, and one for the stacks; or the longest legal step.
    assert ended < 3.0 + 4.0
    assert "it hangs, and is ended" in folder.output()
    assert "keep_the_interpreter" in folder.output() or "compute_for_ever" in folder.output()


async def test_a_process_that_is_stopped_and_goes_on_does_not_hang(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNBUS_MUTE_LIMIT", "3")
    port = free_port()
    async with engines(folder, 2, f"--health=127.0.0.1:{port}") as runtime:
        client = runtime.client(Engine)
        streams = [Stream(client, request_of(number)) for number in range(STREAMS)]
        await eventually(lambda: all(len(stream.token_ids) > 20 for stream in streams))
        pids = await asyncio.to_thread(pids_of, folder)
        [victim, _] = pids.values()

        for _ in range(2):
            os.kill(victim, signal.SIGSTOP)
            # Far beyond all that it might be given.
            await asyncio.sleep(LIMIT + 5.0)
            _, page = await asyncio.to_thread(health, port, "/ready")
            [problem] = page["problems"].values()
            assert "it is stopped (SIGSTOP) or waits for a disk, for " in problem
            os.kill(victim, signal.SIGCONT)
            await asyncio.sleep(1.0)
        assert folder.output().count("it is stopped (SIGSTOP) or waits for a disk") == 2
        for stream in streams:
            await stream.check()
        # It makes steps again.
        await asyncio.gather(*(Stream(client, request_of(n, tokens=50)).reading for n in range(8)))

        assert await asyncio.to_thread(pids_of, folder) == pids
    assert "hangs" not in folder.output()


@pytest.mark.timeout(13 * 3600)
@pytest.mark.nightly(
    "tests/llm/engine/test_step_watch.py::test_steps_of_a_long_prompt_may_make_nothing"
)
async def test_nothing_hangs_under_full_load_with_long_prompts(folder: Folder) -> None:
    seconds = float(os.environ.get("HANG_FREE_SECONDS", "120"))
    count = int(os.environ.get("HANG_FREE_ENGINES", "2"))
    began = asyncio.get_running_loop().time()
    async with engines(folder, count) as runtime:
        client = runtime.client(Engine)

        async def ask(number: int) -> int:
            asked = 0
            while asyncio.get_running_loop().time() - began < seconds:
                length = (30_000, 8_000, 500, 40)[(number + asked) % 4]
                await Stream(client, request_of(number, length, 20)).check()
                asked += 1
            return asked

        asked = await asyncio.gather(*(ask(number) for number in range(8 * count)))

    print(f"{count} engines, {seconds:g} s, {sum(asked)} requests, prompts of up to 30,000 tokens")
    assert "hangs" not in folder.output()


async def many_hangs(folder: Folder, count: int, instances: int, at_once: int) -> None:
    """Have engines hang under streams, several at once, and be noticed soon."""
    noticed: list[float] = []
    random = Random(count)
    hanging: set[str] = set()
    numbers = iter(range(count))
    async with engines(folder, instances) as runtime:
        client = runtime.client(Engine)
        ending = asyncio.Event()

        async def ask(number: int) -> int:
            asked = 0
            while not ending.is_set():
                await Stream(client, request_of(number + asked * STREAMS, tokens=150)).check()
                asked += 1
            return asked

        def serving() -> list[str]:
            return sorted(set(runtime.instance_ids(Engine)) - hanging)

        async def hang_each() -> None:
            for _ in numbers:
                # One that was ended often starts again after half a minute.
                await eventually(lambda: len(serving()) > max(1, instances // 4))
                victim = random.choice(serving())
                hanging.add(victim)
                with call_options(instance=victim):
                    # One that has just started has learned nothing of its steps.
                    await Stream(client, request_of(STREAMS, tokens=80)).check()
                way = random.choice(["lock", "c", "loop", "scheduler"])
                seconds = await hang(folder, runtime, way, victim)
                # A scheduler may have had one step more.
                assert seconds < LIMIT * (2 if way == "scheduler" else 1) + 3.0, way
                noticed.append(seconds)
                hanging.remove(victim)

        asking = [asyncio.create_task(ask(number)) for number in range(STREAMS)]
        await asyncio.gather(*(hang_each() for _ in range(at_once)))
        assert not any(task.done() for task in asking), [task for task in asking if task.done()]
        ending.set()
        answered = sum(await asyncio.gather(*asking))
    noticed.sort()
    assert len(noticed) == count
    print(
        f"{count} hangs, noticed after {noticed[count // 2]:.2f} s (median), "
        f"{noticed[-1]:.2f} s at most; {answered} streams, none lost or doubled a token"
    )
    # No engine counted as hung that did not hang.
    assert folder.output().count("it hangs, and is ended") == count


@pytest.mark.timeout(900)
@pytest.mark.nightly(
    "tests/llm/engine/test_hangs.py::test_an_engine_that_hangs_is_withdrawn_and_its_streams_go_on_elsewhere"
)
async def test_streams_outlive_tens_of_hangs(folder: Folder) -> None:
    await many_hangs(folder, 30, instances=3, at_once=1)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
async def test_streams_outlive_a_thousand_hangs(folder: Folder) -> None:
    await many_hangs(folder, int(os.environ.get("HANGS", "1000")), instances=16, at_once=3)
