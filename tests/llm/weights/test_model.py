from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.llm.weights.gguf_files import write_gguf
from tests.llm.weights.safetensors_files import write_safetensors
from tests.llm.weights.tiny_models import EOS, LLAMA3, TINY_MODELS

from dynbus.llm.weights import BrokenModel, UnsupportedModel
from dynbus.llm.weights.config import config_of_json
from dynbus.llm.weights.model import open_weights
from dynbus.llm.weights.safetensors import SafetensorsFile

TINY = TINY_MODELS["llama"]


def refused(path: Path, kind: type[ValueError] = BrokenModel) -> str:
    with pytest.raises(kind) as caught, open_weights(path):
        pass
    text = str(caught.value)
    assert str(path) in text
    return text


def changed_config(folder: Path, **values: object) -> Path:
    TINY.write_folder(folder)
    (folder / "config.json").write_text(json.dumps({**TINY.config, **values}))
    return folder


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_folder_and_a_file_have_the_same_configuration_and_weights(
    name: str, tmp_path: Path
) -> None:
    tiny = TINY_MODELS[name]
    folder, file = tiny.write_folder(tmp_path / "folder"), tiny.write_gguf(tmp_path / "a.gguf")

    with open_weights(folder) as one, open_weights(file) as other:
        layers = one.layer(1), other.layer(1)
        frequencies = one.rope_frequencies(), other.rope_frequencies()
        assert one.is_tied == other.is_tied == tiny.is_tied
        assert one.config.eos_token_ids == other.config.eos_token_ids == (EOS, 4)
        assert one.config.hidden == other.config.hidden

    np.testing.assert_allclose(*frequencies, rtol=1e-5)
    for field in ("qkv", "qkv_bias", "q_norm", "k_norm", "output", "gate_up", "down"):
        left, right = (getattr(layer, field) for layer in layers)
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("type", ["F16", "BF16"])
def test_half_precision_is_read_as_float32(type: str, tmp_path: Path) -> None:
    exact = {"a": np.array([[1.5, -2.0]], np.float32)}

    with SafetensorsFile.open(write_safetensors(tmp_path / "a", exact, type)) as file:
        read = file.tensors["a"].dequantised()

    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, exact["a"])


def test_a_model_may_be_in_several_files(tmp_path: Path) -> None:
    folder = TINY.write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    tensors = TINY.tensors()
    names = sorted(tensors)
    halves = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in halves.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    with open_weights(folder) as weights:
        np.testing.assert_array_equal(weights.embedding(), tensors["model.embed_tokens.weight"])

    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../b.safetensors"}}))
    assert "'../b.safetensors' is no file in the model's folder" in _text_of(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "b.safetensors"}}))
    assert f"the tensor {names[0]!r} of the index is missing" in _text_of(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "c.safetensors"}}))
    assert "c.safetensors is missing" in _text_of(folder)
    index.write_text("{}")
    assert "'weight_map' is missing" in _text_of(folder)


