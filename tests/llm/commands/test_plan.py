"""`dynbus plan` says how many engines a trace takes, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from tests.llm.profiles import made_profile

from dynbus import ConfigError
from dynbus.llm.commands.plan import plan
from dynbus.llm.commands.planning import parse_objective
from dynbus.llm.mock.profile import write_profile
from dynbus.llm.planning import Target
from dynbus.llm.profiling import TrafficShape, draw_traffic


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace of 60 requests, one a second, and a profile."""
    folder = tmp_path_factory.mktemp("plan")
    write_profile(folder / "p.json", made_profile(held_out=-0.1))
    drawn = draw_traffic(TrafficShape(60.0, 12.0, 500), 60, 16, seed=1)
    lines = [
        {
            "timestamp": 1000 * one.arrival,
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": one.hash_ids.tolist(),
            "block_size": 16,
        }
        for one in drawn.requests
    ]
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def planned(folder: Path, *arguments: str, objective: str = "ttft_p95=40ms,itl_p95=20ms") -> Result:
    given = ["--trace", str(folder / "t.jsonl"), "--profile", str(folder / "p.json")]
    return CliRunner().invoke(plan, [*given, "--objective", objective, "--speed", "60", *arguments])


def test_programs_get_the_engines_and_how_sure_they_are(folder: Path) -> None:
    result = planned(folder, "--policy", "kv,round_robin", "--layout", "together,apart", "--json")

    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)
    assert len(plans) == 4
    assert [one["cost"] for one in plans] == sorted(one["cost"] for one in plans)
    for one in plans:
        assert one["least"] <= one["engines"] <= one["most"]
        assert [each["name"] for each in one["objective"]] == ["ttft_p95", "itl_p95"]
        assert all(each["attained_ms"] <= each["limit_ms"] for each in one["objective"])
    apart = [one for one in plans if one["layout"] == "apart"]
    splits = [one for plan in apart for one in (plan, *plan["tried"])]
    assert [one["prefill"] + one["decode"] for one in splits] == [one["engines"] for one in splits]


def test_people_get_a_table_with_the_cheapest_first(folder: Path, tmp_path: Path) -> None:
    result = planned(
        folder,
        *("--profile", str(folder / "p.json"), "--price", "3", "--blocks", "128,256"),
        *("--plot", str(tmp_path / "plan.svg")),
    )

    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:4] == ["COST", "ENGINES", "RANGE", "PROFILE"]
    costs = [float(line[0]) for line in lines[1:]]
    assert len(costs) == 4
    assert costs == sorted(costs)
    assert costs[2] == 3 * costs[0]
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    names = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(name and "128 blocks" in name for name in names)


def test_profiles_of_the_same_name_are_told_apart_by_their_files(
    folder: Path, tmp_path: Path
) -> None:
    write_profile(tmp_path / "other.json", made_profile())
    arguments = ("--profile", str(tmp_path / "other.json"), "--blocks", "256,256", "--json")

    plans = json.loads(planned(folder, *arguments).stdout)

    assert {one["profile"] for one in plans} == {
        f"m on e, {folder / 'p.json'}",
        f"m on e, {tmp_path / 'other.json'}",
    }
    assert len(plans) == 2


def test_an_objective_that_no_number_keeps_ends_with_a_failure(folder: Path) -> None:
    result = planned(folder, "--most", "3", objective="itl_mean=10ms,ttft_p95=1ms")

    assert result.exit_code == 1
    assert "not 3" in result.stdout


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        ("ttft=1s", "'ttft=1s' is not METRIC_STATISTIC=TIME"),
        ("ttft_p95", "'ttft_p95' is not METRIC_STATISTIC=TIME"),
        ("ttft_p95=fast", "objective ttft_p95='fast' must be 0 or more seconds"),
        ("ttft_p95=1s,ttft_p95=2s", "objective ttft_p95 is there twice"),
        (" , ", "the objective is empty"),
    ],
)
def test_an_objective_that_cannot_be_read_is_refused(objective: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_objective(objective)

    assert reason in str(caught.value)


def test_an_objective_has_several_targets() -> None:
    assert parse_objective("ttft_p95=500ms, e2e_mean=2s") == [
        Target("ttft", "p95", 0.5),
        Target("e2e", "mean", 2.0),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--price", "1", "--price", "2"), "2 prices for 1 profiles"),
        (("--price", "inf"), "inf is not in the range"),
        (("--bandwidth", "inf"), "inf is not in the range"),
        (("--blocks", "many"), "'many': give whole numbers from 1 to 100,000,000"),
        (("--blocks", "0"), "'0': give whole numbers from 1 to"),
        (("--host-blocks", "100000000000"), "give whole numbers from 0 to 100,000,000"),
        (("--most", "1000000000"), "1000000000 is not in the range"),
        (("--layout", "beside"), "'beside': give together, apart"),
        (("--policy", "best"), "policy 'best' is unknown"),
        (("--blocks", "4"), "--blocks 4 of 16 tokens hold 64: give --blocks"),
        (("--plot", "plan.png"), "is no SVG file"),
        (("--layout", "apart", "--most", "1"), "the layout apart has 2 engines at least"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    folder: Path, arguments: tuple[str, ...], reason: str
) -> None:
    result = planned(folder, *arguments)

    assert result.exit_code != 0
    assert reason in result.output + str(result.exception)


def test_requests_longer_than_what_was_fitted_are_named(folder: Path, tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1020, "output_length": 9, "hash_ids": [0, 1]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line))

    result = planned(folder, "--trace", str(tmp_path / "t.jsonl"))

    assert result.exit_code == 1
    assert "t.jsonl, line 1: the request and its output have 1029 tokens" in result.output
    assert "profile the engine with --context 1029" in result.output
