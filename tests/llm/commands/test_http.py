"""`dynbus http`: what it refuses before anything is opened."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dynbus import cli
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError
from dynbus.kvrouter import RouterConfig
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.catalog import Catalog
from dynbus.testing import TestKit
from dynbus.testing import run as run_in_virtual_time

COSTS = "def cost(shape, candidates):\n    return [0.0 for _ in candidates]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; what is put on the path is taken off it again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been served."""
    begun: list[str] = []

    def run(main: Coroutine[Any, Any, None]) -> None:
        begun.append("served")
        main.close()

    monkeypatch.setattr(uvloop, "run", run)
    # It sets up the telemetry of the whole process.
    monkeypatch.setattr("dynbus.spi.measure_process", lambda: lambda: None)
    return begun


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["http", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("nosuch:thing", "policy 'nosuch:thing' cannot be loaded: there is no module 'nosuch'"),
        ("nosuch", "policy 'nosuch' is unknown: use one of"),
        ("missing.py:cost", "policy 'missing.py:cost': there is no file missing.py in"),
        ("costs_without:cost", "costs_without.py has no 'cost'"),
        ("kv,dynamo", "--policy 'kv,dynamo' names 2 policies: give one"),
        ("", "--policy '' names no policy"),
    ],
)
def test_a_policy_that_cannot_be_loaded_keeps_the_front_end_from_starting(
    folder: Path,
    served: list[str],
    capsys: pytest.CaptureFixture[str],
    policy: str,
    reason: str,
) -> None:
    (folder / "costs_without.py").write_text("")

    code = run("--policy", policy)

    assert code == exit_codes.CONFIG_ERROR
    assert reason in capsys.readouterr().err
    assert served == []


def test_a_file_of_keys_that_cannot_be_used_keeps_the_front_end_from_starting(
    folder: Path, served: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "keys").write_text("ada short\n")

    code = run("--api-keys", "keys")

    assert code == exit_codes.CONFIG_ERROR
    assert "line 1: write a key of 8 to 512 printable characters" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("policy", ["costs_of_module:cost", "costs_of_file.py:cost", "dynamo"])
def test_a_policy_is_looked_for_in_the_current_folder(
    folder: Path, served: list[str], policy: str
) -> None:
    for name in ("costs_of_module", "costs_of_file"):
        (folder / f"{name}.py").write_text(COSTS)

    code = run("--policy", policy)

    assert code == exit_codes.OK
    assert served == ["served"]


def test_a_program_s_front_end_refuses_a_policy_that_cannot_be_loaded_too() -> None:
    async def story() -> None:
        async with TestKit() as kit, Catalog(kit.caller) as catalog:
            HttpFrontEnd(
                kit.caller,
                catalog,
                HttpSettings(port=0),
                router=RouterConfig(policy="kv", shadows=["nosuch:thing"]),
            )

    with pytest.raises(ConfigError, match="policy 'nosuch:thing' cannot be loaded"):
        run_in_virtual_time(story())
