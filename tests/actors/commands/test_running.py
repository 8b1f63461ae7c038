"""A run that cannot begin says why, and ends with the code for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.actors.commands import running
from dynbus.actors.commands.running import execute
from dynbus.bus import exit_codes
from dynbus.bus.errors import Unavailable

from .options import run_options


def test_what_cannot_be_used_ends_with_its_code_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    code = execute(run_options(targets=["missing.py"]))

    assert code == exit_codes.CONFIG_ERROR
    assert capsys.readouterr() == (
        "",
        f"dynbus: 'missing.py': there is no file missing.py in {tmp_path}\n",
    )


def test_a_dry_run_warns_about_a_variable_that_is_nearly_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    (tmp_path / "warned_actors.py").write_text(
        "from dynbus import Actor, handler\n"
        'class Warned(Actor, namespace="demo"):\n'
        "    @handler\n"
        "    async def call(self) -> str:\n"
        '        return ""\n'
    )
    monkeypatch.setenv("DYNBUS_Wared__x", "1")

    code = execute(run_options(targets=["warned_actors.py"]))

    printed = capsys.readouterr()
    assert code == exit_codes.OK
    assert "demo.Warned" in printed.out
    assert printed.err == (
        "dynbus: the environment variable DYNBUS_Wared__x is not used: this run has no actor "
        "Wared (did you mean Warned?)\n"
    )


def test_the_log_of_a_server_that_does_not_start_is_shown_below_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise Unavailable("not ready at nats://a:pw@h:\n  line 1\n  line 2")

    monkeypatch.setattr(running, "make_plan", fail)

    code = execute(run_options())

    assert code == exit_codes.NO_SERVER
    assert capsys.readouterr().err == "dynbus: not ready at nats://a:***@h:\n  line 1\n  line 2\n"
