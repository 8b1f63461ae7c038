from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.llm.models.hub_process import wanted_files
from dynbus.llm.models.source import resolve

from .tiny_model import tiny_folder

pytestmark = pytest.mark.anyio


async def test_a_folder_is_called_as_it_is(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "Tiny-1")

    model = await resolve(folder)

    assert (model.path, model.format, model.name) == (folder, "folder", "Tiny-1")


async def test_a_file_is_called_without_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.Q8_0.gguf"
    path.write_bytes(b"GGUF")

    model = await resolve(str(path))

    assert (model.path, model.format, model.name) == (path, "gguf", "Tiny.Q8_0")


async def test_a_folder_with_several_files_says_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    with pytest.raises(ConfigError, match=r"name one of a\.gguf, b\.gguf"):
        await resolve(tmp_path)


async def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model"):
        await resolve(tmp_path)


REPOSITORY = [
    ".gitattributes",
    "README.md",
    "config.json",
    "generation_config.json",
    "model-1.safetensors",
    "model-2.safetensors",
    "model.safetensors.index.json",
    "modeling_custom.py",
    "onnx/config.json",
    "original/consolidated.pth",
    "pytorch_model.bin",
    "tokenizer.json",
    "training_args.bin",
]


def test_only_weights_and_what_describes_them_are_got_of_a_repository() -> None:
    assert wanted_files(REPOSITORY) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_one_gguf_file_is_got() -> None:
    assert wanted_files(["a.gguf", "config.json"]) == ["a.gguf"]
    assert wanted_files(["a.gguf", "b.gguf"], "b.gguf") == ["b.gguf"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["a.gguf", "b.gguf"], "2 GGUF files"),
        (["pytorch_model.bin", "config.json"], "neither"),
        (["model.safetensors"], "neither"),
    ],
)
def test_a_repository_without_a_model_is_refused(files: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wanted_files(files)
