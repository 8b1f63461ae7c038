"""A profile tells what steps take, within what it was fitted to, and is a file that is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.profiles import made_profile

from dynbus import ConfigError
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock import MockConfig, MockEngine, OutsideProfile, read_profile
from dynbus.llm.mock.profile import HeldOutError, at_row, write_profile
from dynbus.llm.mock.timing import StepWork
from dynbus.llm.mock.worker import MockOptions


def test_a_table_is_linear_between_its_rows_and_constant_beyond_them() -> None:
    rows = [(2, 0.01), (4, 0.03)]

    assert [at_row(rows, each) for each in (1, 2, 3, 4, 9)] == pytest.approx(
        [0.01, 0.01, 0.02, 0.03, 0.03]
    )
    assert at_row(rows, 1, from_zero=True) == pytest.approx(0.005)


def test_a_step_takes_the_sum_of_its_parts() -> None:
    timing = made_profile().timing()

    work = StepWork(prompts=1, prompt_tokens=64, attention=2016, requests=2, context_tokens=100)

    # Three requests, 64 prompt tokens, what these attend to, and the context decoded.
    assert timing.step(work, 0) == pytest.approx(0.003 + 0.0064 + 2016 * 1e-8 + 100 * 1e-6)


@given(st.integers(1, 900), st.integers(1, 4), st.integers(1, 64))
def test_several_decode_steps_take_what_each_takes(context: int, requests: int, steps: int) -> None:
    timing = made_profile().timing(1.5)

    many = timing.decode_steps(context, requests, steps, 0)

    one_by_one = [
        timing.step(StepWork(requests=requests, context_tokens=context + requests * step), 0)
        for step in range(steps)
    ]
    assert many.tolist() == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize(
    "work",
    [
        StepWork(requests=5, context_tokens=10),
        StepWork(prompts=1, prompt_tokens=257),
        StepWork(requests=1, context_tokens=4097),
    ],
)
def test_a_step_beyond_what_was_fitted_is_refused_with_the_range(work: StepWork) -> None:
    with pytest.raises(OutsideProfile, match="fitted to 4, 256 and 4096 at most"):
        made_profile().timing().step(work, 0)


def test_quiet_steps_that_grow_beyond_it_are_refused_too() -> None:
    timing = made_profile().timing()

    assert len(timing.decode_steps(4000, 4, 25, 0)) == 25
    with pytest.raises(OutsideProfile):
        timing.decode_steps(4000, 4, 26, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 5),
        ("max_num_batched_tokens", 257),
        ("context_length", 1025),
        ("block_size", 32),
    ],
)
def test_an_engine_of_a_size_that_was_not_fitted_is_refused(name: str, value: int) -> None:
    with pytest.raises(OutsideProfile, match=f"{name} = {value}: the profile of m on e"):
        made_profile().size(**{name: value})


def test_a_mock_engine_plays_it() -> None:
    profile = made_profile()
    engine = MockEngine(MockConfig(**profile.size(blocks=32), timing=profile.timing()))
    engine.add("a", GenerateRequest([1] * 64, max_tokens=2))

    first, second = engine.step(), engine.step()

    assert first.delay == pytest.approx(0.001 + 0.0064 + 2016 * 1e-8)
    assert second.delay == pytest.approx(0.001 + 65e-6)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = made_profile()

    write_profile(tmp_path / "p.json", profile)

    assert read_profile(tmp_path / "p.json") == profile


def _changed(**changes: Any) -> str:
    return json.dumps(msgspec.to_builtins(made_profile()) | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "is no profile: Object missing required field `version`"),
        ("nothing", "is no profile: JSON is malformed"),
        (_changed(version=2), "is of version 2, and this dynbus reads version 1"),
        (_changed(blocks=0), "is no profile: Expected `int` >= 1"),
        ('{"a":' * 100_000, "is no profile: maximum recursion depth"),
        ('{"version": 1, "model": "\udcff"}', "is no profile: "),
        (
            _changed(held_out=[dict.fromkeys(HeldOutError.__struct_fields__, -1)]),
            "is no profile: Expected `float` > -1",
        ),
        (
            _changed(
                costs={
                    "sequences": [[2, 0.1], [1, 0.1]],
                    "prompt_tokens": [[1, 0.1]],
                    "attention": 0.0,
                    "context_tokens": 0.0,
                }
            ),
            "the rows of costs.sequences are not in their order",
        ),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(ConfigError) as caught:
        read_profile(path)

    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the profile no\.json cannot be read"):
        read_profile(Path("no.json"))


def test_a_mock_worker_has_the_sizes_of_its_profile_but_for_those_given(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, made_profile())

    engine = MockOptions(profile=str(path), blocks=20, speedup_ratio=2.0).engine

    assert (engine.block_size, engine.blocks, engine.max_num_seqs) == (16, 20, 4)
    assert engine.context_length == 1024
    assert engine.timing == made_profile().timing(2.0)


def test_a_mock_worker_of_a_size_that_was_not_fitted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, made_profile())

    with pytest.raises(OutsideProfile, match="max_num_seqs = 8"):
        MockOptions(profile=str(path), max_num_seqs=8).engine  # noqa: B018 - it raises
