"""A run that reloads watches the right folders, and notices what changes in them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from dynbus.actors.commands.reload import NAMED, names_of, watched_folders, watching
from dynbus.bus.errors import ConfigError


def test_the_folders_of_targets_and_of_the_settings_are_watched_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)

    found = watched_folders(["a/x.py", "a/y.py:Name", "package.module:Name"], ["b/config.yaml"])

    assert found == [tmp_path, tmp_path / "a", tmp_path / "b"]


def test_targets_in_no_folder_that_exists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reload: none of the folders of /missing/x.py exists"):
        watched_folders(["/missing/x.py"], [])


def test_a_change_of_very_many_files_is_one_short_line() -> None:
    files = [f"/project/m{number:03}.py" for number in range(100)]

    assert names_of(files[:2]) == "m000.py, m001.py"
    assert names_of(files).count(".py") == NAMED
    assert names_of(files).endswith(f" and {100 - NAMED} more")


@pytest.mark.anyio
async def test_changes_are_noticed_below_the_targets_and_beside_what_was_loaded_elsewhere(
    tmp_path: Path,
) -> None:
    project, library = tmp_path / "project", tmp_path / "library"
    for folder in (project / "inner", library / "inner"):
        folder.mkdir(parents=True)
    (project / "known.py").touch()
    changed: dict[str, bool] = {}
    heard = asyncio.Event()

    def listen(told: Mapping[str, bool]) -> None:
        changed.update(told)
        heard.set()

    async with asyncio.timeout(60), watching([str(project / "known.py")], []) as watch:
        (project / "known.py").write_text("1")
        (project / "notes.txt").write_text("1")
        watch.cover([str(library / "shared.py"), str(project / "inner" / "x.py")])
        watch.tell(listen)
        while len(changed) < 3:
            heard.clear()
            (project / "inner" / "new.py").write_text("1")
            (library / "shared.py").write_text("1")
            (library / "inner" / "far.py").write_text("1")
            await heard.wait()

    names = {str(Path(path).relative_to(tmp_path)): new for path, new in changed.items()}
    assert names.keys() == {"project/known.py", "project/inner/new.py", "library/shared.py"}
    assert names["project/known.py"] is False
