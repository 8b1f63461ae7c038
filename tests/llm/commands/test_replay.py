"""`dynbus lab replay` compares policies, for people and for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError
from dynbus.cli import main
from dynbus.llm.commands.replay import replay

ROOT = Path(__file__).parents[3]
EXCERPT = ROOT / "tests" / "data" / "mooncake" / "conversation.jsonl"
GUIDE = ROOT / "docs" / "guides" / "replaying.md"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(
        replay, [str(EXCERPT), "--limit", "40", "--instances", "2", *arguments]
    )


def test_an_autoscaler_scales_the_fleet_within_its_bounds() -> None:
    options = ("--policy", "kv", "--cold-start", "30", "--json", "--speed", "0.02")
    fixed = invoke(*options, "--instances", "4")
    scaled = invoke(*options, "--instances", "4", "--autoscale", "1:3")

    assert scaled.exit_code == 0, scaled.output
    [before], [after] = json.loads(fixed.output), json.loads(scaled.output)
    assert "scaled" not in before
    found = after["scaled"]
    assert (found["least"], found["most"]) == (1, 3)
    assert found["changes"] > 0
    assert found["hours"] < 3 * after["duration_s"] / 3600


@pytest.mark.parametrize(
    ("bounds", "reason"), [("3", "as in 2:16"), ("5:2", "5 to 2 instances"), ("0:0", "most of 1")]
)
def test_bounds_of_an_autoscaler_that_are_none_are_refused(bounds: str, reason: str) -> None:
    refused = invoke("--autoscale", bounds)

    assert refused.exit_code != 0
    assert reason in refused.output + str(refused.exception)


def dynbus(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    """The command as its console script runs it: its folder is on the path, the current is not."""
    return subprocess.run(
        [sys.executable, "-P", "-c", "from dynbus.cli import main; main()", *arguments],
        cwd=at,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


class Ended(NamedTuple):
    """How a command ended."""

    code: object
    out: str
    err: str


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """Runs the command in this process, with the modules that it imports taken back afterwards."""
    before = set(sys.modules)

    def run(*arguments: str, at: Path) -> Ended:
        monkeypatch.chdir(at)
        monkeypatch.setattr(sys, "path", sys.path[:])
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return Ended(ended.value.code, out, err)

    yield run
    for name in {"my_costs", "broken"} - before:
        sys.modules.pop(name, None)


def test_programs_get_a_list_with_the_figures_of_each_policy() -> None:
    result = invoke("--policy", "round_robin,random,dynamo,kv", "--json")

    figures = json.loads(result.stdout)
    assert [each["policy"] for each in figures] == ["round_robin", "random", "dynamo", "kv"]
    for each in figures:
        assert set(each) == {
            "policy",
            "requests",
            "duration_s",
            "ttft_ms",
            "itl_ms",
            "hit_rate",
            "output_tokens_per_s",
        }
        assert each["requests"] == 40
        assert set(each["ttft_ms"]) == set(each["itl_ms"]) == {"mean", "p50", "p99"}
        assert 0 < each["ttft_ms"]["mean"] <= each["ttft_ms"]["p99"]


def test_people_get_a_column_for_each_policy() -> None:
    result = invoke("--policy", "round_robin,dynamo")

    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["FIGURE", "round_robin", "dynamo"]
    assert ["requests", "40", "40"] in lines


def test_more_speed_makes_them_wait_longer() -> None:
    slow, fast = (
        json.loads(invoke("--policy", "round_robin", "--json", "--speed", speed).stdout)[0]
        for speed in ("1", "20")
    )

    assert fast["ttft_ms"]["mean"] > 2 * slow["ttft_ms"]["mean"]


def mean_ttft(*arguments: str) -> float:
    result = invoke("--policy", "round_robin", "--json", "--speed", "20", *arguments)
    assert result.exit_code == 0, result.stderr
    ttft: float = json.loads(result.stdout)[0]["ttft_ms"]["mean"]
    return ttft


def test_fewer_engines_make_them_wait_longer_and_more_engines_less_long() -> None:
    alone = mean_ttft()

    assert mean_ttft("--kill", "0.1", "--kill", "0.2", "--cold-start", "60") > alone
    assert mean_ttft("--scale", "0.1=1") > alone
    assert mean_ttft("--scale", "0.1=24") < alone
    assert mean_ttft("--scale", "0.1=24", "--cold-start", "600") == alone


@pytest.mark.parametrize(
    "given", ["3", "3=", "=3", "nan=3", "-1=3", "3=-1", "inf=1", "3=100000000"]
)
def test_a_scale_that_is_no_number_at_a_time_is_refused(given: str) -> None:
    result = invoke("--scale", given)

    assert result.exit_code == exit_codes.USAGE
    assert "as in 60=12" in result.stderr


def test_a_plot_is_written(tmp_path: Path) -> None:
    result = invoke("--policy", "round_robin", "--plot", str(tmp_path / "ttft.svg"))

    assert result.exit_code == 0
    assert (tmp_path / "ttft.svg").read_text().startswith("<svg")


def test_a_plot_is_printed_below_the_table_where_it_is_asked_for(tmp_path: Path) -> None:
    asked = invoke("--policy", "round_robin,kv", "--plot", "-").stdout.splitlines()
    not_asked = invoke("--policy", "round_robin,kv").stdout.splitlines()

    at = asked.index("Times to the first token")
    assert asked[:at] == not_asked
    assert [line.split()[:2] for line in asked[at + 1 : at + 3]] == [
        ["p50", "round_robin"],
        ["p50", "kv"],
    ]
    assert not Path("-").exists()


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path,
) -> None:
    nowhere = invoke("--policy", "round_robin", "--plot", str(tmp_path / "no" / "ttft.svg"))
    picture = invoke("--policy", "round_robin", "--plot", str(tmp_path / "ttft.png"))

    assert (nowhere.exit_code, nowhere.stdout) == (2, "")
    assert "there is no folder" in nowhere.stderr
    assert (picture.exit_code, picture.stdout) == (2, "")
    assert "is no SVG file" in picture.stderr


def test_the_figures_are_printed_when_the_plot_fails_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "write_text", full)

    result = invoke("--policy", "round_robin", "--plot", str(tmp_path / "ttft.svg"))

    assert result.exit_code == 1
    assert "FIGURE" in result.stdout
    assert "the plot was not written: no space is left" in result.stderr


def test_an_unknown_policy_is_refused_before_anything_is_read() -> None:
    result = invoke("--policy", "round_robin,best")

    assert isinstance(result.exception, ConfigError)
    assert "policy 'best' is unknown" in str(result.exception)


def test_an_engine_that_cannot_be_is_refused_too() -> None:
    result = invoke("--policy", "round_robin", "--max-num-batched-tokens", "10")

    assert isinstance(result.exception, ConfigError)
    assert "is less than max_num_seqs = 256" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--block-size", "48"), "block_size = 48"),
        (("--blocks", "10"), "conversation.jsonl, line 1: the request needs 7257 tokens"),
        (("--blocks", "10"), "--blocks 10 of 64 tokens hold 640: give --blocks"),
        (("--slo-ttft", "-5"), "an objective of -5 ms for the TTFT is kept by no request"),
    ],
)
def test_a_fleet_that_cannot_serve_the_trace_says_why(
    arguments: tuple[str, ...], reason: str
) -> None:
    result = invoke("--policy", "round_robin", *arguments)

    assert result.exit_code == 1
    assert reason in result.output


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}\n", "line 1 is no request"),
        ("\n\xff\n", "line 2 is no request"),
        ("", "has no request"),
    ],
)
def test_a_file_that_is_no_trace_is_wrong_input_with_its_line(
    text: str, reason: str, tmp_path: Path, refused: Callable[..., Ended]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.encode("latin-1"))

    ended = refused("lab", "replay", str(path), at=tmp_path)

    assert (ended.code, ended.out) == (3, "")
    assert "dynbus: ConfigError: " in ended.err
    assert f"x.jsonl{', ' if 'line' in reason else ' '}{reason}" in ended.err


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A folder with `my_costs.py` as the guide shows it, and a trace."""
    shown = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert shown is not None
    (tmp_path / "my_costs.py").write_text(shown[1])
    lines = EXCERPT.read_text().splitlines(keepends=True)
    (tmp_path / "trace.jsonl").write_text("".join(lines[:20]))
    return tmp_path


