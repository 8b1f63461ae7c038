"""`dynbus run` as its user knows it: real processes, real signals, an embedded server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.conditions import PATIENCE, Stopwatch

from dynbus.bus.nats.server_process import RunningServer, free_port

from .project import ACTORS, Folder

LEAVES = """
import sys
from dynbus import Actor, handler

class Leaves(Actor, namespace="demo"):
    @handler
    async def leave(self) -> str:
        sys.exit(9)
"""

FAILS = """
from dynbus import Actor, handler

class Fails(Actor, namespace="demo"):
    async def on_start(self) -> None:
        raise RuntimeError("the model is missing")

    @handler
    async def call(self) -> str:
        return ""

class Good(Actor, namespace="demo"):
    @handler
    async def call(self) -> str:
        return ""
"""


NODES = """
from dynbus import Actor, depends, handler

class Engine(Actor, namespace="demo", extra_config=("lib_",)):
    def __init__(self, phase: str) -> None:
        self.phase = " ".join([phase, *self.config.as_args(prefix="lib_")])

    @handler
    async def step(self, text: str) -> str:
        return f"{text}, {self.phase} by {self.instance_id}"

class Frontend(Actor, namespace="demo"):
    prefill = depends(Engine, node="prefill")
    decode = depends(Engine, node="decode")

    @handler
    async def complete(self, text: str) -> str:
        return await self.decode.step(await self.prefill.step(text))
"""

NODE_SETTINGS = """
prefill: {class: Engine, phase: prefilled, workers: 2}
decode: {phase: wrong}
"""

GRAPH = """
from dynbus import Actor, depends, handler

class Front(Actor, namespace="demo"):
    engine = depends("Engine")
    spare = depends("not_installed_anywhere:Spare")

    @handler
    async def ask(self) -> list[str]:
        asked = self.runtime.client(Engine)
        return [await self.engine.where(), await asked.where(), str(hasattr(self, "spare"))]

class Engine(Actor, namespace="demo"):
    @handler
    async def where(self) -> str:
        return str(self.__dynbus_name__)
"""

LINKED = """
from graph_actors import Engine, Front

