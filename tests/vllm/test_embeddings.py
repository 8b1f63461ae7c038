"""A model that vLLM runs for pooling is served for embeddings, and for nothing else."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.vllm.conftest import running
from tests.vllm.test_vllm_worker import calling, items_of, prompt

from dynbus.bus.errors import InvalidRequest
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.embedding import EmbedRequest
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.models.card import ModelType
from dynbus.llm.models.catalog import Catalog

pytestmark = pytest.mark.anyio


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_embeddings_are_the_last_states_of_transformers(
    tmp_path: Path, own_server: RunningServer, tiny_model: Path
) -> None:
    texts = [prompt(f"text {length}", length) for length in (1, 40, 300, 40)]
    with running(tmp_path, own_server.url, tiny_model, "--Engine.runner=pooling") as run:
        async with calling(run, own_server.url, 1) as (runtime, engine):
            embed = [engine.embed(EmbedRequest(text)) for text in texts]
            made = await asyncio.gather(*embed)
            refused: list[str] = []
            for request in (EmbedRequest([5], 8), EmbedRequest([5] * 1100), EmbedRequest([512])):
                with pytest.raises(InvalidRequest) as raised:
                    await engine.embed(request)
                refused.append(str(raised.value))
            with pytest.raises(InvalidRequest, match="embeddings alone"):
                await items_of(engine, GenerateRequest([5], 4))
            leaving = asyncio.ensure_future(engine.embed(EmbedRequest(prompt("left", 900))))
            await asyncio.sleep(0)
            leaving.cancel()
            async with Catalog(runtime) as catalog:
                card = await catalog.wait_for("tiny", ModelType.Embedding, timeout=60)
                others = catalog.find("tiny", ModelType.Chat | ModelType.Completions)
        assert run.stop() == 0

    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    for text, one in zip(texts, made, strict=True):
        with torch.no_grad():
            state = model(torch.tensor([text])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(one.vector(), state / np.linalg.norm(state), atol=2e-4)
    assert "Matryoshka" in refused[0]
    assert "1024" in refused[1]
    assert "512" in refused[2]
    assert card.context_length == 1024
    assert others is None