@pytest.mark.parametrize("own", ["my_costs:cost", "my_costs.py:cost", "./my_costs.py:cost"])
def test_the_guides_cost_function_in_the_current_folder_is_a_policy(own: str, guide: Path) -> None:
    policies = f"round_robin, {own}"
    ended = dynbus("lab", "replay", "trace.jsonl", "--policy", policies, "--json", at=guide)

    assert ended.returncode == 0, ended.stderr
    assert [one["policy"] for one in json.loads(ended.stdout)] == ["round_robin", "my_costs:cost"]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("my_prices:cost", "there is no module 'my_prices' in {folder}, "),
        ("my_prices.py:cost", "there is no file my_prices.py in {folder}"),
        ("my_costs.cost", "did you mean my_costs:cost?"),
        ("dynbus.py:cost", "the name 'dynbus' belongs to another module"),
        ("my_costs.py:nothing", "{folder}/my_costs.py has no 'nothing'"),
        ("broken:cost", "broken:cost raised KeyError: 'weights' ({folder}/broken.py, line 2)"),
        (" , ", "names no policy"),
    ],
)
def test_a_policy_that_cannot_be_used_is_one_line_that_says_why(
    policy: str, reason: str, guide: Path, refused: Callable[..., Ended]
) -> None:
    (guide / "dynbus.py").write_text("def cost(request, candidates): ...\n")
    (guide / "broken.py").write_text("def cost(request, candidates):\n    return {}['weights']\n")

    ended = refused("lab", "replay", "trace.jsonl", "--policy", policy, at=guide)

    assert (ended.code, ended.out) == (3, "")
    last = ended.err.splitlines()[-1]
    assert last.startswith("dynbus: ConfigError: ")
    assert reason.format(folder=guide.resolve()) in last
    assert "Traceback" not in ended.err
