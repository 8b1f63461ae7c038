"""Units, as systemd itself reads them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.actors.deploying.literals import ELSEWHERE, PLAIN, WHOLE

from dynbus.actors.deploying.application import Application
from dynbus.actors.deploying.units import units


@pytest.mark.parametrize("application", [PLAIN, WHOLE, ELSEWHERE], ids=["plain", "whole", "nats"])
def test_systemd_finds_nothing_wrong_with_the_units(
    application: Application, tmp_path: Path
) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd-analyze is not installed")
    prefix = tmp_path / "opt"
    program = prefix / ".venv" / "bin" / "dynbus"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    for name, text in units(application, str(prefix), "made").items():
        (tmp_path / name).write_text(text)

    done = subprocess.run(
        [systemd, "verify", "--man=no", *sorted(tmp_path.glob("*.*"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_is_told_to_drain_and_has_time_for_it() -> None:
    text = units(WHOLE, "/opt/chat", "made")["chat-printer.service"]

    assert "\nKillMode=mixed\nTimeoutStopSec=95\n" in text
    assert "\nLoadCredential=chat_Printer.nk:/etc/chat/keys/chat_Printer.nk\n" in text


def test_a_word_with_special_characters_stays_one_word() -> None:
    odd = replace(WHOLE, options=('--Engine.text=50% of "$x"',))

    text = units(odd, "/opt/chat", "made")["chat-engine.service"]

    assert r'"--Engine.text=50%% of \"$$x\""' in text
