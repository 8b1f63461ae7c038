from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.llm.weights.gguf_files import gguf_bytes, write_gguf

from dynbus.llm.weights import BrokenModel, UnsupportedModel
from dynbus.llm.weights.gguf import GgufFile

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["a", "Ġb", "日"],
    "tokenizer.ggml.token_type": [1, 1, 3],
    "nested": [["a"], ["b", "c"]],
}


def tensors() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(0)
    return {
        "norm.weight": random.standard_normal(64, np.float32),
        "linear.weight": random.standard_normal((6, 64), np.float32),
    }


def broken(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(BrokenModel) as caught:
        GgufFile.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_metadata_are_read_by_key(tmp_path: Path) -> None:
    with GgufFile.open(write_gguf(tmp_path / "a.gguf", METADATA, {})) as file:
        assert dict(file.metadata) == METADATA
        assert file.metadata["tokenizer.ggml.tokens"] is file.metadata["tokenizer.ggml.tokens"]
        assert "missing" not in file.metadata


@pytest.mark.parametrize(
    ("type", "error"),
    [("F32", 0), ("F16", 1e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_0", 0.35), ("Q4_1", 0.2)],
)
def test_tensors_of_each_type_are_dequantised(tmp_path: Path, type: str, error: float) -> None:
    wanted = tensors()

    with GgufFile.open(write_gguf(tmp_path / "a.gguf", METADATA, wanted, type)) as file:
        linear = file.tensors["linear.weight"]
        read = linear.dequantised()
        norm = file.tensors["norm.weight"].dequantised()

    assert (linear.shape, linear.type) == ((6, 64), type)
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, wanted["linear.weight"], atol=error)
    np.testing.assert_array_equal(norm, wanted["norm.weight"])


def test_a_block_of_q4_0_is_its_nibbles_less_eight_by_its_scale(tmp_path: Path) -> None:
    content = gguf_bytes({}, {"a": np.ones((1, 32), np.float32)}, "Q4_0")
    block = struct.pack("<e", 0.5) + bytes(range(16))
    path = tmp_path / "a.gguf"
    path.write_bytes(content[:-32] + block + bytes(14))

    with GgufFile.open(path) as file:
        read = file.tensors["a"].dequantised()

    assert read[0].tolist() == [(n - 8) / 2 for n in range(16)] + [-4.0] * 16


def test_a_type_that_is_not_read_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, {"a": np.ones((1, 256), np.float32)}, "Q6_K")

    with GgufFile.open(path) as file, pytest.raises(UnsupportedModel) as caught:
        file.tensors["a"].dequantised()

    assert str(caught.value) == (
        f"{path}: tensor 'a' is of type Q6_K, which is not supported: choose a file with F32, "
        "F16, Q4_0, Q4_1, Q8_0, BF16"
    )


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = gguf_bytes(METADATA, tensors())

    for length in range(0, len(content), 7):
        broken(tmp_path, content[:length])


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<4s", b"PKLE", "it does not begin with 'GGUF'"),
        (8, "<Q", 1 << 60, "tells of 1 keys and 1152921504606846976 tensors"),
        (16, "<Q", 1 << 40, "tells of 1099511627776 keys and 1 tensors"),
        (24, "<Q", (1 << 64) - 1, "within key 0 of the metadata"),
        (33, "<I", 99, "the metadata 'a' are of type 99"),
        (41, "<Q", 1 << 62, "within the metadata 'a'"),
    ],
)
def test_a_file_that_lies_is_refused(
    tmp_path: Path, at: int, form: str, value: object, message: str
) -> None:
    content = bytearray(gguf_bytes({"a": ["x", "y"]}, {"t": np.ones(64, np.float32)}))

    struct.pack_into(form, content, at, value)

    assert message in broken(tmp_path, bytes(content))


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (8 + 1, "<I", 0, "tensor 't' has 0 dimensions"),
        (8 + 1, "<I", 5, "tensor 't' has 5 dimensions"),
        (8 + 1 + 4, "<Q", 0, "tensor 't' has the shape [2, 0], with nothing in it"),
        (8 + 1 + 4, "<Q", 1 << 63, "within tensor 't'"),
        (8 + 1 + 4, "<Q", 33, "has rows of 33 numbers, and Q8_0 has blocks of 32"),
        (8 + 1 + 4 + 16 + 4, "<Q", 31, "tensor 't' is at 31, which is no multiple of 32"),
        (8 + 1 + 4 + 16 + 4, "<Q", 1 << 63, "within tensor 't'"),
    ],
)
def test_a_tensor_that_is_not_in_the_file_is_refused(
    tmp_path: Path, at: int, form: str, value: int, message: str
) -> None:
    content = bytearray(gguf_bytes({}, {"t": np.ones((2, 64), np.float32)}, "Q8_0"))

    struct.pack_into(form, content, 24 + at, value)

    assert message in broken(tmp_path, bytes(content))


@pytest.mark.parametrize("alignment", [0, 3, 1 << 30, "x"])
def test_an_alignment_that_cannot_be_is_refused(tmp_path: Path, alignment: object) -> None:
    content = gguf_bytes({"general.alignment": alignment}, {})

    assert "the alignment is" in broken(tmp_path, content)


def test_other_versions_and_byte_orders_are_refused(tmp_path: Path) -> None:
    content = gguf_bytes({}, {})
    path = tmp_path / "a.gguf"

    for version, message in (
        (struct.pack("<I", 1), "is of version 1"),
        (struct.pack(">I", 3), "is big-endian"),
    ):
        path.write_bytes(content[:4] + version + content[8:])
        with pytest.raises(UnsupportedModel, match=message):
            GgufFile.open(path)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_bytes_that_are_changed_give_an_error_or_other_values_and_nothing_else(
    tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(gguf_bytes(METADATA, tensors(), "Q4_1"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 8))
        value = data.draw(st.sampled_from([0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]))
        struct.pack_into("<Q", content, at, value)
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)

    # Anything else that is raised fails the test.
    with suppress(BrokenModel, UnsupportedModel), GgufFile.open(path) as file:
        for key in file.metadata:
            file.metadata[key]
        for tensor in file.tensors.values():
            tensor.dequantised()