Front.link(Engine)
"""


# Starting ----------------------------------------------------------------------------------


def test_a_file_runs_twice_side_by_side_and_each_graph_calls_its_own(folder: Folder) -> None:
    (folder.path / "graph_actors.py").write_text(GRAPH)
    (folder.path / "linked.py").write_text(LINKED)
    folder.start_ready("linked.py:Front", "--in-process", instances=2)
    # Its workers import graph_actors alone: what is linked they know from the plan.
    folder.start_ready("linked.py:Front", "--namespace", "staging", instances=4)

    answers = {
        namespace: json.loads(folder.dynbus("call", f"{namespace}.Front.ask").stdout)
        for namespace in ("demo", "staging")
    }
    rows = json.loads(folder.dynbus("ps", "--json").stdout)
    restarted = folder.dynbus("restart", "staging.Engine")

    engines = {
        row["namespace"]: f"{row['namespace']}.Engine@{row['instance_id']}"
        for row in rows
        if row["component"] == "Engine"
    }
    assert len(rows) == 4
    assert answers == {name: [engine, engine, "False"] for name, engine in engines.items()}
    assert restarted.stdout.endswith("\nstaging.Engine: restarted\n"), restarted.stderr


def test_an_actor_and_what_it_depends_on_are_served_with_an_embedded_server(
    folder: Folder,
) -> None:
    folder.start_ready("actors.py:Shouter", "--Splitter.separator=,", instances=2)

    answer = folder.dynbus("call", "demo.Shouter.shout", '"a,b"')

    assert (answer.returncode, answer.stdout) == (0, '"A"\n"B"\n'), answer.stderr
    assert folder.output().count("nats-server 2.") == 1
    assert "started on" in folder.output()
    assert "demo.Slow" not in folder.output()


@pytest.mark.nightly(
    "tests/actors/test_processes.py::test_a_process_shows_its_label_leads_a_group_and_its_end_is_told",
    "tests/actors/test_loader.py::test_a_file_names_further_nodes_of_the_classes_of_the_run",
)
def test_each_instance_has_a_process_and_the_file_says_how_many(folder: Folder) -> None:
    (folder.path / "config.yaml").write_text("Splitter:\n  ServiceArgs: {workers: 2}\n")

    folder.start_ready("actors.py:Splitter", "-f", "config.yaml", instances=2)

    rows = json.loads(folder.dynbus("ps", "--json").stdout)
    assert [row["state"] for row in rows] == ["serving", "serving"]
    assert len({row["address"] for row in rows}) == 2
    assert len(folder.workers()) == 2


@pytest.mark.parametrize(
    "in_process",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.nightly(
                "tests/actors/test_node_names.py::test_each_node_of_one_class_is_called_by_its_own_name"
            ),
        ),
    ],
)
def test_one_class_runs_as_two_nodes_with_settings_of_their_own(
    in_process: bool, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.path / "nodes.py").write_text(NODES)
    (folder.path / "config.yaml").write_text(NODE_SETTINGS)
    (folder.path / "more.yaml").write_text("decode: {lib_step: -2, lib_other: 1}")
    monkeypatch.setenv("DYNBUS_CONFIG", '{"decode": {"lib_other": false}}')
    words = ["nodes.py", "-f", "config.yaml", "-f", "more.yaml", "--decode.phase=decoded"]

    planned = json.loads(folder.dynbus_in_a_process("run", *words, "--dry-run", "--json").stdout)[
        "actors"
    ]
    folder.start_ready(*words, *(["--in-process"] if in_process else []), instances=4)
    answer = folder.dynbus("call", "demo.Frontend.complete", '"a"')
    instances = json.loads(folder.dynbus("ps", "--json").stdout)

    assert [(each["address"], each["class"], each["instances"]) for each in planned] == [
        ("demo.prefill", "nodes:Engine", 2),
        ("demo.decode", "nodes:Engine", 1),
        ("demo.Frontend", "nodes:Frontend", 1),
    ]
    components = sorted(each["component"] for each in instances)
    assert components == ["Frontend", "decode", "prefill", "prefill"]
    ids = {
        name: [each["instance_id"] for each in instances if each["component"] == name]
        for name in ("prefill", "decode")
    }
    assert answer.stdout in [
        f'"a, prefilled by {first}, decoded --step=-2 by {second}"\n'
        for first in ids["prefill"]
        for second in ids["decode"]
    ], answer.stderr


def test_in_process_serves_everything_in_one_process(folder: Folder) -> None:
    run = folder.start_ready("actors.py", "--in-process", instances=3)

    rows = json.loads(folder.dynbus("ps", "--json").stdout)

    assert sorted(row["component"] for row in rows) == ["Shouter", "Slow", "Splitter"]
    assert {row["address"].rpartition(":")[2] for row in rows} == {str(run.pid)}
    assert folder.workers() == []


@pytest.mark.nightly(
    "tests/test_docs.py::test_the_readme_runs_the_hello_example",
    "tests/actors/commands/test_plan.py::test_a_printed_plan_has_every_value_defaults_included",
)
def test_a_dry_run_prints_the_plan_and_starts_nothing(folder: Folder) -> None:
    ended = folder.dynbus_in_a_process(
        "run", "actors.py:Shouter", "--dry-run", "--json", "--Splitter.workers=3"
    )

    plan = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert [(actor["address"], actor["instances"]) for actor in plan["actors"]] == [
        ("demo.Splitter", 3),
        ("demo.Shouter", 1),
    ]
    assert plan["servers"] == [folder.url]
    assert not (folder.path / ".dynbus").exists()


def test_files_of_the_user_that_have_names_of_the_standard_library_do_no_harm(
    folder: Folder,
) -> None:
    (folder.path / "service").mkdir()
    (folder.path / "service" / "actors.py").write_text(ACTORS)
    (folder.path / "socket.py").write_text("raise RuntimeError('the wrong socket')")

    # As the installed command does: without the working directory on the path.
    folder.start("service/actors.py:Slow", python=("-P",))

    folder.wait_for(lambda: " is ready" in folder.output())


# Failing to start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        (),
        pytest.param(
            ("--in-process",),
            marks=pytest.mark.nightly(
                "tests/actors/test_serving.py::test_an_actor_whose_on_start_raises_ends_the_serving_and_stops_the_others",
                "tests/actors/test_serving.py::test_an_exception_of_the_users_code_is_shown_from_their_first_line_on",
            ),
        ),
    ],
    ids=["processes", "in process"],
)
def test_an_actor_whose_on_start_raises_ends_the_run_with_its_traceback_once(
    mode: tuple[str, ...], folder: Folder
) -> None:
    (folder.path / "fails.py").write_text(FAILS)

    ended = folder.dynbus_in_a_process("run", "fails.py", "--Fails.workers=2", *mode)

    assert ended.returncode == 5
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    told = ended.stderr[ended.stderr.index("Traceback (most recent call last)") :].splitlines()
    assert told == [
        "Traceback (most recent call last):",
        f'  File "{folder.path}/fails.py", line 6, in on_start',
        '    raise RuntimeError("the model is missing")',
        "RuntimeError: the model is missing",
        "dynbus: demo.Fails did not start: RuntimeError: the model is missing",
    ]
    assert folder.workers() == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("missing.py",), 3, "there is no file missing.py"),
        (
            ("actors.py", "--Spliter.x=1"),
            3,
            "no actor Spliter (did you mean Splitter?)",
        ),
        (("actors.py", "--Splitter.x=1"), 3, "has no argument 'x'"),
        (("actors.py", "--Splitter.x"), 2, "--Splitter.x has no value"),
        (("actors.py", "--separator=,"), 2, "name: --Actor.separator=VALUE"),
        (
            ("dynbus.llm:SmallWorker", "--SmallWorker.host_folder=kept"),
            3,
            "SmallWorker: host_folder: needs host_memory_mib and host_checksums",
        ),
        ((), 2, "Missing argument"),
        (("actors.py", "--health", "nowhere"), 3, "--health: 'nowhere' is not an address"),
        (("actors.py", "--health", "0.0.0.0:0"), 3, "or add --health-public"),
        (("actors.py", "--nats", "bla"), 3, "--nats = 'bla': write NATS URLs, nats://HOST:PORT"),
        (("actors.py:Slow", "--nats", "nats://192.0.2.1:1", "--fresh"), 3, "is not embedded"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_code(
    arguments: tuple[str, ...], code: int, text: str, folder: Folder
) -> None:
    ended = folder.dynbus("run", *arguments)

    assert ended.returncode == code, ended.stderr
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_file_that_raises_is_shown_with_the_users_frames_alone(folder: Folder) -> None:
    (folder.path / "broken.py").write_text("def load():\n    return 1 / 0\n\nload()\n")

    ended = folder.dynbus_in_a_process("run", "broken.py")

    assert ended.returncode == 3
    assert 'broken.py", line 2, in load' in ended.stderr
    assert "importlib" not in ended.stderr
    assert "loader.py" not in ended.stderr


def test_a_server_elsewhere_that_is_not_there_ends_the_run(folder: Folder) -> None:
    (folder.path / "config.yaml").write_text("bus: {connect_timeout: 1}\n")
    url = f"nats://127.0.0.1:{free_port()},nats://127.0.0.1:{free_port()}"

    ended = folder.dynbus_in_a_process("run", "actors.py:Slow", "-f", "config.yaml", "--nats", url)

    assert ended.returncode == 4
    assert "no NATS server can be reached" in ended.stderr


# Ending ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        (),
        pytest.param(
            ("--in-process",),
            marks=pytest.mark.nightly(
                "tests/actors/commands/test_interrupts.py::test_the_first_signal_drains_and_says_so",
                "tests/actors/test_instance.py::test_a_call_that_runs_is_finished_before_on_stop",
            ),
        ),
    ],
    ids=["processes", "in process"],
)
def test_ctrl_c_in_the_terminal_lets_calls_finish(mode: tuple[str, ...], folder: Folder) -> None:
    run = folder.start_ready("actors.py:Slow", *mode)
    call = folder.begin("call", "demo.Slow.work", "1.5")
    folder.wait_for_file("working")

    os.killpg(run.pid, signal.SIGINT)

    output, errors = call.communicate(timeout=PATIENCE)
    assert (output, errors) == ('"done"\n', "")
    assert folder.exit_of(run) == 0
    assert (folder.path / "stopped").exists()
    assert folder.processes() == []


@pytest.mark.nightly(
    "tests/scenarios/test_run.py::test_ctrl_c_in_the_terminal_lets_calls_finish",
    "tests/actors/commands/test_interrupts.py::test_the_first_signal_drains_and_says_so",
)
def test_sigterm_to_every_process_of_a_service_is_one_drain(folder: Folder) -> None:
    run = folder.start_ready("actors.py:Slow")
    call = folder.begin("call", "demo.Slow.work", "1.5")
    folder.wait_for_file("working")

    os.killpg(run.pid, signal.SIGTERM)

    assert call.communicate(timeout=PATIENCE)[0] == '"done"\n'
    assert folder.exit_of(run) == 0


@pytest.mark.parametrize(
    "mode",
    [
        (),
        pytest.param(
            ("--in-process",),
            marks=pytest.mark.nightly(
                "tests/actors/commands/test_interrupts.py::test_the_second_signal_stops_and_a_watchdog_ends_a_process_that_is_blocked"
            ),
        ),
    ],
    ids=["processes", "in process"],
)
def test_a_second_ctrl_c_stops_at_once_even_when_a_handler_blocks(
    mode: tuple[str, ...], folder: Folder
) -> None:
    run = folder.start_ready("actors.py:Slow", *mode)
    call = folder.begin("call", "demo.Slow.block", "600")
    folder.wait_for_file("blocking")
    os.killpg(run.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(1.0)

    os.killpg(run.pid, signal.SIGINT)

    assert folder.exit_of(run, 8.0) == 130
    folder.wait_for(lambda: folder.workers() == [], 3.0)
    call.kill()
    call.communicate(timeout=PATIENCE)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            (),
            marks=pytest.mark.nightly(
                "tests/actors/test_serving.py::test_the_last_word_cuts_an_on_stop_that_hangs_short"
            ),
        ),
        ("--in-process",),
    ],
    ids=["processes", "in process"],
)
def test_a_second_ctrl_c_cuts_an_on_stop_that_hangs_short(
    mode: tuple[str, ...], folder: Folder
) -> None:
    hang = 'Path("stopping").touch()\n        await asyncio.sleep(600)'
    (folder.path / "hangs.py").write_text(ACTORS.replace('Path("stopped").touch()', hang))
    run = folder.start_ready("hangs.py:Slow", *mode)
    os.killpg(run.pid, signal.SIGINT)
    folder.wait_for_file("stopping")

    os.killpg(run.pid, signal.SIGINT)

    assert folder.exit_of(run, 8.0) == 130
    assert "was cancelled after 0.5 s" in folder.output()
    assert "is stopped" in folder.output()
    assert folder.workers() == []


def test_nothing_is_left_when_the_parent_is_killed(folder: Folder) -> None:
    run = folder.start_ready("actors.py:Slow", "--Slow.workers=2", instances=2)
    call = folder.begin("call", "demo.Slow.block", "600")
    folder.wait_for_file("blocking")

    run.kill()

    folder.wait_for(lambda: folder.workers() == [], 6.0)
    call.kill()
    call.communicate(timeout=PATIENCE)
    folder.wait_for(lambda: folder.processes() == [], 6.0)


@pytest.mark.nightly(
    "tests/actors/test_supervisor.py::test_a_drain_while_children_still_load_leaves_none"
)
def test_ctrl_c_while_starting_ends_the_run_tidily(folder: Folder) -> None:
    slow = FAILS.replace('raise RuntimeError("the model is missing")', "await sleep(600)")
    (folder.path / "starts.py").write_text("from asyncio import sleep\n" + slow)
    run = folder.start("starts.py")
    folder.wait_for(lambda: " is ready" in folder.output())

    os.killpg(run.pid, signal.SIGINT)

    assert folder.exit_of(run) == 0
    assert folder.processes() == []


@pytest.mark.parametrize(
    "mode",
    [
        (),
        pytest.param(
            ("--in-process",),
            marks=pytest.mark.nightly(
                "tests/bus/test_instance_records.py::test_an_end_without_a_connection_waits_for_nothing"
            ),
        ),
    ],
    ids=["processes", "in process"],
)
def test_an_idle_application_whose_broker_is_gone_ends_within_seconds_over_all_its_levels(
    mode: tuple[str, ...], folder: Folder, own_server: RunningServer
) -> None:
    (folder.path / "levels.py").write_text(
        ACTORS
        + """
