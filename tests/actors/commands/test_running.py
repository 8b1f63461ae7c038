"""A run that cannot begin says why, and ends with the code for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from dynbus.actors.commands import run as running
from dynbus.actors.commands.run import (
    _in_process as in_process,  # pyright: ignore[reportPrivateUsage]
)
from dynbus.actors.commands.run import execute
from dynbus.actors.running.in_process import Failure, leave_within
from dynbus.bus import exit_codes
from dynbus.bus.errors import Unavailable
from dynbus.bus.extras import EXTRAS
from dynbus.bus.nats.server_process import RunningServer

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


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_shows_a_run_that_this_machine_would_refuse_and_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    # Each case loads a module of its own.
    target = f"large_actors_{as_json}.py"
    (tmp_path / target).write_text(
        "from dynbus import Actor, handler\n"
        'class Large(Actor, namespace="demo", workers=2, resources={"gpu": 4}):\n'
        "    def __init__(self, size: int = 7) -> None: ...\n"
        "    @handler\n"
        "    async def call(self) -> str:\n"
        '        return ""\n'
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    code = execute(run_options(targets=[target], as_json=as_json))

    printed = capsys.readouterr()
    assert code == exit_codes.OK
    assert "demo.Large" in printed.out
    assert "size" in printed.out
    reason = "demo.Large/1 needs 4 GPUs, and there is none: CUDA_VISIBLE_DEVICES"
    assert f"dynbus: this machine would refuse the run: {reason}" in printed.err
    if as_json:
        assert json.loads(printed.out)["refused_here"].startswith(reason)


def test_a_task_that_swallows_its_cancellation_keeps_no_process_that_has_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    let_go: list[Callable[[], object]] = []
    kept: list[asyncio.Task[None]] = []

    async def stubborn(free: asyncio.Event) -> None:
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    async def run(*arguments: object) -> tuple[Failure, int]:
        loop, free = asyncio.get_running_loop(), asyncio.Event()
        kept.append(loop.create_task(stubborn(free)))
        let_go.append(partial(loop.call_soon_threadsafe, free.set))
        await asyncio.sleep(0)
        return Failure(exit_codes.START_FAILED, "the model is missing"), exit_codes.START_FAILED

    def leave(code: int) -> None:
        codes.append(code)
        let_go[0]()

    monkeypatch.setattr(running, "_run_in_process", run)
    monkeypatch.setattr(running, "leave_within", partial(leave_within, seconds=0.2))
    monkeypatch.setattr(os, "_exit", leave)

    in_process(cast("Any", None), run_options())

    assert codes == [exit_codes.START_FAILED]
    assert "dynbus: the model is missing" in capsys.readouterr().err


@pytest.mark.parametrize("in_process_too", [False, True])
def test_a_health_port_that_is_taken_ends_the_run_with_one_line_and_the_remedy(
    in_process_too: bool,
    nats_server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The provider of a run in this process would be that of every later test, and shut down.
    monkeypatch.setitem(EXTRAS, "metrics", ("dynbus_has_no.such_package",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    module = f"healthy_actors_{in_process_too}".lower()
    (tmp_path / f"{module}.py").write_text(
        "from dynbus import Actor, handler\n"
        'class Healthy(Actor, namespace="demo"):\n'
        "    @handler\n"
        "    async def call(self) -> str:\n"
        '        return ""\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        code = execute(
            run_options(
                targets=[f"{module}.py"],
                dry_run=False,
                nats=nats_server.url,
                health=address,
                in_process=in_process_too,
                log_level="critical",
            )
        )

    assert code == exit_codes.CONFIG_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dynbus: --health: the health server cannot listen at {address}: ")
    assert line.endswith("give another port, or port 0 for any free one")


def test_a_run_in_one_process_cannot_reload(capsys: pytest.CaptureFixture[str]) -> None:
    code = execute(run_options(dry_run=False, reload=True, in_process=True))

    assert code == exit_codes.CONFIG_ERROR
    assert capsys.readouterr().err == (
        "dynbus: --reload replaces the processes of single instances, and --in-process has one "
        "for all: leave one of the two out\n"
    )


def test_the_log_of_a_server_that_does_not_start_is_shown_below_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise Unavailable("not ready at nats://a:pw@h:\n  line 1\n  line 2")

    monkeypatch.setattr(running, "load_run", fail)

    code = execute(run_options())

    assert code == exit_codes.NO_SERVER
    assert capsys.readouterr().err == "dynbus: not ready at nats://a:***@h:\n  line 1\n  line 2\n"
