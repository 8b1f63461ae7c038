"""The graphs of examples/llm, who is served, and by whom; with mocks for its models."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from tests.conditions import wait_until
from tests.llm.proxy.scripted_server import ScriptedServer

from dynbus.testing import RunningServer, free_port

from .conftest import running

MODEL = "smollm2-135m-instruct"
BOUND = 60.0


def get(url: str, body: object = None) -> Any:
    """What is answered to a GET, or to a POST with a body; JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=BOUND) as response:
        return json.load(response)


@contextmanager
def served(
    graph: str,
    server: RunningServer,
    *models: str,
    file: str = "actors.py",
    endpoint: str = "demo.Engine.generate",
    options: Sequence[str] = ("--Engine.engine=mock", "--in-process"),
) -> Generator[str]:
    """The front end of a graph, once it has these models."""
    port = free_port()
    options = ("-f", f"{graph}.yaml", f"--Front.port={port}", *options)
    with running("llm", server.url, (endpoint,), options, file=file):
        url = f"http://127.0.0.1:{port}/v1"
        wait_until(lambda: has_models(url, models), what="the models are there")
        yield url


def has_models(url: str, models: Sequence[str]) -> bool:
    """Whether the front end takes connections and knows these models, and no other."""
    try:
        return {model["id"] for model in get(f"{url}/models")["data"]} == set(models)
    except urllib.error.URLError:
        return False


def chat(url: str, model: str, question: str = "Hello, how are you today?") -> Any:
    messages = [{"role": "user", "content": question}]
    asked = {"model": model, "messages": messages, "max_tokens": 4}
    answer = get(f"{url}/chat/completions", asked)
    assert answer["choices"][0]["message"]["content"]
    return answer["usage"]


def test_one_engine_serves_one_model(own_server: RunningServer) -> None:
    with served("aggregated", own_server, MODEL) as url:
        assert chat(url, MODEL)["completion_tokens"] == 4


def test_several_engines_of_a_model_share_its_requests_by_their_caches(
    own_server: RunningServer,
) -> None:
    with served("data_parallel", own_server, MODEL) as url:
        question = "Once upon a time there was a question with many words. " * 3
        chat(url, MODEL, question)

        again = chat(url, MODEL, question)

        state = get(url.removesuffix("v1") + "page/state")
    assert again["prompt_tokens_details"]["cached_tokens"] > 100
    assert len(state["instances"]) == 2
    assert state["models"][0]["policy"] == "kv"


@pytest.mark.parametrize(
    ("graph", "other"), [("models", "random-words"), ("processor", "guide")], ids=lambda one: one
)
def test_a_second_model_is_served_beside_the_first(
    graph: str, other: str, own_server: RunningServer
) -> None:
    with served(graph, own_server, MODEL, other) as url:
        plain = chat(url, MODEL)
        told = chat(url, other)

    # The processor's instructions are a part of the prompt.
    assert (told["prompt_tokens"] > plain["prompt_tokens"]) == (other == "guide")


def test_servers_that_run_already_share_the_requests_of_their_model(
    own_server: RunningServer,
) -> None:
    with scripted_servers(2) as servers:
        options = [
            f"--Server.url={servers[0].url},{servers[1].url}",
            "--Server.kv_events=",
            "--Server.kv_replay=",
            "--in-process",
        ]
        with served(
            "servers",
            own_server,
            "served",
            file="servers.py",
            endpoint="demo.Server.generate",
            options=options,
        ) as url:
            # Both are as good for one request alone, and one of them is drawn.
            for number in range(64):
                chat(url, "served", f"say {number}")
                if all(server.asked for server in servers):
                    break
    assert all(server.asked for server in servers)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: see docs/guides/vllm.md",
)
@pytest.mark.timeout(900)
def test_engines_of_vllm_serve_a_model(
    own_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.vllm.conftest import ENVIRONMENT, OPTIONS, write_model

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path)
    options = [*OPTIONS, f"--Engine.model={tmp_path}", "--Engine.workers=1"]
    with served("engines", own_server, "qwen3", file="engines.py", options=options) as url:
        assert chat(url, "qwen3")["completion_tokens"] == 4


@contextmanager
def scripted_servers(count: int) -> Generator[list[ScriptedServer]]:
    """Servers of OpenAI's API, in a thread."""
    servers = [ScriptedServer() for _ in range(count)]
    with start_blocking_portal() as portal:
        for server in servers:
            portal.call(server.start)
        try:
            yield servers
        finally:
            for server in servers:
                portal.call(server.kill)
