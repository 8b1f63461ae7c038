"""`dynbus call`, `ps`, `doctor` and `bench` against actors that run, as a shell uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conditions import PATIENCE

from dynbus.bus.nats.server_process import free_port

from .project import Folder, project_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A project whose actors run while these tests call them."""
    with project_folder(tmp_path_factory.mktemp("project")) as project:
        project.start_ready("actors.py", instances=3)
        yield project


# call --------------------------------------------------------------------------------------


def test_a_result_is_printed_as_json(folder: Folder) -> None:
    ended = folder.dynbus_in_a_process("call", "demo.Slow.work", "0.01")

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, '"done"\n', "")


def test_what_a_raw_call_brings_is_written_as_it_is(folder: Folder) -> None:
    ended = folder.dynbus("call", "demo.Splitter.split", '"a b"', "--raw")

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, '"a""b"', "")


def test_a_stream_is_printed_line_by_line_as_it_comes(folder: Folder) -> None:
    call = folder.begin("call", "demo.Slow.tick")
    assert call.stdout is not None

    lines = [call.stdout.readline() for _ in range(3)]

    assert lines == ["0\n", "1\n", "2\n"]
    assert call.poll() is None
    call.send_signal(signal.SIGTERM)
    call.communicate(timeout=PATIENCE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_call_on_the_far_side(
    number: signal.Signals, code: int, folder: Folder
) -> None:
    (folder.path / "cancelled").unlink(missing_ok=True)
    call = folder.begin("call", "demo.Slow.tick")
    assert call.stdout is not None
    call.stdout.readline()

    call.send_signal(number)

    _, errors = call.communicate(timeout=PATIENCE)
    assert call.returncode == code
    assert "Traceback" not in errors
    folder.wait_for_file("cancelled")


def test_a_reader_that_leaves_cancels_the_call(folder: Folder) -> None:
    (folder.path / "cancelled").unlink(missing_ok=True)
    command = f"'{sys.executable}' -m dynbus call demo.Slow.tick | head -2; echo ${{PIPESTATUS[0]}}"

    ended = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=folder.environment(),
        timeout=120,
        check=False,
    )

    assert (ended.stdout, ended.stderr) == ("0\n1\n141\n", "")
    folder.wait_for_file("cancelled")


@pytest.mark.nightly(
    "tests/actors/commands/test_call.py::test_a_request_is_read_from_standard_input"
)
def test_a_request_can_come_from_standard_input(folder: Folder) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dynbus", "call", "demo.Splitter.split", "-", "--json"],
        input='"a b"',
        capture_output=True,
        text=True,
        env=folder.environment(),
        timeout=120,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, '"a"\n"b"\n')


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("demo.Splitter.fail", '"why"'), 10, "dynbus: HandlerError: ValueError: why (at demo."),
        (("demo.Nobody.call", '"a"'), 11, "dynbus: NoInstances: no instance serves"),
        (("demo.Slow.work", "9", "--timeout", "0.2"), 14, "dynbus: DeadlineExceeded: "),
        (("demo.Slow.work", '"x"'), 16, "dynbus: InvalidRequest: "),
        (("demo.Slow.work", "1", "--instance", "nobody"), 12, "dynbus: Unavailable: "),
        (("demo.Slow", "1"), 2, "is not an endpoint"),
        (("demo.Slow.work", "{"), 2, "it is not JSON"),
        (("demo.Slow.work", "[" * 100_000), 2, "it is not JSON"),
        (("demo.Slow.work", "1", "--metadata", "x"), 2, "write KEY=VALUE"),
        (("demo.Slow.work", "1", "--timeout", "0"), 2, "--timeout"),
        (("demo.Slow.work", "1", "--instance", "a b"), 3, "is not a valid name"),
    ],
)
def test_a_failed_call_ends_with_one_line_and_the_code_of_its_kind(
    arguments: tuple[str, ...], code: int, text: str, folder: Folder
) -> None:
    ended = folder.dynbus("call", *arguments)

    assert ended.returncode == code, ended.stderr
    assert text in ended.stderr.splitlines()[-1]
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


@pytest.mark.nightly(
    "tests/actors/commands/test_calling.py::test_an_error_is_one_object_for_programs"
)
def test_with_json_an_error_is_one_object(folder: Folder) -> None:
    ended = folder.dynbus("call", "demo.Splitter.fail", '"why"', "--json")

    error = json.loads(ended.stderr)
    assert error["error"] == "HandlerError"
    assert error["message"] == "ValueError: why"
    assert error["hop"].startswith("demo.Splitter.fail@")


