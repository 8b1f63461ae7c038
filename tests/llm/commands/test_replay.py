"""`dynbus replay` compares policies, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dynbus.bus.errors import ConfigError
from dynbus.llm.commands.replay import replay

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake" / "conversation.jsonl"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(
        replay, [str(EXCERPT), "--limit", "40", "--instances", "2", *arguments]
    )


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


def test_a_plot_is_written(tmp_path: Path) -> None:
    result = invoke("--policy", "round_robin", "--plot", str(tmp_path / "ttft.svg"))

    assert result.exit_code == 0
    assert (tmp_path / "ttft.svg").read_text().startswith("<svg")


def test_an_unknown_policy_is_refused_before_anything_is_read() -> None:
    result = invoke("--policy", "round_robin,best")

    assert isinstance(result.exception, ConfigError)
    assert "policy 'best' is unknown" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--block-size", "48"), "block_size = 48"),
        (("--blocks", "8"), "shorten the prompt or lower max_tokens"),
        (("--max-num-batched-tokens", "10"), "is less than max_num_seqs = 256"),
    ],
)
def test_a_fleet_that_cannot_serve_the_trace_says_why(
    arguments: tuple[str, ...], reason: str
) -> None:
    result = invoke("--policy", "round_robin", *arguments)

    assert result.exit_code == 1
    assert reason in result.output


def test_a_file_that_is_no_trace_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")

    result = CliRunner().invoke(replay, [str(path)])

    assert result.exit_code == 1
    assert "x.jsonl, line 1 is no request" in result.output
