"""Two models have the same fingerprint exactly if their files say the same."""

from __future__ import annotations

from pathlib import Path

from tests.llm.weights.tiny_models import TINY_MODELS, TinyModel

from dynbus.llm.weights.fingerprint import fingerprint


def test_the_same_files_have_the_same_fingerprint_wherever_they_are(tmp_path: Path) -> None:
    one, other = (TINY_MODELS["llama"].write_folder(tmp_path / name) for name in ("one", "other"))
    (other / "README.md").write_text("not of the model")

    assert fingerprint(one) == fingerprint(other) != ""


def test_other_weights_of_the_same_shapes_have_another(tmp_path: Path) -> None:
    one = TINY_MODELS["llama"].write_folder(tmp_path / "one")
    other = TinyModel("tuned", "llama").write_folder(tmp_path / "other")

    assert fingerprint(one) != fingerprint(other)
    weights = one / "model.safetensors"
    before = fingerprint(weights)
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert fingerprint(weights) != before


def test_a_folder_without_a_model_has_none(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""