@pytest.mark.nightly(
    "tests/actors/test_clients.py::test_a_call_that_waits_goes_to_the_instance_that_appears",
    "tests/actors/commands/test_call.py::test_every_option_reaches_the_call",
)
def test_a_call_can_wait_for_its_first_instance(folder: Folder, tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "from dynbus import Actor, handler\n"
        'class Late(Actor, namespace="demo"):\n'
        "    @handler\n"
        "    async def call(self) -> str:\n"
        '        return "here"\n'
    )
    call = folder.begin("call", "demo.Late.call", "--wait", str(PATIENCE))

    run = folder.start(str(late))

    assert call.communicate(timeout=PATIENCE)[0] == '"here"\n'
    os.killpg(run.pid, signal.SIGINT)
    assert folder.exit_of(run) == 0


@pytest.mark.nightly(
    "tests/actors/commands/test_calling.py::test_a_server_that_is_not_there_is_named_with_the_remedy"
)
def test_without_a_server_a_call_ends_with_no_server(folder: Folder) -> None:
    ended = folder.dynbus("call", "demo.A.b", "1", "--nats", f"nats://127.0.0.1:{free_port()}")

    assert ended.returncode == 4
    assert ended.stderr.startswith("dynbus: Unavailable: no NATS server can be reached")


# cancel ------------------------------------------------------------------------------------


def test_cancel_ends_a_call_of_somebody_else_by_its_id(folder: Folder) -> None:
    call = folder.begin("call", "demo.Slow.tick", "--request-id", "to-be-cancelled")
    assert call.stdout is not None
    call.stdout.readline()

    ended = folder.dynbus("cancel", "to-be-cancelled", "--namespace", "demo", "--json")

    [told] = json.loads(ended.stdout)["requests"]
    _, errors = call.communicate(timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (told["found"], told["calls"], len(told["instances"])) == (True, 1, 1)
    assert call.returncode == 15
    assert "an operator cancelled the requests of this id" in errors


@pytest.mark.nightly(
    "tests/bus/test_cancellation.py::test_what_was_ended_is_told_request_by_request"
)
def test_cancel_says_at_which_instance_a_call_ended_and_so_does_the_log(folder: Folder) -> None:
    call = folder.begin("call", "demo.Slow.tick", "--request-id", "to-be-named")
    assert call.stdout is not None
    call.stdout.readline()

    listed = folder.dynbus("ps", "--requests", "--json")
    table = folder.dynbus("ps", "--requests", "--namespace", "demo")
    ended = folder.dynbus("cancel", "to-be-named", "--namespace", "demo")

    call.communicate(timeout=PATIENCE)
    assert re.fullmatch(r"to-be-named: cancelled 1 call at demo\.Slow@[0-9a-f]+\n", ended.stdout)
    line = "an operator cancelled requests in demo, 1 calls: to-be-named"
    folder.wait_for(lambda: line in folder.output())
    # A handler whose caller left has a second to end: those of other tests may be listed, too.
    [told] = [each for each in json.loads(listed.stdout) if each["request_id"] == "to-be-named"]
    assert (told["endpoint"], told["state"]) == ("tick", "runs")
    assert re.search(r"(?m)^to-be-named +demo\.Slow\.tick +[0-9a-f]+ +runs +\d+s *$", table.stdout)


def test_where_no_request_runs_or_waits_ps_says_so(folder: Folder) -> None:
    def is_said() -> bool:
        listed = folder.dynbus("ps", "--requests")
        return (listed.stdout, listed.stderr) == ("", "no request runs or waits\n")

    # Those of other tests may still be ending.
    folder.wait_for(is_said)


def test_cancel_says_what_it_did_not_find(folder: Folder) -> None:
    unknown = folder.dynbus("cancel", "nobody's")
    elsewhere = folder.dynbus("cancel", "nobody's", "--namespace", "other")
    malformed = folder.dynbus("cancel", "ä")

    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "processes heard it, and nothing of it runs or waits" in unknown.stderr
    assert (elsewhere.returncode, elsewhere.stdout) == (1, "")
    assert "nobody heard it; is the namespace right?" in elsewhere.stderr
    assert malformed.returncode == 2
    assert "is no request id" in malformed.stderr


# ps, doctor, bench -------------------------------------------------------------------------


def test_ps_shows_every_instance_with_its_load(folder: Folder) -> None:
    (folder.path / "working").unlink(missing_ok=True)
    call = folder.begin("call", "demo.Slow.work", "600")
    folder.wait_for_file("working")

    rows: dict[str, Any] = {}

    def all_serve_and_one_runs() -> bool:
        listed = json.loads(folder.dynbus("ps", "--json").stdout)
        rows.update({row["component"]: row for row in listed})
        states = {row["state"] for row in listed}
        return states == {"serving"} and rows["Slow"]["running"] == 1

    # Calls that other tests have cancelled may still be ending.
    folder.wait_for(all_serve_and_one_runs)

    assert sorted(rows) == ["Shouter", "Slow", "Splitter"]
    assert rows["Slow"]["waiting"] == 0
    assert 0 < rows["Splitter"]["age"] < 600
    assert sorted(rows["Splitter"]["endpoints"]) == ["fail", "split"]
    call.send_signal(signal.SIGINT)
    call.communicate(timeout=PATIENCE)


@pytest.mark.nightly(
    "tests/bus/commands/test_terminal.py::test_a_piped_table_is_plain_text_with_nothing_cut_off"
)
def test_ps_prints_a_plain_table_when_piped(folder: Folder) -> None:
    ended = folder.dynbus("ps", "--namespace", "demo")

    head, *rows = ended.stdout.splitlines()
    assert head.split() == [
        "COMPONENT",
        "INSTANCE",
        "STATE",
        "AGE",
        "LOAD",
        "ENDPOINTS",
        "ADDRESS",
    ]
    assert [row.split()[0] for row in rows] == ["demo.Shouter", "demo.Slow", "demo.Splitter"]
    assert "\x1b" not in ended.stdout


def test_ps_of_another_namespace_is_empty(folder: Folder) -> None:
    ended = folder.dynbus("ps", "--namespace", "other")

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "no instance in other\n")


