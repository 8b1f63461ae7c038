from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.llm.small import references
from tests.llm.small.decoders import (
    BACKENDS,
    BLOCK_SIZE,
    BLOCKS,
    decoder,
    decoding,
    greedy,
    prefill,
)
from tests.llm.weights.tiny_models import TINY_MODELS, VOCABULARY

from dynbus.llm.engine import Chunk

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_model = pytest.mark.parametrize("name", TINY_MODELS)
has_transformers = find_spec("torch") is not None and find_spec("transformers") is not None


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [
        [int(token) for token in random.integers(5, VOCABULARY, int(length))]
        for length in random.integers(1, 60, count)
    ]


def tables(count: int, seed: int = 0) -> list[list[int]]:
    """Blocks for each of several sequences, in no order."""
    blocks = np.random.default_rng(seed).permutation(BLOCKS).reshape(count, -1)
    return [[int(block) for block in row] for row in blocks]


@each_backend
@each_model
def test_text_and_logits_are_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    wanted = references.stored()[name]
    model = decoder(TINY_MODELS[name].write_folder(tmp_path), backend)

    tokens, logits = greedy(model, references.prompt(), references.GENERATED)

    assert tokens == wanted["tokens"]
    reach = max(wanted["first_logits"]) - min(wanted["first_logits"])
    np.testing.assert_allclose(logits[0], wanted["first_logits"], atol=1e-3 * reach)
    np.testing.assert_allclose(logits[-1], wanted["last_logits"], atol=1e-3 * reach)


@pytest.mark.skipif(not has_transformers, reason="transformers and PyTorch are not installed")
@each_backend
@each_model
def test_logits_are_those_of_transformers_that_is_installed(
    name: str, backend: str, tmp_path: Path
) -> None:
    folder = TINY_MODELS[name].write_folder(tmp_path)
    tokens = references.prompt(200)
    wanted = references.logits(references.load(folder), tokens)
    model = decoder(folder, backend)

    made = [prefill(model, tokens[:64], list(range(BLOCKS)))]
    for length in range(65, 201):
        made.append(model.compute([decoding(tokens[:length], list(range(BLOCKS)))])[0])

    np.testing.assert_allclose(made, wanted[63:], atol=1e-3 * float(np.ptp(wanted)))


@each_model
def test_a_gguf_file_gives_the_same_as_a_folder(name: str, tmp_path: Path) -> None:
    tiny = TINY_MODELS[name]
    folder = decoder(tiny.write_folder(tmp_path / "folder"))
    file = decoder(tiny.write_gguf(tmp_path / "a.gguf"))

    wanted = prefill(folder, references.prompt(), list(range(BLOCKS)))
    made = prefill(file, references.prompt(), list(range(BLOCKS)))

    np.testing.assert_allclose(made, wanted, atol=1e-4)


@each_backend
@pytest.mark.parametrize("seed", range(6))
def test_chunks_batches_and_places_in_the_cache_change_nothing(
    seed: int, backend: str, tmp_path: Path
) -> None:
    model = decoder(TINY_MODELS["qwen3"].write_folder(tmp_path), backend)
    random = np.random.default_rng(seed)
    texts, places = prompts(4, seed), tables(4, seed)
    wanted = [prefill(model, text, list(range(BLOCKS))) for text in texts]

    done = [0] * 4
    made: dict[int, NDArray[np.float32]] = {}
    while len(made) < 4:
        chunks: dict[int, Chunk] = {}
        for at in (int(at) for at in random.permutation(4)):
            left = len(texts[at]) - done[at]
            if count := int(random.integers(0, min(30, left) + 1)):
                last = done[at] + count
                chunks[at] = Chunk(texts[at][done[at] : last], done[at], places[at], count == left)
                done[at] = last
        if chunks:
            logits = model.compute(list(chunks.values()))
            sampled = [at for at, chunk in chunks.items() if chunk.is_sampled]
            assert logits.shape == (len(sampled), VOCABULARY)
            made.update(zip(sampled, logits, strict=True))

    np.testing.assert_allclose([made[at] for at in range(4)], wanted, atol=2e-4)


