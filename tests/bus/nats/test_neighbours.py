"""Notes of other folders' servers are believed only where nobody else could write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.bus.nats import neighbours
from dynbus.bus.nats.embedded_guard import DataFolder


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "notes"
    monkeypatch.setattr(neighbours, "notes_dir", lambda: found)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    path = tmp_path / "project" / ".dynbus"
    path.mkdir(parents=True)
    return DataFolder(path)


def test_the_last_server_at_a_port_is_known(folder: DataFolder, tmp_path: Path) -> None:
    neighbours.announce(4222, DataFolder(tmp_path))
    neighbours.announce(4222, folder)

    found = neighbours.data_folder(4222)

    assert found is not None
    assert found.path == folder.path
    assert neighbours.data_folder(4223) is None


def test_a_folder_that_is_gone_is_not_known(folder: DataFolder) -> None:
    neighbours.announce(4222, folder)
    folder.path.rmdir()

    assert neighbours.data_folder(4222) is None


def test_notes_that_others_may_write_are_not_believed(notes: Path, folder: DataFolder) -> None:
    neighbours.announce(4222, folder)
    notes.chmod(0o777)

    assert neighbours.data_folder(4222) is None


def test_a_link_in_the_place_of_the_notes_is_not_followed(
    notes: Path, folder: DataFolder, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    notes.symlink_to(elsewhere)

    neighbours.announce(4222, folder)

    assert list(elsewhere.iterdir()) == []
    assert neighbours.data_folder(4222) is None


def test_notes_that_cannot_be_written_are_told(
    notes: Path, folder: DataFolder, caplog: pytest.LogCaptureFixture
) -> None:
    notes.write_text("a file in its place")

    neighbours.announce(4222, folder)

    assert "cannot be noted in" in caplog.text
