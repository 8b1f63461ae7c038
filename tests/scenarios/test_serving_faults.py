"""Every process of a stack that serves models is killed in turn, while clients ask without end.

Engines that are killed cost no client anything: each has the whole right answer. Of what else is
killed a client gets that or one typed error: its status, or an event in a stream that has begun.
Then the stack serves again by itself.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from typing import Any, Final

import psutil
import pytest
from openai import AsyncOpenAI
from tests.bus.servers import survey_of
from tests.conditions import PATIENCE, eventually

from dynbus.bus.nats.server_process import RunningServer, free_port

from .project import Folder

pytestmark = pytest.mark.anyio

STACK: Final = """
import asyncio, tempfile
from pathlib import Path
from dynbus.kvrouter import RouterActor
from dynbus.llm import ModelInput, ModelType, register_llm
from dynbus.llm.mock.text_model import write_mock_model
from dynbus.llm.worker import ModelWorker

class Engine(ModelWorker, namespace="stack"):
    pass

class Router(RouterActor, namespace="stack"):
    def __init__(self) -> None:
        super().__init__("stack.Engine.generate")

    async def on_start(self) -> None:
        await super().on_start()
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(write_mock_model, Path(folder))
            await register_llm(
                ModelInput.Tokens, ModelType.Chat, self.generate, folder, "routed"
            )
"""

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
MODELS: Final = ("mock", "routed")
"""One that front ends route by themselves, and one behind a router that is a process of its own."""

PROMPTS: Final = [f"Say something of the number {number}. " * 20 for number in range(6)]
TOKENS: Final = 20
LONG: Final = 60
CLIENTS: Final = 12
"""So many that each front end, interface and model is asked."""


def request(path: str, model: str, prompt: str, *, stream: bool) -> bytes:
    """A request for an answer that is always the same."""
    asked: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "stream": stream}
    if path == "/v1/completions":
        asked["prompt"] = prompt
    else:
        asked["messages"] = [{"role": "user", "content": prompt}]
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Cut(Exception):
    """Raised when an answer has no end: the front end was killed."""


def unchunked(data: bytes) -> bytes:
    """A body that came in chunks.

    Raises:
        Cut: its end is missing.
    """
    pieces: list[bytes] = []
    while True:
        size, _, data = data.partition(b"\r\n")
        if not size or len(data) < int(size, 16) + 2:
            raise Cut
        if not int(size, 16):
            return b"".join(pieces)
        pieces.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]


class Answer:
    """What came of a request.

    Attributes:
        status: of HTTP.
        text: as far as it came.
        error: the error that it is, or ended with.
        is_whole: whether it has its proper end.
    """

    def __init__(self, data: bytes) -> None:
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            raise Cut
        self.status = int(head.split(b" ")[1])
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.is_whole = False
        if b"text/event-stream" in head:
            self._read_events(unchunked(body))
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            raise Cut
        told = json.loads(body)
        self.error = told.get("error")
        if self.error is None:
            self.is_whole = True
            self.text = self._said(told)

    def _read_events(self, body: bytes) -> None:
        *events, rest = body.decode().split("\n\n")
        assert rest == ""
        for event in events:
            assert not self.is_whole, "something comes after the end"
            assert self.error is None, "something comes after the end"
            kind, _, data = event.rpartition("data: ")
            if data == "[DONE]":
                self.is_whole = True
                continue
            told = json.loads(data)
            if kind == "event: error\n":
                self.error = told["error"]
            else:
                self.text += self._said(told)
                self.is_whole = told.get("type") == "message_stop"

    def _said(self, told: dict[str, Any]) -> str:
        """The text of an answer, or of a piece of one, of any of the three interfaces."""
        if "choices" in told:
            return "".join(
                choice["text"]
                if "text" in choice
                else (choice.get("delta") or choice["message"]).get("content") or ""
                for choice in told["choices"]
            )
        if told["type"] == "message":
            return "".join(str(block["text"]) for block in told["content"])
        return str(told.get("delta", {}).get("text", ""))


async def ask(port: int, data: bytes) -> Answer:
    """The answer to a request.

    Raises:
        ConnectionRefusedError: nobody took it.
        Cut: it has no end.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(PATIENCE):
            writer.write(data)
            while piece := await reader.read(65536):
                received += piece
    except ConnectionError:
        if received:
            raise Cut from None
        # It waited to be accepted.
        raise ConnectionRefusedError from None
    finally:
        writer.close()
    return Answer(received)


