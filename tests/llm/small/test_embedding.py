"""The small engine's embeddings are those of the model, whatever is computed beside them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.llm.small import plain_forward, references
from tests.llm.small.decoders import BACKENDS
from tests.llm.weights.tiny_models import HIDDEN, TINY_MODELS, VOCABULARY

from dynbus.llm.embedding import Embedded, EmbedRequest, Pooling
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.small import SmallConfig, SmallEngine

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_pooling = pytest.mark.parametrize("pooling", ["mean", "last"])
has_transformers = find_spec("torch") is not None and find_spec("transformers") is not None


def texts(count: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [
        [int(token) for token in random.integers(5, VOCABULARY, int(length))]
        for length in random.integers(1, longest, count)
    ]


def engine_of(path: Path, backend: Any = "numpy", **options: Any) -> SmallEngine:
    chosen: dict[str, Any] = {"block_size": 8, "blocks": 64, "max_num_batched_tokens": 32}
    return SmallEngine(path, SmallConfig(backend=backend, **{**chosen, **options}))


def drain(engine: SmallEngine) -> dict[str, Embedded]:
    found: dict[str, Embedded] = {}
    steps = 0
    while engine.has_work:
        step = engine.step()
        assert not step.failures
        found.update(step.embedded)
        steps += 1
        assert steps < 5000
    return found


@each_backend
@each_pooling
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_embeddings_are_those_of_a_plain_forward(
    name: str, pooling: Pooling, backend: str, tmp_path: Path
) -> None:
    tiny = TINY_MODELS[name]
    engine = engine_of(tiny.write_folder(tmp_path), backend, pooling=pooling)
    given = texts(6)

    for number, text in enumerate(given):
        engine.add_embedding(str(number), EmbedRequest(text))
    found = drain(engine)

    for number, text in enumerate(given):
        wanted = plain_forward.embedding(tiny, text, pooling)
        np.testing.assert_allclose(found[str(number)].vector(), wanted, atol=2e-5)


@pytest.mark.skipif(not has_transformers, reason="transformers and PyTorch are not installed")
@each_pooling
@pytest.mark.parametrize("name", TINY_MODELS)
def test_embeddings_are_those_of_transformers_that_is_installed(
    name: str, pooling: Pooling, tmp_path: Path
) -> None:
    folder = TINY_MODELS[name].write_folder(tmp_path)
    model = references.load(folder)
    engine = engine_of(folder, pooling=pooling)
    given = texts(4, seed=3)

    for number, text in enumerate(given):
        engine.add_embedding(str(number), EmbedRequest(text))
    found = drain(engine)

    for number, text in enumerate(given):
        states = references.states(model, text)
        wanted = states.mean(0) if pooling == "mean" else states[-1]
        wanted /= np.linalg.norm(wanted)
        np.testing.assert_allclose(found[str(number)].vector(), wanted, atol=2e-5)


def test_fewer_dimensions_are_the_first_ones_at_length_1(tmp_path: Path) -> None:
    tiny = TINY_MODELS["llama"]
    engine = engine_of(tiny.write_folder(tmp_path))
    (text,) = texts(1, seed=1)

    for dimensions in (1, 10, HIDDEN):
        engine.add_embedding(str(dimensions), EmbedRequest(text, dimensions))
    found = drain(engine)

    for dimensions in (1, 10, HIDDEN):
        wanted = plain_forward.embedding(tiny, text, "mean", dimensions)
        np.testing.assert_allclose(found[str(dimensions)].vector(), wanted, atol=2e-5)


@each_pooling
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_embeddings_of_one_batch_change_nothing_of_each_other(
    seed: int, pooling: Pooling, tmp_path: Path
) -> None:
    """With a cache so small that requests lose their blocks, and chunks of a few tokens."""
    path = TINY_MODELS["qwen3"].write_folder(tmp_path)
    options: dict[str, Any] = {"pooling": pooling, "deterministic": True}
    given = texts(8, seed)
    alone = engine_of(path, **options, max_num_batched_tokens=512)
    wanted: dict[str, object] = {}
    tokens: dict[str, list[int]] = {}
    for number, text in enumerate(given):
        alone.add_embedding(f"text {number}", EmbedRequest(text))
        wanted.update({name: one.embedding for name, one in drain(alone).items()})
        tokens[str(number)] = generated(alone, {str(number): text})[str(number)]

    beside = engine_of(path, **options, blocks=18, max_num_batched_tokens=24)
    found: dict[str, object] = {}
    for number, text in enumerate(given):
        beside.add_embedding(f"text {number}", EmbedRequest(text))
    made = generated(beside, {str(number): text for number, text in enumerate(given)}, found)

    assert beside.load.preempted
    assert made == tokens
    assert found == wanted
    assert beside.load.active_blocks == 0


def generated(
    engine: SmallEngine, prompts: dict[str, list[int]], embedded: dict[str, object] | None = None
) -> dict[str, list[int]]:
    """The greedy tokens of prompts; embeddings that are made meanwhile are put into `embedded`."""
    for name, prompt in prompts.items():
        request = GenerateRequest(prompt, 20, sampling=Sampling(temperature=0), ignore_eos=True)
        engine.add(name, request)
    made: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        step = engine.step()
        assert not step.failures
        for name, item in step.outputs:
            made[name] += item.token_ids
        if embedded is not None:
            embedded.update({name: one.embedding for name, one in step.embedded})
    return made


@pytest.mark.parametrize(("pooling", "cached"), [("last", 48), ("mean", 0)])
def test_a_text_begins_with_what_is_cached_where_its_last_state_alone_is_wanted(
    pooling: Pooling, cached: int, tmp_path: Path
) -> None:
    engine = engine_of(TINY_MODELS["llama"].write_folder(tmp_path), pooling=pooling)
    text = list(range(5, 55))

    found: list[Embedded] = []
    for name in ("a", "b"):
        engine.add_embedding(name, EmbedRequest(text))
        found.append(drain(engine)[name])

    assert [one.cached_tokens for one in found] == [0, cached]
    np.testing.assert_allclose(found[0].vector(), found[1].vector(), atol=1e-5)
    assert engine.load.active_blocks == 0


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (EmbedRequest([]), "empty"),
        (EmbedRequest([VOCABULARY]), "not from 0 to"),
        (EmbedRequest([-1]), "-1"),
        (EmbedRequest([5] * 513), "513 tokens, and 512 fit"),
        (EmbedRequest([5], 0), "dimensions = 0"),
        (EmbedRequest([5], HIDDEN + 1), f"1 to {HIDDEN}"),
        (EmbedRequest([5], lora_name="legal"), "'legal'"),
    ],
)
def test_a_text_that_cannot_be_embedded_is_refused(
    request_: EmbedRequest, reason: str, tmp_path: Path
) -> None:
    engine = engine_of(TINY_MODELS["llama"].write_folder(tmp_path), blocks=80)

    with pytest.raises(ValueError, match=reason):
        engine.add_embedding("a", request_)

    assert not engine.has_work
    engine.add_embedding("a", EmbedRequest([5] * 512))
    assert len(drain(engine)["a"].vector()) == HIDDEN


def test_an_engine_without_pooling_makes_no_embeddings(tmp_path: Path) -> None:
    engine = engine_of(TINY_MODELS["llama"].write_folder(tmp_path), pooling=None)

    with pytest.raises(ValueError, match="makes no embeddings"):
        engine.add_embedding("a", EmbedRequest([5]))
