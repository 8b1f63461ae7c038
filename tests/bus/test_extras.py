"""What is missing of dynbus is named with the command that installs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.bus import extras
from dynbus.bus.extras import EXTRAS, has_extra, how_to_install

ROOT = Path(__file__).parents[2]


def test_an_extra_is_missing_where_a_package_above_its_modules_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = has_extra("metrics")
    monkeypatch.setitem(EXTRAS, "metrics", ("dynbus_has_no.such_package",))

    assert (there, has_extra("metrics")) == (True, False)


def test_a_clone_is_installed_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    here = how_to_install("otlp", "zmq")
    monkeypatch.chdir(tmp_path)

    assert here == 'pip install -e ".[otlp,zmq]"'
    assert how_to_install("otlp") == f'pip install -e "{ROOT}[otlp]"'


def test_an_installed_package_gets_its_extras_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "dynbus" / "bus" / "extras.py"))

    assert how_to_install("otlp", "zmq") == 'pip install "dynbus[otlp,zmq]"'