class Clients:
    """They ask all the time, half of them each of two front ends, some for streams.

    Attributes:
        outcomes: how often a request to a port ended in which way: `right`, `cut`, `refused`, or
            the code of an error.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._texts: dict[tuple[str, str], str] = {}
        self._asked = [0] * CLIENTS
        self._right = [0] * CLIENTS
        self.outcomes: Counter[tuple[int, str]] = Counter()

    async def learn(self) -> None:
        """Ask for each answer once; all front ends and models say the same."""

        async def learn_one(path: str, prompt: str) -> None:
            answers = await asyncio.gather(
                *(
                    ask(port, request(path, model, prompt, stream=False))
                    for port in self._ports
                    for model in (MODELS if "chat" in path else MODELS[:1])
                )
            )
            (self._texts[path, prompt],) = {answer.text for answer in answers}

        await asyncio.gather(*(learn_one(*each) for each in product(PATHS, PROMPTS)))

    async def run(self, number: int) -> None:
        """What one client does."""
        port = self._ports[number % 2]
        model = MODELS[number % 4 == 3]
        path = PATHS[number % 3] if model == MODELS[0] else PATHS[0]
        while True:
            self._asked[number] += 1
            asked = self._asked[number]
            prompt = PROMPTS[(number + asked) % len(PROMPTS)]
            stream = (number + asked) % 4 > 0
            outcome = await self._outcome(port, path, model, prompt, stream=stream)
            self.outcomes[port, outcome] += 1
            if outcome == "right":
                self._right[number] = asked
            else:
                await asyncio.sleep(0.05)

    async def _outcome(self, port: int, path: str, model: str, prompt: str, *, stream: bool) -> str:
        expected = self._texts[path, prompt]
        try:
            answer = await ask(port, request(path, model, prompt, stream=stream))
        except ConnectionRefusedError:
            return "refused"
        except Cut:
            return "cut"
        if answer.error is None:
            assert answer.is_whole, "a stream that began has neither its end nor an error"
            assert answer.text == expected
            return "right"
        assert not answer.is_whole
        assert answer.status == (200 if answer.text else 503), answer.error
        assert expected.startswith(answer.text)
        if path == "/v1/messages":
            return str(answer.error["type"])
        assert answer.error["type"] == "service_unavailable", answer.error
        return str(answer.error["code"])

    async def are_served(self, *ports: int) -> None:
        """Wait until each has the right answer to a request that it sends from now on.

        Args:
            ports: whose clients; all unless given.
        """
        ports = ports or tuple(self._ports)
        numbers = [number for number in range(CLIENTS) if self._ports[number % 2] in ports]
        asked = list(self._asked)
        await eventually(
            lambda: all(self._right[number] > asked[number] for number in numbers),
            what=f"all are served again: {self.outcomes}",
        )

    def errors(self, port: int) -> set[str]:
        """How requests to a port have ended otherwise since this was asked last."""
        found = {outcome for at, outcome in self.outcomes if at == port and outcome != "right"}
        for outcome in found:
            del self.outcomes[port, outcome]
        return found


@asynccontextmanager
async def asking(clients: Clients) -> AsyncGenerator[None]:
    """Have all of them ask while the block runs; what one finds wrong ends it."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(clients.run(number)) for number in range(CLIENTS)]
        yield
        for task in running:
            task.cancel()


