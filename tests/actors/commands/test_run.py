"""The command line of `dynbus run` becomes options, and what does not fit is named."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.actors.commands.options import run_options

from dynbus.actors.commands import run as running
from dynbus.actors.commands.options import RunOptions
from dynbus.actors.commands.run import run
from dynbus.actors.running.configuration import NodeOption
from dynbus.bus import exit_codes


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """The options that reach the run, instead of the run."""
    seen: list[RunOptions] = []

    def execute(options: RunOptions) -> int:
        seen.append(options)
        return exit_codes.ESCALATED

    monkeypatch.setattr(running, "execute", execute)
    return seen


def invoke(*words: str) -> Result:
    return CliRunner().invoke(run, words)


def test_without_options_everything_has_its_default(given: list[RunOptions]) -> None:
    result = invoke("actors.py")

    (options,) = given
    assert result.exit_code == exit_codes.ESCALATED
    assert options == RunOptions(
        targets=("actors.py",),
        config_files=(),
        nats=None,
        namespace=None,
        in_process=False,
        reload=False,
        fresh=False,
        dry_run=False,
        graph=None,
        as_json=False,
        log_format=None,
        log_level="info",
        otlp_endpoint=None,
        health=None,
        health_public=False,
        health_tls_cert=None,
        health_tls_key=None,
        health_tls_client_ca=None,
        node_options=[],
    )


def test_options_of_actors_may_stand_anywhere(given: list[RunOptions]) -> None:
    words = ["--A.b=c", "actors.py", "--nats", "nats://h:1", "--A.d", "--e", "other.py", "--reload"]

    invoke(*words)

    (options,) = given
    assert options.node_options == [NodeOption("A", "b", "c"), NodeOption("A", "d", "--e")]
    assert options.targets == ("actors.py", "other.py")
    assert (options.nats, options.reload) == ("nats://h:1", True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("actors.py", "--A.b"), "--A.b has no value: write --A.b=VALUE"),
        ((), "Missing argument"),
        (("actors.py", "--log-level", "loud"), "'--log-level': 'loud' is not one of"),
        (("actors.py", "--reloed"), "--reloed"),
    ],
)
def test_a_wrong_command_line_is_refused_as_wrong_usage(
    words: tuple[str, ...], text: str, given: list[Any]
) -> None:
    result = invoke(*words)

    assert (result.exit_code, given) == (exit_codes.USAGE, [])
    assert text in result.output


def test_help_teaches_what_a_target_is_and_where_values_come_from() -> None:
    text = invoke("--help").output

    assert "[--Actor.ARGUMENT=VALUE]... TARGET..." in text
    assert "actors.py:Shouter" in text
    assert "DYNBUS_Splitter__separator" in text
    assert "--Splitter.workers=0" in text
    assert "5 an actor did not start" in text


def test_a_person_sees_that_a_run_begins_where_the_log_has_warnings_alone(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run_nothing(options: RunOptions) -> tuple[None, int]:
        return None, exit_codes.OK

    def configure_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(running, "_run_in_children", run_nothing)
    monkeypatch.setattr(running, "configure_logging", configure_nothing)
    caplog.set_level("WARNING", logger="dynbus")
    options = run_options(dry_run=False, log_level="warning")

    running.execute(options)
    to_a_file = capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    running.execute(options)
    to_a_person = capsys.readouterr().err

    assert to_a_file == ""
    assert to_a_person == "dynbus: starting the actors of planned_actors.py\n"
