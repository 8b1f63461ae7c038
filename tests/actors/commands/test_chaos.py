"""`dynbus lab chaos` refuses what it cannot do before it starts anything, and tells its finds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from dynbus.actors.chaos.checker import Promise, Spread, Violation
from dynbus.actors.chaos.report import Report, Resources, Sample
from dynbus.actors.chaos.schedule import Kind
from dynbus.actors.chaos.servers import ServerHoldings
from dynbus.actors.chaos.trial import TrialOptions
from dynbus.actors.commands.lab import chaos as command
from dynbus.bus.errors import ConfigError

KEPT = Report(
    held=True,
    interrupted=False,
    seed=7,
    seconds=60.0,
    kinds=["kill"],
    pauses=(1.0, 2.0),
    servers=1,
    instances={"demo.Shouter": 2},
    callers=16,
    load=["demo.Shouter.shout: 2 items; may not fail"],
    carried_out={"kill": 3},
    skipped={"kill": 1},
    calls=1234,
    items=2468,
    ends={"well": 1234},
    stalls={"kill": Spread(2, 0.5, 1.0, 1.0, {"0.5": 1, "1": 1})},
    unexplained=None,
    longest=[],
    whole_after=0.4,
    broken={},
    violations=[],
    before=Sample(0.0, Resources(50.0, 10, 20), ServerHoldings(6, 60, 1, 6, 3000)),
    after=Sample(62.0, Resources(51.0, 10, 20), ServerHoldings(6, 60, 1, 9, 4000)),
    samples=[],
    steps=[],
)
BROKEN = msgspec.structs.replace(
    KEPT,
    held=False,
    broken={Promise.DOUBLED.value: 1},
    violations=[Violation(Promise.DOUBLED, "call 3", "item 2 is b'[red]'")],
)


class Asked:
    """Stands for the run: what it was asked for, and what it finds."""

    def __init__(self) -> None:
        self.options: list[TrialOptions] = []
        self.finds = KEPT

    async def run_trial(self, options: TrialOptions, interrupted: asyncio.Event) -> Report:
        self.options.append(options)
        return self.finds


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(command, "run_trial", asked.run_trial)
    return asked


def chaos(*arguments: str) -> Result:
    return CliRunner().invoke(command.chaos, arguments)


def test_without_a_target_echoes_are_served_and_every_fault_comes_but_that_of_a_cluster(
    asked: Asked,
) -> None:
    result = chaos("--seed", "7", "--minutes", "2")

    (options,) = asked.options
    assert result.exit_code == 0
    assert (options.graph, options.seed, options.seconds) == (None, 7, 120.0)
    assert set(options.kinds) == set(Kind) - {Kind.LEADER}


def test_a_seed_that_was_drawn_is_told_so_that_the_run_can_be_repeated(asked: Asked) -> None:
    result = chaos()

    assert f"--seed {asked.options[0].seed}:" in result.output


def test_a_graph_is_asked_for_as_dynbus_run_takes_it(asked: Asked) -> None:
    chaos("a.py", "-f", "a.yaml", "--A.x=1", "--call", 'demo.A.f={"n": 1}', "--call", "demo.A.g")

    (options,) = asked.options
    assert options.graph is not None
    assert (options.graph.targets, options.graph.config_files) == (["a.py"], ["a.yaml"])
    assert [option.key for option in options.graph.options] == ["x"]
    assert [(str(name), data) for name, data in options.calls] == [
        ("demo.A.f", b'{"n": 1}'),
        ("demo.A.g", None),
    ]


def test_a_promise_that_was_not_kept_is_told_and_fails_the_command(
    asked: Asked, tmp_path: Path
) -> None:
    asked.finds = BROKEN

    result = chaos("--json", str(tmp_path / "found.json"))

    assert result.exit_code == 1
    assert "an item came twice: item 2 is b'[red]'" in " ".join(result.output.split())
    assert json.loads((tmp_path / "found.json").read_text()) == json.loads(
        msgspec.json.encode(BROKEN)
    )


def test_what_was_found_until_ctrl_c_is_told_with_the_code_of_ctrl_c(asked: Asked) -> None:
    asked.finds = msgspec.structs.replace(KEPT, interrupted=True)

    assert chaos().exit_code == 130


def test_json_on_the_output_is_all_that_is_there(asked: Asked) -> None:
    result = chaos("--json", "-")

    assert json.loads(result.stdout)["calls"] == 1234


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kinds", "frost"], "there is no fault 'frost'"),
        (["--kinds", "leader"], "leader needs a cluster: add --servers 3"),
        (["--pause", "0"], "'0' is no pause between two faults"),
        (["--call", "demo.A.f"], "--call and --strict are for a TARGET"),
        (["--strict"], "--call and --strict are for a TARGET"),
        (["a.py", "--call", "demo.A.f={"], "--call demo.A.f: the request is not JSON"),
        (["a.py", "--call", "demo"], "'demo'"),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file: No such file"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    asked: Asked, arguments: list[str], told: str
) -> None:
    result = chaos(*arguments)

    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)
    assert asked.options == []


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["-f", "a.yaml"], ["--A.x=1"]])
def test_wrong_usage_is_refused(asked: Asked, arguments: list[str]) -> None:
    assert (chaos(*arguments).exit_code, asked.options) == (2, [])