class Highest(Actor, namespace="demo"):
    shouter = depends(Shouter)

    @handler
    async def call(self) -> str:
        return ""
"""
    )
    run = folder.start_ready(
        *("levels.py:Highest", "--nats", own_server.url, "--log-format", "json", *mode), instances=3
    )
    # Those of three instances, and in processes of their own that by which operators reach the run.
    connections = 2 if mode else 7

    own_server.kill()
    # A server that is killed ends or resets, by what it had not read.
    folder.wait_for(lambda: folder.output().count("is lost: ") == connections)
    os.killpg(run.pid, signal.SIGTERM)

    assert folder.exit_of(run, 5.0) == 0
    assert folder.output().count("is stopped") == 3


LOADS = """
import asyncio, time
from pathlib import Path
from dynbus import Actor, handler

class Loads(Actor, namespace="demo"):
    async def on_start(self) -> None:
        Path("loading").touch()
        {load}

    @handler
    async def call(self) -> str:
        return ""
"""


@pytest.mark.parametrize(
    "mode",
    [
        (),
        pytest.param(
            ("--in-process",),
            marks=pytest.mark.nightly(
                "tests/actors/commands/test_interrupts.py::test_the_first_signal_drains_and_says_so",
                "tests/actors/test_leaving.py::test_threads_that_go_on_are_named",
            ),
        ),
    ],
    ids=["processes", "in process"],
)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(
            signal.SIGINT,
            marks=pytest.mark.nightly(
                "tests/actors/commands/test_interrupts.py::test_the_first_signal_drains_and_says_so",
                "tests/actors/test_leaving.py::test_threads_that_go_on_are_named",
            ),
        ),
    ],
)
def test_a_load_in_a_thread_is_left_behind_and_that_is_said(
    number: signal.Signals, mode: tuple[str, ...], folder: Folder
) -> None:
    (folder.path / "loads.py").write_text(
        LOADS.format(load="await asyncio.to_thread(time.sleep, 400)")
    )
    run = folder.start("loads.py", *mode)
    folder.wait_for_file("loading")

    os.killpg(run.pid, number)

    assert folder.exit_of(run, 8.0) == 0
    assert "abandoning threads that still run, since nothing can cancel them: " in folder.output()
    assert "calls that run" not in folder.output()
    assert "running calls" not in folder.output()
    assert folder.processes() == []


@pytest.mark.nightly(
    "tests/actors/test_supervisor.py::test_a_child_that_goes_on_for_longer_is_killed_and_named"
)
def test_a_start_that_blocks_its_loop_is_left_behind_and_that_is_said(folder: Folder) -> None:
    (folder.path / "loads.py").write_text(LOADS.format(load="time.sleep(400)"))
    run = folder.start("loads.py")
    folder.wait_for_file("loading")

    os.killpg(run.pid, signal.SIGTERM)

    assert folder.exit_of(run) == 0
    assert "the start of demo.Loads/1 blocks its event loop" in folder.output()
    assert folder.processes() == []


@pytest.mark.nightly(
    "tests/actors/test_leaving.py::test_threads_that_go_on_are_named",
    "tests/actors/test_leaving.py::test_a_process_that_does_not_end_is_ended_with_its_code",
)
def test_a_thread_that_outlives_its_instance_does_not_keep_the_process(folder: Folder) -> None:
    thread = "import threading; threading.Thread(target=time.sleep, args=(400,)).start()"
    (folder.path / "loads.py").write_text(LOADS.format(load=thread))
    run = folder.start_ready("loads.py", "--in-process")

    os.killpg(run.pid, signal.SIGTERM)

    assert folder.exit_of(run, 8.0) == 0
    assert "abandoning threads that still run" in folder.output()


# Restarting --------------------------------------------------------------------------------


def test_an_instance_that_is_killed_is_started_again(folder: Folder) -> None:
    folder.start_ready("actors.py:Slow")
    (worker,) = folder.workers()

    worker.kill()

    folder.wait_for(lambda: folder.output().count(" is ready") == 2)
    (successor,) = folder.workers()
    assert successor.pid != worker.pid
    assert "demo.Slow/1 ended: killed by SIGKILL; restarting in" in folder.output()


DIES_AGAIN = ACTORS.replace(
    "async def on_stop(self) -> None:",
    """async def on_start(self) -> None:
        if Path("once").exists():
            raise RuntimeError("the disk is full")
        Path("once").touch()

    async def on_stop(self) -> None:""",
)


@pytest.mark.nightly(
    "tests/actors/test_supervisor.py::test_a_child_that_keeps_crashing_is_started_for_ever_and_named_meanwhile"
)
def test_an_instance_that_keeps_dying_is_named_and_the_others_go_on(folder: Folder) -> None:
    (folder.path / "dies.py").write_text(DIES_AGAIN)
    port = free_port()
    run = folder.start_ready(
        *("dies.py:Slow", "dies.py:Splitter", "--health", f"127.0.0.1:{port}"), instances=2
    )
    folder.wait_for(lambda: health(port, "/ready")[0] == 200)
    (slow,) = [each for each in folder.workers() if "demo.Slow/1" in " ".join(each.cmdline())]

    slow.kill()

    folder.wait_for(lambda: "demo.Slow/1 ended (4 times in a row): " in folder.output())
    status, body = health(port, "/ready")
    assert (status, list(body["problems"])) == (503, ["demo.Slow/1"])
    assert "RuntimeError: the disk is full" in body["problems"]["demo.Slow/1"]
    assert health(port, "/live")[0] == 200
    assert folder.dynbus("call", "demo.Splitter.split", '"a"').stdout == '"a"\n'
    (folder.path / "once").unlink()
    folder.wait_for(lambda: health(port, "/ready")[0] == 200)
    assert run.poll() is None


def test_a_handler_that_calls_sys_exit_is_named_and_its_worker_ends_with_that_code(
    folder: Folder,
) -> None:
    (folder.path / "leaves.py").write_text(LEAVES)
    run = folder.start_ready("leaves.py", "--Leaves.ServiceArgs.on_crash=escalate")

    folder.dynbus("call", "demo.Leaves.leave")

    assert folder.exit_of(run) == 6
    assert "demo.Leaves.leave raised SystemExit(9) in request " in folder.output()
    last = folder.output().splitlines()[-1]
    assert last == "dynbus: demo.Leaves/1 ended: exit code 9; its on_crash is escalate"


@pytest.mark.nightly(
    "tests/actors/test_supervisor.py::test_a_child_whose_end_escalates_ends_the_run_with_the_reason"
)
def test_an_instance_whose_end_escalates_ends_the_run(folder: Folder) -> None:
    run = folder.start_ready("actors.py:Slow", "--Slow.ServiceArgs.on_crash=escalate")

    folder.workers()[0].kill()

    assert folder.exit_of(run) == 6
    last = folder.output().splitlines()[-1]
    assert last == "dynbus: demo.Slow/1 ended: killed by SIGKILL; its on_crash is escalate"


BREAKS = """
from pathlib import Path
from dynbus import Actor, handler

