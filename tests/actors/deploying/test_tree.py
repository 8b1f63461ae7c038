"""The folder of a deployment: written, compared, and nothing of others touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.actors.deploying.tree import Difference, differences, heading, write
from dynbus.bus.errors import ConfigError

FILES = {"a.yaml": f"# {heading('test')}\none: 1\n", "b.yaml": f"# {heading('test')}\ntwo: 2\n"}


def test_what_was_written_differs_in_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", FILES, force=False)

    assert differences(tmp_path / "out", FILES) == []


def test_each_file_that_is_otherwise_is_told(tmp_path: Path) -> None:
    write(tmp_path, {**FILES, "old.yaml": FILES["a.yaml"]}, force=False)
    (tmp_path / "a.yaml").unlink()
    (tmp_path / "b.yaml").write_text("three: 3\n")
    (tmp_path / "of_others.yaml").write_text("four: 4\n")

    assert differences(tmp_path, FILES) == [
        Difference("a.yaml", "missing"),
        Difference("b.yaml", "differs"),
        Difference("old.yaml", "left over"),
    ]


def test_a_file_of_others_is_written_over_by_force_alone(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("mine\n")

    with pytest.raises(ConfigError, match=r"a\.yaml was not made by dynbus deploy: give another"):
        write(tmp_path, FILES, force=False)

    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
    assert (tmp_path / "a.yaml").read_text() == "mine\n"
    write(tmp_path, FILES, force=True)
    assert differences(tmp_path, FILES) == []


def test_a_file_that_is_no_more_of_it_is_removed(tmp_path: Path) -> None:
    write(tmp_path, FILES, force=False)

    write(tmp_path, {"a.yaml": FILES["a.yaml"]}, force=False)

    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]
