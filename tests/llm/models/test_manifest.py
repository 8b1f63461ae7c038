from __future__ import annotations

import json
from typing import Any

import pytest

from dynbus.llm.generation import DefaultSampling
from dynbus.llm.models.manifest import (
    Manifest,
    MirroredFile,
    digest_of_files,
    manifest_name,
    model_in_name,
    read_manifest,
)
from dynbus.llm.models.origins import ModelUnavailable

DIGEST = "a1" * 32


def file(name: str, size: int = 3) -> MirroredFile:
    return MirroredFile(name=name, size=size, sha256=DIGEST, parts=[DIGEST])


def fields(*names: str, **other: Any) -> dict[str, Any]:
    files = [{"name": name, "size": 3, "sha256": DIGEST, "parts": [DIGEST]} for name in names]
    return {"version": 1, "model": "org/tiny", "commit": "c" * 40, "files": files, **other}


def test_a_manifest_is_read_as_json() -> None:
    names = ("config.json", "model.safetensors")
    told = fields(*names, sampling={"temperature": 0.5}, later="ignored")

    assert read_manifest("m", json.dumps(told).encode()) == Manifest(
        model="org/tiny",
        commit="c" * 40,
        files=[file(name) for name in names],
        sampling=DefaultSampling(temperature=0.5),
    )


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([], "no manifest"),
        (fields("config.json"), "neither safetensors"),
        (fields("config.json", "model.safetensors", "modeling.py"), "not the files of one"),
        (fields("config.json", "config.json", "a.safetensors"), "not the files of one"),
        (fields("../model.gguf"), "neither safetensors"),
        (fields("a/b.gguf"), "no plain name"),
        (fields("a\\b.gguf"), "no plain name"),
        (fields("a\n.gguf"), "no plain name"),
        (fields(files=[{"name": "a.gguf", "size": 1, "sha256": "x", "parts": []}]), "cannot be"),
        (fields(files=[{"name": "a.gguf", "size": -1, "sha256": DIGEST, "parts": []}]), "cannot"),
        (fields("a.gguf", version=2), "version 2, and this dynbus reads 1"),
    ],
)
def test_what_is_no_manifest_is_refused(told: Any, why: str) -> None:
    with pytest.raises(ModelUnavailable, match=why):
        read_manifest("m", json.dumps(told).encode())


def test_the_name_of_an_object_has_the_model_and_the_revision() -> None:
    assert manifest_name("org/tiny", None) == "models/org/tiny@main"
    assert model_in_name(manifest_name("org/tiny/a.gguf", "refs/pr/1")) == (
        "org/tiny/a.gguf",
        "refs/pr/1",
    )
    assert model_in_name("parts/abc") is None


def test_the_digest_of_files_does_not_depend_on_their_order() -> None:
    one, other = file("a.json"), file("b.json")

    assert digest_of_files([one, other]) == digest_of_files([other, one])
    assert digest_of_files([one]) != digest_of_files([file("a.json", 4)])