@pytest.mark.nightly(
    "tests/bus/commands/test_ps.py::test_a_record_without_an_answering_instance_is_silent_and_its_load_unknown"
)
def test_ps_shows_a_frozen_instance_as_silent(folder: Folder) -> None:
    rows = json.loads(folder.dynbus("ps", "--json").stdout)
    (address,) = [row["address"] for row in rows if row["component"] == "Shouter"]
    process = psutil.Process(int(address.rpartition(":")[2]))
    process.suspend()

    def states() -> dict[str, str]:
        rows = json.loads(folder.dynbus("ps", "--json").stdout)
        return {row["component"]: row["state"] for row in rows}

    try:
        # On a busy machine others may be silent, too, for a moment.
        expected = {"Shouter": "silent", "Slow": "serving", "Splitter": "serving"}
        folder.wait_for(lambda: states() == expected)
    finally:
        process.resume()


@pytest.mark.nightly(
    "tests/bus/commands/test_doctor.py::test_a_fit_server_passes_every_check_and_nothing_is_left_on_it"
)
def test_doctor_finds_nothing_wrong_with_the_embedded_server(folder: Folder) -> None:
    ended = folder.dynbus("doctor", "--json")

    checks = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert [check for check in checks if check["status"] == "fail"] == []
    bucket = next(check for check in checks if check["name"] == "instances bucket")
    assert bucket["found"] == "as dynbus makes it"


@pytest.mark.nightly(
    "tests/actors/commands/test_bench.py::test_a_stream_has_as_many_tokens_as_were_asked_for",
    "tests/actors/commands/test_bench.py::test_every_figure_has_a_name_and_a_text_of_its_own",
)
def test_bench_measures_the_users_server_and_leaves_nothing(folder: Folder) -> None:
    before = {process.pid for process in folder.processes()}

    ended = folder.dynbus("lab", "bench", "--duration", "0.2", "--json")

    figures = json.loads(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert list(figures) == [
        "round_trip_us",
        "unary_p50_us",
        "unary_p99_us",
        "unary_per_second",
        "items_per_second",
        "items_per_second_64",
    ]
    assert all(value > 0 for value in figures.values())
    assert figures["unary_p50_us"] <= figures["unary_p99_us"]
    assert {process.pid for process in folder.processes()} == before
