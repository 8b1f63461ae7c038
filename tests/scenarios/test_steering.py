"""A `dynbus run` that goes on is scaled, restarted and stopped from another terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from operator import lt
from pathlib import Path

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Runtime
from dynbus.bus import exit_codes

from .project import Folder, project_folder

CALLERS = 16

SPLIT = """
from collections.abc import AsyncGenerator
from dynbus import Actor, handler

class Splitter(Actor, namespace="demo"):
    @handler
    async def split(self, text: str) -> AsyncGenerator[str, None]:
        for word in text.split():
            yield word

    @handler
    async def upper(self, text: str) -> str:
        return text.upper()
"""

LONG = """
import asyncio
from collections.abc import AsyncGenerator
from dynbus import Actor, handler

class Long(Actor, namespace="demo"):
    @handler(resume="go_on", timeout=None, concurrency=None)
    async def count(self, first: int) -> AsyncGenerator[int, None]:
        for number in range(first, 30_000):
            yield number
            await asyncio.sleep(0.02)

    @staticmethod
    def go_on(first: int, items: list[int]) -> int:
        return first + len(items)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with project_folder(tmp_path) as project:
        (tmp_path / "split.py").write_text(SPLIT)
        (tmp_path / "long.py").write_text(LONG)
        yield project


async def call_until(done: asyncio.Event, runtime: Runtime) -> tuple[int, int]:
    """How many unary calls and streams were answered until then, each in full."""
    split = await runtime.endpoint("demo.Splitter.split").client()
    upper = await runtime.endpoint("demo.Splitter.upper").client()
    unary = streams = 0
    while not done.is_set():
        assert await upper.round_robin("a b") == "A B"
        unary += 1
        assert [word async for word in split.round_robin("a b c d")] == ["a", "b", "c", "d"]
        streams += 1
        # So that the run, too, gets a processor.
        await asyncio.sleep(0.02)
    return unary, streams


@pytest.mark.anyio
async def test_a_rolling_restart_and_a_change_of_number_lose_no_call(folder: Folder) -> None:
    await asyncio.to_thread(folder.start_ready, "split.py", "--Splitter.workers=2", instances=2)
    done = asyncio.Event()

    async with Runtime.connect(folder.url) as runtime:
        callers = [asyncio.create_task(call_until(done, runtime)) for _ in range(CALLERS)]
        try:
            commands = [
                await asyncio.to_thread(folder.dynbus_in_a_process, *command)
                for command in (("restart",), ("scale", "Splitter=3"), ("scale", "Splitter=1"))
            ]
        finally:
            done.set()
        counts = await asyncio.gather(*callers)

    assert [(command.returncode, command.stderr) for command in commands] == [(0, "")] * 3
    assert [command.stdout.splitlines() for command in commands] == [
        [
            "demo.Splitter/3 starts in place of demo.Splitter/1 (1 of 2)",
            "demo.Splitter/3 is ready, demo.Splitter/1 drains",
            "demo.Splitter/1 starts in place of demo.Splitter/2 (2 of 2)",
            "demo.Splitter/1 is ready, demo.Splitter/2 drains",
            "demo.Splitter: restarted",
        ],
        ["demo.Splitter: 1 instance starts", "demo.Splitter: 3 instances"],
        ["demo.Splitter: 2 instances drain", "demo.Splitter: 1 instance"],
    ]
    assert all(unary and streams for unary, streams in counts)
    assert len(folder.workers()) == 1


@pytest.mark.nightly(
    "tests/actors/test_handed_on_streams.py::test_every_instance_is_replaced_and_no_reader_notices_however_long_its_stream"
)
@pytest.mark.anyio
async def test_a_rolling_restart_under_streams_of_ten_minutes_takes_seconds_and_breaks_none(
    folder: Folder,
) -> None:
    await asyncio.to_thread(folder.start_ready, "long.py", "--Long.workers=3", instances=3)
    first_workers = set(folder.workers())
    found: list[list[int]] = [[] for _ in range(CALLERS)]

    async with Runtime.connect(folder.url) as runtime:
        client = await runtime.endpoint("demo.Long.count").client(
            resume=lambda first, items: first + len(items), migration_limit=1
        )

        async def read(items: list[int]) -> None:
            async for number in client.round_robin(0):
                items.append(number)

        readers = [asyncio.create_task(read(items)) for items in found]
        try:
            await eventually(lambda: all(found))
            watch = Stopwatch()
            commands = [
                await asyncio.to_thread(folder.dynbus_in_a_process, *command)
                for command in (("restart",), ("scale", "Long=1"))
            ]
            took = watch.seconds()
            counts = [len(items) for items in found]
            await eventually(lambda: all(map(lt, counts, map(len, found))))
        finally:
            ended = [reader for reader in readers if reader.done()]
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)

    assert [(command.returncode, command.stderr) for command in commands] == [(0, "")] * 2
    assert len(folder.workers()) == 1
    assert not first_workers & set(folder.workers())
    assert ended == []
    assert found == [list(range(len(items))) for items in found]
    # As long as starting three processes takes; each may drain for 30 s.
    assert took < 30.0