class Engine(Actor, namespace="demo"):
    async def on_start(self) -> None:
        if Path("broken").exists():
            raise RuntimeError("still no engine")

    async def on_stop(self) -> None:
        Path("stopped").touch()

    @handler
    async def generate(self) -> str:
        Path("broken").touch()
        self.report_broken("the engine died")
        return "never"

class Other(Actor, namespace="demo"):
    @handler
    async def call(self) -> str:
        return "well"
"""


@pytest.mark.parametrize(
    "mode",
    [
        (),
        pytest.param(
            ("--in-process",),
            marks=pytest.mark.nightly(
                "tests/actors/test_instance.py::test_one_that_reports_that_it_is_broken_is_withdrawn_at_once_and_its_calls_may_be_retried",
                "tests/actors/test_supervisor.py::test_a_child_that_keeps_crashing_is_started_for_ever_and_named_meanwhile",
            ),
        ),
    ],
    ids=["processes", "in process"],
)
def test_an_actor_that_reports_that_it_is_broken_is_started_again_and_named_meanwhile(
    mode: tuple[str, ...], folder: Folder
) -> None:
    (folder.path / "breaks.py").write_text(BREAKS)
    port = free_port()
    run = folder.start_ready(
        *("breaks.py", "--health", f"127.0.0.1:{port}", "--log-format", "json", *mode), instances=2
    )
    folder.wait_for(lambda: "health at" in folder.output())

    ended = folder.dynbus("call", "demo.Engine.generate")

    assert ended.returncode == 22, ended.stderr
    assert "the instance is broken: the engine died" in ended.stderr
    folder.wait_for(lambda: "still no engine" in str(health(port, "/ready")[1]["problems"]))
    assert health(port, "/ready")[0] == 503
    assert health(port, "/live")[0] == 200
    assert (folder.path / "stopped").exists()
    assert folder.dynbus("call", "demo.Other.call").stdout == '"well"\n'
    (folder.path / "broken").unlink()
    folder.wait_for(lambda: health(port, "/ready")[0] == 200)
    os.killpg(run.pid, signal.SIGTERM)
    assert folder.exit_of(run) == 0


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            (),
            marks=pytest.mark.nightly(
                "tests/actors/test_supervisor.py::test_a_child_whose_end_escalates_ends_the_run_with_the_reason"
            ),
        ),
        ("--in-process",),
    ],
    ids=["processes", "in process"],
)
def test_an_actor_that_is_broken_and_escalates_ends_the_run_with_the_reason(
    mode: tuple[str, ...], folder: Folder
) -> None:
    (folder.path / "breaks.py").write_text(BREAKS)
    run = folder.start_ready(
        "breaks.py", "--Engine.ServiceArgs.on_crash=escalate", *mode, instances=2
    )

    folder.dynbus("call", "demo.Engine.generate")

    assert folder.exit_of(run) == 6
    last = folder.output().splitlines()[-1]
    assert last.startswith("dynbus: demo.Engine")
    assert "is broken: the engine died" in last


# Reloading ---------------------------------------------------------------------------------


def test_a_reloading_run_that_begins_with_a_mistake_says_what_it_waits_for(folder: Folder) -> None:
    (folder.path / "actors.py").write_text("def broken(:")
    folder.start("actors.py:Splitter", "--reload")
    folder.wait_for(lambda: "nothing is served; waiting for a file to change" in folder.output())

    (folder.path / "actors.py").write_text("def still_broken(:")
    folder.wait_for(lambda: "cannot be loaded: nothing is served" in folder.output())
    (folder.path / "actors.py").write_text(ACTORS)

    folder.wait_for(lambda: " is ready" in folder.output())


def test_nothing_is_left_when_a_reloading_run_is_killed(folder: Folder) -> None:
    run = folder.start_ready("actors.py:Splitter", "--reload")

    run.kill()

    folder.wait_for(lambda: folder.processes() == [], 12.0)


@pytest.mark.nightly(
    "tests/scenarios/test_run.py::test_nothing_is_left_when_the_parent_is_killed",
    "tests/scenarios/test_run.py::test_nothing_is_left_when_a_reloading_run_is_killed",
)
def test_the_run_of_a_reloading_run_that_is_killed_does_not_wait_for_its_calls(
    folder: Folder,
) -> None:
    run = folder.start_ready("actors.py:Slow", "--reload")
    call = folder.begin("call", "demo.Slow.work", "600")
    folder.wait_for_file("working")

    run.kill()

    folder.wait_for(lambda: folder.workers() == [], 8.0)
    call.kill()
    call.communicate(timeout=PATIENCE)


# Health ------------------------------------------------------------------------------------


def health(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(
            ["--in-process"],
            marks=pytest.mark.nightly(
                "tests/bus/test_logs.py::test_every_line_names_the_actor_the_instance_and_the_process"
            ),
        ),
    ],
)
def test_log_lines_outside_of_calls_name_actor_instance_and_process(
    options: list[str], folder: Folder
) -> None:
    run = folder.start_ready("actors.py:Shouter", *options, "--log-format", "json", instances=2)

    lines = [json.loads(line) for line in folder.output().splitlines() if line[:1] == "{"]

    ready = {line["actor"]: line for line in lines if line["event"].endswith(" is ready")}
    workers = {each.pid for each in folder.workers()} or {run.pid}
    assert set(ready) == {"demo.Shouter", "demo.Splitter"}
    for actor, line in ready.items():
        assert line["event"] == f"{actor}@{line['instance']} is ready"
    assert {line["process"] for line in ready.values()} == workers


STARTS_WHEN_LET = ACTORS.replace(
    "async def on_stop(self) -> None:",
    """async def on_start(self) -> None:
        while Path("held").exists():
            await asyncio.sleep(0.02)

    async def on_stop(self) -> None:""",
)


def test_the_health_of_all_processes_is_served_by_the_parent(folder: Folder) -> None:
    (folder.path / "held_up.py").write_text(STARTS_WHEN_LET)
    port = free_port()
    folder.start_ready("held_up.py:Slow", "--health", f"127.0.0.1:{port}")
    folder.wait_for(lambda: health(port, "/ready")[0] == 200)
    assert f"health at http://127.0.0.1:{port}" in folder.output()
    (worker,) = folder.workers()

    (folder.path / "held").touch()
    worker.kill()

    folder.wait_for(lambda: health(port, "/ready")[0] == 503)
    assert health(port, "/live")[0] == 200
    (folder.path / "held").unlink()
    folder.wait_for(lambda: health(port, "/ready")[0] == 200)


@pytest.mark.nightly(
    "tests/bus/test_health.py::test_on_the_control_thread_it_answers_while_the_main_loop_is_blocked"
)
def test_health_answers_while_a_handler_blocks_the_only_process(folder: Folder) -> None:
    port = free_port()
    folder.start_ready("actors.py:Slow", "--in-process", "--health", f"127.0.0.1:{port}")
    call = folder.begin("call", "demo.Slow.block", "3")
    folder.wait_for_file("blocking")

    watch = Stopwatch()
    answer = health(port, "/live")
    took = watch.seconds()

    assert answer == (200, {"status": "ok", "problems": {}})
    assert took < 1.5
    assert call.communicate(timeout=PATIENCE)[0] == '"done"\n'


COUNTING = """
from prometheus_client import Counter
from dynbus import Actor, handler

