"""`dynbus profile` measures the small engine, and its file is what replays and mocks take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.llm.profiles import made_profile

from dynbus.llm.commands.profile import profile
from dynbus.llm.commands.profiling import Profiled
from dynbus.llm.commands.replay import replay
from dynbus.llm.mock import read_profile
from dynbus.llm.mock.profile import OutsideProfile, write_profile
from dynbus.llm.mock.tiny_model import write_tiny_model

SIZE = ("--backend", "numpy", "--threads", "1", "--max-num-seqs", "2", "--blocks", "64")
QUICK = ("--context", "100", "--repeats", "1", "--requests", "20", "--prompt-tokens", "20")


def measured(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(profile, [str(model), *SIZE, *QUICK, *arguments])


def test_the_profile_of_the_small_engine_is_written_and_printed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "tiny.json"

    result = measured(model, "--out", str(path), "--json")

    assert result.exit_code == 0, result.output
    written = read_profile(path)
    assert json.loads(result.stdout)["model"] == written.model == "tiny"
    assert written.engine == "small, numpy"
    assert (written.block_size, written.blocks, written.max_num_seqs) == (16, 64, 2)
    assert written.context_length == 100
    # Two layers, two heads of 16 numbers, keys and values of 16 tokens as float32.
    assert written.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert [count for count, _ in written.costs.sequences] == [1, 2]
    assert all(seconds > 0.0 for _, seconds in written.costs.sequences)
    assert [each.load for each in written.held_out] == [0.3, 0.5, 0.7]


def test_people_get_the_fit_its_range_and_its_errors(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")

    result = measured(model, "--out", str(tmp_path / "tiny.json"))

    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "PROFILE tiny on small, numpy"
    assert "tokens of a request 100" in lines
    said = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert said.count("measuring") == 10
    assert "checking" in said
    assert "LOAD REQUESTS TTFT mean TTFT p99 TPOT mean TPOT p99" in lines
    assert [line.split()[:2] for line in lines[-3:]] == [
        ["30%", "20"],
        ["50%", "20"],
        ["70%", "20"],
    ]


def test_check_fails_where_a_goal_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = made_profile(held_out=0.3)

    def measure(*arguments: object) -> Profiled:
        return Profiled(missed, "")

    monkeypatch.setattr("dynbus.llm.commands.profiling.profile_small", measure)

    lenient = measured(tmp_path, "--out", str(tmp_path / "p.json"))
    strict = measured(tmp_path, "--out", str(tmp_path / "p.json"), "--check")

    assert (lenient.exit_code, strict.exit_code) == (0, 1)
    assert "the goal is missed: mean TTFT at load 0.5 by +30.0%, goal 10%" in strict.stderr


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = measured(tmp_path, "--out", str(tmp_path / "no" / "p.json"))

    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no folder" in result.stderr


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "p.json")

    # There is no such model.
    result = measured(tmp_path, "--out", str(link))

    assert result.exit_code != 0
    assert [one.name for one in tmp_path.iterdir()] == ["link.json"]
    assert link.is_symlink()


def test_a_check_that_leaves_the_profile_throws_no_measurement_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def outside(*arguments: object) -> None:
        raise OutsideProfile("a step of 9 requests")

    monkeypatch.setattr("dynbus.llm.commands.profiling.check_profile", outside)
    model = write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "tiny.json"

    lenient, strict = (
        measured(model, "--out", str(path)),
        measured(model, f"--out={path}", "--check"),
    )

    assert (lenient.exit_code, strict.exit_code) == (0, 1)
    assert read_profile(path).held_out == []
    assert "its error is not known: a step of 9 requests" in lenient.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--seed", "-1"), "-1 is not in the range"),
        (("--prompt-tokens", "4000"), "no request is longer than 100 tokens"),
        (("--out", "/dev/full"), "is no plain file"),
        (("--out", "/proc/x.json"), "cannot be written"),
    ],
)
def test_what_cannot_end_well_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr("dynbus.llm.profiling.SteppedBench.carry_out", measure)
    model = write_tiny_model(tmp_path / "tiny")

    result = measured(model, "--out", str(tmp_path / "p.json"), *arguments)

    assert result.exit_code != 0
    assert reason in result.output + str(result.exception)
    assert not (tmp_path / "p.json").exists()


def lab_replay(folder: Path, *arguments: str) -> Result:
    write_profile(folder / "p.json", made_profile())
    lines = [
        {"timestamp": 100 * at, "input_length": 100, "output_length": 10, "hash_ids": [at]}
        for at in range(20)
    ]
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return CliRunner().invoke(
        replay,
        [
            *(str(folder / "t.jsonl"), "--profile", str(folder / "p.json")),
            *("--instances", "2", "--policy", "round_robin", "--json", *arguments),
        ],
    )


def test_a_replay_takes_the_times_and_sizes_of_a_profile(tmp_path: Path) -> None:
    (figures,) = json.loads(lab_replay(tmp_path).stdout)

    # One request, 100 prompt tokens, and what they attend to.
    assert figures["ttft_ms"]["mean"] == pytest.approx(1 + 10 + 4950e-5, abs=0.001)
    assert figures["itl_ms"]["mean"] == pytest.approx(1 + 105e-3, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--max-num-seqs", "8"), "the profile of m on e was fitted to 4 at most"),
        (("--block-size", "64"), "the profile of m on e is of blocks of 16 tokens"),
    ],
)
def test_a_replay_beyond_the_profile_is_refused(
    arguments: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    result = lab_replay(tmp_path, *arguments)

    assert result.exit_code != 0
    assert reason in str(result.exception)


@pytest.mark.parametrize(
    ("engine", "arguments", "reason"),
    [
        ("demo.Engine", ("--blocks", "64"), "demo.Engine is on the bus, for which it says nothing"),
        ("tiny.gguf", ("--instance", "a"), "tiny.gguf is a model of this process"),
        ("org/qwen2.5", ("--nats", "nats://h"), "org/qwen2.5 is a model of this process"),
    ],
)
def test_options_of_the_other_kind_of_engine_are_refused(
    engine: str, arguments: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(profile, [engine, "--out", str(tmp_path / "p.json"), *arguments])

    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())