def _text_of(folder: Path) -> str:
    return refused(folder)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", 9, "config.json is no JSON: "),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", 1000, "it is cut"),
        ("model.safetensors", 4, "it is cut"),
        ("model.safetensors", 0, "the file is empty"),
        ("model.safetensors", -8, "ends beyond the file's"),
    ],
)
def test_a_folder_that_is_broken_is_refused(
    name: str, length: int | None, message: str, tmp_path: Path
) -> None:
    path = TINY.write_folder(tmp_path) / name
    content = path.read_bytes()
    path.unlink()
    if length is not None:
        path.write_bytes(content[:length])

    assert message in refused(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, "8 bytes, which is not"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "the header is not as"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "ends beyond"),
        ({"a": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 63]}}, "ends beyond"),
        ({"a": {"dtype": "F32"}}, "the header is not as the format has it"),
        (
            {"a": {"dtype": "F32", "shape": [1 << 63] * 200_000, "data_offsets": [0, 8]}},
            "the header is not as the format has it",
        ),
        ([1], "the header is not as the format has it"),
    ],
)
def test_a_header_that_lies_is_refused(header: object, message: str, tmp_path: Path) -> None:
    content = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(8))

    with pytest.raises(BrokenModel, match=message) as caught:
        SafetensorsFile.open(path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "json", [b'{"a\xff": 1}', b'{"a": ' + b"[" * 100_000], ids=["bytes", "deep"]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_json_that_cannot_be_read_is_refused(name: str, json: bytes, tmp_path: Path) -> None:
    head = struct.pack("<Q", len(json)) if name.endswith(".safetensors") else b""
    (TINY.write_folder(tmp_path) / name).write_bytes(head + json)

    refused(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = TINY.write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    assert "the weights are pickled, which could run any code" in refused(folder, UnsupportedModel)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None: a number from 1 to"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
        ({"num_hidden_layers": 3}, "the tensor 'model.layers.2.input_layernorm.weight' is missing"),
        (
            {"num_hidden_layers": 1 << 24},
            "the tensor 'model.layers.2.input_layernorm.weight' is missing",
        ),
        ({"num_hidden_layers": 1}, "there are more layers than the 1 of the configuration"),
        ({"num_attention_heads": 3}, "3 heads cannot share 2 heads of keys"),
        ({"head_dim": 15}, "a head has 15 numbers"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', and no number"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": -1}, "rope_theta is -1: a positive number"),
        ({"intermediate_size": 97}, "has the shape [96, 64], and the configuration says [97, 64]"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], and no object"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}, "low_freq_factor 5.0 is not below"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    values: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert message in refused(changed_config(tmp_path, **values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "gpt2"},
            "the architecture 'gpt2' is not supported: llama, qwen2, qwen3 are",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "the rope scaling 'yarn' is not supported: linear and llama3 are, or none",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: silu is"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window attention is not supported"),
        ({"partial_rotary_factor": 0.5}, "with a part that does not rotate"),
        ({"quantization_config": {"bits": 4}}, "quantised weights in a folder"),
        ({"model_type": "qwen2", "num_hidden_layers": 2}, None),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    values: dict[str, object], message: str | None, tmp_path: Path
) -> None:
    folder = changed_config(tmp_path, **values)

    if message is None:
        with open_weights(folder):
            return
    assert message in refused(folder, UnsupportedModel)


def test_tensors_that_have_no_place_are_refused(tmp_path: Path) -> None:
    folder = TINY.write_folder(tmp_path)
    odd = {"model.layers.0.mlp.gate_proj.bias": np.ones(4, np.float32)}
    write_safetensors(folder / "model.safetensors", TINY.tensors() | odd)

    message = refused(folder, UnsupportedModel)

    assert "with the tensors model.layers.0.mlp.gate_proj.bias" in message


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("general.architecture", "bert", UnsupportedModel, "the architecture 'bert'"),
        ("llama.rope.scaling.type", "yarn", UnsupportedModel, "the rope scaling 'yarn'"),
        ("llama.expert_count", 8, UnsupportedModel, "a mixture of experts"),
        ("llama.rope.dimension_count", 8, UnsupportedModel, "llama.rope.dimension_count is 8"),
        ("llama.embedding_length", "x", BrokenModel, "llama.embedding_length is 'x'"),
        ("llama.block_count", 9, BrokenModel, "the tensor 'model.layers.2."),
    ],
)
def test_metadata_of_a_gguf_file_that_cannot_be_are_refused(
    key: str, value: object, kind: type[ValueError], message: str, tmp_path: Path
) -> None:
    metadata = TINY.gguf_metadata() | {key: value}

    path = write_gguf(tmp_path / "a.gguf", metadata, TINY.gguf_tensors())

    assert message in refused(path, kind)


def test_a_gguf_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", TINY.gguf_metadata(), {})

    assert "the tensor 'token_embd.weight' is missing" in refused(path)


def test_the_newer_spelling_of_rotations_is_read() -> None:
    older = {**TINY.config, "rope_theta": 5e5, "rope_scaling": LLAMA3}
    newer = {**TINY.config, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    del newer["rope_theta"]

    assert config_of_json("a", older, {}) == config_of_json("a", newer, {})


ODD: list[object] = [
    None,
    True,
    0,
    -1,
    3,
    1e308,
    5e-324,
    float("nan"),
    1 << 63,
    10**30,
    "",
    "silu",
    [],
    [1],
    {},
    {"rope_type": "llama3", "factor": "x"},
    {"type": "linear", "factor": 1e300},
]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        st.sampled_from([*TINY.config, "rope_scaling", "head_dim"]), st.sampled_from(ODD)
    )
)
def test_a_configuration_of_odd_values_is_read_or_refused_and_nothing_else(
    tmp_path: Path, values: dict[str, object]
) -> None:
    folder = changed_config(tmp_path, **values)

    # Anything else that is raised fails the test, a warning too.
    with suppress(BrokenModel, UnsupportedModel), open_weights(folder) as weights:
        weights.rope_frequencies()
