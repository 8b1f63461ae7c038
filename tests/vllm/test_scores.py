"""A cross-encoder that vLLM runs is served for scores, and for nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import anyio.to_thread
import numpy as np
import pytest
from tests.conditions import eventually
from tests.vllm.conftest import running
from tests.vllm.test_vllm_worker import calling
from tests.vllm.tiny_cross_encoder import write_tiny_cross_encoder

from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.card import ModelType
from dynbus.llm.models.catalog import Catalog

pytestmark = pytest.mark.anyio

QUERY = "is the capital of France"
DOCUMENTS = ["Paris is the capital", "a cat sat on the mat", "the dog", "Paris of France"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_scores_are_those_of_transformers(tmp_path: Path, own_server: RunningServer) -> None:
    model = tmp_path / "model"
    write_tiny_cross_encoder(model)

    def rank(url: str) -> Any:
        asked = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
        request = Request(f"{url}/v1/rerank", json.dumps(asked).encode())
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    # It has no adapters, no cache of blocks, and contexts as long as its positions.
    options = ("--Engine.enable_lora=false", "--Engine.max_model_len=512")
    with running(tmp_path, own_server.url, model, *options) as run:
        async with (
            calling(run, own_server.url, 1) as (runtime, _),
            Catalog(runtime) as catalog,
            HttpFrontEnd(runtime, catalog, HttpSettings(port=0, grace=1.0)) as front,
        ):
            card = await catalog.wait_for("tiny", ModelType.Score, timeout=60)
            await eventually(lambda: front.shared.models.served)
            ranked = await anyio.to_thread.run_sync(rank, front.url)
        assert run.stop() == 0

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
    assert ranked["usage"]["prompt_tokens"] == int(pairs["attention_mask"].sum())
    assert card.types == ["score"]