JOBS = """
import msgspec
from dynbus import Actor, handler

class Page(msgspec.Struct):
    text: str

class Printer(Actor, namespace="demo"):
    @handler
    async def show(self, page: Page) -> str:
        return page.text

    @handler(durable=True)
    async def print(self, page: Page) -> str:
        return page.text
"""


@pytest.mark.nightly(
    "tests/actors/test_control.py::test_a_restart_that_breaks_callers_is_refused_unless_it_is_forced",
)
def test_a_restart_that_running_callers_could_not_read_is_refused_unless_it_is_forced(
    folder: Folder,
) -> None:
    file = folder.path / "jobs.py"
    file.write_text(JOBS)
    folder.start_ready("jobs.py")
    before = set(folder.workers())

    file.write_text(JOBS.replace("text: str\n", "text: str\n    size: int\n"))
    refused = folder.dynbus_in_a_process("restart")
    checked = folder.dynbus_in_a_process("schema", "check", "jobs.py", "--against", "running")
    kept = set(folder.workers())
    answer = folder.dynbus("call", "demo.Printer.show", '{"text": "a"}')
    forced = folder.dynbus_in_a_process("restart", "--force")
    no_answer = folder.dynbus("call", "demo.Printer.show", '{"text": "a"}')
    file.write_text(JOBS.replace("text: str\n", "text: str\n    size: int = 1\n"))
    fitting = folder.dynbus_in_a_process("restart")

    missing = "field 'size' of the request is required and never sent"
    assert (refused.returncode, refused.stdout) == (exit_codes.FAILURE, "")
    assert refused.stderr.startswith(
        "dynbus: nothing is restarted, since callers that run could not go on: demo.Printer.print: "
        f"{missing}"
    )
    assert "give it a default: jobs that wait have the old form" in refused.stderr
    assert f"demo.Printer.show: {missing}" in refused.stderr
    assert "`dynbus restart --force` restarts all the same" in refused.stderr
    assert checked.returncode == exit_codes.FAILURE
    assert checked.stdout.count(missing) == 2
    assert kept == before
    assert json.loads(answer.stdout) == "a"
    assert (forced.returncode, forced.stderr) == (0, "")
    assert no_answer.returncode == exit_codes.CALL_CODES["InvalidRequest"]
    assert (fitting.returncode, fitting.stderr) == (0, "")
    assert "demo.Printer: restarted" in fitting.stdout


@pytest.mark.nightly(
    "tests/actors/test_resumed_streams.py::test_an_untyped_stream_is_replayed_where_its_client_says_so",
    "tests/actors/commands/test_call.py::test_every_option_reaches_the_call",
)
def test_a_stream_of_the_command_line_that_is_replayed_outlives_its_instance(
    folder: Folder,
) -> None:
    folder.start_ready("long.py", "--Long.workers=2", instances=2)
    call = folder.begin("call", "demo.Long.count", "29500", "--replay")
    assert call.stdout is not None
    first = [call.stdout.readline() for _ in range(10)]

    (request,) = json.loads(folder.dynbus("ps", "--requests", "--json").stdout)
    rows = json.loads(folder.dynbus("ps", "--json").stdout)
    (row,) = (each for each in rows if each["instance_id"] == request["instance_id"])
    os.kill(int(row["address"].rpartition(":")[2]), signal.SIGKILL)

    rest, errors = call.communicate(timeout=PATIENCE)
    assert (call.returncode, errors) == (0, "")
    assert [int(line) for line in [*first, *rest.splitlines()]] == [*range(29_500, 30_000)]