jobs = Counter("jobs", "Jobs of the user's own counting.")

class Counting(Actor, namespace="demo"):
    @handler
    async def work(self) -> int:
        jobs.inc()
        return 1
"""


def metrics_page(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


@pytest.mark.nightly(
    "tests/actors/commands/test_aggregated_metrics.py::test_counters_of_an_actor_s_own_make_one_family",
    "tests/actors/commands/test_aggregated_metrics.py::test_process_metrics_of_the_workers_stand_beside_those_of_the_parent",
    "tests/bus/test_telemetry.py::test_however_many_instances_come_and_go_an_endpoint_keeps_its_labels",
)
def test_no_family_stands_twice_on_the_page_and_no_instance_has_series_of_its_own(
    folder: Folder,
) -> None:
    pytest.importorskip("opentelemetry.exporter.prometheus")
    (folder.path / "counting.py").write_text(COUNTING)
    port = free_port()
    folder.start_ready("counting.py", "--health", f"127.0.0.1:{port}")
    folder.dynbus("call", "demo.Counting.work")
    (instance,) = [row["instance_id"] for row in json.loads(folder.dynbus("ps", "--json").stdout)]

    page = metrics_page(port)

    lines = page.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    own = [line for line in lines if line.startswith("jobs_total")]
    assert len(types) == len(set(types))
    assert len(series) == len(set(series))
    assert own == ['jobs_total{dynbus_worker="demo.Counting/1"} 1.0']
    assert sum(line.startswith("process_cpu_seconds_total") for line in lines) == 2
    assert 'process_cpu_seconds_total{dynbus_worker="demo.Counting/1"}' in page
    assert instance not in page


def test_metrics_of_several_processes_come_from_one_page(folder: Folder) -> None:
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = free_port()
    folder.start_ready(
        "actors.py:Splitter",
        "--Splitter.workers=2",
        "--health",
        f"127.0.0.1:{port}",
        instances=2,
    )
    instances = [row["instance_id"] for row in json.loads(folder.dynbus("ps", "--json").stdout)]
    for instance in instances:
        folder.dynbus("call", "demo.Splitter.split", '"a"', "--instance", instance)

    page = metrics_page(port)

    calls = [line for line in page.splitlines() if line.startswith("dynbus_calls_total{")]
    assert [call.partition('dynbus_worker="')[2].partition('"')[0] for call in calls] == [
        "demo.Splitter/1",
        "demo.Splitter/2",
    ]
