"""The graphs of examples/llm, each with mocks for its models: who is served, and by whom."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from dynbus.bus.nats.server_process import RunningServer, free_port

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
def served(graph: str, server: RunningServer, *models: str) -> Generator[str]:
    """The front end of a graph, once it has these models."""
    port = free_port()
    options = ("-f", f"{graph}.yaml", "--Engine.engine=mock", f"--Front.port={port}")
    with running("llm", server.url, ("demo.Engine.generate",), (*options, "--in-process")):
        url = f"http://127.0.0.1:{port}/v1"
        end = time.monotonic() + BOUND
        while {model["id"] for model in get(f"{url}/models")["data"]} != set(models):
            assert time.monotonic() < end, "the models are not there"
            time.sleep(0.05)
        yield url


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