@pytest.mark.nightly(
    "tests/actors/test_control.py::test_a_node_that_one_run_alone_has_names_the_run",
    "tests/actors/test_control.py::test_a_run_of_another_user_is_named_as_such_and_stands_in_nobodys_way",
)
def test_a_run_is_stopped_by_its_folder_and_several_are_told_apart(folder: Folder) -> None:
    first = folder.start_ready("actors.py:Splitter")
    second = folder.start_ready("actors.py:Slow", instances=2)
    sockets = sorted((folder.path / ".dynbus").glob("run-*.sock"))

    unclear = folder.dynbus("stop")
    wrong = folder.dynbus("stop", "--run", "1")
    one = folder.dynbus("stop", "--run", str(second.pid))
    ended = second.wait(60)
    other = folder.dynbus("stop", "--now")
    killed = folder.start_ready("actors.py:Splitter", instances=3)
    killed.kill()
    killed.wait(60)
    none = folder.dynbus("stop")

    assert len(sockets) == 2
    assert (unclear.returncode, wrong.returncode) == (exit_codes.CONFIG_ERROR,) * 2
    for run in (first, second):
        assert f"--run {run.pid} (demo." in unclear.stderr
    assert "--run 1: no dynbus run with this process id runs in" in wrong.stderr
    assert (one.returncode, ended) == (0, exit_codes.OK)
    assert (folder.path / "stopped").exists()
    assert (other.returncode, first.wait(60)) == (0, exit_codes.INTERRUPTED)
    assert "no dynbus run runs in" in none.stderr
    assert list((folder.path / ".dynbus").glob("run-*.sock")) == []


def test_only_its_owner_can_ask_a_run_and_what_is_no_question_is_refused(folder: Folder) -> None:
    run = folder.start_ready("actors.py:Splitter")
    (path,) = (folder.path / ".dynbus").glob("run-*.sock")
    scale = b'{"type":"scale","name":"Splitter","count":-1}\n'
    answers: list[bytes] = []
    with contextlib.chdir(folder.path):
        for question in (b"{}\n", scale, b"x" * 100_000):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(os.path.relpath(path))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(question)
                    connection.shutdown(socket.SHUT_WR)
                    answers.append(connection.makefile("rb").read())

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"this is no question to a run" in answers[0]
    assert b"-1 instances: give a number from 0 to 1024" in answers[1]
    assert run.poll() is None
    assert folder.dynbus("scale", "Spliter=2").stderr == (
        "dynbus: this run has no Spliter (did you mean Splitter?); it has demo.Splitter\n"
    )


def test_a_run_is_scaled_and_drained_over_the_bus_by_the_name_of_its_host(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYNBUS_HOST", "node-7")
    run = folder.start_ready("actors.py:Splitter")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("NATS_URL", (tmp_path / ".dynbus" / "nats.url").read_text().strip())
    folder.path = elsewhere

    scaled = folder.dynbus("scale", "Splitter=2", "--host", "node-7")
    hosts = json.loads(folder.dynbus("ps", "--hosts", "--json").stdout)
    nowhere = folder.dynbus("drain", "host=node-8")
    run.send_signal(signal.SIGSTOP)
    unanswered = folder.dynbus("drain", "host=node-7")
    run.send_signal(signal.SIGCONT)
    drained = folder.dynbus("drain", "host=node-7")

    where = f"node-7 {run.pid}: "
    assert (scaled.returncode, scaled.stdout.splitlines()) == (
        0,
        [f"{where}demo.Splitter: 1 instance starts", f"{where}demo.Splitter: 2 instances"],
    )
    assert [(one["host"], one["instances"]) for one in hosts] == [("node-7", 2)]
    assert (nowhere.returncode, nowhere.stdout) == (exit_codes.FAILURE, "")
    assert f"no dynbus run on host node-8; there are: {where}demo.Splitter" in nowhere.stderr
    # The instances of a run that hangs go on, and are named.
    assert unanswered.returncode == exit_codes.FAILURE
    assert "none that answers" in unanswered.stderr
    assert unanswered.stderr.count("goes on: no dynbus run that answers has it") == 2
    assert (drained.returncode, drained.stdout) == (0, f"{where}ended\n")
    assert run.wait(PATIENCE) == exit_codes.OK
