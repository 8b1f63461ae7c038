"""Files in a model's folder that are none, or are somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynbus.llm.weights.errors import BrokenModel
from dynbus.llm.weights.gguf import GgufFile
from dynbus.llm.weights.small_files import read_small_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model, beside a file that is not the model's."""
    (tmp_path / "secret").write_text("of its owner")
    found = tmp_path / "model"
    found.mkdir()
    return found


def refused(path: Path, limit: int = 100) -> str:
    with pytest.raises(BrokenModel) as caught:
        read_small_file(path, limit)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_pipe_or_a_device_is_not_read_for_ever(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "folder").mkdir()

    for name in ("pipe", "device", "folder"):
        assert "no plain file" in refused(folder / name)
        with pytest.raises(BrokenModel, match="no plain file"):
            GgufFile.open(folder / name)


def test_a_file_that_is_too_large_is_not_read_to_its_end(folder: Path) -> None:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)

    assert "larger than 100 bytes" in refused(folder / "large")


def test_a_link_out_of_the_folder_is_refused_for_what_it_leads_to_is_told_to_others(
    folder: Path,
) -> None:
    (folder / "tokenizer.json").symlink_to("../secret")
    (folder / "again").symlink_to("tokenizer.json")
    (folder / "loop").symlink_to("loop")

    for name in ("tokenizer.json", "again"):
        assert "out of the model's folder" in refused(folder / name)
    refused(folder / "loop")


def test_links_in_a_folder_and_in_the_cache_of_a_hub_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "real").write_bytes(b"here")
    (folder / "link").symlink_to("real")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "hub" / "models--org--tiny" / "blobs" / "1"
    blob.parent.mkdir()
    blob.write_bytes(b"there")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (tmp_path / "elsewhere").symlink_to(snapshot)

    assert read_small_file(folder / "link") == b"here"
    assert read_small_file(snapshot / "config.json") == b"there"
    assert read_small_file(tmp_path / "elsewhere" / "config.json") == b"there"
    with pytest.raises(FileNotFoundError):
        read_small_file(folder / "missing")
