"""examples/disaggregated, as its user runs it, with a tiny model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from benchmarks.serving.model import words, write_model
from tests.conditions import wait_until
from tests.examples.conftest import running

from dynbus.bus.nats.server_process import RunningServer, free_port


def get(url: str, body: object = None) -> Any:
    """What is answered to a GET, or to a POST with a body; JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def has_a_model(url: str) -> bool:
    """Whether the front end takes connections and knows a model."""
    try:
        return bool(get(f"{url}/v1/models")["data"])
    except urllib.error.URLError:
        return False


@pytest.mark.timeout(180)
def test_a_long_prompt_is_computed_by_one_engine_and_decoded_by_another(
    nats_server: RunningServer, tmp_path: Path
) -> None:
    write_model(tmp_path, 2048)
    port = free_port()
    options = [
        *("-f", "disaggregated.yaml", f"--Front.port={port}"),
        *(f"--{node}.model={tmp_path}" for node in ("prefill", "decode")),
        *(f"--{node}.model_name=tiny" for node in ("prefill", "decode")),
    ]
    endpoints = ("demo.prefill.prefill", "demo.decode.generate")
    with running("disaggregated", nats_server.url, endpoints, options):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: has_a_model(url), what="the front end has a model")
        asked = {"model": "tiny", "prompt": words(500, 1), "max_tokens": 4, "temperature": 0}

        answer = get(f"{url}/v1/completions", asked)

        assert answer["usage"]["completion_tokens"] == 4

        def transfers() -> Any:
            instances = get(f"{url}/page/state")["instances"]
            [decode] = [one for one in instances if one["component"] == "demo.decode"]
            return decode.get("transfers", {})

        wait_until(lambda: transfers().get("prompts_handed_over") == 1, what="it was handed over")
        assert transfers()["transferred_bytes"] > 0
        assert transfers()["blocks_quarantined"] == 0
        roles = {one.get("role", "") for one in get(f"{url}/page/state")["instances"]}
        assert roles == {"", "prefill"}