@each_backend
def test_a_chunk_reads_what_an_earlier_one_of_its_step_writes(backend: str, tmp_path: Path) -> None:
    model = decoder(TINY_MODELS["llama"].write_folder(tmp_path), backend)
    text = references.prompt(40)
    shared = list(range(10, 15))
    wanted = prefill(model, text, shared)

    chunks = [
        Chunk(text[:BLOCK_SIZE], 0, [0], False),
        Chunk(text[BLOCK_SIZE:], BLOCK_SIZE, [0, 1, 2, 3, 4], True),
    ]
    made = model.compute(chunks)

    np.testing.assert_allclose(made[0], wanted, atol=1e-4)


@each_backend
@each_model
def test_a_deterministic_backend_gives_the_same_bits_in_any_batch(
    name: str, backend: str, tmp_path: Path
) -> None:
    model = decoder(TINY_MODELS[name].write_folder(tmp_path), backend, deterministic=True)
    texts = prompts(4)
    texts[0] += references.prompt(70)
    places = tables(4)
    alone = [prefill(model, text, list(range(BLOCKS))) for text in texts]

    chunked = [prefill(model, text, place, 7) for text, place in zip(texts, places, strict=True)]
    one_by_one = prefill(model, texts[0], places[0], 1)
    together = model.compute(
        [Chunk(text, 0, place, True) for text, place in zip(texts, places, strict=True)]
    )
    decoded = model.compute(
        [decoding(text, place) for text, place in zip(texts, places, strict=True)]
    )

    np.testing.assert_array_equal(one_by_one, alone[0])
    np.testing.assert_array_equal(chunked, alone)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(decoded, alone)


ROW_IN_EACH_PLACE = """
import numpy as np
from dynbus.llm.small.numpy_backend import NumpyBackend

backend = NumpyBackend(deterministic=True)
random = np.random.default_rng(0)
row, matrix = random.random((1, 64), np.float32), random.random((64, 96), np.float32)
products = set()
for place in range(16):
    rows = random.random((16, 64), np.float32)
    rows[place] = row
    products.add(backend.linear(rows, matrix)[place].tobytes())
    products.add(backend.logits(rows, np.ascontiguousarray(matrix.T))[place].tobytes())
products_alone = {
    backend.linear(row, matrix).tobytes(),
    backend.logits(row, np.ascontiguousarray(matrix.T)).tobytes(),
}
assert products == products_alone, len(products)
"""


@pytest.mark.parametrize("kernels", ["Haswell", "Nehalem"])
def test_a_deterministic_product_is_the_same_in_each_place_with_any_kernels_of_blas(
    kernels: str,
) -> None:
    # Which kernels OpenBLAS takes depends on the processor. Haswell's, which AMD's processors get
    # too, compute a row of a product in another way in another place.
    env = os.environ | {"OPENBLAS_CORETYPE": kernels}

    subprocess.run([sys.executable, "-c", ROW_IN_EACH_PLACE], env=env, check=True, timeout=60)


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    folder = TINY_MODELS["llama"].write_folder(tmp_path)
    table = list(range(BLOCKS))
    exact = prefill(decoder(folder), references.prompt(), table)

    rough = prefill(decoder(folder, "torch", dtype="bfloat16"), references.prompt(), table)

    np.testing.assert_allclose(rough, exact, atol=0.05 * float(np.ptp(exact)))


def test_nothing_is_computed_of_rows_whose_logits_nobody_needs(tmp_path: Path) -> None:
    model = decoder(TINY_MODELS["llama"].write_folder(tmp_path))

    made = model.compute([Chunk([5, 6], 0, [0], False)])

    assert made.shape == (0, VOCABULARY)