async def read_long(client: AsyncOpenAI, number: int, begun: asyncio.Event) -> tuple[str, Any]:
    """The text of a long answer and how many tokens it says that it has, read as a stream."""
    text = ""
    count = 0
    usage: Any = None
    stream = await client.chat.completions.create(
        model=MODELS[0],
        messages=[{"role": "user", "content": PROMPTS[number]}],
        max_tokens=LONG,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        count += 1
        if count > LONG // 5:
            begun.set()
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return text, usage


@asynccontextmanager
async def reading(
    port: int, expected: list[tuple[str, Any]]
) -> AsyncGenerator[list[tuple[str, Any]]]:
    """Have the `openai` package read long answers while the block runs, and to their ends.

    Args:
        expected: what they are; empty where that is not known yet.

    Yields:
        What they were, at the end.
    """
    found: list[tuple[str, Any]] = []
    begun = [asyncio.Event() for _ in range(4)]
    async with (
        AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client,
        asyncio.timeout(PATIENCE),
        asyncio.TaskGroup() as tasks,
    ):
        readers = [
            tasks.create_task(read_long(client, number, each)) for number, each in enumerate(begun)
        ]
        for each in begun:
            await each.wait()
        yield found
    found += [reader.result() for reader in readers]
    assert found == (expected or found)


def get(port: int, path: str) -> bytes:
    """What is answered to a GET; nothing where nobody listens yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
            data: bytes = answer.read()
            return data
    except OSError:
        return b""


async def has_models(port: int) -> bool:
    """Whether a front end lists all models."""
    told = await asyncio.to_thread(get, port, "/v1/models")
    return {one["id"] for one in json.loads(told or b'{"data": []}')["data"]} == set(MODELS)


async def agree(*ports: int) -> bool:
    """Whether front ends show the same models and all instances, and their routers find hits."""
    pages = [json.loads(await asyncio.to_thread(get, port, "/page/state")) for port in ports]
    shown = [
        [[one["name"] for one in page["models"]], [one["id"] for one in page["instances"]]]
        for page in pages
    ]
    hits = [page["hit_rate"] or 0.0 for page in pages]
    return len(shown[0][1]) == 3 and shown[0] == shown[1] and min(hits) > 0.3


def worker(folder: Folder, label: str) -> psutil.Process:
    """The process of an instance."""
    return next(one for one in folder.workers() if f"{label} " in f"{' '.join(one.cmdline())} ")


def renderers(front: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that render chat templates for a front end."""
    children = psutil.Process(front.pid).children()
    return [one for one in children if any("rendering" in word for word in one.cmdline())]


@pytest.mark.nightly(
    "tests/llm/pipeline/test_migration.py::test_an_answer_is_the_same_whichever_engines_are_killed",
    "tests/scenarios/test_worker_death.py::test_a_stream_goes_on_elsewhere_when_its_worker_is_killed_or_frozen",
    "tests/scenarios/test_broker_restart.py::test_64_streams_go_on_byte_exactly_over_a_restart_of_the_broker",
    "tests/llm/text/test_guarded_tokenizer.py::test_a_process_that_is_killed_is_followed_by_another",
    "tests/scenarios/test_front_ends_that_die.py::test_a_front_end_that_dies_or_freezes_costs_its_clients_a_reconnect_and_no_token",
    "tests/llm/http/test_connections.py::test_requests_that_run_have_their_grace_and_then_an_error",
)
@pytest.mark.timeout(600)
async def test_whichever_process_is_killed_clients_get_an_answer_or_one_error(
    folder: Folder, own_server: RunningServer
) -> None:
    folder.url = own_server.url
    (folder.path / "stack.py").write_text(STACK)
    first, second = free_port(), free_port()
    engines = ("--Engine.engine=mock", "--Engine.workers=2", "--Engine.speedup_ratio=0.5")
    run = folder.start("stack.py", *engines, "--log-level=warning")
    fronts = [folder.start_front_end(port) for port in (first, second)]
    for port in (first, second):
        await eventually(partial(has_models, port), what=f"models at port {port}")
    clients = Clients([first, second])
    await clients.learn()
    async with reading(second, []) as long:
        """Nothing is killed yet."""

    async with asking(clients):
        await clients.are_served()
        assert clients.errors(first) == clients.errors(second) == set()
        # Whoever was asked first: what a prompt left in a cache, both front ends find.
        await eventually(partial(agree, first, second), what="both front ends show the same")

        for label in ("stack.Engine/1", "stack.Engine/2"):
            async with reading(first, long):
                worker(folder, label).kill()
            await clients.are_served()
            assert clients.errors(first) == clients.errors(second) == set()

        worker(folder, "stack.Router/1").kill()
        await clients.are_served()

        own_server.kill()
        await own_server.start()
        await clients.are_served()
        assert not {"cut", "refused"} & (clients.errors(first) | clients.errors(second))

        for renderer in renderers(fronts[0]):
            renderer.kill()
        await clients.are_served()

        # One front end goes; the other's clients hear nothing of it.
        clients.errors(first)
        fronts[0].kill()
        await clients.are_served(second)
        fronts[0] = folder.start_front_end(first)
        await clients.are_served(first)
        assert not {"cut", "refused"} & clients.errors(second)

        clients.errors(first)
        fronts[1].send_signal(signal.SIGTERM)
        await eventually(lambda: fronts[1].poll() is not None)
        await clients.are_served(first)
        assert fronts[1].returncode == 0
        assert "cut" not in clients.errors(second)
        assert not {"cut", "refused"} & clients.errors(first)

    # Nobody asks any longer, and nothing is left of what was asked.
    await eventually(lambda: b"dynbus_http_requests_in_flight 0" in get(first, "/metrics"))
    await eventually(lambda: nothing_runs(own_server.url))
    for process in (fronts[0], run):
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(folder.exit_of, process) == 0
    assert "Traceback" not in folder.output()


async def nothing_runs(url: str) -> bool:
    """Whether all instances are there, and none has a call."""
    rows = (await survey_of(url)).rows
    found = sorted(one.component for one in rows)
    return found == ["Engine", "Engine", "Router", "http"] and not any(one.running for one in rows)
