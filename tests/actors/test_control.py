"""A run goes on where nobody can be let to steer it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.control import controlled
from dynbus.actors.running.in_process import Ending
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import Supervisor


@pytest.mark.anyio
async def test_a_run_in_a_folder_that_cannot_be_written_to_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    # For the superuser every folder can be written to; this is none.
    (tmp_path / ".dynbus").write_text("")
    supervisor = Supervisor([], WorkerSettings([], {}), ForkServer(), Ending(), drain_grace=1.0)
    entered = False

    async with controlled(supervisor, lambda at_once: None):
        entered = True

    assert entered
    (message,) = caplog.messages
    assert message.startswith("dynbus stop, restart and scale do not reach this run: its socket ")
    assert message.endswith(": File exists")
