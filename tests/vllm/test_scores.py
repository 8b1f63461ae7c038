"""A cross-encoder that vLLM runs is served for scores, and for nothing else: by its worker, and by
`vllm serve` behind one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import anyio.to_thread
import numpy as np
import pytest
from tests.conditions import PATIENCE, eventually
from tests.vllm.conftest import ENVIRONMENT, START_TIMEOUT, running
from tests.vllm.test_vllm_worker import calling
from tests.vllm.tiny_cross_encoder import write_tiny_cross_encoder

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.proxy import OpenAiWorker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

QUERY = "is the capital of France"
DOCUMENTS = ["Paris is the capital", "a cat sat on the mat", "the dog", "Paris of France"]


def ask(url: str, path: str, fields: dict[str, Any]) -> Any:
    """The answer of a front end."""
    request = Request(f"{url}{path}", json.dumps({"model": "tiny", **fields}).encode())
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


async def assert_scored_as_by_transformers(runtime: Runtime, model: Path, kind: ModelInput) -> None:
    """Have a front end rank and score texts with what serves the model, and compare it."""
    async with (
        Catalog(runtime) as catalog,
        HttpFrontEnd(runtime, catalog, HttpSettings(port=0, grace=1.0)) as front,
    ):
        card = await catalog.wait_for("tiny", ModelType.Score, timeout=START_TIMEOUT)
        await eventually(lambda: front.shared.models.served)
        asked = partial(ask, front.url)
        rank: Any = {"query": QUERY, "documents": DOCUMENTS}
        ranked = await anyio.to_thread.run_sync(asked, "/v1/rerank", rank)
        score: Any = {"text_1": QUERY, "text_2": DOCUMENTS}
        scored = await anyio.to_thread.run_sync(asked, "/v1/score", score)

    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    pairs = tokenizer([QUERY] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = torch.sigmoid(scorer(**pairs).logits[:, 0]).numpy()
    order = np.argsort(-scores)
    assert [one["index"] for one in ranked["results"]] == order.tolist()
    made = [one["relevance_score"] for one in ranked["results"]]
    np.testing.assert_allclose(made, scores[order], atol=2e-4)
    np.testing.assert_allclose([one["score"] for one in scored["data"]], scores, atol=2e-4)
    assert ranked["usage"]["prompt_tokens"] == int(pairs["attention_mask"].sum())
    assert (card.types, card.input) == (["score"], kind)


@pytest.mark.nightly
async def test_scores_are_those_of_transformers(tmp_path: Path, own_server: RunningServer) -> None:
    model = tmp_path / "model"
    write_tiny_cross_encoder(model)

    # It has no adapters, and contexts as long as its positions.
    options = ("--Engine.enable_lora=false", "--Engine.max_model_len=512")
    with running(tmp_path, own_server.url, model, *options) as run:
        async with calling(run, own_server.url, 1) as (runtime, _):
            await assert_scored_as_by_transformers(runtime, model, ModelInput.Tokens)
        assert run.stop() == 0


@contextmanager
def server_of(folder: Path, model: Path) -> Generator[str]:
    """The address of a `vllm serve` that is on the way to be there."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += [f"--port={port}", "--host=127.0.0.1", "--served-model-name=tiny"]
    command += ["--dtype=float32", "--max-model-len=512", "--enforce-eager"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.nightly
async def test_scores_of_a_server_pass(tmp_path: Path, own_server: RunningServer) -> None:
    model = tmp_path / "model"
    write_tiny_cross_encoder(model)

    with server_of(tmp_path, model) as url:
        async with Runtime.connect(own_server.url) as runtime:
            with anyio.fail_after(START_TIMEOUT):
                await runtime.start(OpenAiWorker, url=url, task="score")
            await assert_scored_as_by_transformers(runtime, model, ModelInput.Text)
